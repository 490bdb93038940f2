"""Each guard that is taken out is missed: its directed faults break the promise that it keeps, and break none with it.

A run is an installation of its own and takes more than a minute, so these are asked for with `-m chaos`.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.guards import Guard
from tests.chaos.oracle import Promise

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(480)]
_BREAKS = {
    Guard.COMMIT_LATE: {Promise.TURNS_LOST},
    Guard.DEDUPE: {Promise.SAMPLES_TRAINED_TWICE},
    Guard.FSYNC: {Promise.EXCHANGES_LOST},
    Guard.MANIFEST: {Promise.SAMPLES_TRAINED_TWICE, Promise.LOG_CONFLICTS},
    Guard.FENCE: {Promise.ROWS_DIFFER},
    Guard.BUFFERS: {Promise.TURNS_LOST, Promise.LOG_CONFLICTS},
}


def _run(folder: Path, option: str, guard: Guard) -> tuple[int, dict[str, int]]:
    report = folder / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", option, guard, "--keep", str(folder / "run"),
         "--json", str(report), "--patience-s", "30"],
        check=False, capture_output=True, text=True, timeout=450,
    )  # fmt: skip
    assert report.exists(), done.stderr[-2000:]
    return done.returncode, json.loads(report.read_text())


@pytest.mark.parametrize("guard", Guard)
def test_a_guard_that_is_taken_out_is_missed(tmp_path: Path, guard: Guard) -> None:
    status, report = _run(tmp_path, "--break", guard)
    assert status == 1
    assert any(report[promise] for promise in _BREAKS[guard]), report


@pytest.mark.parametrize("guard", Guard)
def test_the_same_faults_break_nothing_while_the_guard_is_there(tmp_path: Path, guard: Guard) -> None:
    status, report = _run(tmp_path, "--faults-of", guard)
    assert {promise.value: report[promise] for promise in Promise} == dict.fromkeys(map(str, Promise), 0)
    assert status == 0
