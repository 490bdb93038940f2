"""What is measured of a run: what its database says, its memory, its scores.

Linux only.

Simulates nothing. lists of measurements in, figures out. A figure that was not measured is None.
"""

import asyncio
import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from clawstream.errors import PartUnavailable
from clawstream.local.installation import Installation
from clawstream.projections.look.sql import rows_of
from clawstream.stream.kafka.connect import connected

COUNTED_WITHIN_S = 300.0
_COUNTS = """
SELECT (SELECT count(*) FROM sessions WHERE num_main > 0) AS sessions,
       (SELECT count(*) FROM turns WHERE kind = 'paired') AS turns,
       (SELECT count(*) FROM samples WHERE refreshed_id IS NULL) AS samples,
       (SELECT count(*) FROM samples WHERE num_earlier_turns = 0 AND refreshed_id IS NULL) AS samples_first_answer,
       (SELECT count(*) FROM newest_verdicts AS v WHERE v.score < 0 OR EXISTS (
           SELECT 1 FROM hints AS h WHERE h.turn_id = v.turn_id AND h.kind = 'found')) AS corrections,
       (SELECT count(*) FROM policies) AS policy_versions
"""
_REFUSALS = "SELECT reason, count(*) AS num FROM refusals WHERE refreshed_id IS NULL GROUP BY reason ORDER BY reason"
_EXCHANGE_TO_ROW = """
SELECT extract(epoch FROM c.committed_at) * 1000 - e.finished_at_ms AS ms
FROM exchanges e
JOIN commits c ON c.topic = e.source_topic AND c.partition = e.source_partition
              AND e.source_offset >= c.first_offset AND e.source_offset < c.next_offset
WHERE e.turn_type = 'main'
"""
# What people had said when the batch of each version was planned: answers they had got, and samples trained on.
_INTERACTIONS = """
SELECT b.policy_version,
       (SELECT count(*) FROM exchanges AS e WHERE e.kind = 'completed' AND e.turn_type = 'main'
           AND e.finished_at_ms < b.planned_at_ms) AS interactions,
       sum(cardinality(b.sample_ids)) OVER (ORDER BY b.policy_version) AS samples
FROM batches AS b ORDER BY b.policy_version
"""
# From a complaint or hint that was trained on to the first answer whose every token is of a policy that knew it. NULL:
# nobody asked any more.
_CORRECTION_TO_POLICY = """
WITH corrections AS (
    SELECT b.policy_version, e.received_at_ms
    FROM batches AS b
    JOIN steps USING (policy_id, policy_version)
    CROSS JOIN LATERAL unnest(b.sample_ids) AS planned (sample_id)
    JOIN samples AS s ON s.sample_id = planned.sample_id AND (s.total_reward < 0 OR s.hint IS NOT NULL)
        AND s.refreshed_id IS NULL
    JOIN turns AS t ON t.turn_id = s.turn_id AND t.kind = 'paired'
    JOIN exchanges AS e ON e.exchange_id = t.next_exchange_id
), answers AS (
    SELECT (SELECT min(version) FROM unnest(sampled_by(versions)) AS sampling (version)) AS version, first_token_at_ms
    FROM exchanges
    WHERE kind = 'completed' AND turn_type = 'main'
), by_version AS MATERIALIZED (
    SELECT version, min(first_token_at_ms) AS first_token_at_ms FROM answers GROUP BY version
), first_answers AS MATERIALIZED (
    SELECT b.policy_version, (
        SELECT min(first_token_at_ms) FROM by_version WHERE version >= b.policy_version
    ) AS first_token_at_ms
    FROM batches AS b
)
SELECT (f.first_token_at_ms - c.received_at_ms) / 1000.0 AS s
FROM corrections AS c
JOIN first_answers AS f USING (policy_version)
WHERE f.first_token_at_ms IS NOT NULL
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What was said, and what became of it."""

    sessions: int
    turns: int  # paired
    samples: int
    samples_first_answer: int
    corrections: int  # turns that were judged bad, or that gave a hint
    policy_versions: int
    refusals: Mapping[str, int]  # by reason
    interactions: Mapping[int, int]  # answers that people had got, by the version whose batch was planned then
    trained_samples: Mapping[int, int]  # by version, all batches up to its own
    exchange_to_row_ms: tuple[float, ...]
    correction_to_policy_s: tuple[float, ...]  # of each correction that was trained on and answered after that


async def counted(running: Installation) -> Counts:
    """Return what the database says; raises PartUnavailable where it does not catch up with the log."""
    async with connected(running.settings.kafka, client_id="count") as log:
        try:
            async with asyncio.timeout(COUNTED_WITHIN_S):
                while await log.lag("project") != 0:  # noqa: ASYNC110  # the broker tells nobody
                    await asyncio.sleep(0.1)
        except TimeoutError as error:
            raise PartUnavailable(
                f"the database did not hold the whole log within {COUNTED_WITHIN_S:.0f} s: see project.log in the "
                "logs folder of this run"
            ) from error
    return await asyncio.to_thread(_counts, running.addresses.postgres)


def _counts(url: str) -> Counts:
    totals: dict[str, Any] = rows_of(url, _COUNTS)[0]
    versions: list[dict[str, Any]] = rows_of(url, _INTERACTIONS)
    refusals: list[dict[str, Any]] = rows_of(url, _REFUSALS)
    return Counts(
        **totals,
        refusals={row["reason"]: row["num"] for row in refusals},
        interactions={row["policy_version"]: row["interactions"] for row in versions},
        trained_samples={row["policy_version"]: int(row["samples"]) for row in versions},
        exchange_to_row_ms=tuple(float(str(row["ms"])) for row in rows_of(url, _EXCHANGE_TO_ROW)),
        correction_to_policy_s=tuple(float(str(row["s"])) for row in rows_of(url, _CORRECTION_TO_POLICY)),
    )


JAVA = "java"  # the broker is counted apart
LOOK_EVERY_S = 2.0


class Footprint:
    """The largest footprint seen of this process and all below it, the JVM left out."""

    def __init__(self) -> None:
        self.peak_mb = 0.0

    async def watch(self) -> None:
        """Look again and again until cancelled."""
        while True:
            self.peak_mb = max(self.peak_mb, await asyncio.to_thread(_pss_mb))
            await asyncio.sleep(LOOK_EVERY_S)


def _pss_mb() -> float:
    me = psutil.Process()
    total_bytes = 0
    for process in [me, *me.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
            if process.name() != JAVA:
                total_bytes += process.memory_full_info().pss
    return total_bytes / 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionScore:
    """Share of held-out problems whose first answer is right and in the wanted style, at one policy version."""

    update: int
    score: float
    low: float  # 95 % interval
    high: float
    num_problems: int
    num_right: int | None = None  # in whatever style; None, here and below: measured by an older version
    num_styled: int | None = None  # right or not
    by_persona: Mapping[str, float] | None = None  # each person's share


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Of a list of durations in ms."""

    p50: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """What one request of a student looked like from outside."""

    started_at_ms: float
    finished_at_ms: float
    ttft_ms: float | None
    gaps: tuple[tuple[float, float], ...]  # (when the gap ended, its length in ms), between chunks of content
    failed: bool
    first_answer: bool
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The content of `demo.json`."""

    method: str
    seed: int
    baseline_score: float
    ceiling_score: float
    scores: tuple[VersionScore, ...]
    sessions: int
    turns: int
    samples: int
    policy_versions: int
    requests: int
    requests_failed: int
    max_stream_gap_ms_during_swap: float | None
    ttft_ms: Percentiles
    exchange_to_row_ms: Percentiles
    problems: int
    samples_first_answer: int
    versions_behind_mean: float
    versions_behind_max: int
    peak_mb: float
    wall_s: float

    def as_json(self) -> dict[str, Any]:
        """The figures under the names that `demo.json` has."""
        found = asdict(self)
        behind = {"mean": found.pop("versions_behind_mean"), "max": found.pop("versions_behind_max")}
        return found | {"versions_behind": behind}


def percentiles(values: Sequence[float]) -> Percentiles:
    """Return the nearest-rank percentiles of at least one value."""
    return Percentiles(p50=at_share(values, 0.50), p99=at_share(values, 0.99))


def at_share(values: Sequence[float], share: float) -> float:
    """Return the nearest-rank value that `share` of them do not exceed; there has to be one."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def longest_gap_during(chats: Sequence[Chat], swaps: Sequence[tuple[float, float]]) -> float | None:
    """Return the longest gap in any stream that overlaps a swap (start, end in ms); None where none does."""
    gaps = [
        length
        for chat in chats
        for end, length in chat.gaps
        if any(end - length < swap_end and swap_start < end for swap_start, swap_end in swaps)
    ]
    return max(gaps, default=None)
