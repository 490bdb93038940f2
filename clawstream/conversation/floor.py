"""What can be learned from an answer, and the second looks of sessions that taught nothing (the floor). Pure.

A token without the log-prob of the policy that sampled it is not trained on; no number stands in for a missing one. A
second look counts only the turns before `TurnsSettled` on the topic, so its choice does not depend on what else has
arrived.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from clawstream.conversation.continuing import Renderer
from clawstream.conversation.history import SettledTurns
from clawstream.conversation.messages import Message, loops, parse, text_of, tool_calls_of
from clawstream.events import (
    AnswerRefreshed,
    ExchangeCompleted,
    FinishReason,
    HintAbsent,
    HintFound,
    LearnsFrom,
    Mask,
    RefusalReason,
    TokenIds,
    TurnPaired,
    VerdictReached,
)

Hint = HintFound | HintAbsent
_HALF = "\ufffd"  # how bytes are shown that form no character yet


def is_cut(answer: ExchangeCompleted | AnswerRefreshed) -> bool:
    """Return whether the answer ran into the policy's own limit: nobody asked for so few tokens, and it did not end."""
    return answer.finish_reason is FinishReason.LENGTH and not answer.sampling.limit_by_client


def mask(answer: ExchangeCompleted | AnswerRefreshed, *, rewarded: bool = True) -> Mask | RefusalReason:
    """Return 1 for each output token that is trained on and 0 for the others; or why no token is trained on.

    An answer without text, a truncated one and a looping one are not trained on. A cut answer is, whatever is in it, if
    it is `rewarded`: its cut is its reward. An answer given again is not rewarded: it has only a hint, which says
    nothing of where an answer ends.
    """
    if not answer.output_ids:
        return RefusalReason.EMPTY_ANSWER
    if not (rewarded and is_cut(answer)) and (reason := _unusable(answer)) is not None:
        return reason
    trained = tuple([int(value is not None and math.isfinite(value)) for value in answer.output_logprobs])
    if len(trained) != len(answer.output_ids) or not any(trained):
        return RefusalReason.MISALIGNED
    return trained


def _unusable(answer: ExchangeCompleted | AnswerRefreshed) -> RefusalReason | None:
    message = parse(answer.message or b"{}")
    if not (text_of(message).strip() or tool_calls_of(message)):
        return RefusalReason.EMPTY_ANSWER
    if answer.finish_reason is FinishReason.LENGTH:
        return RefusalReason.TRUNCATED
    return RefusalReason.LOOPING if loops(answer.output_ids) else None


def num_thinking(message: Message, output_ids: TokenIds, renderer: Renderer) -> int:
    """Return how many of an answer's first tokens are its thought, of which judges see nothing, the end mark left out.

    0 where it has none, and where the thought that the client was shown is not in one piece in what was sampled.
    """
    thought = message.get("reasoning_content")
    if not isinstance(thought, str) or not thought:
        return 0
    start = renderer.decode(output_ids).find(thought)
    if start < 0:
        return 0
    end = start + len(thought)

    def num_characters(num: int) -> int:
        return len(renderer.decode(output_ids[:num]).rstrip(_HALF))

    return bisect_left(range(len(output_ids)), end, key=num_characters)


class Teaches(NamedTuple):
    """Whether the trainer can use a sample of an answer: with a verdict of -1 or 1, with a hint, or without either."""

    by_verdict: bool
    by_hint: bool
    unasked: bool = False  # without either: the answer was cut, which is a reward that no verdict changes


def teaches(answer: ExchangeCompleted, learns: LearnsFrom) -> Teaches:
    """Return how the trainer can use a sample of the answer: not at all where the answer gets no sample."""
    if isinstance(mask(answer), RefusalReason):
        return Teaches(False, False)
    is_own = answer.sampling.of_the_policy
    by_reward = learns.verdicts and is_own
    by_hint = learns.hints and (is_own or learns.hints_off_distribution)
    return Teaches(by_reward, by_hint, unasked=by_reward and is_cut(answer))


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondLook:
    """A turn to be looked at again, in view of the session's first `num_turns` turns."""

    turn_id: str
    num_turns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondLooks:
    """The second looks due, in order, and whether all facts for them are known."""

    due: tuple[SecondLook, ...]
    settled: bool


def second_looks(
    turns: Sequence[TurnPaired],
    marks: Sequence[SettledTurns],
    verdicts: Mapping[str, VerdictReached],
    hints: Mapping[str, Hint],
    looks: Mapping[str, VerdictReached],
    taught_by: Callable[[str], Teaches | None],
) -> SecondLooks:
    """Return the second looks that are due in a session.

    `turns` are its paired turns in topic order; `verdicts` and `hints` are of revision 0, `looks` of revision 1.
    `taught_by` says of a turn what its answer can teach; None: the answer is not known yet. A session that has no
    usable sample at a mark gets one more look, at a turn whose sample a verdict would make usable. No turn gets two.
    Interrupted answers don't count here, since the settings decide whether they have samples.
    """
    due: dict[str, SecondLook] = {}
    decided: set[int] = set()  # starts of marks whose second look gave a usable sample
    for mark in marks:
        seen = turns[mark.start : mark.num_turns]
        if any(turn.turn_id not in verdicts or turn.turn_id not in hints for turn in seen):
            return SecondLooks(due=tuple(due.values()), settled=False)
        known = {turn.turn_id: taught_by(turn.turn_id) for turn in seen if not turn.interrupted}
        whole = {turn_id: by for turn_id, by in known.items() if by is not None}
        if len(whole) < len(known):
            return SecondLooks(due=tuple(due.values()), settled=False)
        if any(_makes_usable(by, verdicts[turn_id], hints[turn_id]) for turn_id, by in whole.items()):
            continue
        # The turn with most votes for or against it; of equals `max` keeps the earliest.
        best = max(
            (turn_id for turn_id, by in whole.items() if by.by_verdict),
            key=lambda turn: verdicts[turn].num_positive + verdicts[turn].num_negative,
            default=None,
        )
        if best is None or best in due or mark.start in decided:
            continue
        due[best] = SecondLook(turn_id=best, num_turns=mark.num_turns)
        if best not in looks:
            return SecondLooks(due=tuple(due.values()), settled=False)
        if looks[best].score in (-1, 1):
            decided.add(mark.start)
    return SecondLooks(due=tuple(due.values()), settled=True)


def _makes_usable(by: Teaches, verdict: VerdictReached, hint: Hint) -> bool:
    by_verdict = by.unasked or (by.by_verdict and verdict.score in (-1, 1))
    return by_verdict or (by.by_hint and isinstance(hint, HintFound))
