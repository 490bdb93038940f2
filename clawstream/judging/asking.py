"""Which questions are asked about each turn of a session, and when the votes are concluded. Pure.

Of two facts with one identity the first counts, so reading a record again changes nothing.

A step is taken by the record that completes its facts, in whatever order they arrive. So after a restart
the same record takes an interrupted step again, and rebuilding a session skips none. A ballot needs a turn and the
request that shows it; a verdict needs its votes; the floor needs the verdicts and hints that were read back, and the
mark that the turns are settled.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from clawstream.conversation.floor import Over, SecondLooks, SettledTurns, buried, is_over, marked, second_looks
from clawstream.conversation.history import reaction, rebuild
from clawstream.conversation.messages import Message, answer_before, parse
from clawstream.events import (
    Event,
    ExchangeCompleted,
    ExchangeFailed,
    HintAbsent,
    HintFound,
    Question,
    RequestDelta,
    TurnPaired,
    TurnsSettled,
    VerdictReached,
    VoteCast,
    derived_id,
)
from clawstream.judging.prompts import Case, Prompt, floor_prompt, hint_prompt, score_prompt
from clawstream.judging.votes import conclusions

_K = TypeVar("_K")
_V = TypeVar("_V")


class VoteKey(NamedTuple):
    """The key of the votes on one question about one turn."""

    turn_id: str
    question: Question
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgingState:
    """What judging knows of a session; of two facts with one identity the first counts."""

    requests: Mapping[str, RequestDelta] = field(default_factory=lambda: MappingProxyType({}))  # without tokens
    parts: Mapping[str, bytes] = field(default_factory=lambda: MappingProxyType({}))  # of interrupted answers
    turns: Mapping[str, TurnPaired] = field(default_factory=lambda: MappingProxyType({}))  # in topic order
    asked: frozenset[tuple[str, int]] = frozenset()  # turn and revision
    votes: Mapping[VoteKey, Mapping[int, VoteCast]] = field(default_factory=lambda: MappingProxyType({}))  # by ballot
    verdicts: Mapping[tuple[str, int], VerdictReached] = field(default_factory=lambda: MappingProxyType({}))
    hints: Mapping[tuple[str, int], HintFound | HintAbsent] = field(default_factory=lambda: MappingProxyType({}))
    marks: tuple[SettledTurns, ...] = ()
    over: Over = field(default_factory=lambda: MappingProxyType({}))


def learn(session: JudgingState, event: Event, *, judge: str, prompt_version: str) -> JudgingState:
    """Return the session with the fact in it; the same object where it is known already or of another judge."""
    if is_over(session.over, event):
        return session
    match event:
        case ExchangeCompleted() | ExchangeFailed():
            delta = replace(event.request, kept_tokens=0, token_ids=())
            requests = _with(session.requests, event.exchange_id, delta)
            if requests is session.requests:
                return session
            part = event.message if isinstance(event, ExchangeFailed) else None
            parts = session.parts if part is None else _with(session.parts, event.exchange_id, part)
            return replace(session, requests=requests, parts=parts)
        case TurnPaired():
            turns = _with(session.turns, event.turn_id, event)
            return session if turns is session.turns else replace(session, turns=turns)
        case TurnsSettled():
            marks = marked(session.marks, event, len(session.turns))
            return session if marks is session.marks else replace(session, marks=marks)
        case VoteCast() | VerdictReached() | HintFound() | HintAbsent():
            ours = (event.judge, event.prompt_version) == (judge, prompt_version)
            return _learn_judged(session, event) if ours else session
    return session


def _learn_judged(session: JudgingState, event: VoteCast | VerdictReached | HintFound | HintAbsent) -> JudgingState:
    if isinstance(event, VoteCast):
        box = VoteKey(event.turn_id, event.question, event.revision)
        cast = session.votes.get(box, {})
        votes = _with(cast, event.ballot, event)
        return session if votes is cast else replace(session, votes=MappingProxyType({**session.votes, box: votes}))
    key = (event.turn_id, event.revision)
    if isinstance(event, VerdictReached):
        verdicts = _with(session.verdicts, key, event)
        return session if verdicts is session.verdicts else replace(session, verdicts=verdicts)
    hints = _with(session.hints, key, event)
    return session if hints is session.hints else replace(session, hints=hints)


def _with(known: Mapping[_K, _V], key: _K, value: _V) -> Mapping[_K, _V]:
    return known if key in known else MappingProxyType({**known, key: value})


FIRST_LOOK = 0
FLOOR_LOOK = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Ballot:
    """One question to one judge about one turn."""

    session_id: str
    turn_id: str
    question: Question
    revision: int
    number: int
    prompt: Prompt
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Judging:
    """How turns are judged: who is asked, how often, and how many must be readable."""

    judge: str
    prompt_version: str
    num_votes: int
    quorum: int
    hint_quorum: int


class _TurnToAsk(NamedTuple):
    """A turn to ask about, its revision, and the last turn of the session that the judge is shown."""

    turn: TurnPaired
    revision: int
    in_view_of: TurnPaired


class JudgingResult(NamedTuple):
    """The session after a record, and what to write and to ask."""

    session: JudgingState | None
    events: list[Event]
    ballots: list[Ballot]


def observe(session: JudgingState | None, event: Event, judging: Judging) -> JudgingResult:
    """Return what follows from one more record of a session, of any topic that judging reads."""
    before = session if session is not None else JudgingState()
    after = learn(before, event, judge=judging.judge, prompt_version=judging.prompt_version)
    if after is before:
        return JudgingResult(session, [], [])
    events: list[Event] = []
    if isinstance(event, VoteCast):
        cast = after.votes[VoteKey(event.turn_id, event.question, event.revision)]
        events = conclusions(
            cast, event, num_votes=judging.num_votes, quorum=judging.quorum, hint_quorum=judging.hint_quorum
        )
    ballots: list[Ballot] = []
    if not isinstance(event, VoteCast):  # no look depends on a vote
        after, ballots = _ask(after, judging)
    return JudgingResult(_rest(after), events, ballots)


def _ask(session: JudgingState, judging: Judging) -> tuple[JudgingState, list[Ballot]]:
    """Return the session with every possible look taken, and the ballots of these looks."""
    ballots: list[Ballot] = []
    for look in _looks(session):
        needed = [look.turn.next_exchange_id, look.in_view_of.next_exchange_id]
        if look.turn.interrupted:
            needed.append(look.turn.turn_id)
        if (look.turn.turn_id, look.revision) in session.asked or any(id_ not in session.requests for id_ in needed):
            continue
        session = replace(session, asked=session.asked | {(look.turn.turn_id, look.revision)})
        ballots += _ballots(session, look, judging)
    return session, ballots


def _looks(session: JudgingState) -> list[_TurnToAsk]:
    turns = list(session.turns.values())
    first = [_TurnToAsk(turn, FIRST_LOOK, turn) for turn in turns]
    again = _second_looks(session).due if session.marks else ()
    return first + [_TurnToAsk(session.turns[look.turn_id], FLOOR_LOOK, turns[look.num_turns - 1]) for look in again]


def _second_looks(session: JudgingState) -> SecondLooks:
    return second_looks(
        list(session.turns.values()),
        session.marks,
        {turn: verdict for (turn, revision), verdict in session.verdicts.items() if revision == FIRST_LOOK},
        {turn: hint for (turn, revision), hint in session.hints.items() if revision == FIRST_LOOK},
        {turn: verdict for (turn, revision), verdict in session.verdicts.items() if revision == FLOOR_LOOK},
    )


def _ballots(session: JudgingState, look: _TurnToAsk, judging: Judging) -> Iterable[Ballot]:
    """Return the ballots of `look` that have no vote yet."""
    turn_id = look.turn.turn_id
    for question, prompt in _questions(session, look):
        cast = session.votes.get(VoteKey(turn_id, question, look.revision), {})
        for number in range(judging.num_votes):
            if number not in cast:
                yield Ballot(
                    session_id=look.turn.session_id,
                    turn_id=turn_id,
                    question=question,
                    revision=look.revision,
                    number=number,
                    prompt=prompt,
                    seed=_seed(turn_id, question, look.revision, number),
                )


def _questions(session: JudgingState, look: _TurnToAsk) -> list[tuple[Question, Prompt]]:
    case = _case(session, look.turn)
    if look.revision == FIRST_LOOK:
        return [
            (Question.SCORE, score_prompt(case)),
            (Question.HINT, hint_prompt(case)),
        ]
    whole = _messages(session, look.in_view_of.next_exchange_id)
    return [(Question.SCORE, floor_prompt(case, whole))]


def _messages(session: JudgingState, exchange_id: str) -> tuple[Message, ...]:
    return tuple(parse(raw) for raw in rebuild(exchange_id, session.requests).messages)


def _case(session: JudgingState, turn: TurnPaired) -> Case:
    """Return the turn as `next_exchange_id`'s request shows it: what came before the echo, the echo, what followed.

    That request may leave an interrupted answer out; the case then has the part that the client got.
    """
    raw = rebuild(turn.next_exchange_id, session.requests).messages
    messages = tuple(map(parse, raw))
    if turn.interrupted:
        asked = rebuild(turn.turn_id, session.requests).messages
        return Case(
            request=tuple(map(parse, asked)),
            answer=parse(session.parts[turn.turn_id]),
            next_state=reaction(asked, raw, turn.next_state),
            interrupted=True,
        )
    followed = tuple(messages[index] for index in turn.next_state)
    echo = answer_before(raw, turn.next_state[0])
    return Case(request=messages[:echo], answer=messages[echo], next_state=followed)


def _seed(turn_id: str, question: Question, revision: int, number: int) -> int:
    return int(derived_id("seed", turn_id, question.value, revision, number)[:7], 16)


def _rest(session: JudgingState) -> JudgingState:
    """Return the state still needed: of a session that is done and judged, its ids and the facts of its next life."""
    newest = session.marks[-1] if session.marks else None
    if newest is None or not newest.settled.done or newest.num_turns != len(session.turns):
        return session
    end = newest.settled.after_exchange_id
    if end not in session.requests or not _second_looks(session).settled or not _all_judged(session):
        return session
    order = list(session.requests)
    return JudgingState(
        requests=MappingProxyType({id_: session.requests[id_] for id_ in order[order.index(end) + 1 :]}),
        parts=MappingProxyType(
            {id_: part for id_, part in session.parts.items() if id_ in order[order.index(end) + 1 :]}
        ),
        votes=MappingProxyType({box: cast for box, cast in session.votes.items() if box.turn_id not in session.turns}),
        verdicts=MappingProxyType({key: said for key, said in session.verdicts.items() if key[0] not in session.turns}),
        hints=MappingProxyType({key: said for key, said in session.hints.items() if key[0] not in session.turns}),
        over=buried(session.over, session.marks, session.turns),
    )


def _all_judged(session: JudgingState) -> bool:
    keys = [(turn_id, FIRST_LOOK) for turn_id in session.turns]
    return all(key in session.verdicts and key in session.hints for key in keys)
