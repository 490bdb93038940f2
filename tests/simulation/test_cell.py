"""What a run was like is said by update, whatever numbers its versions have."""

from pathlib import Path

from clawstream.events import StepTaken
from clawstream.simulation.cell import _outcome
from clawstream.simulation.counting import Counts
from clawstream.simulation.figures import Chat
from clawstream.simulation.run import Lived
from tests.projections.logs import example
from tests.simulation.outcomes import score

FAILED = Chat(
    started_at_ms=0.0, finished_at_ms=1.0, ttft_ms=None, gaps=(), failed=True, first_answer=True, num_tokens=0
)
COUNTS = Counts(
    sessions=9, turns=9, samples=9, samples_first_answer=9, corrections=2, policy_versions=4, refusals={},
    interactions={1: 10, 2: 20, 3: 30, 4: 40}, trained_samples={}, exchange_to_row_ms=(), correction_to_policy_s=(),
)  # fmt: skip


def test_after_a_rejected_step_updates_are_counted_by_what_was_published() -> None:
    lived = Lived(
        scores=(), ceiling=None, chats=(FAILED,), steps=tuple(example(StepTaken, policy_version=v) for v in (1, 3, 4)),
        swaps=(), published={v: Path("v") for v in (0, 1, 3, 4)}, versions=(0, 1, 3, 4), num_rejected=1, counts=COUNTS,
        peak_mb=1.0, wall_s=1.0,
    )  # fmt: skip

    found = _outcome(lived, {2: score(2, 0.5), 3: score(3, 0.6)}, score(2, 0.1), code="abc")

    assert found.interactions == {2: 30, 3: 40}
    assert [(step.update, step.version) for step in found.steps] == [(1, 1), (2, 3), (3, 4)]
    assert found.at_flip == score(2, 0.1)
    assert (found.rejected, found.requests_failed) == (1, 1)
