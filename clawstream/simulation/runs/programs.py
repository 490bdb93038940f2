"""The processes that simulate people, how long they talk, and what the policy topic says meanwhile."""

import asyncio
import contextlib
import json
import math
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from clawstream.errors import PartUnavailable
from clawstream.events import BatchPlanned, GroupSettled, PolicyActivated, PolicyPublished, StepRejected, StepTaken
from clawstream.gateway.access.key_file import add_key
from clawstream.gateway.access.keys import Allowance
from clawstream.local.servers.accounts import write_private
from clawstream.local.servers.server_process import end_child, start_child
from clawstream.simulation.problems import MAX_STEPS
from clawstream.simulation.runs.figures import Chat, GeneralScore, VersionScore
from clawstream.simulation.runs.scenarios import STEPS_A_ROUND, ScenarioPrograms, TimeLimits, names_of
from clawstream.stream import topics
from clawstream.stream.kafka.kafka_log import KafkaLog
from clawstream.stream.stage import Record

KEYS_AT_ONCE = 64  # requests of a person's own key; a scorer has 32
_END_WITHIN_S = 10.0
MORE_SHARE = 0.2  # further sessions while a batch is not full, as a share of those so far: some give no sample
SESSIONS_A_SAMPLE = 250  # sessions for each sample of a batch; if the batch is still not full after these, the run ends
AT_A_TIME = 4  # batches: at most as many sessions are held at a time as these have samples
PLANNED_WITHIN_S = 2.0  # after its last sample; a batch that is not planned by then is not full
_SEE = "see student.log in the logs folder of this run"
_GROUPED = ("trajectories", "groups")
_USUAL = TimeLimits()


class Watch:
    """The versions so far: planned, trained, published, served; and the stages that make samples."""

    def __init__(self, *, refreshes: bool = False, within_s: float = _USUAL.update_s) -> None:
        """Without a version served for `within_s`, `until` gives up."""
        self.within_s = within_s
        # With refreshes, samples lead to new answers, and these to samples: so the refresh stage has to be done, too.
        self.refreshes = refreshes
        self.stages = ("turns", "judging", *(("refresh",) if self.refreshes else ()), "samples")
        self.planned = self.taken = self.activated = 0
        self._alive_at_s = 0.0  # by the event loop's clock
        self.steps: list[StepTaken] = []
        self.published: dict[int, Path] = {}
        self.num_planned = self.num_rejected = 0  # batches
        self.rounds: tuple[int, ...] = ()  # the version served after each, the base's first; none: there are no rounds
        self.swaps: list[tuple[float, float]] = []  # (start, end) in ms since the epoch
        self._changed = asyncio.Condition()

    async def read(self, log: KafkaLog) -> None:
        """Follow the topic until cancelled."""
        async for records in log.follow([topics.POLICY], "earliest"):
            async with self._changed:
                for record in records:
                    if isinstance(record, Record):
                        self._learn(record.event)
                self._changed.notify_all()

    def _learn(self, event: object) -> None:
        match event:
            case BatchPlanned():
                self.planned = event.policy_version
                self.num_planned += 1
            case StepTaken():
                self.taken = event.policy_version
                self.steps.append(event)
            case StepRejected():
                self.planned = self.taken  # its number stays unused
                self.num_rejected += 1
            case PolicyPublished():
                self.published[event.policy_version] = Path(event.path)
            case PolicyActivated():
                self.activated = event.policy_version
                self._alive_at_s = asyncio.get_running_loop().time()
                end_ms = float(event.activated_at_ms)
                self.swaps.append((end_ms - event.pause_ms, end_ms))

    @property
    def versions(self) -> tuple[int, ...]:
        """The version after each update, the base's first; rejected steps are no updates."""
        return tuple(sorted({0, *self.published}))

    def begin_rounds(self) -> None:
        """Count rounds from now on; the version served now is the base's."""
        self.rounds = self.rounds or (self.activated,)

    def end_round(self) -> None:
        self.rounds = (*self.rounds, self.activated)

    @property
    def reached(self) -> int:
        """How many rounds are over, or, where there are none, how many updates are served."""
        return len(self.rounds) - 1 if self.rounds else self.updates

    @property
    def updates(self) -> int:
        return sum(0 < version <= self.activated for version in self.published)

    @property
    def settled(self) -> bool:
        """Whether every batch that was planned is served."""
        return self.planned == self.taken == max(self.published, default=0) == self.activated

    def wait_again(self) -> None:
        """Restart the time limit of `until`: people were heard, and have more to say."""
        self._alive_at_s = asyncio.get_running_loop().time()

    async def plans_more(self, num_planned: int, *, within_s: float) -> bool:
        """Return whether more than `num_planned` batches are planned, now or within `within_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s), self._changed:
                await self._changed.wait_for(lambda: self.num_planned > num_planned)
        return self.num_planned > num_planned

    async def until_planned(self, batches: int) -> None:
        """Return once so many batches are planned; raises what `until` does."""
        await self.until(lambda: self.num_planned >= batches, what=f"plan of batch {batches}, whose samples are there,")

    async def until_settled(self) -> None:
        """Return once every batch that was planned is served, or rejected; raises what `until` does."""
        await self.until(lambda: self.settled, what=f"version {self.planned} in the engine")

    async def until_served(self, updates: int) -> None:
        """Return once so many updates are served; raises what `until` does."""
        await self.until(lambda: self.updates >= updates, what=f"update {updates}")

    async def until(self, reached: Callable[[], bool], *, what: str) -> None:
        """Return once `reached()`; raise PartUnavailable after too long without a version served or a `wait_again`."""
        loop = asyncio.get_running_loop()
        asked_at_s = loop.time()
        async with self._changed:
            while not reached():
                until_s = max(asked_at_s, self._alive_at_s) + self.within_s
                if loop.time() >= until_s:
                    raise PartUnavailable(
                        f"no {what} within {self.within_s:.0f} s: see the logs folder of this run, train.log first"
                    )
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(until_s):
                        await self._changed.wait()


@contextlib.asynccontextmanager
async def program(*argv: str, log: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """Yield the process of `python -m ARGV`, its stderr in `log`; it ends with the block, or with this process."""
    process = await start_child([sys.executable, "-m", *argv], log=log, piped=True)
    try:
        yield process
    finally:
        await end_child(process, _END_WITHIN_S)


class StudentProcess:
    """The student process: commands such as `pause` go to its stdin, and its stdout gives a report a line."""

    def __init__(self, process: asyncio.subprocess.Process, *, within_s: float = _USUAL.pause_s) -> None:
        """Without an answer for `within_s`, people who are to say that they are done are given up."""
        self._process, self._within_s = process, within_s
        self._paused = asyncio.Event()
        self.chats: list[Chat] = []

    async def listen(self) -> None:
        """Collect the process's reports until it ends."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            report = json.loads(line)
            if report["event"] == "paused":
                self._paused.set()
            else:
                self.chats.append(_chat(report))

    async def pause(self) -> None:
        """Return once no session is open; raise PartUnavailable when the process does not say so in time."""
        await self._all_said("pause")

    async def go(self) -> None:
        await self._tell("go")

    async def flip(self) -> None:
        """Let each person want what another wanted, in all sessions that start from now on."""
        await self._tell("flip")

    async def talk(self, talker: str) -> None:
        """Let the talker alone start sessions from now on."""
        await self._tell(f"talk {talker}")

    async def hold(self, num_sessions: int) -> None:
        """Let so many sessions start, and return once they are over; raises what `pause` does."""
        await self._all_said(f"go {num_sessions}")

    async def _all_said(self, command: str) -> None:
        self._paused.clear()
        await self._tell(command)
        num_answers = -1
        while not self._paused.is_set():
            if num_answers == len(self.chats):
                raise PartUnavailable(f"students did not pause, and got no answer for {self._within_s:.0f} s: {_SEE}")
            num_answers = len(self.chats)
            await self._wait_paused()

    async def _wait_paused(self) -> None:
        """Return once they paused, or after the limit; raise PartUnavailable as soon as their process has ended."""
        async with asyncio.TaskGroup() as group:
            waits = [group.create_task(self._paused.wait()), group.create_task(self._process.wait())]
            await asyncio.wait(waits, timeout=self._within_s, return_when=asyncio.FIRST_COMPLETED)
            for one in waits:
                one.cancel()
        if not self._paused.is_set() and self._process.returncode is not None:
            raise PartUnavailable(f"the students ended with exit code {self._process.returncode}: {_SEE}")

    async def _tell(self, command: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{command}\n".encode())
            await self._process.stdin.drain()
        except ConnectionError as error:
            raise PartUnavailable(f"the students ended before {command!r}: {_SEE}") from error


def _chat(report: dict[str, Any]) -> Chat:
    return Chat(
        finished_at_ms=report["started_at_s"] * 1000 + report["total_ms"],
        ttft_ms=report["ttft_ms"],
        gaps=tuple((ended_at_s * 1000, gap_ms) for ended_at_s, gap_ms in report["gaps"]),
        failed=report["failed"],
        first_answer=report["first_answer"],
        num_tokens=report["num_chunks"],
    )


@dataclass(frozen=True, slots=True)
class ScorerProcess:
    """The scoring process; every call is one run of it."""

    gateway: str
    problems: Path
    logs: Path
    _: KW_ONLY
    cast: ScenarioPrograms
    seed: int
    temperature: float
    max_tokens: int | None = None
    api_keys: Path | None = None  # of people who have keys of their own, and so may be answered by different versions
    graded_by: str | None = None  # a language model, as MODEL@URL; None: code marks the answers
    base: tuple[str, Path] | None = None  # an engine of the untrained model, and its folder; None: it is not asked

    async def score(self, update: int, *, hinted: bool = False) -> VersionScore:
        """Ask all held-out problems; raise PartUnavailable when some answer did not come or versions were mixed."""
        argv = [
            *self.cast.scores, "--base-url", f"{self.gateway}/v1", "--problems", str(self.problems),
            "--seed", str(self.seed), "--temperature", str(self.temperature), *(("--hinted",) if hinted else ()),
            "--timeout-s", str(self.cast.limits.request_s),
            *(() if self.max_tokens is None else ("--max-tokens", str(self.max_tokens))),
            *(() if self.api_keys is None else ("--api-keys", str(self.api_keys))),
            *(() if self.graded_by is None else ("--graded-by", self.graded_by)),
            *(() if self.base is None else ("--base-engine", self.base[0], "--base", str(self.base[1]))),
        ]  # fmt: skip
        log = self.logs / "scorer.log"
        async with program(*argv, log=log) as process:
            output, _ = await process.communicate()
        if process.returncode != 0:
            raise PartUnavailable(f"the scorer exited with {process.returncode}: see {log}")
        found = json.loads(output)
        others = set() if self.api_keys is None else {"0"}
        if set(found["policy_versions"]) - others != {str(update)} - others:
            raise PartUnavailable(
                f"answers for the score of update {update} came from versions {found['policy_versions']}: "
                "a score is of one version, so the run ends here"
            )
        return VersionScore(
            update=update, score=found["score"], low=found["ci95_low"], high=found["ci95_high"],
            num_problems=found["n"], num_right=found["right"], num_styled=found.get("styled"),
            num_ungraded=found["ungraded"], by_persona=found.get("by_persona"),
            prompt_tokens=found.get("prompt_tokens"),
            general=GeneralScore(**found["general"]) if "general" in found else None,
        )  # fmt: skip


def keys_for(scenario: str, keys_file: Path, folder: Path) -> Path:
    """Give each person of the scenario an API key under their name; return the file of keys for the programs."""
    keys_file.unlink(missing_ok=True)
    shown = {name: add_key(keys_file, name, Allowance(max_concurrent=KEYS_AT_ONCE)) for name in names_of(scenario)}
    file = folder / "api_keys.json"
    write_private(file, json.dumps(shown))
    return file


async def batches(target: int, cast: ScenarioPrograms, students: StudentProcess, watch: Watch, log: KafkaLog) -> None:
    """Let people talk for one batch after the other, each answered by the policy trained on all earlier batches.

    When people begin, less than a batch of samples is left over. Where no prompts are answered again and code plays the
    people, a session gives at most one sample. So no more batches are planned than are missing. Raises PartUnavailable
    where too few batches come about.
    """
    enough = 1 if cast.one_by_one else cast.batch_samples // cast.samples_a_session
    while (missing := target - watch.updates) > 0:
        planned, num_asked = watch.num_planned, 0
        is_full = missing == 1 and await watch.plans_more(planned, within_s=PLANNED_WITHIN_S)  # of samples left over
        while not is_full:
            num_sessions = min(math.ceil(num_asked * MORE_SHARE) or enough, missing * cast.batch_samples)
            if num_asked >= SESSIONS_A_SAMPLE * cast.batch_samples:
                raise PartUnavailable(
                    f"{num_asked} sessions in a row made no batch of {cast.batch_samples} samples for update "
                    f"{watch.updates + 1}, so the run ends here. Either people are content, and have too little to say "
                    "that this method learns from: ask for fewer updates. Or the trainer plans nothing: train.log in "
                    "the logs folder of this run says why"
                )
            await _held(num_sessions, cast, students, watch)
            num_asked += num_sessions
            is_full = await watch.plans_more(planned, within_s=PLANNED_WITHIN_S)
            if not is_full:
                await quiet(cast, watch, log)
                is_full = await watch.plans_more(planned, within_s=PLANNED_WITHIN_S)
        # With left-over samples these are too few for two batches.
        if num_asked <= cast.batch_samples and cast.samples_a_session == 1 and not watch.refreshes:
            await watch.until_settled()
        else:
            await quiet(cast, watch, log)
        if not cast.one_by_one:
            enough = max(cast.batch_samples // cast.samples_a_session, math.floor(num_asked * (1 - MORE_SHARE)))


async def _held(num_sessions: int, cast: ScenarioPrograms, students: StudentProcess, watch: Watch) -> None:
    """Let people hold so many sessions, and restart the watch's time limit meanwhile."""
    while num_sessions > 0:
        await students.hold(min(num_sessions, AT_A_TIME * cast.batch_samples))
        num_sessions -= AT_A_TIME * cast.batch_samples
        watch.wait_again()


async def steps(
    num_rounds: int, attempts: int, cast: ScenarioPrograms, students: StudentProcess, watch: Watch, log: KafkaLog
) -> None:
    """Let agents take so many rounds of steps, each with the policy trained on all earlier rounds.

    Groups are whole, so the last round may have a group's steps too many. Raises PartUnavailable where a request
    failed: its group would never be whole.
    """
    watch.begin_rounds()
    for number in range(1, num_rounds + 1):
        while (left := number * STEPS_A_ROUND - len(students.chats)) > 0:
            await students.hold(attempts * math.ceil(left / (attempts * MAX_STEPS)))
            if num_failed := sum(chat.failed for chat in students.chats):
                raise PartUnavailable(
                    f"{num_failed} of {len(students.chats)} requests of agents failed in round {number}, expected "
                    "none: their groups would never be whole, so the run ends here. See gateway.log and engine.log in "
                    "the logs folder of this run, and run it again"
                )
        await _trained(cast, watch, log)
        watch.end_round()


async def _trained(cast: ScenarioPrograms, watch: Watch, log: KafkaLog) -> None:
    """Return once every batch that the settled groups fill is planned and served; raises what `quiet` does."""
    while True:
        await quiet(cast, watch, log)
        num_planned, num_waiting = await _left_over(log)
        is_due = num_waiting >= cast.batch_samples
        if not is_due and watch.num_planned >= num_planned and watch.settled:
            return
        await watch.until_planned(num_planned + is_due)


async def _left_over(log: KafkaLog) -> tuple[int, int]:
    """Return how many batches are planned on the log, and how many samples of settled groups are in no batch."""
    num_planned, settled, planned = 0, set[str](), set[str]()
    async for records in log.follow([topics.GROUPS, topics.POLICY], until_end=True):
        for record in records:
            match record.event if isinstance(record, Record) else None:
                case GroupSettled(advantages=advantages):
                    settled.update(step.sample_id for step in advantages)
                case BatchPlanned(sample_ids=sample_ids):
                    num_planned += 1
                    planned.update(sample_ids)
                case _:
                    pass
    return num_planned, len(settled - planned)


async def quiet(cast: ScenarioPrograms, watch: Watch, log: KafkaLog) -> None:
    """Return once no stage has anything left to read and every planned batch is served."""
    stages = watch.stages if cast.attempts is None else (*watch.stages, *_GROUPED)
    times = 0
    try:
        async with asyncio.timeout(cast.limits.update_s):
            while times < 3:
                lags = [await log.lag(stage) for stage in stages]
                times = times + 1 if watch.settled and all(lag == 0 for lag in lags) else 0
                await asyncio.sleep(0.1)
    except TimeoutError as error:
        raise PartUnavailable(
            f"the stages were not done with what students said within {cast.limits.update_s:.0f} s: see the logs folder"
        ) from error
