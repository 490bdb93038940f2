"""Which prompts are answered again, and how often. Pure.

The further answers to a turn's prompt are numbered. The one rule: each number is asked for once, however many hints the
turn has and however often feedback changes. An answer that is on the log is not asked for again.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from clawstream.events import (
    FOR_A_LATE_SAMPLE,
    AnswerRefreshed,
    Event,
    RefreshAsked,
    RehearsalAsked,
    SampleAssembled,
    Sampling,
    TokenIds,
    derived_id,
    is_ours,
)
from clawstream.stream.stage import Step

Known = frozenset[tuple[str, int]]  # turns and numbers that were asked for, or answered
NOTHING: Known = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class RefreshRequest:
    """A prompt to be answered again."""

    session_id: str
    turn_id: str
    number: int
    policy_id: str
    prompt_ids: TokenIds
    sampling: Sampling  # as the turn's own answer was sampled
    at_ms: int  # when the broker appended the sample that it follows from; of a rehearsal: when it was asked for
    rehearsal: RehearsalAsked | None = None  # what the answer's sample is to hold; None: the samples stage makes it

    @property
    def seeded(self) -> Sampling:
        """The sampling with a seed of this turn and number: another answer's seed would repeat that answer."""
        return replace(self.sampling, seed=int(derived_id("seed", self.turn_id, self.number)[:7], 16))


def observe(
    known: Known, event: Event, at_ms: int, *, policy_id: str, by_key: bool = False, answers_per_hint: int
) -> Step[Known, RefreshRequest]:
    """Return what follows from one more record of a session; `at_ms` is when the broker appended it.

    Events of other policies ask for nothing: their engines are not ours. By key, the policies of keys are ours too.
    """

    def ours(whose: str) -> bool:
        return is_ours(whose, policy_id, by_key=by_key)

    match event:
        case AnswerRefreshed():
            return Step(known | {(event.turn_id, event.number)})
        case RefreshAsked() if ours(event.policy_id):
            return _asked(known, event, event.asked_at_ms, (FOR_A_LATE_SAMPLE,))
        case RehearsalAsked() if ours(event.policy_id):
            return _asked(known, event, event.asked_at_ms, (event.number,))
        case SampleAssembled(refreshed_id=None, hint=str()) if ours(event.policy_id):
            first = FOR_A_LATE_SAMPLE + 1
            # Greedy answers are all the same one.
            num_further = min(answers_per_hint - 1, 1) if event.sampling.is_greedy else answers_per_hint - 1
            return _asked(known, event, at_ms, range(first, first + num_further))
    return Step(known or None)


def _asked(
    known: Known, event: RefreshAsked | RehearsalAsked | SampleAssembled, at_ms: int, numbers: Iterable[int]
) -> Step[Known, RefreshRequest]:
    asks = [
        RefreshRequest(
            session_id=event.session_id,
            turn_id=event.turn_id,
            number=number,
            policy_id=event.policy_id,
            prompt_ids=event.prompt_ids,
            sampling=event.sampling,
            at_ms=at_ms,
            rehearsal=event if isinstance(event, RehearsalAsked) else None,
        )
        for number in numbers
        if (event.turn_id, number) not in known
    ]
    return Step(known | {(ask.turn_id, ask.number) for ask in asks} or None, calls=asks)
