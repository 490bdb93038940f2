"""The demonstration: one run that is scored on the way, and its measurements."""

from clawstream.simulation.runs.figures import Figures, longest_gap_during, percentiles
from clawstream.simulation.runs.run import Plan, RunRecord, Tell, simulate

SCENARIO = "student"
TEMPERATURE = 0.8


async def demonstrate(plan: Plan, *, tell: Tell) -> Figures:
    """Run it, and return what was measured; raises PartUnavailable where `simulate` does."""
    return _figures(plan, await simulate(plan, tell=tell))


def _figures(plan: Plan, record: RunRecord) -> Figures:
    steps, counts = record.steps, record.counts
    assert record.ceiling is not None, "a demonstration is scored on the way"
    return Figures(
        method=plan.method,
        seed=plan.seed,
        baseline_score=record.scores[0].score,
        ceiling_score=record.ceiling.score,
        scores=record.scores,
        sessions=counts.sessions,
        turns=counts.turns,
        samples=counts.samples,
        policy_versions=counts.policy_versions,
        requests=len(record.chats),
        requests_failed=sum(chat.failed for chat in record.chats),
        max_stream_gap_ms_during_swap=longest_gap_during(record.chats, record.swaps),
        ttft_ms=percentiles([chat.ttft_ms for chat in record.chats if chat.ttft_ms is not None]),
        exchange_to_row_ms=percentiles(counts.exchange_to_row_ms),
        problems=record.scores[0].num_problems,
        samples_first_answer=counts.samples_first_answer,
        versions_behind_mean=sum(step.mean_versions_behind * step.num_samples for step in steps)
        / sum(step.num_samples for step in steps),
        versions_behind_max=max(step.max_versions_behind for step in steps),
        peak_mb=record.peak_mb,
        wall_s=record.wall_s,
    )
