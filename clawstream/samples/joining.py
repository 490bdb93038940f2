"""Join an answer with what judges said of it to a sample, or say why there is none. Pure.

The one rule: a sample rests on its answer, its verdict and its hint, and on nothing else; whichever comes last writes
it, so the same facts give the same bytes in any order. A score of 0, or none, is nothing to train on.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from clawstream.errors import UnusableExchange
from clawstream.events import (
    Event,
    ExchangeCompleted,
    HintAbsent,
    HintFound,
    OffDistribution,
    RefusalReason,
    SampleAssembled,
    SampleRefused,
    TurnsSettled,
    VerdictReached,
)
from clawstream.events.floor import buried, second_looks
from clawstream.events.history import WholeRequest, rebuild
from clawstream.inference.continuing import Renderer
from clawstream.samples.hinted import Hinted, hinted_prompt
from clawstream.samples.masks import mask
from clawstream.samples.session import Answer, Judged, Recalled, Session, judged_of, learn

FIRST_LOOK = 0
FLOOR_LOOK = 1


class Follows(NamedTuple):
    """The session after a record, and what to write."""

    session: Session | None
    events: list[Event]


def observe(
    session: Session | None,
    event: Event,
    renderer: Renderer,
    *,
    off_distribution: OffDistribution | None = OffDistribution.REFUSE,
    forgets: bool = True,
) -> Follows:
    """Return what follows from one more record of a session, of any topic that joining reads.

    A session that is done and joined is then forgotten, where `forgets` says so.
    """
    before = session if session is not None else Session()
    after = learn(before, event)
    if after is before:
        return Follows(session, [])
    events: list[Event] = []
    if isinstance(event, TurnsSettled) and after.marks[-1].start == len(after.turns):
        events.append(_refused(event.session_id, None, None, RefusalReason.NO_NEXT_STATE))
    ready = [key for key in _completed(after, event) if key not in after.joined and _is_ready(after, key)]
    for key in ready:
        joined = _join(after, key, renderer, off_distribution=off_distribution)
        events.append(joined.event)
        after = after._replace(joined=after.joined | {key}, recalled=joined.recalled)
    return Follows(_rest(after) if forgets else after, events)


def _completed(session: Session, event: Event) -> list[Judged]:
    """Return the verdicts that `event`, the newest, may be the last fact for."""
    match event:
        case VerdictReached() | HintFound() | HintAbsent():
            return [judged_of(event)]
        case ExchangeCompleted():
            return [key for key in session.verdicts if key.turn_id == event.exchange_id]
    return []


def _is_ready(session: Session, key: Judged) -> bool:
    hinted = key.revision == FLOOR_LOOK or key in session.hints
    return hinted and key in session.verdicts and key.turn_id in session.answers


class _Joined(NamedTuple):
    event: SampleAssembled | SampleRefused
    recalled: Recalled


def _join(session: Session, key: Judged, renderer: Renderer, *, off_distribution: OffDistribution | None) -> _Joined:
    answer, verdict = session.answers[key.turn_id], session.verdicts[key]
    found = session.hints.get(key)
    hint = found.hint if isinstance(found, HintFound) else None
    reward = verdict.score if verdict.score in (-1, 1) else None
    if hint is None and reward is None:
        floor = key.revision == FLOOR_LOOK
        reason = RefusalReason.FLOOR_UNDECIDED if floor else RefusalReason.NO_SIGNAL
        return _Joined(_refused(verdict.session_id, None if floor else key.turn_id, key, reason), session.recalled)
    if off_distribution is not None and not answer.exchange.sampling.of_the_policy:
        if hint is None or off_distribution is not OffDistribution.HINT_ONLY:
            refusal = _refused(verdict.session_id, key.turn_id, key, RefusalReason.OFF_DISTRIBUTION)
            return _Joined(refusal, session.recalled)
        reward = None  # it would weigh tokens by a probability that they were not drawn with
    return _sample(session, answer, key, reward=reward, hint=hint, renderer=renderer)


def _sample(
    session: Session, answer: Answer, key: Judged, *, reward: int | None, hint: str | None, renderer: Renderer
) -> _Joined:
    exchange = answer.exchange

    def refused(reason: RefusalReason, recalled: Recalled = session.recalled) -> _Joined:
        return _Joined(_refused(exchange.session_id, key.turn_id, key, reason), recalled)

    trained = mask(exchange)
    if isinstance(trained, RefusalReason):
        return refused(trained)
    request = _request(session, answer)
    if request is None:
        return refused(RefusalReason.PROMPT_UNKNOWN)
    hinted = Hinted(None, session.recalled)
    if hint is not None:
        hinted = hinted_prompt(session, answer, request, hint, renderer)
        if hinted.token_ids is None:
            return refused(RefusalReason.HINT_UNRENDERABLE, hinted.recalled)
    sample = SampleAssembled(
        session_id=exchange.session_id,
        turn_id=key.turn_id,
        judge=key.judge,
        prompt_version=key.prompt_version,
        revision=key.revision,
        reward=reward,
        hint=hint,
        prompt_ids=request.token_ids,
        hinted_prompt_ids=hinted.token_ids,
        response_ids=exchange.output_ids,
        response_logprobs=exchange.output_logprobs,
        trained=trained,
        temperature=exchange.sampling.temperature,
        sampling=exchange.sampling,
        policy_id=exchange.policy_id,
        versions=exchange.versions,
        num_earlier_turns=answer.num_earlier_turns,
    )
    return _Joined(sample, hinted.recalled)


def _request(session: Session, answer: Answer) -> WholeRequest | None:
    """Return the whole request; one that rests on another era's is not known, however long we remember that one."""
    deltas = {id_: asked.delta for id_, asked in session.requests.items() if asked.era == answer.era}
    try:
        return rebuild(answer.exchange.exchange_id, deltas)
    except UnusableExchange:
        return None


def _refused(session_id: str, turn_id: str | None, key: Judged | None, reason: RefusalReason) -> SampleRefused:
    return SampleRefused(
        session_id=session_id,
        turn_id=turn_id,
        judge=None if key is None else key.judge,
        prompt_version=None if key is None else key.prompt_version,
        revision=FIRST_LOOK if key is None else key.revision,
        reason=reason,
    )


def _rest(session: Session) -> Session:
    """Return what is still needed of a session: once it is done and joined, its ids and what is of a later life."""
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
    if not (later or verdicts or hints):
        return Session(over=over)
    return Session(
        era=session.era,
        ended_after=session.ended_after,
        requests=MappingProxyType({id_: session.requests[id_] for id_ in later}),
        answers=MappingProxyType({id_: session.answers[id_] for id_ in later if id_ in session.answers}),
        verdicts=MappingProxyType(verdicts),
        hints=MappingProxyType(hints),
        joined=frozenset(key for key in session.joined if key.turn_id not in session.turns),
        over=over,
    )


def _all_joined(session: Session) -> bool:
    """Return whether every judge that has spoken has spoken of every turn, and the floor has had its say."""
    judges = {(key.judge, key.prompt_version) for key in session.verdicts}
    if session.turns and not judges:
        return False
    return all(_judge_is_done(session, *judge) for judge in judges)


def _judge_is_done(session: Session, judge: str, prompt_version: str) -> bool:
    def of(revision: int) -> Mapping[str, VerdictReached]:
        mine = (judge, prompt_version, revision)
        return {key.turn_id: verdict for key, verdict in session.verdicts.items() if key[:3] == mine}

    hints = {key.turn_id: hint for key, hint in session.hints.items() if key[:2] == (judge, prompt_version)}
    looks = second_looks(list(session.turns), session.marks, of(FIRST_LOOK), hints, of(FLOOR_LOOK))
    turns = [Judged(judge, prompt_version, FIRST_LOOK, turn_id) for turn_id in session.turns]
    again = [Judged(judge, prompt_version, FLOOR_LOOK, look.turn_id) for look in looks.due]
    return looks.settled and all(key in session.joined for key in [*turns, *again])
