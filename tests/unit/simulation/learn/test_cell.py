"""What a run was like is said by update, whatever numbers its versions have, and each is scored by what was wanted."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from clawstream.events import StepTaken
from clawstream.simulation.learn import cell
from clawstream.simulation.learn.cell import Order, _outcome, _scores
from clawstream.simulation.runs.counting import Counts
from clawstream.simulation.runs.figures import Chat, VersionScore
from clawstream.simulation.runs.people import People
from clawstream.simulation.runs.run import RunRecord
from tests.unit.projections.logs import example
from tests.unit.simulation.learn.outcomes import cell as cell_of
from tests.unit.simulation.learn.outcomes import score

FAILED = Chat(finished_at_ms=1.0, ttft_ms=None, gaps=(), failed=True, first_answer=True, num_tokens=0)
COUNTS = Counts(
    sessions=9, turns=9, samples=9, samples_first_answer=9, corrections=2, policy_versions=4, refusals={},
    interactions={1: 10, 2: 20, 3: 30, 4: 40}, exchange_to_row_ms=(), correction_to_policy_s=(),
)  # fmt: skip


LIVED = RunRecord(
    scores=(), ceiling=None, chats=(FAILED,), steps=tuple(example(StepTaken, policy_version=v) for v in (1, 3, 4)),
    swaps=(), published={v: Path(f"v{v}") for v in (0, 1, 3, 4)}, versions=(0, 1, 3, 4), num_rejected=1, counts=COUNTS,
    peak_mb=1.0, wall_s=1.0,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Asking:
    """A room that keeps what it was asked."""

    problems: Path
    asked: list[tuple[str, str, int]] = field(default_factory=list)

    async def score(self, checkpoint: Path, version: int, *, base: Path) -> VersionScore:
        assert base == Path("base")
        self.asked.append((self.problems.name, checkpoint.name, version))
        return score(version, 0.1 * len(self.asked))


async def test_each_version_is_scored_by_what_was_wanted_when_it_learned_and_that_of_the_flip_by_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking = Asking(problems=Path("scored"))

    @asynccontextmanager
    async def room(
        folder: Path, people: People, cache_dir: Path, *, own: object, key: str | None
    ) -> AsyncIterator[Asking]:
        del folder, cache_dir, own, key
        yield replace(asking, problems=people.scored)

    monkeypatch.setattr(cell, "room", room)
    people = People(scenario="all", hint_share=0.5, asked=Path("a"), scored=Path("scored"), scored_flipped=Path("new"))
    plan = replace(cell_of(), updates=3, flip_after=2, score_at=(0, 1, 2, 3))
    order = Order(cell=plan, people=people, base=Path("base"), cache_dir=tmp_path)

    scores, at_flip = await _scores(order, tmp_path, LIVED)

    assert asking.asked == [  # version 3 is update 2
        ("scored", "v1", 1), ("scored", "v3", 3), ("new", "v3", 3), ("new", "v4", 4),
    ]  # fmt: skip
    assert [(update, round(found.score, 1)) for update, found in scores.items()] == [(1, 0.1), (2, 0.2), (3, 0.4)]
    assert at_flip is not None
    assert (at_flip.update, round(at_flip.score, 1)) == (2, 0.3)


def test_after_a_rejected_step_updates_are_counted_by_what_was_published() -> None:
    found = _outcome(LIVED, {2: score(2, 0.5), 3: score(3, 0.6)}, score(2, 0.1), code="abc")

    assert found.interactions == {2: 30, 3: 40}
    assert [(step.update, step.version) for step in found.steps] == [(1, 1), (2, 3), (3, 4)]
    assert found.at_flip == score(2, 0.1)
    assert (found.rejected, found.requests_failed) == (1, 1)
