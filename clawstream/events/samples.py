"""Samples: all that a trainer needs to know of one turn, or the reason why the turn has no sample.

Refreshed answers are among them: today's policy answers a recorded prompt again. Only the trainer uses such an answer.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from clawstream.events.base import LogProbs, Mask, SessionEvent, TokenIds, derived_id
from clawstream.events.exchanges import FinishReason, Sampling, VersionSpan
from clawstream.events.policy import asker_of

NOBODY = "nobody"  # a sample's `judge` where no judge was asked
FOR_A_LATE_SAMPLE = 0  # number of the answer asked for in place of a late sample's; further ones count from 1


def refreshed_id_of(turn_id: str, number: int) -> str:
    """Return the id of the AnswerRefreshed with this number, and so the `refreshed_id` of its samples."""
    return derived_id("AnswerRefreshed", turn_id, number)


class RefusalReason(StrEnum):
    """Why a turn, or a whole session, gives no sample."""

    NO_SIGNAL = "no_signal"  # neither a hint, nor a verdict of -1 or 1, nor a score or a hint by feedback
    NO_NEXT_STATE = "no_next_state"  # the session ended, and none of its answers was paired with a next state
    FLOOR_UNDECIDED = "floor_undecided"  # the second look that the floor asks for gave no -1 or 1 either
    EMPTY_ANSWER = "empty_answer"
    TRUNCATED = "truncated"  # the answer ran into the client's max_tokens
    LOOPING = "looping"  # the answer ends in the same tokens over and over
    MISALIGNED = "misaligned"  # token ids and log-probs differ in number, or every log-prob is missing
    INTERRUPTED = "interrupted"  # the client left; the settings exclude such answers, or the version is not known
    OFF_DISTRIBUTION = "off_distribution"  # sampled greedily, from the likeliest tokens alone, or shaped
    PICTURES = "pictures"  # there are pictures in the prompt, which no trainer sees yet
    PROMPT_UNKNOWN = "prompt_unknown"  # an exchange that holds a part of the prompt is not known any more
    HINT_UNRENDERABLE = (
        "hint_unrenderable"  # the hinted prompt can't be rendered or is too long, and the answer has no score
    )
    HINT_UNSCORED = "hint_unscored"  # an engine is the teacher, and that engine or the policy's gave no log-probs
    ANSWER_UNKNOWN = "answer_unknown"  # the feedback names an answer that is not in the session


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardWeights:
    """The weight of each source in a reward; 0: its scores are recorded, but do not count."""

    judge: float = 1.0
    person: float = 1.0
    environment: float = 1.0
    heuristic: float = 1.0

    def weighed(
        self, *, judge: float | None, person: float | None, environment: float | None, heuristic: float | None
    ) -> list[float]:
        """Return the scores that count, each times its weight; None is the score of a source that gave none.

        Where a person's score counts, a judge's and a heuristic's don't: they guess what the person said. An
        environment's outcome is no guess and stays.
        """
        if person is not None and self.person > 0:
            judge = heuristic = None
        said = (
            (self.judge, judge),
            (self.person, person),
            (self.environment, environment),
            (self.heuristic, heuristic),
        )
        return [weight * score for weight, score in said if score is not None and weight > 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnsFrom:
    """What the trainer can use, as its method and the weights of rewards say; the rest is only recorded."""

    verdicts: bool = True  # judges' verdicts of -1 or 1
    hints: bool = True
    hints_off_distribution: bool = False  # hints on answers not drawn with the policy's own probabilities
    other_hints: bool = False  # hints offered beside the longest; the trainer takes one of them all


EVERYTHING = LearnsFrom()


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedHint:
    """A hint that the trainer may take in place of the sample's own."""

    hint: str
    hinted_prompt_ids: TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleAssembled(SessionEvent):
    """One trainable turn: tokens exactly as sampled, and the reward, the hinted prompt, or both.

    Both are absent where feedback took back what an earlier sample of the turn said. Of a turn's samples one counts:
    of those of the last look, the one that takes the most feedback into account.

    The model is trained on `response_ids` after `prompt_ids`; its teacher sees `hinted_prompt_ids` instead of
    `prompt_ids`. A refreshed answer to the turn's prompt has a sample of its own, with the hint alone: scores of the
    turn's own answer are no reward for it. An answer that rehearses a hint has a sample of its own, too.
    """

    turn_id: str
    judge: str  # NOBODY where no judge is asked
    prompt_version: str
    revision: int
    reward: int | None  # the judge's part, -1 or 1; None: the verdict is neither
    hint: str | None
    prompt_ids: TokenIds
    hinted_prompt_ids: TokenIds | None  # None exactly when `hint` is
    response_ids: TokenIds
    response_logprobs: LogProbs  # of the behaviour policy, at `temperature`
    trained: Mask  # one value per response id
    temperature: float
    sampling: Sampling  # as the exchange's event has it
    policy_id: str
    versions: tuple[VersionSpan, ...]
    num_earlier_turns: int  # main turns of the session before this one; 0: this is its first answer
    total_reward: float | None  # the weighted sum of the parts that count, -1 to 1; None: no part counts
    person_reward: float | None = None  # the newest score by this source; None, here and in the next two: no score
    environment_reward: float | None = None
    heuristic_reward: float | None = None
    num_feedback: int | None = None  # how often feedback had changed a source's score, or a person's hint; None: never
    teacher: str | None = None  # the engine that scored as the teacher; None: the trainer scores with its own weights
    teacher_logprobs: LogProbs | None = None  # of the response after the hinted prompt, at temperature 1
    student_logprobs: LogProbs | None = None  # by the policy's engine after the prompt, at temperature 1
    student_version: int | None = None  # of `student_logprobs`; None exactly when the three fields above are
    group_id: str | None = None  # the task that its session is an attempt at; None: it belongs to no group
    step_index: int | None = None  # of this turn in its attempt; None exactly when `group_id` is
    refreshed_id: str | None = None  # the refreshed answer that this is a sample of; None: of the turn's own answer
    hint_by_person: bool = False  # the hint is a person's own words; False: it is a judge's, or there is none
    cut: bool = False  # the answer ran into the policy's own limit, so `reward` is -1, whatever a judge said
    calls_tools: bool = False  # the answer calls a tool, so its next state is the tool's result
    num_thinking: int = 0  # thinking tokens at the answer's beginning, which no judge saw; 0: none, or not known
    key_name: str | None = None  # the API key that the request had; None: the gateway asked for none
    hint_id: str | None = None  # of the held hint that this answer rehearses; None: it rehearses none
    other_hints: tuple[OfferedHint, ...] = ()  # the longest first; empty unless the settings let the trainer choose

    @property
    def learned_reward(self) -> float | None:
        """The reward to train on; None: no part gives one, or the parts cancel each other."""
        return self.total_reward or None

    @property
    def answer_id(self) -> str:
        """The id of the answer; at most one sample of an answer is trained on."""
        return self.turn_id if self.refreshed_id is None else self.refreshed_id

    @property
    def asker(self) -> str | None:
        """Who was answered; None: nobody knows."""
        return asker_of(self.policy_id, self.key_name)

    @property
    def event_id(self) -> str:
        """One per answer, look and known feedback (its number, its scores and a person's hint)."""
        heard = (self.num_feedback, self.person_reward, self.environment_reward, self.heuristic_reward)
        look = (self.answer_id, self.judge, self.prompt_version, self.revision)
        words = (self.hint,) if self.hint_by_person else ()
        return derived_id("SampleAssembled", *look, *(() if self.num_feedback is None else heard), *words)

    @property
    def sample_id(self) -> str:
        """The id under which batches name this sample."""
        return self.event_id


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRefused(SessionEvent):
    """There is no sample of this turn; or of this refreshed answer; or, where `turn_id` is None, of this session."""

    IDENTITY: ClassVar = ("session_id", "answer_id", "judge", "prompt_version", "revision")

    turn_id: str | None
    judge: str | None  # None: no judge was asked, as no turn was paired
    prompt_version: str | None
    revision: int
    reason: RefusalReason
    refreshed_id: str | None = None  # of the refreshed answer; None: the turn's own answer or the session is refused

    @property
    def answer_id(self) -> str | None:
        """The id of the answer."""
        return self.turn_id if self.refreshed_id is None else self.refreshed_id


@dataclass(frozen=True, slots=True, kw_only=True)
class RefreshAsked(SessionEvent):
    """A sample of the turn came too late to be trained on, so the turn's prompt is to be answered again, once.

    The event holds all that an engine needs, since every stage may have forgotten the turn by now.
    """

    IDENTITY: ClassVar = ("turn_id",)

    turn_id: str
    sample_id: str  # the first sample of the turn that came too late
    policy_id: str
    prompt_ids: TokenIds
    sampling: Sampling
    asked_at_ms: int  # when the broker appended that sample, since the epoch, UTC


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRefreshed(SessionEvent):
    """The policy's new answer to the prompt of exchange `turn_id`, or why there is none; one event for each number.

    The event names no hint: all hints of the turn score the answer, or the one hint that it rehearses.
    """

    IDENTITY: ClassVar = ("turn_id", "number")

    turn_id: str
    number: int  # 0: a sample came too late; 1, 2, ..: further answers for the turn's hints; below 0: a rehearsal
    policy_id: str
    sampling: Sampling
    versions: tuple[VersionSpan, ...]  # in output order; their num_tokens sum to len(output_ids)
    message: bytes | None  # as JSON; None: there is no answer
    output_ids: TokenIds  # as sampled, the stop token included
    output_logprobs: LogProbs  # one per output id, at the sampling temperature
    finish_reason: FinishReason | None  # None exactly when `message` is
    error: str | None  # why there is no answer
    answered_at_ms: int  # since the epoch, UTC
