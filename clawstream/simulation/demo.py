"""The demonstration: the whole of clawstream on one machine, with simulated people, and how well the policy did.

Everything but the people, their judge and the policy they talk to is the product itself, over HTTP through the real
gateway. Problems for the score are asked as side turns while the students are quiet, so that one version answers all.
"""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from clawstream.config import Settings, load
from clawstream.errors import PartUnavailable
from clawstream.events import BatchPlanned, PolicyActivated, PolicyPublished, StepTaken
from clawstream.local.installation import Installation, installation
from clawstream.local.ports import reserved
from clawstream.local.supervisor import Part
from clawstream.projections.sql import rows_of
from clawstream.simulation import problems
from clawstream.simulation.figures import Chat, Figures, Score, longest_gap_during, percentiles
from clawstream.simulation.footprint import Footprint
from clawstream.simulation.opinions import STYLE_HINTS
from clawstream.simulation.programs import Scorer, Students, program
from clawstream.stream.connect import connected
from clawstream.stream.kafka import KafkaLog
from clawstream.stream.stage import Record

HINT = STYLE_HINTS[0]
WRONG_SHARE = 0.1  # of the judge's votes
STUDENTS_AT_ONCE = 8
TEMPERATURE = 0.8
LEARNING_RATE = 2e-4
COUNTS = """
SELECT (SELECT count(*) FROM sessions WHERE num_main > 0) AS sessions,
       (SELECT count(*) FROM turns WHERE kind = 'paired') AS turns,
       (SELECT count(*) FROM samples) AS samples,
       (SELECT count(*) FROM samples WHERE num_earlier_turns = 0) AS samples_first_answer,
       (SELECT count(*) FROM policies) AS policy_versions
"""
EXCHANGE_TO_ROW = """
SELECT extract(epoch FROM c.committed_at) * 1000 - e.finished_at_ms AS ms
FROM exchanges e
JOIN commits c ON c.topic = e.source_topic AND c.partition = e.source_partition
              AND e.source_offset >= c.first_offset AND e.source_offset < c.next_offset
WHERE e.turn_type = 'main'
"""
Method = Literal["combined", "binary", "opd", "topk"]
POLICY_TOPIC = "clawstream.policy.v1"
UPDATE_WITHIN_S = 300.0  # a run that makes no update for this long has failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to demonstrate."""

    method: Method
    updates: int
    seed: int
    score_every: int
    folder: Path
    cache_dir: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far the run is, for whoever watches it."""

    phase: str
    update: int = 0
    score: float | None = None
    requests: int | None = None  # None, here and above: as it was
    tokens_per_s: float | None = None


SETTINGS = """# Settings of one demonstration; `clawstream -c {path} sql "..."` looks at what it left.
environment = false
data_dir = {data_dir}
cache_dir = {cache_dir}

[engine]
port = 0
model_path = {model_path}

[gateway]
port = 0
default_temperature = {temperature}

[policy]
id = {policy_id}
served_model = "policy"
renderer = "qwen3"
enable_thinking = false

[judge]
url = "http://127.0.0.1:{judge_port}/v1"
model = "simulated-judge"
votes = 3

[training]
method = "{method}"
batch_samples = 16
max_updates = {updates}
learning_rate = {learning_rate}
seed = {seed}
threads = 1

[monitor]
port = 0
"""


class Watch:
    """What the policy topic says, as it is written."""

    def __init__(self) -> None:
        self.planned = self.taken = self.published = self.activated = 0
        self.steps: list[StepTaken] = []
        self.swaps: list[tuple[float, float]] = []  # (start, end) in ms since the epoch
        self._changed = asyncio.Condition()

    async def read(self, log: KafkaLog) -> None:
        """Follow the topic until cancelled."""
        async for records in log.follow([POLICY_TOPIC], "earliest"):
            async with self._changed:
                for record in records:
                    if isinstance(record, Record):
                        self._learn(record.event)
                self._changed.notify_all()

    def _learn(self, event: object) -> None:
        match event:
            case BatchPlanned():
                self.planned = event.policy_version
            case StepTaken():
                self.taken = event.policy_version
                self.steps.append(event)
            case PolicyPublished():
                self.published = event.policy_version
            case PolicyActivated():
                self.activated = event.policy_version
                end_ms = float(event.activated_at_ms)
                self.swaps.append((end_ms - event.pause_ms, end_ms))

    @property
    def settled(self) -> bool:
        """Whether every batch that was planned is served."""
        return self.planned == self.taken == self.published == self.activated

    async def until(self, reached: Callable[[], bool], *, what: str) -> None:
        """Return once `reached()`; raise PartUnavailable when nothing moves for too long."""
        async with self._changed:
            while not reached():
                try:
                    async with asyncio.timeout(UPDATE_WITHIN_S):
                        await self._changed.wait()
                except TimeoutError as error:
                    raise PartUnavailable(
                        f"no {what} within {UPDATE_WITHIN_S:.0f} s: see the logs folder of this run, train.log first"
                    ) from error


async def demonstrate(
    plan: Plan, base: Path, *, built_base_s: float | None, tell: Callable[[Progress], None]
) -> Figures:
    """Run the whole of it, and return what was measured; the data stays in the plan's folder.

    Raises PartUnavailable when a part does not come up or no update is made for too long.
    """
    started = time.perf_counter()
    students_file, scored_file = problems.write(plan.folder / "problems")
    footprint = Footprint()
    async with contextlib.AsyncExitStack() as stack:
        judge_port = stack.enter_context(reserved())
        settings = _settings(plan, base, judge_port)
        judge = Part(
            name="judge",
            command=(sys.executable, "-m", "clawstream.simulation.judge", "--port", str(judge_port),
                     "--wrong-share", str(WRONG_SHARE), "--seed", str(plan.seed)),
        )  # fmt: skip
        tell(Progress(phase="starting the parts"))
        running = await stack.enter_async_context(
            installation(settings, model_path=base, say=lambda _: None, extra_parts=[judge])
        )
        log = await stack.enter_async_context(connected(running.settings.kafka, client_id="demo"))
        scorer = Scorer(running.addresses.gateway, scored_file, plan.folder, plan.seed)
        watch = Watch()
        async with asyncio.TaskGroup() as tasks:
            watching = [tasks.create_task(watch.read(log)), tasks.create_task(footprint.watch())]
            await watch.until(lambda: watch.activated == 0 and watch.swaps != [], what="base policy in the engine")
            tell(Progress(phase="scoring the base"))
            baseline = await scorer.score(0)
            tell(Progress(phase="scoring the base with the hint", score=baseline.score))
            ceiling = await scorer.score(0, hint=HINT)
            chats, scores = await _teach(plan, running, students_file, watch, scorer, log, baseline, tell)
            tell(Progress(phase="reading the figures", update=watch.activated, score=scores[-1].score))
            found = await _counted(running)
            for task in watching:
                task.cancel()
    return _figures(
        plan, scores=scores, ceiling=ceiling, chats=chats, watch=watch, found=found,
        peak_mb=footprint.peak_mb, wall_s=time.perf_counter() - started, built_base_s=built_base_s,
    )  # fmt: skip


async def _teach(
    plan: Plan, running: Installation, students_file: Path, watch: Watch, scorer: Scorer, log: KafkaLog,
    baseline: Score, tell: Callable[[Progress], None],
) -> tuple[list[Chat], list[Score]]:  # fmt: skip
    """Let students chat until every update is made and served; score on the way, while they are quiet."""
    scores = [baseline]
    argv = (
        "clawstream.simulation.student", "--base-url", f"{running.addresses.gateway}/v1", "--problems",
        str(students_file), "--seed", str(plan.seed), "--concurrency", str(STUDENTS_AT_ONCE),
    )  # fmt: skip
    async with program(*argv, log=plan.folder / "logs" / "student.log") as process:
        students = Students(process)
        listening = asyncio.create_task(students.listen())
        ticker = asyncio.create_task(_tick(watch, students, scores, tell))
        try:
            while scores[-1].update < plan.updates:
                target = min(plan.updates, scores[-1].update + plan.score_every)
                await watch.until(lambda target=target: watch.activated >= target, what=f"update {target}")  # type: ignore[misc]
                await students.pause()
                await _quiet(watch, log)
                scores.append(await scorer.score(watch.activated))
                if scores[-1].update < plan.updates:
                    await students.go()
        finally:
            ticker.cancel()
            listening.cancel()
            await asyncio.gather(ticker, listening, return_exceptions=True)
        return students.chats, scores


async def _tick(watch: Watch, students: Students, scores: Sequence[Score], tell: Callable[[Progress], None]) -> None:
    window_s = 5.0
    while True:
        since_ms = (time.time() - window_s) * 1000
        tokens = sum(chat.num_tokens for chat in students.chats if chat.finished_at_ms > since_ms)
        tell(
            Progress(
                phase="students chat, the policy learns",
                update=watch.activated,
                score=scores[-1].score,
                requests=len(students.chats),
                tokens_per_s=tokens / window_s,
            )
        )
        await asyncio.sleep(0.5)


async def _quiet(watch: Watch, log: KafkaLog) -> None:
    """Return once no stage has anything left to read and every planned batch is served."""
    quiet = 0
    try:
        async with asyncio.timeout(UPDATE_WITHIN_S):
            while quiet < 3:
                lags = [await log.lag(stage) for stage in ("turns", "judging", "samples")]
                quiet = quiet + 1 if watch.settled and all(lag == 0 for lag in lags) else 0
                await asyncio.sleep(0.1)
    except TimeoutError as error:
        raise PartUnavailable(
            f"the stages were not done with what students said within {UPDATE_WITHIN_S:.0f} s: see the logs folder"
        ) from error


def _settings(plan: Plan, base: Path, judge_port: int) -> Settings:
    """Write the run's settings file, and read it; no variable of the environment reaches this run."""
    path = plan.folder / "clawstream.toml"
    path.write_text(
        SETTINGS.format(
            path=path,
            data_dir=json.dumps(str(plan.folder.absolute())),
            model_path=json.dumps(str(base.absolute())),
            cache_dir=json.dumps(str(plan.cache_dir.absolute())),
            policy_id=json.dumps(plan.folder.name),
            temperature=TEMPERATURE,
            judge_port=judge_port,
            method=plan.method,
            updates=plan.updates,
            learning_rate=LEARNING_RATE,
            seed=plan.seed,
        )
    )
    return load(path)


async def _counted(running: Installation) -> dict[str, Any]:
    """Return what the database says of the run, once it holds the whole log."""
    url = running.addresses.postgres
    async with connected(running.settings.kafka, client_id="demo-count") as log:
        async with asyncio.timeout(UPDATE_WITHIN_S):
            while await log.lag("project") != 0:  # noqa: ASYNC110  # the broker tells nobody
                await asyncio.sleep(0.1)
    rows = await asyncio.to_thread(rows_of, url, COUNTS)
    delays = await asyncio.to_thread(rows_of, url, EXCHANGE_TO_ROW)
    return dict(rows[0]) | {"exchange_to_row_ms": [float(str(row["ms"])) for row in delays]}


def _figures(
    plan: Plan, *, scores: Sequence[Score], ceiling: Score, chats: Sequence[Chat], watch: Watch, found: dict[str, Any],
    peak_mb: float, wall_s: float, built_base_s: float | None,
) -> Figures:  # fmt: skip
    steps = watch.steps
    return Figures(
        method=plan.method,
        seed=plan.seed,
        baseline_score=scores[0].score,
        ceiling_score=ceiling.score,
        scores=tuple(scores),
        sessions=found["sessions"],
        turns=found["turns"],
        samples=found["samples"],
        policy_versions=found["policy_versions"],
        requests=len(chats),
        requests_failed=sum(chat.failed for chat in chats),
        max_stream_gap_ms_during_swap=longest_gap_during(chats, watch.swaps),
        ttft_ms=percentiles([chat.ttft_ms for chat in chats if chat.ttft_ms is not None]),
        exchange_to_row_ms=percentiles(found["exchange_to_row_ms"]),
        problems=scores[0].num_problems,
        samples_first_answer=found["samples_first_answer"],
        versions_behind_mean=sum(step.mean_versions_behind * step.num_samples for step in steps)
        / sum(step.num_samples for step in steps),
        versions_behind_max=max(step.max_versions_behind for step in steps),
        peak_mb=peak_mb,
        wall_s=wall_s,
        built_base_s=built_base_s,
    )
