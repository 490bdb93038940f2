"""What is kept of a session that is over. Pure.

Facts that a sample may still need are kept. A fact of a past life that is written again does not count in the session's
next life.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeVar

from clawstream.conversation.floor import buried, second_looks
from clawstream.events import VerdictReached
from clawstream.samples.session import (
    FIRST_LOOK,
    FLOOR_LOOK,
    PAST_LIVES,
    JoiningState,
    RecalledPrompts,
    VerdictKey,
    is_ready,
)

_K = TypeVar("_K")
_V = TypeVar("_V")


def rest(session: JoiningState) -> JoiningState:
    """Return the state still needed: of a session that is done and joined, the facts of its next life.

    Its ids are kept too, so that facts written again are recognised, and its last lives, for feedback still to come.
    """
    newest = session.marks[-1] if session.marks else None
    if newest is None or not newest.settled.done or newest.num_turns != len(session.turns):
        return session
    end = newest.settled.after_exchange_id
    if end not in session.requests or not _all_joined(session):
        return session
    order = list(session.requests)
    later = order[order.index(end) + 1 :]
    verdicts = {key: said for key, said in session.verdicts.items() if key.turn_id not in session.turns}
    hints = {key: said for key, said in session.hints.items() if key.turn_id not in session.turns}
    over = buried(session.over, session.marks, session.turns)
    life = _life(session, set(order[: order.index(end) + 1]))
    past = (*session.past, life)[-PAST_LIVES:]
    feedback = MappingProxyType({id_: said for id_, said in session.feedback.items() if id_ not in life.answers})
    refreshed = _only(session.refreshed, lambda turn_id: turn_id not in life.answers)
    if not (later or verdicts or hints):
        return JoiningState(over=over, past=past, feedback=feedback, refreshed=refreshed)
    return JoiningState(
        era=session.era,
        ended_after=session.ended_after,
        orphans=session.orphans - life.answers.keys(),
        feedback=feedback,
        refreshed=refreshed,
        scored_anew=frozenset(pair for pair in session.scored_anew if pair[0].turn_id not in life.answers),
        past=past,
        requests=MappingProxyType({id_: session.requests[id_] for id_ in later}),
        answers=MappingProxyType({id_: session.answers[id_] for id_ in later if id_ in session.answers}),
        verdicts=MappingProxyType(verdicts),
        hints=MappingProxyType(hints),
        scores=_only(session.scores, lambda turn_id: turn_id not in session.turns),
        joined=_only(session.joined, lambda key: key.turn_id not in session.turns and key.turn_id not in life.answers),
        over=over,
    )


def _life(session: JoiningState, exchange_ids: set[str]) -> JoiningState:
    """Return the session reduced to the facts about these exchanges."""

    def of_it(key: VerdictKey) -> bool:
        return key.turn_id in exchange_ids

    return session._replace(
        requests=_only(session.requests, exchange_ids.__contains__),
        answers=_only(session.answers, exchange_ids.__contains__),
        verdicts=_only(session.verdicts, of_it),
        hints=_only(session.hints, of_it),
        scores=_only(session.scores, exchange_ids.__contains__),
        feedback=_only(session.feedback, exchange_ids.__contains__),
        refreshed=_only(session.refreshed, exchange_ids.__contains__),
        scored_anew=frozenset(pair for pair in session.scored_anew if of_it(pair[0])),
        joined=_only(session.joined, of_it),
        recalled=RecalledPrompts(),
        over=MappingProxyType({}),
        past=(),
    )


def _only(known: Mapping[_K, _V], wanted: Callable[[_K], bool]) -> Mapping[_K, _V]:
    return MappingProxyType({key: value for key, value in known.items() if wanted(key)})


def _all_joined(session: JoiningState) -> bool:
    """Return whether every judge with a verdict has one on every turn, and the floor's second looks are done."""
    judges = {(key.judge, key.prompt_version) for key in session.verdicts}
    if session.turns and not judges:
        return False
    return all(_judge_is_done(session, *judge) for judge in judges)


def _judge_is_done(session: JoiningState, judge: str, prompt_version: str) -> bool:
    def of(revision: int) -> Mapping[str, VerdictReached]:
        mine = (judge, prompt_version, revision)
        return {key.turn_id: verdict for key, verdict in session.verdicts.items() if key[:3] == mine}

    hints = {key.turn_id: hint for key, hint in session.hints.items() if key[:2] == (judge, prompt_version)}
    looks = second_looks(list(session.turns.values()), session.marks, of(FIRST_LOOK), hints, of(FLOOR_LOOK))
    turns = [VerdictKey(judge, prompt_version, FIRST_LOOK, turn_id) for turn_id in session.turns]
    again = [VerdictKey(judge, prompt_version, FLOOR_LOOK, look.turn_id) for look in looks.due]
    # A teacher's score that is still to come finds its answer in `past`.
    return looks.settled and all(is_ready(session, key) for key in [*turns, *again])
