"""How the rig's command exits: a broken promise, a run that shows nothing, and a rig that broke are three things."""

import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.chaos.oracle import Promise
from tests.chaos.schedule import Kind
from tests.chaos.verdict import Floor, Status, Verdict, floor, verdict

ENOUGH = Counter({kind.value: 5 for kind in list(Kind)[:6]})
NONE_BROKEN = dict.fromkeys(map(str, Promise), 0)


def judged(
    *,
    broken: Promise | None = None,
    acknowledged: int = 1000,
    applied: Mapping[str, int] = ENOUGH,
    crashes: Mapping[str, int] | None = None,
    left: str = "",
    reached: bool = True,
    least: Floor | None = None,
) -> Verdict:
    counts = NONE_BROKEN | ({} if broken is None else {broken.value: 1})
    return verdict(
        counts, acknowledged=acknowledged, applied=applied, crashes=crashes or {}, left=left,
        reached=reached, least=least or floor(60),
    )  # fmt: skip


def test_a_minute_that_did_enough_and_broke_nothing_is_kept() -> None:
    assert judged() == Verdict(status=Status.KEPT, reasons=())


@pytest.mark.parametrize("promise", Promise)
def test_one_broken_promise_of_any_kind_is_status_one_whatever_else_there_is(promise: Promise) -> None:
    found = judged(broken=promise, crashes={"turns-0": 1}, acknowledged=3)
    assert (found.status, found.reasons[0]) == (Status.BROKEN, f"{promise}: 1")


def test_a_part_that_crashed_while_every_promise_was_kept_is_no_broken_promise() -> None:
    found = judged(crashes={"train": 2})
    assert found.status == Status.UNPROVEN
    assert "train crashed 2 times" in found.reasons[0]


def test_what_was_left_undone_is_said() -> None:
    found = judged(left="turns is 3 behind")
    assert (found.status, found.reasons) == (Status.UNPROVEN, ("not drained: turns is 3 behind",))


def test_faults_that_did_not_reach_their_guard_show_nothing() -> None:
    found = judged(reached=False)
    assert (found.status, found.reasons) == (Status.UNPROVEN, ("the faults did not reach the guard",))


@pytest.mark.parametrize(
    ("acknowledged", "applied", "said"),
    [
        (999, ENOUGH, "999 exchanges acknowledged, and a run of this length has at least 1000"),
        (1000, ENOUGH - Counter({Kind.KILL.value: 1}), "29 faults, and a run of this length has at least 30"),
        (
            1000,
            {kind.value: 6 for kind in list(Kind)[:5]},
            "5 kinds of faults, and a run of this length has at least 6",
        ),
    ],
)
def test_a_minute_below_its_floor_shows_nothing(acknowledged: int, applied: Mapping[str, int], said: str) -> None:
    found = judged(acknowledged=acknowledged, applied=applied)
    assert (found.status, found.reasons) == (Status.UNPROVEN, (said,))


def test_the_floor_grows_and_shrinks_with_the_time_and_kinds_do_not_grow() -> None:
    assert floor(60) == Floor(exchanges=1000, faults=30, kinds=6)
    assert floor(900) == Floor(exchanges=15_000, faults=450, kinds=6)
    assert floor(20) == Floor(exchanges=333, faults=10, kinds=2)


def test_a_run_whose_faults_are_directed_has_no_floor() -> None:
    few = verdict(NONE_BROKEN, acknowledged=5, applied={"sigkill": 1}, crashes={}, left="", reached=True, least=None)
    assert few.status == Status.KEPT


@pytest.mark.slow
def test_a_rig_that_breaks_exits_with_a_status_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    command = [sys.executable, "-m", "tests.chaos", "--keep", str(tmp_path / "file" / "run")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == Status.RIG_FAILED, done.stderr
    assert "NotADirectoryError" in done.stderr
