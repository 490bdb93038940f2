"""What is asked about a turn, and when votes come to something."""

from collections.abc import Iterable
from dataclasses import replace

from clawstream.events import (
    Event,
    ExchangeCompleted,
    HintAbsence,
    HintAbsent,
    Question,
    TurnPaired,
    TurnsSettled,
    TurnType,
    VerdictReached,
    VerdictStatus,
    VoteCast,
    VoteStatus,
)
from clawstream.judging.votes import Ballot, Judging, VotingRules, learn, observe
from clawstream.judging.votes import JudgingState as State
from tests import recorded
from tests.flow import Flow, Oracle
from tests.sessions import Session, assistant, user

RULES = VotingRules(num_votes=3, quorum=2, hint_quorum=2)
JUDGING = Judging(judge="judge@test", prompt_version="v", rules=RULES)


def fold(events: Iterable[Event], state: State | None = None) -> tuple[State | None, list[Event], list[Ballot]]:
    written: list[Event] = []
    asked: list[Ballot] = []
    for event in events:
        state, new, ballots = observe(state, event, JUDGING)
        written += new
        asked += ballots
    return state, written, asked


def two_turns() -> tuple[ExchangeCompleted, ExchangeCompleted, TurnPaired]:
    session = Session()
    first = session.ask([user("2+2?")], "5")
    second = session.ask([user("2+2?"), assistant("5"), user("no")], "4")
    return first, second, paired(first, second)


def paired(first: ExchangeCompleted, second: ExchangeCompleted) -> TurnPaired:
    return TurnPaired(session_id="s", turn_id=first.exchange_id, next_exchange_id=second.exchange_id, next_state=(2,))


def vote(turn_id: str, question: Question, ballot: int, score: int) -> VoteCast:
    return VoteCast(
        session_id="s",
        turn_id=turn_id,
        question=question,
        judge="judge@test",
        prompt_version="v",
        revision=0,
        ballot=ballot,
        status=VoteStatus.READABLE,
        score=score,
        hint=None,
        text="",
        error=None,
        prompt_tokens=None,
        completion_tokens=None,
        latency_ms=1,
        cast_at_ms=0,
    )


def votes(turn_id: str, question: Question, *scores: int) -> list[VoteCast]:
    return [vote(turn_id, question, ballot, score) for ballot, score in enumerate(scores)]


def test_both_questions_are_asked_at_once_by_ballots_with_seeds_of_their_own() -> None:
    first, second, turn = two_turns()
    _, _, ballots = fold([first, second, turn])
    assert [(ballot.key.question, ballot.number) for ballot in ballots] == [
        *[(Question.SCORE, number) for number in range(3)],
        *[(Question.HINT, number) for number in range(3)],
    ]
    assert len({ballot.seed for ballot in ballots}) == 6


def test_the_record_that_completes_a_turn_asks_about_it_whichever_that_is() -> None:
    first, second, turn = two_turns()
    state, _, early = fold([turn, first])
    _, _, ballots = fold([second], state)
    assert (early, len(ballots)) == ([], 6)


def test_known_votes_are_not_asked_for_again() -> None:
    first, second, turn = two_turns()
    known = [vote(turn.turn_id, Question.SCORE, 1, 1), vote(turn.turn_id, Question.HINT, 2, -1)]
    _, _, ballots = fold([first, *known, second, turn, turn])
    assert [(ballot.key.question, ballot.number) for ballot in ballots] == [
        (Question.SCORE, 0),
        (Question.SCORE, 2),
        (Question.HINT, 0),
        (Question.HINT, 1),
    ]


def test_the_last_ballot_and_no_other_writes_the_verdict() -> None:
    first, second, turn = two_turns()
    cast = votes(turn.turn_id, Question.SCORE, 1, -1, 1)
    state, early, _ = fold([first, second, turn, *cast[:2], cast[0]])
    _, written, _ = fold([cast[2], *cast], state)
    assert early == []
    (verdict,) = written
    assert isinstance(verdict, VerdictReached)
    assert (verdict.status, verdict.score, verdict.num_positive, verdict.num_negative) == (
        VerdictStatus.DECIDED,
        1,
        2,
        1,
    )


def test_of_two_votes_on_one_ballot_the_first_counts() -> None:
    first, second, turn = two_turns()
    cast = votes(turn.turn_id, Question.SCORE, 1, 1, 1)
    again = [replace(one, score=-1, latency_ms=9) for one in cast[:2]]
    _, (verdict,), _ = fold([first, second, turn, *cast[:2], *again, cast[2]])
    assert isinstance(verdict, VerdictReached)
    assert verdict.num_positive == 3


def test_votes_of_another_judge_or_prompt_are_no_votes_here() -> None:
    first, second, turn = two_turns()
    cast = votes(turn.turn_id, Question.SCORE, 1, 1, 1)
    others = [replace(cast[0], judge="other@test"), replace(cast[1], prompt_version="w"), cast[2]]
    _, written, ballots = fold([first, *others, second, turn])
    assert written == []
    assert len(ballots) == 5


def test_votes_on_a_later_life_of_a_session_outlive_the_end_of_an_earlier_one() -> None:
    session = Session()
    first = session.ask([user("a")], "b")
    second = session.ask([user("a"), assistant("b"), user("c")], "d")
    session.forget()
    third = session.ask([user("start over")], "e")
    fourth = session.ask([user("start over"), assistant("e"), user("f")], "g")
    before, after = paired(first, second), paired(third, fourth)
    settled = TurnsSettled(session_id="s", after_exchange_id=second.exchange_id, done=True)
    cast = [*votes(third.exchange_id, Question.SCORE, 1, 1), *votes(third.exchange_id, Question.HINT, -1, -1, -1)]
    verdict = VerdictReached(
        session_id="s",
        turn_id=first.exchange_id,
        judge="judge@test",
        prompt_version="v",
        revision=0,
        status=VerdictStatus.DECIDED,
        score=1,
        num_positive=3,
        num_neutral=0,
        num_negative=0,
        num_unreadable=0,
        num_failed=0,
    )
    no_hint = HintAbsent(
        session_id="s",
        turn_id=first.exchange_id,
        judge="judge@test",
        prompt_version="v",
        revision=0,
        reason=HintAbsence.NONE_OFFERED,
        num_offered=0,
    )
    state, _, _ = fold([first, second, third, fourth, before, settled, *cast, verdict, no_hint])
    assert state is not None
    assert first.exchange_id not in state.requests
    _, _, ballots = fold([after], state)
    assert [(ballot.key.question, ballot.number) for ballot in ballots] == [(Question.SCORE, 2)]


def test_what_the_client_asked_for_itself_meanwhile_is_not_the_answer_that_is_judged() -> None:
    session = Session()
    first = session.ask(recorded.HEARTBEAT[:2], "Answer 2.")
    session.ask(recorded.HEARTBEAT, "Disk full.", turn_type=TurnType.SIDE)
    session.ask(recorded.USER_AFTER_AN_ALERT, "Look at it.")
    log = Flow(judge := Oracle()).run(session.written)
    [turn] = log.of(TurnPaired)
    asked = [prompt for prompt in judge.asked if "<answer>" in prompt]
    assert (turn.turn_id, len(asked) > 0) == (first.exchange_id, True)
    assert all("<answer>\nAnswer 2.\n</answer>" in prompt and "Disk full." not in prompt for prompt in asked)


def test_of_two_exchanges_with_one_id_the_first_counts() -> None:
    session = Session()
    first = session.ask([user("2+2?")], "5")
    state, _, _ = fold([first])
    assert state is not None
    failed = replace(Session().fail([user("2+2?")], "half"), exchange_id=first.exchange_id)
    assert learn(state, failed, JUDGING) is state


def test_a_reward_model_is_shown_the_conversation_once_for_each_question_and_again_for_a_second_look_at_most() -> None:
    first, second, turn = two_turns()
    rating = replace(JUDGING, rules=VotingRules(num_votes=1, quorum=1, hint_quorum=1), rates=True)
    state: State | None = None
    ballots: list[Ballot] = []
    for event in (first, second, turn):
        state, _, asked = observe(state, event, rating)
        ballots += asked
    assert [(ballot.key.question, ballot.number) for ballot in ballots] == [(Question.SCORE, 0), (Question.HINT, 0)]
    for ballot in ballots:
        assert [message["content"] for message in ballot.prompt.rated] == ["2+2?", "5"]
        assert not ballot.prompt.user

    written: list[Event] = []
    for question in (Question.SCORE, Question.HINT):
        state, new, _ = observe(state, vote(turn.turn_id, question, 0, -1), rating)
        written += new

    verdict, hint = written
    assert isinstance(verdict, VerdictReached)
    assert (verdict.status, verdict.score) == (VerdictStatus.DECIDED, -1)
    assert isinstance(hint, HintAbsent)
    assert (hint.turn_id, hint.reason) == (turn.turn_id, HintAbsence.NONE_OFFERED)
