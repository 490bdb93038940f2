"""Which questions are asked about each turn of a session, and when the votes are concluded. Pure.

Of two facts with one identity the first counts, so reading a record again changes nothing. A step is taken by the
record that completes its facts, in whatever order they arrive. A ballot needs a turn and the request that shows it; a
verdict needs its votes; the floor needs the verdicts and hints read back, and the mark that the turns are settled.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from clawstream.conversation.floor import (
    Over,
    SecondLooks,
    SettledTurns,
    buried,
    changed,
    is_over,
    marked,
    only,
    second_looks,
    with_first,
)
from clawstream.conversation.history import rebuild
from clawstream.conversation.messages import parse
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
from clawstream.judging.prompts import Prompt, case_of, floor_prompt, hint_prompt, score_prompt
from clawstream.judging.votes import Cast, VoteKey, VotingRules, count
from clawstream.stream.stage import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Judging:
    """Who is asked about turns, and how often."""

    judge: str
    prompt_version: str
    rules: VotingRules


class JudgingState(NamedTuple):
    """What judging knows of a session; of two facts with one identity the first counts."""

    requests: Mapping[str, RequestDelta] = MappingProxyType({})  # without tokens
    parts: Mapping[str, bytes] = MappingProxyType({})  # of interrupted answers
    turns: Mapping[str, TurnPaired] = MappingProxyType({})  # in topic order
    asked: frozenset[tuple[str, int]] = frozenset()  # turn and revision
    votes: Cast = MappingProxyType({})
    verdicts: Mapping[tuple[str, int], VerdictReached] = MappingProxyType({})
    hints: Mapping[tuple[str, int], HintFound | HintAbsent] = MappingProxyType({})
    marks: tuple[SettledTurns, ...] = ()
    over: Over = MappingProxyType({})


def learn(session: JudgingState, event: Event, judging: Judging) -> JudgingState:
    """Return the session with the fact in it; the same object where it is known already or of another judge."""
    if is_over(session.over, event):
        return session
    match event:
        case ExchangeCompleted() | ExchangeFailed():
            delta = replace(event.request, kept_tokens=0, token_ids=())
            after = session._replace(requests=with_first(session.requests, event.exchange_id, delta))
            if isinstance(event, ExchangeFailed) and event.message is not None:
                after = after._replace(parts=with_first(session.parts, event.exchange_id, event.message))
        case TurnPaired():
            after = session._replace(turns=with_first(session.turns, event.turn_id, event))
        case TurnsSettled():
            after = session._replace(marks=marked(session.marks, event, len(session.turns)))
        case VerdictReached() if _is_by(judging, event):
            key = (event.turn_id, event.revision)
            after = session._replace(verdicts=with_first(session.verdicts, key, event))
        case HintFound() | HintAbsent() if _is_by(judging, event):
            after = session._replace(hints=with_first(session.hints, (event.turn_id, event.revision), event))
        case _:
            after = session
    return changed(session, after)


def _is_by(judging: Judging, event: VoteCast | VerdictReached | HintFound | HintAbsent) -> bool:
    return (event.judge, event.prompt_version) == (judging.judge, judging.prompt_version)


FIRST_LOOK = 0
FLOOR_LOOK = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Ballot:
    """One question to one judge about one turn."""

    session_id: str
    key: VoteKey
    number: int
    prompt: Prompt
    seed: int


class _TurnToAsk(NamedTuple):
    """A turn to ask about, its revision, and the last turn of the session that the judge is shown."""

    turn: TurnPaired
    revision: int
    in_view_of: TurnPaired


def observe(session: JudgingState | None, event: Event, judging: Judging) -> Step[JudgingState, Ballot]:
    """Return what follows from one more record of a session, of any topic that judging reads."""
    before = session if session is not None else JudgingState()
    if isinstance(event, VoteCast):  # no look depends on a vote
        if is_over(before.over, event) or not _is_by(judging, event):
            return Step(session)
        votes, events = count(before.votes, event, judging.rules)
        return Step(session) if votes is before.votes else Step(_rest(before._replace(votes=votes)), events)
    after = learn(before, event, judging)
    if after is before:
        return Step(session)
    after, ballots = _ask(after, judging)
    return Step(_rest(after), calls=ballots)


def _ask(session: JudgingState, judging: Judging) -> tuple[JudgingState, list[Ballot]]:
    """Return the session with every possible look taken, and the ballots of these looks."""
    ballots: list[Ballot] = []
    for look in _looks(session):
        needed = [look.turn.next_exchange_id, look.in_view_of.next_exchange_id]
        if look.turn.interrupted:
            needed.append(look.turn.turn_id)
        if (look.turn.turn_id, look.revision) in session.asked or any(id_ not in session.requests for id_ in needed):
            continue
        session = session._replace(asked=session.asked | {(look.turn.turn_id, look.revision)})
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
    for question, prompt in _questions(session, look):
        key = VoteKey(judging.judge, judging.prompt_version, look.turn.turn_id, question, look.revision)
        cast = session.votes.get(key, {})
        for number in range(judging.rules.num_votes):
            if number not in cast:
                seed = int(derived_id("seed", key.turn_id, question.value, key.revision, number)[:7], 16)
                yield Ballot(session_id=look.turn.session_id, key=key, number=number, prompt=prompt, seed=seed)


def _questions(session: JudgingState, look: _TurnToAsk) -> list[tuple[Question, Prompt]]:
    turn = look.turn
    history = rebuild(turn.next_exchange_id, session.requests).messages
    if turn.interrupted:
        asked = rebuild(turn.turn_id, session.requests).messages
        case = case_of(history, turn.next_state, asked, session.parts[turn.turn_id])
    else:
        case = case_of(history, turn.next_state)
    if look.revision == FIRST_LOOK:
        return [(Question.SCORE, score_prompt(case)), (Question.HINT, hint_prompt(case))]
    whole = rebuild(look.in_view_of.next_exchange_id, session.requests).messages
    return [(Question.SCORE, floor_prompt(case, tuple(map(parse, whole))))]


def _rest(session: JudgingState) -> JudgingState:
    """Return the state still needed: of a session that is done and judged, its ids and the facts of its next life."""
    newest = session.marks[-1] if session.marks else None
    if newest is None or not newest.settled.done or newest.num_turns != len(session.turns):
        return session
    end = newest.settled.after_exchange_id
    if end not in session.requests or not _second_looks(session).settled or not _all_judged(session):
        return session
    ids = list(session.requests)
    later = set(ids[ids.index(end) + 1 :])
    turns = session.turns
    return JudgingState(
        requests=only(session.requests, later.__contains__),
        parts=only(session.parts, later.__contains__),
        votes=only(session.votes, lambda box: box.turn_id not in turns),
        verdicts=only(session.verdicts, lambda key: key[0] not in turns),
        hints=only(session.hints, lambda key: key[0] not in turns),
        over=buried(session.over, session.marks, turns),
    )


def _all_judged(session: JudgingState) -> bool:
    keys = [(turn_id, FIRST_LOOK) for turn_id in session.turns]
    return all(key in session.verdicts and key in session.hints for key in keys)
