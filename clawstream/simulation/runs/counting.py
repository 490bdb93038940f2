"""The figures of a run: counts from its database, once that holds the whole log, and its memory (Linux only)."""

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
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
# The answers that people had got when the batch of each version was planned.
_INTERACTIONS = """
SELECT b.policy_version,
       (SELECT count(*) FROM exchanges AS e WHERE e.kind = 'completed' AND e.turn_type = 'main'
           AND e.finished_at_ms < b.planned_at_ms) AS interactions
FROM batches AS b ORDER BY b.policy_version
"""
# From a complaint or hint that was trained on to the first answer all of whose tokens are of a version trained on it.
# Complaints and hints after which nobody asked any more are left out.
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
# From a hint that was trained on to the first time that an engine served a version trained on it.
_CORRECTION_TO_SERVED = """
SELECT ((SELECT min(a.activated_at_ms) FROM activations AS a
         WHERE a.policy_id = b.policy_id AND a.policy_version >= b.policy_version)
        - e.received_at_ms) / 1000.0 AS s
FROM batches AS b
JOIN steps USING (policy_id, policy_version)
CROSS JOIN LATERAL unnest(b.sample_ids) AS planned (sample_id)
JOIN samples AS s ON s.sample_id = planned.sample_id AND s.hint IS NOT NULL AND s.refreshed_id IS NULL
JOIN turns AS t ON t.turn_id = s.turn_id AND t.kind = 'paired'
JOIN exchanges AS e ON e.exchange_id = t.next_exchange_id
"""
JAVA = "java"  # the broker's process, which is not counted
MEASURED_EVERY_S = 2.0


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
    exchange_to_row_ms: tuple[float, ...]
    correction_to_policy_s: tuple[float, ...]  # of corrections that were trained on and after which people asked again
    correction_to_served_s: tuple[float, ...] = ()  # of all hints that were trained on


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
        exchange_to_row_ms=tuple(float(str(row["ms"])) for row in rows_of(url, _EXCHANGE_TO_ROW)),
        correction_to_policy_s=tuple(float(str(row["s"])) for row in rows_of(url, _CORRECTION_TO_POLICY)),
        correction_to_served_s=tuple(
            float(str(row["s"])) for row in rows_of(url, _CORRECTION_TO_SERVED) if row["s"] is not None
        ),
    )


class Footprint:
    """The largest memory seen of this process and all its descendants, without the JVM."""

    def __init__(self) -> None:
        self.peak_mb = 0.0

    async def watch(self) -> None:
        while True:
            self.peak_mb = max(self.peak_mb, await asyncio.to_thread(_pss_mb))
            await asyncio.sleep(MEASURED_EVERY_S)


def _pss_mb() -> float:
    me = psutil.Process()
    total_bytes = 0
    for process in [me, *me.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
            if process.name() != JAVA:
                total_bytes += process.memory_full_info().pss
    return total_bytes / 2**20
