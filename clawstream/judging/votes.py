"""The questions to a judge about each turn (score and hint), and the conclusions from its votes. Pure.

A vote is the last \\boxed{} value after any thinking. A reply without an allowed value is unreadable, never a score of
0. A score needs a quorum of readable votes. A question is concluded once all its ballots have votes, in any order. Of
two events with one identity the first counts. A ballot waits for the turn and the request that shows it. A session's
second look (FLOOR_LOOK) waits for the answers, first verdicts and hints of its turns, and the mark that the turns are
settled.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from clawstream.conversation.floor import SecondLooks, Teaches, second_looks, teaches
from clawstream.conversation.history import (
    Over,
    SettledTurns,
    buried,
    changed,
    is_over,
    marked,
    only,
    rebuild,
    with_entry,
    with_first,
)
from clawstream.conversation.messages import parse
from clawstream.events import (
    EVERYTHING,
    MAX_OTHER_HINTS,
    MIN_HINT_CHARACTERS,
    Event,
    ExchangeCompleted,
    ExchangeFailed,
    HintAbsence,
    HintAbsent,
    HintFound,
    LearnsFrom,
    OtherHint,
    Question,
    RequestDelta,
    TurnPaired,
    TurnsSettled,
    VerdictReached,
    VerdictStatus,
    VoteCast,
    VoteStatus,
    derived_id,
    words_of,
)
from clawstream.judging.prompts import Prompt, case_of, floor_prompt, hint_prompt, rated_prompt, score_prompt
from clawstream.stream.stage import Step

_BOX = re.compile(r"\\boxed\s*\{([^{}]*)\}")
_HINT = re.compile(r"\[HINT_START\](.*?)\[HINT_END\]", re.DOTALL)
_ALLOWED = {Question.SCORE: {-1, 0, 1}, Question.HINT: {-1, 1}}
_SCORES = {"-1": -1, "0": 0, "1": 1, "+1": 1}
FIRST_LOOK = 0
FLOOR_LOOK = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteReading:
    """A readable vote; `hint` is None unless the question asks for a hint and the reply gives one."""

    score: int
    hint: str | None


def read(question: Question, text: str, *, cut: bool = False) -> VoteReading | None:
    """Return the vote in the judge's reply `text`, which may be `cut` at the limit; None: it is unreadable."""
    _, thought, answer = text.rpartition("</think>")
    if not thought and (cut or "<think>" in answer):
        return None  # the thinking never ended; a template may have begun it
    boxes = _BOX.findall(answer)
    score = _SCORES.get(boxes[-1].strip().replace("\u2212", "-")) if boxes else None
    if score is None or score not in _ALLOWED[question]:
        return None
    hints = _HINT.findall(answer) if question is Question.HINT and score == 1 else []
    return VoteReading(score=score, hint=hints[-1].strip() or None if hints else None)


def rating(text: str, above: float) -> VoteReading:
    """Return the vote in a reward model's number: good above `above`, else bad."""
    return VoteReading(score=1 if float(text) > above else -1, hint=None)


def outcome(scores: Sequence[int | None], *, quorum: int) -> tuple[VerdictStatus, int | None]:
    """Return the score with the most readable votes: 0 for a tie, None for fewer votes than `quorum`."""
    if len(scores) < quorum:
        return VerdictStatus.BELOW_QUORUM, None
    (ahead, most), *others = Counter(scores).most_common()
    if any(num_votes == most for _, num_votes in others):
        return VerdictStatus.TIED, 0
    return VerdictStatus.DECIDED, ahead


def choose(votes: Sequence[VoteCast], *, quorum: int) -> str | HintAbsence:
    """Return the longest offered hint if at least `quorum` votes offer one (of equals the first), or why there is none.

    OpenClaw-RL takes a hint that a single vote offers. With three votes, each wrong once in ten, every fourth answer
    that needs no hint would get one.
    """
    readable = [vote for vote in votes if vote.status is VoteStatus.READABLE]
    if not readable:
        unread = any(vote.status is VoteStatus.UNREADABLE for vote in votes)
        return HintAbsence.UNREADABLE if unread else HintAbsence.FAILED
    offered = offers(votes)
    if not offered:
        return HintAbsence.NONE_OFFERED
    if len(offered) < quorum:
        return HintAbsence.OUTVOTED
    longest = max(offered, key=len)
    return longest if len(longest) >= MIN_HINT_CHARACTERS else HintAbsence.TOO_SHORT


def offers(votes: Sequence[VoteCast]) -> list[str]:
    """Return the hints that votes offer, in the order of the ballots."""
    return [one.hint for one in _offered(votes)]


def others(votes: Sequence[VoteCast], chosen: str) -> tuple[OtherHint, ...]:
    """Return the longest hints that votes offer beside `chosen`, no two of the same words; of equals the first."""
    found = {words_of(one.hint): one for one in reversed(_offered(votes))}
    long_enough = [
        one for words, one in found.items() if words != words_of(chosen) and len(one.hint) >= MIN_HINT_CHARACTERS
    ]
    return tuple(sorted(long_enough, key=lambda one: (-len(one.hint), one.ballot))[:MAX_OTHER_HINTS])


def _offered(votes: Sequence[VoteCast]) -> list[OtherHint]:
    ordered = sorted(votes, key=lambda vote: vote.ballot)
    said = [(vote.hint.strip(), vote.ballot) for vote in ordered if vote.score == 1 and vote.hint is not None]
    return [OtherHint(hint=hint, ballot=ballot) for hint, ballot in said if hint]


class VoteKey(NamedTuple):
    """The key of one judge's votes on one question about one turn."""

    judge: str
    prompt_version: str
    turn_id: str
    question: Question
    revision: int


Cast = Mapping[VoteKey, Mapping[int, VoteCast]]  # a session's votes by key and ballot number


@dataclass(frozen=True, slots=True, kw_only=True)
class VotingRules:
    """How many votes each question gets, how many readable ones a score needs, and how many offers a hint needs."""

    num_votes: int
    quorum: int
    hint_quorum: int


def count(cast: Cast, vote: VoteCast, rules: VotingRules) -> tuple[Cast, list[Event]]:
    """Return the votes with `vote` added, and the conclusion if it is the last one; a ballot's first vote counts."""
    asked = VoteKey(vote.judge, vote.prompt_version, vote.turn_id, vote.question, vote.revision)
    known = cast.get(asked, {})
    if vote.ballot in known:
        return cast, []
    votes = with_entry(known, vote.ballot, vote)
    return with_entry(cast, asked, votes), conclusions(votes, vote, rules)


def conclusions(cast: Mapping[int, VoteCast], vote: VoteCast, rules: VotingRules) -> list[Event]:
    """Return the conclusion on a question if `vote` was its last missing vote."""
    votes = [cast[number] for number in range(rules.num_votes) if number in cast]
    if vote.ballot >= rules.num_votes or len(votes) < rules.num_votes:
        return []
    if vote.question is Question.SCORE:
        return [_verdict(votes, rules.quorum)]
    return [_hint(votes, rules.hint_quorum)]


def _verdict(votes: list[VoteCast], quorum: int) -> VerdictReached:
    scores = [vote.score for vote in votes if vote.status is VoteStatus.READABLE]
    statuses = [vote.status for vote in votes]
    status, score = outcome(scores, quorum=quorum)
    return VerdictReached(
        **_identity(votes[0]),
        status=status,
        score=score,
        num_positive=scores.count(1),
        num_neutral=scores.count(0),
        num_negative=scores.count(-1),
        num_unreadable=statuses.count(VoteStatus.UNREADABLE),
        num_failed=statuses.count(VoteStatus.FAILED),
    )


def _hint(votes: list[VoteCast], quorum: int) -> HintFound | HintAbsent:
    chosen, num_offered = choose(votes, quorum=quorum), len(offers(votes))
    if isinstance(chosen, HintAbsence):
        return HintAbsent(**_identity(votes[0]), reason=chosen, num_offered=num_offered)
    return HintFound(**_identity(votes[0]), hint=chosen, num_offered=num_offered, others=others(votes, chosen))


def _identity(vote: VoteCast) -> dict[str, Any]:
    """Return the fields that a conclusion shares with its votes."""
    shared = ("session_id", "turn_id", "judge", "prompt_version", "revision")
    return {name: getattr(vote, name) for name in shared}


@dataclass(frozen=True, slots=True, kw_only=True)
class Judging:
    """The judge that is asked, its prompts' version, the rules of voting, and what the trainer learns from."""

    judge: str
    prompt_version: str
    rules: VotingRules
    learns: LearnsFrom = EVERYTHING
    rates: bool = False  # it is a reward model, which is shown the conversation alone


class JudgingState(NamedTuple):
    """The state of a session in this stage; of two events with one identity the first counts."""

    requests: Mapping[str, RequestDelta] = MappingProxyType({})  # without tokens
    parts: Mapping[str, bytes] = MappingProxyType({})  # interrupted answers, as far as the client got them
    answers: Mapping[str, Teaches] = MappingProxyType({})  # what each whole answer can teach
    turns: Mapping[str, TurnPaired] = MappingProxyType({})  # in topic order
    asked: frozenset[tuple[str, int]] = frozenset()  # the looks taken, by turn and revision
    votes: Cast = MappingProxyType({})
    verdicts: Mapping[tuple[str, int], VerdictReached] = MappingProxyType({})
    hints: Mapping[tuple[str, int], HintFound | HintAbsent] = MappingProxyType({})
    marks: tuple[SettledTurns, ...] = ()
    over: Over = MappingProxyType({})


def learn(session: JudgingState, event: Event, judging: Judging) -> JudgingState:
    """Return the session with `event` added; the same object where the event is known, or another judge's."""
    if is_over(session.over, event):
        return session
    match event:
        case ExchangeCompleted() | ExchangeFailed() if event.exchange_id not in session.requests:
            delta = replace(event.request, kept_tokens=0, token_ids=())
            after = session._replace(requests=with_entry(session.requests, event.exchange_id, delta))
            if isinstance(event, ExchangeCompleted):
                taught = teaches(event, judging.learns)
                after = after._replace(answers=with_entry(session.answers, event.exchange_id, taught))
            elif event.message is not None:
                after = after._replace(parts=with_entry(session.parts, event.exchange_id, event.message))
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Ballot:
    """One of a judge's equal requests about a turn; the reply becomes one vote."""

    session_id: str
    key: VoteKey
    number: int
    prompt: Prompt
    seed: int


class _TurnToAsk(NamedTuple):
    """A look at a turn: the turn, the revision, and the last turn of the session that the judge is shown."""

    turn: TurnPaired
    revision: int
    in_view_of: TurnPaired


def observe(session: JudgingState | None, event: Event, judging: Judging) -> Step[JudgingState, Ballot]:
    """Return the state, conclusions and ballots that follow from one more event of a session."""
    before = session if session is not None else JudgingState()
    if isinstance(event, VoteCast):  # looks depend on verdicts, never on single votes
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
    """Take every look whose records are known; return the session and the ballots of these looks."""
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
        session.answers.get,
    )


def _ballots(session: JudgingState, look: _TurnToAsk, judging: Judging) -> Iterable[Ballot]:
    """Return the ballots of `look` that have no vote yet."""
    for question, prompt in _questions(session, look, rates=judging.rates):
        key = VoteKey(judging.judge, judging.prompt_version, look.turn.turn_id, question, look.revision)
        cast = session.votes.get(key, {})
        for number in range(judging.rules.num_votes):
            if number not in cast:
                seed = int(derived_id("seed", key.turn_id, question.value, key.revision, number)[:7], 16)
                yield Ballot(session_id=look.turn.session_id, key=key, number=number, prompt=prompt, seed=seed)


def _questions(session: JudgingState, look: _TurnToAsk, *, rates: bool) -> list[tuple[Question, Prompt]]:
    turn = look.turn
    history = rebuild(turn.next_exchange_id, session.requests).messages
    if turn.interrupted:
        asked = rebuild(turn.turn_id, session.requests).messages
        case = case_of(history, turn.next_state, asked, session.parts[turn.turn_id])
    else:
        case = case_of(history, turn.next_state)
    if rates:
        questions = [Question.SCORE] if look.revision == FLOOR_LOOK else [Question.SCORE, Question.HINT]
        return [(question, rated_prompt(case)) for question in questions]
    if look.revision == FIRST_LOOK:
        return [(Question.SCORE, score_prompt(case)), (Question.HINT, hint_prompt(case))]
    whole = rebuild(look.in_view_of.next_exchange_id, session.requests).messages
    return [(Question.SCORE, floor_prompt(case, tuple(map(parse, whole))))]


def _rest(session: JudgingState) -> JudgingState:
    """Return the state to keep: of a session that is done and judged, its ids and what came after its end."""
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
        answers=only(session.answers, later.__contains__),
        votes=only(session.votes, lambda box: box.turn_id not in turns),
        verdicts=only(session.verdicts, lambda key: key[0] not in turns),
        hints=only(session.hints, lambda key: key[0] not in turns),
        over=buried(session.over, session.marks, turns),
    )


def _all_judged(session: JudgingState) -> bool:
    keys = [(turn_id, FIRST_LOOK) for turn_id in session.turns]
    return all(key in session.verdicts and key in session.hints for key in keys)
