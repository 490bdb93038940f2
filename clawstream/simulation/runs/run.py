"""One run: the whole of clawstream on one machine, with simulated people, until the policy has made its updates.

Everything but the people, their judge and the policy is the product itself; people talk to its gateway over HTTP.
Scores during a run are taken by side turns while nobody chats, so that one version gives all answers of a score.
"""

import asyncio
import contextlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from clawstream.config import Settings, dump, load
from clawstream.errors import PartUnavailable
from clawstream.events import StepTaken
from clawstream.local.installation import Installation, installation
from clawstream.local.servers.accounts import write_private
from clawstream.local.servers.server_process import reserved
from clawstream.local.supervisor import Part
from clawstream.simulation.opinions import Control
from clawstream.simulation.roles import settings_of
from clawstream.simulation.runs import programs
from clawstream.simulation.runs.counting import Counts, Footprint, counted
from clawstream.simulation.runs.figures import Chat, Figures, VersionScore, longest_gap_during, percentiles
from clawstream.simulation.runs.people import People
from clawstream.simulation.runs.programs import ScorerProcess, StudentProcess, Watch, keys_for, program
from clawstream.simulation.runs.scenarios import MAX_TOKENS, Block, blended, blocks_of, lent
from clawstream.stream.kafka.connect import connected
from clawstream.stream.kafka.kafka_log import KafkaLog

WRONG_SHARE = 0.1  # of the judge's votes
STUDENTS_AT_ONCE = 8
_UPDATES_A_ROUND = 12  # at most, with room to spare
Method = Literal["combined", "binary", "opd", "topk", "stepwise", "outcome"]
Tell = Callable[["RunProgress"], None]
SCENARIO = "student"
TEMPERATURE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    people: People
    method: Method
    updates: int  # of agents: rounds, each of at least STEPS_A_ROUND steps
    seed: int
    folder: Path
    cache_dir: Path
    base: Path
    temperature: float
    training: Mapping[str, float | str]  # further settings of that section; a frozen run's learning_rate is 0
    score_every: int | None = None  # updates between two scores during the run; None: no score is taken
    control: Control | None = None
    patient: bool = False  # people wait for the policy that learned from what they said before
    flip_after: int | None = None  # updates: then each person wants what another wanted; None: nobody ever does
    votes_together: float = 0.0  # the share of turns on which the judge's votes are all wrong, or none
    wordy_hints: float = 0.0  # the share of the judge's hints that say more than what is wanted
    adapters: str = "shared"  # "keyed": shared by people with API keys of their own; "by_key": each key has its own
    own: Settings | None = None  # a person's settings, which name policy, engines, judge and trainer; None: simulated

    @property
    def blocks(self) -> tuple[Block, ...]:
        return blocks_of(self.people.scenario, self.updates)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """The progress of a run, for its watchers."""

    phase: str
    update: int = 0
    score: float | None = None
    requests: int | None = None  # None, here and above: unchanged
    tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The measurements of a run, and where its versions lie."""

    scores: tuple[VersionScore, ...]  # during the run, the base's first; none unless the plan asks for them
    ceiling: VersionScore | None  # of the base with the hint in its prompt; None: the plan asks for no scores
    chats: tuple[Chat, ...]
    steps: tuple[StepTaken, ...]
    swaps: tuple[tuple[float, float], ...]  # (start, end) in ms since the epoch
    published: dict[int, Path]
    versions: tuple[int, ...]  # after each update, or round, the base's first
    num_rejected: int  # rejected steps, which made no update
    counts: Counts
    peak_mb: float
    wall_s: float
    environment_steps: int | None = None  # answers that agents got; None: people talked


SETTINGS = """# Settings of one run with simulated people; `clawstream -c {path} sql "..."` looks at what it left.
environment = false
data_dir = {data_dir}
cache_dir = {cache_dir}

[engine]
port = 0
model_path = {model_path}

[gateway]
port = 0
default_temperature = {temperature}
{answer_limit}
[policy]
id = {policy_id}
adapters = "{adapters}"
served_model = "policy"
renderer = "{renderer}"
{thinking}
[judge]
url = "http://127.0.0.1:{judge_port}/v1"
model = "simulated-judge"
votes = {votes}

[training]
method = "{method}"
batch_samples = {batch_samples}
{training}keep_checkpoints = {keep_checkpoints}
seed = {seed}

[rewards]
judge = {judge_weight}

[monitor]
port = 0
"""


async def simulate(plan: Plan, *, tell: Tell) -> RunRecord:
    """Run the plan, and return what was measured; the data stays in the plan's folder.

    Raises PartUnavailable when a part does not come up or no update is made for too long.
    """
    started = time.perf_counter()
    (plan.folder / "logs").mkdir(parents=True, exist_ok=True)
    footprint = Footprint()
    async with contextlib.AsyncExitStack() as stack:
        judge_port = stack.enter_context(reserved())
        settings = _settings(plan, judge_port)
        scenario, keyed = plan.people.scenario, plan.adapters != "shared"
        api_keys = keys_for(scenario, settings.keys_file, plan.folder) if keyed else None
        limits = plan.people.cast.limits
        watch = Watch(refreshes=settings.training.refreshes, within_s=limits.update_s)
        tell(RunProgress(phase="starting the parts"))
        if plan.own is not None:
            await stack.enter_async_context(lent(plan.own.engine, plan.base))
        asked_elsewhere = plan.people.roles.judge or (plan.own is not None and plan.own.judge.url)
        judges = [] if asked_elsewhere else [_judge(plan, judge_port)]
        running = await stack.enter_async_context(
            installation(settings, model_path=plan.base, say=lambda _: None, extra_parts=judges)
        )
        log = await stack.enter_async_context(connected(running.settings.kafka, client_id="run"))
        scorer = ScorerProcess(
            running.addresses.gateway,
            plan.people.scored,
            plan.folder / "logs",
            cast=plan.people.cast,
            seed=plan.seed,
            temperature=plan.temperature,
            max_tokens=None if plan.own is None else MAX_TOKENS,
            graded_by=plan.people.roles.scorer,
        )
        async with asyncio.TaskGroup() as tasks:
            watching = [tasks.create_task(watch.read(log)), tasks.create_task(footprint.watch())]
            scores, ceiling = await _before(plan, scorer, tell)  # the engine has the base while the trainer still loads
            await watch.until(lambda: watch.activated == 0 and watch.swaps != [], what="base policy in the engine")
            chats = await _teach(plan, running, watch, scorer, log, scores, tell, api_keys)
            tell(RunProgress(phase="reading the figures", update=watch.reached, score=_last(scores)))
            counts = await counted(running)
            for task in watching:
                task.cancel()
    return RunRecord(
        scores=tuple(scores), ceiling=ceiling, chats=tuple(chats), steps=tuple(watch.steps), swaps=tuple(watch.swaps),
        published=watch.published, versions=watch.rounds or watch.versions, num_rejected=watch.num_rejected,
        counts=counts, peak_mb=footprint.peak_mb, wall_s=time.perf_counter() - started,
        environment_steps=sum(not chat.failed for chat in chats) if plan.people.cast.attempts else None,
    )  # fmt: skip


def _judge(plan: Plan, port: int) -> Part:
    control = () if plan.control in (None, Control.FROZEN) else ("--control", str(plan.control))
    return Part(
        name="judge",
        command=(sys.executable, "-m", "clawstream.simulation.judge", "--port", str(port), "--seed", str(plan.seed),
                 "--wrong-share", str(WRONG_SHARE), "--scenario", plan.people.scenario,
                 "--together-share", str(plan.votes_together), "--wordy-share", str(plan.wordy_hints), *control),
    )  # fmt: skip


async def _before(plan: Plan, scorer: ScorerProcess, tell: Tell) -> tuple[list[VersionScore], VersionScore | None]:
    """Return the base's scores without and with the hint; none where the plan asks for no scores."""
    if plan.score_every is None:
        return [], None
    tell(RunProgress(phase="scoring the base"))
    baseline = await scorer.score(0)
    tell(RunProgress(phase="scoring the base with the hint", score=baseline.score))
    return [baseline], await scorer.score(0, hinted=True)


async def _teach(
    plan: Plan, running: Installation, watch: Watch, scorer: ScorerProcess, log: KafkaLog,
    scores: list[VersionScore], tell: Tell, api_keys: Path | None,
) -> list[Chat]:  # fmt: skip
    """Let people chat until every update is made and served; add to `scores` while nobody chats."""
    cast = plan.people.cast
    manner = ("--hint-share", plan.people.hint_share) if cast.attempts is None else ("--attempts", cast.attempts)
    argv = (
        cast.asks, "--base-url", f"{running.addresses.gateway}/v1", "--problems", str(plan.people.asked),
        "--seed", str(plan.seed), "--concurrency", str(STUDENTS_AT_ONCE), *map(str, manner),
        *(("--wait",) if plan.patient or cast.attempts is not None else ()),
        *(("--everyday",) if cast.everyday else ()), "--timeout-s", str(cast.limits.request_s),
        *(() if plan.own is None else ("--max-tokens", str(MAX_TOKENS))),
        *(() if plan.people.roles.people is None else ("--played-by", plan.people.roles.people)),
        *(() if api_keys is None else ("--api-keys", str(api_keys))),
    )  # fmt: skip
    async with program(*argv, log=plan.folder / "logs" / "student.log") as process:
        students = StudentProcess(process, within_s=cast.limits.pause_s)
        listening = asyncio.create_task(students.listen())
        ticker = asyncio.create_task(_tick(watch, students, scores, tell))
        try:
            if plan.blocks:
                await students.talk(plan.blocks[0].talker)
            if cast.attempts is not None:
                await programs.steps(plan.updates, cast.attempts, cast, students, watch, log)
            reached = plan.updates if cast.attempts is not None else 0
            while reached < plan.updates:
                target = _next_stop(plan, reached)
                async with asyncio.TaskGroup() as tasks:
                    if plan.patient:
                        tasks.create_task(programs.batches(target, cast, students, watch, log))
                    await watch.until_served(_free_until(plan, target))
                await students.pause()
                await programs.quiet(cast, watch, log)
                if watch.updates < target:
                    await programs.batches(target, cast, students, watch, log)
                    await watch.until_served(target)
                reached = watch.updates
                if plan.score_every is not None:
                    scores.append(replace(await scorer.score(watch.activated), update=reached))
                await _change(plan, target, reached, students)
                if reached < plan.updates and not plan.patient:
                    await students.go()
        finally:
            ticker.cancel()
            listening.cancel()
            await asyncio.gather(ticker, listening, return_exceptions=True)
        return students.chats


async def _change(plan: Plan, target: int, reached: int, students: StudentProcess) -> None:
    """Change who talks, or what they want, if the plan has such a change after update `target`.

    Raises PartUnavailable where a later update was reached: it learned from what was said before the change.
    """
    talkers = {ended.end: begun.talker for ended, begun in itertools.pairwise(plan.blocks)}
    if target != plan.flip_after and target not in talkers:
        return
    if reached != target:
        raise PartUnavailable(
            f"people were to change after update {target}, and {reached} updates are served: later ones were trained "
            "before anybody changed, so the run ends here. Run it again"
        )
    if target == plan.flip_after:
        await students.flip()
    else:
        await students.talk(talkers[target])


def _next_stop(plan: Plan, reached: int) -> int:
    """Return after which update people are stopped next: for a score, for a change of people, or for good."""
    changes = [block.end for block in plan.blocks] if plan.flip_after is None else [plan.flip_after]
    every = plan.score_every or plan.updates
    return min(plan.updates, (reached // every + 1) * every, *(at for at in changes if at > reached))


def _free_until(plan: Plan, target: int) -> int:
    """Return the update up to which people go on asking while weights are trained.

    When an update is served, people have already said enough for the next one. So `programs.batches` makes the last
    update before a score: it plans no more batches than are missing.
    """
    return target if plan.patient or plan.score_every is None else target - 1


async def _tick(watch: Watch, students: StudentProcess, scores: Sequence[VersionScore], tell: Tell) -> None:
    window_s = 5.0
    while True:
        since_ms = (time.time() - window_s) * 1000
        tokens = sum(chat.num_tokens for chat in students.chats if chat.finished_at_ms > since_ms)
        tell(
            RunProgress(
                phase="students chat, the policy learns",
                update=watch.reached,
                score=_last(scores),
                requests=len(students.chats),
                tokens_per_s=tokens / window_s,
            )
        )
        await asyncio.sleep(0.5)


def _settings(plan: Plan, judge_port: int) -> Settings:
    """Write the run's settings file, and read it; of the environment the key of language models alone reaches a run."""
    path, cast = plan.folder / "clawstream.toml", plan.people.cast
    by_steps = cast.attempts is not None
    frozen = {"learning_rate": 0.0} if plan.control is Control.FROZEN else {}
    training = {**({} if by_steps else {"max_updates": plan.updates}), **plan.training, **frozen}
    num_scored_later = (plan.updates + 1) * (_UPDATES_A_ROUND if by_steps else 1)
    path.write_text(
        SETTINGS.format(
            path=path,
            data_dir=json.dumps(str(plan.folder.absolute())),
            model_path=json.dumps(str(plan.base.absolute())),
            cache_dir=json.dumps(str(plan.cache_dir.absolute())),
            policy_id=json.dumps(plan.folder.name),
            adapters="by_key" if plan.adapters == "by_key" else "shared",
            temperature=plan.temperature,
            answer_limit="" if cast.answer_tokens is None else f"default_max_tokens = {cast.answer_tokens}\n",
            renderer=cast.renderer,
            thinking="" if cast.renderer == "auto" else "enable_thinking = false\n",
            judge_port=judge_port,
            method="stepwise" if by_steps else plan.method,
            judge_weight=0.0 if plan.method == "outcome" else 1.0,
            votes=cast.votes,
            batch_samples=cast.batch_samples,
            training="".join(f"{name} = {json.dumps(value)}\n" for name, value in training.items()),
            keep_checkpoints=5 if plan.score_every else num_scored_later,
            seed=plan.seed,
        )
    )
    run, judge = load(path), plan.people.roles.judge
    if plan.own is None and judge is None:
        return run
    whole = run if plan.own is None else blended(run, plan.own)
    if judge is not None:
        asked = settings_of(judge)
        named = {name: getattr(asked, name) for name in ("url", "model", "api_key")}
        votes = run.judge if plan.own is None else plan.own.judge
        whole = whole.model_copy(update={"judge": votes.model_copy(update=named)})
    file = plan.folder / "own.json"
    write_private(file, dump(whole))
    return load(file)


def _last(scores: Sequence[VersionScore]) -> float | None:
    return scores[-1].score if scores else None


async def demonstrate(plan: Plan, *, tell: Tell) -> Figures:
    """Run the plan, which asks for scores, and return its figures; raises what `simulate` raises."""
    record = await simulate(plan, tell=tell)
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
