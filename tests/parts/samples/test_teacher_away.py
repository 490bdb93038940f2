"""A teacher that can't be had: samples without a hint do not wait for it, those with one wait until the deadline."""

from typing import Any

import pytest

from clawstream.errors import TryLater
from clawstream.events import (
    ExchangeCompleted,
    HintAbsent,
    HintFound,
    Question,
    SampleAssembled,
    TeacherScored,
    TeacherStatus,
    TurnPaired,
    VerdictReached,
)
from clawstream.inference.engine import ScoreRequest, Scores
from clawstream.inference.judge_client import TeacherClient as EngineTeacher
from clawstream.samples.joining import SampleRules, TeacherRule
from clawstream.samples.stage import ScoringTeacher, asking_stage, samples_stage
from clawstream.stream.runner.breaker import FAILING_CALLS
from clawstream.stream.runner.hosting import RunnerIntervals
from clawstream.stream.topics import HINTS, SAMPLES
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.flow import Flow, Oracle
from tests.parts.inference.test_teacher import Engine
from tests.sessions import Letters, Session, assistant, user
from tests.unit.samples.test_teacher import judge
from tests.unit.stream import toys

pytestmark = pytest.mark.slow

NO_HINT = Oracle({Question.SCORE: ["\\boxed{-1}"], Question.HINT: ["\\boxed{-1}"]})


class Away:
    async def score(self, _: ScoreRequest) -> Scores:
        raise TryLater("connection refused")


class Counted:
    """Another teacher, and about how many answers it was asked."""

    def __init__(self, teacher: ScoringTeacher) -> None:
        self._teacher = teacher
        self.asked: set[tuple[int, ...]] = set()

    async def score(self, wanted: ScoreRequest) -> Scores:
        self.asked.add(tuple(wanted.hinted_ids))
        return await self._teacher.score(wanted)


def judged(session_id: str, by: Oracle) -> list[Any]:
    """What the samples stage reads of a session of one turn."""
    session = Session(session_id)
    session.ask([user(session_id)], "# four")
    session.ask([user(session_id), assistant("# four"), user("no headings")], "sorry")
    kinds = ExchangeCompleted | TurnPaired | VerdictReached | HintFound | HintAbsent
    log = Flow(by).run(session.written)
    return [record.event for topic in log.topics.values() for record in topic if isinstance(record.event, kinds)]


def behind() -> ScoringTeacher:
    """The policy's engine has weights older than those that sampled."""
    return EngineTeacher(Engine("default"), [Engine("default")], policy_id="policy")


@pytest.mark.parametrize("teacher", [Away(), behind()], ids=["away", "behind"])
async def test_samples_go_on_without_their_hints_and_those_that_have_none_do_not_wait(teacher: ScoringTeacher) -> None:
    log = MemoryLog(MemoryBroker(partitions=1))
    stage = samples_stage(SampleRules(Letters(), asks=TeacherRule("t@e")))
    counted = Counted(teacher)
    stage = asking_stage(stage, counted, deadline_s=4.0, call_timeout_s=0.5)
    hinted = [f"hinted-{number}" for number in range(4)]

    async def made() -> list[tuple[str, str | None]]:
        samples = [record.event for record in await toys.read(log, SAMPLES)]
        return [(event.session_id, event.hint) for event in samples if isinstance(event, SampleAssembled)]

    async def some_made() -> bool:
        return bool(await made())

    async def in_vain() -> bool:
        return len(counted.asked) >= FAILING_CALLS

    for session_id in hinted:
        await log.append(judged(session_id, judge(-1)))
    async with toys.running(stage, log, pace=RunnerIntervals(retry_s=0.05, drain_s=0.1, poll_s=0.05)):
        await toys.until(in_vain)
        await log.append(judged("plain", NO_HINT))
        await toys.until(some_made)
        assert await made() == [("plain", None)]
        await toys.settled(log, "samples")
    assert sorted(await made()) == [*((session_id, None) for session_id in hinted), ("plain", None)]
    said = [record.event for record in await toys.read(log, HINTS) if isinstance(record.event, TeacherScored)]
    assert [scored.status for scored in said] == [TeacherStatus.FAILED] * 4
