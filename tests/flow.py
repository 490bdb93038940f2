"""Turns, judging, samples and groups over a log in memory, in any order and with restarts, to test properties on.

A stage reads any of its topics next; its calls return in any order. A restart keeps what a broker keeps: the log, and
per topic the run of records whose events and calls are done. The rest is forgotten, rebuilt in the order of the log's
clock without writing, and read again.
"""

import random
from collections import defaultdict
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from clawstream.config import JudgeSettings
from clawstream.conversation.continuing import Renderer
from clawstream.events import (
    EVERYTHING,
    AnswerRefreshed,
    Event,
    FeedbackGiven,
    GroupSettled,
    GroupWaited,
    HintAbsent,
    HintFound,
    LearnsFrom,
    Question,
    RefreshAsked,
    RewardWeights,
    SampleAssembled,
    SampleRefused,
    TeacherScored,
    TrajectoryEnded,
    TrajectoryLate,
    TurnOrphaned,
    TurnPaired,
    TurnsSettled,
    VerdictReached,
    VoteCast,
    derived_id,
)
from clawstream.groups.stage import groups_stages
from clawstream.inference.engine import EngineRefused, ScoreRequest, Scores
from clawstream.inference.judge_client import JudgeReply
from clawstream.judging.stage import judging_stage
from clawstream.refresh.stage import Policy, refresh_stage
from clawstream.samples.joining import SampleRules, TeacherRule
from clawstream.samples.stage import asking_stage, samples_stage
from clawstream.stream import topics
from clawstream.stream.stage import Record, Stage
from clawstream.stream.topics import ANSWERS, EXCHANGES, FEEDBACK, HINTS, SAMPLES, TURNS, VERDICTS, VOTES
from clawstream.turns.stage import turns_stage
from tests.sessions import Letters

HOWEVER_DRAWN = LearnsFrom(hints_off_distribution=True)  # by whole distributions

T = TypeVar("T")

_TOPICS: Mapping[str, tuple[type[Event], ...]] = {
    TURNS: (TurnPaired, TurnOrphaned, TurnsSettled),
    VOTES: (VoteCast,),
    VERDICTS: (VerdictReached,),
    HINTS: (HintFound, HintAbsent, TeacherScored),
    SAMPLES: (SampleAssembled, SampleRefused),
    FEEDBACK: (FeedbackGiven,),
    ANSWERS: (RefreshAsked, AnswerRefreshed),
    topics.GROUPS: (TrajectoryEnded, GroupWaited, GroupSettled, TrajectoryLate),
}
_TOPIC_OF = {kind: topic for topic, kinds in _TOPICS.items() for kind in kinds}
REPLIES = {
    Question.SCORE: ("\\boxed{1}", "\\boxed{-1}", "\\boxed{0}", "who knows"),
    Question.HINT: (
        "\\boxed{-1}",
        "\\boxed{1} [HINT_START]Leave out the headings.[HINT_END]",
        "\\boxed{1} [HINT_START]short[HINT_END]",
        "who knows",
    ),
}


class Oracle:
    """A judge whose replies follow from the question and the seed; `replies` says which there are."""

    name = "oracle@test"

    def __init__(self, replies: Mapping[Question, Sequence[str]] = REPLIES) -> None:
        self.replies = replies
        self.asked: list[str] = []

    async def ask(self, system: str, user: str, *, seed: int) -> JudgeReply:
        self.asked.append(f"{system}\n{user}\n{seed}")
        question = Question.HINT if "[HINT_START]" in system else Question.SCORE
        replies = self.replies[question]
        chosen = int(derived_id("reply", user, seed)[:6], 16) % len(replies)
        return JudgeReply(text=replies[chosen], prompt_tokens=None, completion_tokens=None)


class Tutor:
    """A teacher whose scores follow from what is scored; answers of `too_long` tokens are refused."""

    def __init__(self, name: str = "tutor@test", *, too_long: int = 10**9) -> None:
        self.name = name
        self.too_long = too_long
        self.asked: list[ScoreRequest] = []

    async def score(self, wanted: ScoreRequest) -> Scores:
        self.asked.append(wanted)
        if len(wanted.response_ids) >= self.too_long:
            raise EngineRefused(400, "the input is longer than the model's context")
        return Scores(
            tuple(-0.001 * (len(wanted.hinted_ids) + token) for token in wanted.response_ids),
            tuple(-0.001 * (len(wanted.prompt_ids) + token) for token in wanted.response_ids),
            wanted.sampled_by + 1,
        )


@dataclass
class Log:
    """Topics of one partition; the clock counts records."""

    topics: dict[str, list[Record]] = field(default_factory=lambda: defaultdict(list))
    clock_ms: int = 0

    def append(self, topic: str, event: Event) -> None:
        self.clock_ms += 1
        records = self.topics[topic]
        records.append(
            Record(
                topic=topic,
                partition=0,
                offset=len(records),
                timestamp_ms=self.clock_ms,
                key=event.key,
                event=event,
            )
        )

    def first_by_id(self, *topics: str) -> dict[str, Event]:
        """The events of some topics, of two with one id the first."""
        found: dict[str, Event] = {}
        for topic in topics:
            for record in self.topics[topic]:
                found.setdefault(record.event.event_id, record.event)
        return found

    def of(self, kind: type[T]) -> list[T]:
        """The events of one kind, in topic order, repeats left out."""
        seen = self.first_by_id(*self.topics)
        return [event for event in seen.values() if isinstance(event, kind)]


class Worker:
    """One stage at work on the log."""

    def __init__(self, stage: Stage[Any, Any], log: Log) -> None:
        self.stage, self.log = stage, log
        self.committed = dict.fromkeys(stage.reads, 0)
        self.restart()

    def restart(self) -> None:
        """Forget all that is not on the log or committed; rebuild as the runner does."""
        self.states: dict[str, Any] = {}
        self.calls: list[tuple[Record, Any]] = []
        self.undone: dict[str, dict[int, int]] = {topic: {} for topic in self.stage.reads}
        self.position = dict(self.committed)
        read = [record for topic, end in self.committed.items() for record in self.log.topics[topic][:end]]
        for record in sorted(read, key=lambda record: record.timestamp_ms):
            self.states[record.key] = self.stage.step(self.states.get(record.key), record).state

    def choices(self) -> list[str | int]:
        """What can be done next: a topic to read from, or a call to return."""
        unread = [topic for topic in self.stage.reads if self.position[topic] < len(self.log.topics[topic])]
        return [*unread, *range(len(self.calls))]

    def act(self, choice: str | int) -> None:
        if isinstance(choice, str):
            self._read(choice)
        else:
            self._return(choice)

    def _read(self, topic: str) -> None:
        record = self.log.topics[topic][self.position[topic]]
        self.position[topic] += 1
        step = self.stage.step(self.states.get(record.key), record)
        self.states[record.key] = step.state
        self.write(step.events)
        self.undone[topic][record.offset] = len(step.calls)
        self.calls += [(record, call) for call in step.calls]
        self._commit(topic)

    def _return(self, number: int) -> None:
        record, call = self.calls.pop(number)
        assert self.stage.perform is not None
        self.write(now(self.stage.perform(call)))
        self.undone[record.topic][record.offset] -= 1
        self._commit(record.topic)

    def write(self, events: Iterable[Event]) -> None:
        for event in events:
            self.log.append(_TOPIC_OF.get(type(event), EXCHANGES), event)

    def _commit(self, topic: str) -> None:
        while self.undone[topic].get(self.committed[topic]) == 0:
            del self.undone[topic][self.committed[topic]]
            self.committed[topic] += 1


class Flow:
    """The three stages on one log."""

    def __init__(
        self,
        judge: Oracle | None = None,
        settings: JudgeSettings | None = None,
        renderer: Renderer | None = None,
        weights: RewardWeights = RewardWeights(),  # noqa: B008  # frozen
        teacher: Tutor | None = None,
        *,
        judged: bool = True,
        grouped: bool = False,
        interrupted: bool = False,
        refresher: Policy | None = None,
        answers_per_hint: int = 1,
        learns: LearnsFrom = EVERYTHING,
    ) -> None:
        self.log = Log()
        self.judge = judge or Oracle()
        settings = settings or JudgeSettings(votes=3)
        rules = SampleRules(
            renderer or Letters(), weights,
            judged=judged, grouped=grouped, interrupted=interrupted, learns=learns,
        )  # fmt: skip
        self._rules = rules
        samples = _taught(rules, teacher)
        stages: list[Stage[Any, Any]] = [
            turns_stage(),
            judging_stage(settings, self.judge, learns=learns, now_ms=lambda: 0),
            samples,
        ]
        if not judged:
            del stages[1]
        if refresher is not None:
            stages.append(refresh_stage(refresher, "policy", answers_per_hint=answers_per_hint, now_ms=lambda: 0))
        if grouped:
            stages += groups_stages(weights, wait_s=60.0)
        self.workers = [Worker(stage, self.log) for stage in stages]

    def run(self, events: Iterable[Event], rng: random.Random | None = None, *, restarts: float = 0.0) -> Log:
        """Return the log when nothing is left to do; without `rng` every record is handled as soon as it is there."""
        waiting = list(events)
        while True:
            choices: list[tuple[Worker | None, str | int]] = [
                (worker, choice) for worker in self.workers for choice in worker.choices()
            ]
            if waiting and (rng is not None or not choices):
                choices.append((None, 0))
            if not choices:
                return self.log
            worker, choice = choices[0] if rng is None else rng.choice(choices)
            if worker is None:
                self.write(waiting.pop(0))
            elif rng is not None and rng.random() < restarts:
                worker.restart()
            else:
                worker.act(choice)

    def teach(self, teacher: Tutor) -> None:
        """Start the samples stage again, with this teacher."""
        worker = next(worker for worker in self.workers if worker.stage.name == "samples")
        worker.stage = _taught(self._rules, teacher)
        worker.restart()

    def write(self, event: Event) -> None:
        self.log.append(_TOPIC_OF.get(type(event), EXCHANGES), event)

    def states(self) -> list[Any]:
        """What the stages still remember."""
        return [state for worker in self.workers for state in worker.states.values() if state is not None]


def _taught(rules: SampleRules, teacher: Tutor | None) -> Stage[Any, Any]:
    if teacher is None:
        return samples_stage(rules)
    asking = samples_stage(rules._replace(asks=TeacherRule(teacher.name)))
    return asking_stage(asking, teacher, now_ms=lambda: 0)


def now(made: Coroutine[Any, Any, T] | Any) -> T:
    """Return what a coroutine returns that waits for nothing."""
    try:
        made.send(None)
    except StopIteration as stopped:
        return stopped.value  # type: ignore[no-any-return]
    raise AssertionError("the coroutine waits for something")
