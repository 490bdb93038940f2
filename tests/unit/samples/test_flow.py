"""Exchanges to samples through all three stages, in memory."""

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from clawstream.config import JudgeSettings
from clawstream.events import (
    Event,
    ExchangeCompleted,
    FinishReason,
    HintAbsence,
    HintAbsent,
    HintFound,
    LearnsFrom,
    Question,
    RefusalReason,
    SampleAssembled,
    SampleRefused,
    SessionIdle,
    TurnPaired,
    TurnType,
    VerdictReached,
    VerdictStatus,
)
from clawstream.inference.judge_client import JudgeReply
from clawstream.samples.session import PAST_LIVES
from clawstream.stream.topics import HINTS, SAMPLES, TURNS, VERDICTS, VOTES
from tests import recorded
from tests.examples import examples
from tests.flow import Flow, Oracle
from tests.sessions import Letters, Session, assistant, user

SEEDS = st.integers(0, 2**32 - 1)
MOVES = st.lists(
    st.sampled_from(["ask", "ask", "ask", "again", "side", "failed", "reset", "idle", "done", "forget"]), max_size=12
)
GOOD = {Question.SCORE: ["\\boxed{1}"], Question.HINT: ["\\boxed{-1}"]}
UNDECIDED = {Question.SCORE: ["\\boxed{0}"], Question.HINT: ["\\boxed{-1}"]}


def conversation(moves: list[str], session_id: str = "s") -> list[Event]:
    """A session in which the moves happen one after the other."""
    session, messages = Session(session_id), [user("hello")]
    newest: ExchangeCompleted | None = None
    for number, move in enumerate(moves):
        if move == "side":
            newest = session.ask([user("title?")], "a title", turn_type=TurnType.SIDE)
        elif move == "failed":
            session.fail(messages)
        elif move == "done":
            session.done()
            session.forget()
        elif move == "forget":
            session.forget()
        elif move == "idle":
            if newest is not None:
                idle = SessionIdle(session_id=session_id, after_exchange_id=newest.exchange_id, idle_s=1800)
                session.written.append(idle)
        else:
            newest = session.ask(messages, f"answer {number}")
        if move == "ask":
            messages = [*messages, assistant(f"answer {number}"), user(f"reply {number}")]
        elif move == "reset":
            messages = [user(f"start over {number}")]
    return session.written


@examples(2)
@given(MOVES, MOVES, SEEDS)
def test_any_interleaving_and_any_restart_gives_the_same_verdicts_hints_and_samples(
    ann: list[str], ben: list[str], seed: int
) -> None:
    events = [*conversation(ann, "ann"), *conversation(ben, "ben")]
    calm = Flow().run(events)
    wild = Flow().run(events, random.Random(seed), restarts=0.15)
    for topic in (TURNS, VOTES, VERDICTS, HINTS, SAMPLES):
        assert wild.first_by_id(topic) == calm.first_by_id(topic), topic


@given(MOVES, SEEDS)
def test_every_turn_gives_exactly_one_sample_or_refusal_at_first_look(moves: list[str], seed: int) -> None:
    log = Flow().run(conversation(moves), random.Random(seed), restarts=0.1)
    outcomes = [(sample.turn_id, sample.revision) for sample in log.of(SampleAssembled)]
    outcomes += [
        (refused.turn_id, refused.revision) for refused in log.of(SampleRefused) if refused.turn_id is not None
    ]
    paired = sorted(turn.turn_id for turn in log.of(TurnPaired))
    assert sorted(turn_id for turn_id, revision in outcomes if revision == 0) == paired


@given(MOVES, SEEDS)
def test_a_done_and_judged_session_leaves_nothing_behind_but_the_ids_of_what_is_over_and_its_last_lives(
    moves: list[str], seed: int
) -> None:
    flow = Flow()
    flow.run(conversation([*moves, "ask", "done"]), random.Random(seed))
    assert nothing_left(flow)


@example(["ask", "ask"], 735)  # a turn is written again after all of its session is over
@example(["ask", "done", "side"], 0)  # nothing settles a side exchange after the end, written again or not
@given(MOVES, SEEDS)
def test_what_is_written_again_after_its_session_was_forgotten_changes_nothing(moves: list[str], seed: int) -> None:
    rng = random.Random(seed)
    events = conversation([*moves, "done"])
    cut = rng.randint(0, len(events))
    flow = Flow()
    flow.run(events[:cut])
    for topic in (TURNS, VOTES, VERDICTS, HINTS):
        records = flow.log.topics[topic]
        for record in records[rng.randint(0, len(records)) :]:
            flow.log.append(topic, record.event)
    flow.run(events[cut:], rng)

    calm = Flow()
    calm.run(events)
    for topic in (TURNS, VOTES, VERDICTS, HINTS, SAMPLES):
        assert flow.log.first_by_id(topic) == calm.log.first_by_id(topic), topic
    assert nothing_left(flow) or not nothing_left(calm)


def nothing_left(flow: Flow) -> bool:
    """Whether nothing is known but what is over, and lives that feedback may still be about."""
    return all(state == type(state)(**_kept(state)) for state in flow.states())


def _kept(state: Any) -> dict[str, Any]:
    past = getattr(state, "past", ())
    assert len(past) <= PAST_LIVES
    return {"over": state.over} | ({"past": past} if past else {})


@given(MOVES, SEEDS)
def test_nothing_is_trained_on_without_a_score_of_one_or_a_hint(moves: list[str], seed: int) -> None:
    log = Flow().run(conversation(moves), random.Random(seed))
    verdicts = {(verdict.turn_id, verdict.revision): verdict.score for verdict in log.of(VerdictReached)}
    hints = {(hint.turn_id, hint.revision): hint.hint for hint in log.of(HintFound)}
    for sample in log.of(SampleAssembled):
        key = (sample.turn_id, sample.revision)
        assert sample.reward == (verdicts[key] if verdicts[key] in (-1, 1) else None)
        assert sample.hint == hints.get(key)
        assert sample.reward is not None or sample.hint is not None


def test_a_plain_chat_of_two_turns_gives_one_sample_of_exactly_what_was_sampled() -> None:
    session = Session()
    first = session.ask([user("2+2?")], "4")
    session.ask([user("2+2?"), assistant("4"), user("thanks")], "welcome")
    log = Flow(Oracle(GOOD)).run(session.written)
    (sample,) = log.of(SampleAssembled)
    assert (sample.prompt_ids, sample.response_ids) == (first.request.token_ids, first.output_ids)
    assert (sample.response_logprobs, sample.trained) == (first.output_logprobs, (1,))
    assert (sample.sampling, sample.temperature) == (first.sampling, first.sampling.temperature)
    assert (sample.reward, sample.hint, sample.hinted_prompt_ids) == (1, None, None)
    assert (sample.versions, sample.num_earlier_turns) == (first.versions, 0)


def test_six_openclaw_requests_give_three_samples_with_hinted_prompts() -> None:
    s1, s2, s9 = Session("s1"), Session("s2"), Session("s9")
    events = [
        s1.ask(recorded.FIRST_TURN, recorded.GREETING),
        s1.ask(recorded.USER_CORRECTS, "2 and 2 is 4"),
        s2.ask(recorded.OTHER_SESSION, "hello"),
        s9.ask(recorded.TOOL_REQUEST, recorded.LOOKING),
        s9.ask(recorded.TOOL_RESULTS, recorded.FINISHED),
        s9.ask(recorded.USER_CORRECTS_AFTER_TOOLS, "sorry"),
    ]
    hint = "Leave out the headings."
    judge = Oracle({Question.SCORE: ["\\boxed{-1}"], Question.HINT: [f"\\boxed{{1}} [HINT_START]{hint}[HINT_END]"]})
    log = Flow(judge).run(events)
    samples = {sample.turn_id: sample for sample in log.of(SampleAssembled)}
    assert list(samples) == [events[0].exchange_id, events[3].exchange_id, events[4].exchange_id]
    assert [sample.num_earlier_turns for sample in samples.values()] == [0, 0, 1]
    asked = recorded.FIRST_TURN
    hinted = [asked[0], user(f"{asked[1]['content']}\n\n[user's hint / instruction]\n{hint}"), asked[2]]
    assert samples[events[0].exchange_id].hinted_prompt_ids == Letters().prompt_ids(hinted, {"model": "policy"})


def test_a_session_without_a_sample_gets_a_second_look_at_its_best_turn_when_it_is_done() -> None:
    class Torn(Oracle):
        """Undecided at first, and sure once it sees the whole session."""

        async def ask(self, system: str, user: str, *, seed: int) -> JudgeReply:
            self.replies = GOOD if "<session>" in user else UNDECIDED
            return await super().ask(system, user, seed=seed)

    events = conversation(["ask", "ask", "ask", "done"])
    judge = Torn()
    log = Flow(judge).run(events)
    (sample,) = log.of(SampleAssembled)
    first = events[0]
    assert isinstance(first, ExchangeCompleted)
    assert (sample.turn_id, sample.revision, sample.reward, sample.hint) == (first.exchange_id, 1, 1, None)
    assert [refused.reason for refused in log.of(SampleRefused)] == [RefusalReason.NO_SIGNAL] * 2
    assert sum("reply 1" in asked for asked in judge.asked if "<session>" in asked) == 3


class Hinting(Oracle):
    """Offers a hint on each turn and takes no side, but once it sees the whole session."""

    async def ask(self, system: str, user: str, *, seed: int) -> JudgeReply:
        hint = "\\boxed{1} [HINT_START]Leave out the headings.[HINT_END]"
        self.replies = GOOD if "<session>" in user else {Question.SCORE: ["\\boxed{0}"], Question.HINT: [hint]}
        return await super().ask(system, user, seed=seed)


@given(SEEDS)
def test_a_hint_takes_the_second_look_from_a_session_only_where_hints_are_learned_from(seed: int) -> None:
    def of(learns: LearnsFrom) -> list[tuple[int, int | None]]:
        flow = Flow(Hinting(), learns=learns)
        log = flow.run(conversation(["ask", "ask", "done"]), random.Random(seed), restarts=0.1)
        return [(sample.revision, sample.reward) for sample in log.of(SampleAssembled)]

    assert of(LearnsFrom()) == [(0, None)]
    assert of(LearnsFrom(hints=False)) == [(0, None), (1, 1)]
    assert of(LearnsFrom(verdicts=False, hints=False)) == [(0, None)]


@given(SEEDS)
def test_an_answer_that_gives_no_sample_is_not_its_session_s_one_sample(seed: int) -> None:
    class Torn(Oracle):
        """Decided on the first answer, and on the second only once it sees the whole session."""

        async def ask(self, system: str, user: str, *, seed: int) -> JudgeReply:
            self.replies = GOOD if "<session>" in user or "answer 1" not in user else UNDECIDED
            return await super().ask(system, user, seed=seed)

    first, *others = conversation(["ask", "ask", "ask", "done"])
    assert isinstance(first, ExchangeCompleted)
    cut = replace(first, finish_reason=FinishReason.LENGTH)
    log = Flow(Torn()).run([cut, *others], random.Random(seed), restarts=0.1)
    [look] = [verdict.turn_id for verdict in log.of(VerdictReached) if verdict.revision == 1]
    assert [(one.turn_id, one.revision) for one in log.of(SampleAssembled)] == [(look, 1)]
    assert look != first.exchange_id


def test_a_session_that_stays_undecided_is_refused_and_says_so() -> None:
    log = Flow(Oracle(UNDECIDED)).run(conversation(["ask", "ask", "done"]))
    assert log.of(SampleAssembled) == []
    refusals = [(refused.turn_id is None, refused.revision, refused.reason) for refused in log.of(SampleRefused)]
    assert refusals == [(False, 0, RefusalReason.NO_SIGNAL), (True, 1, RefusalReason.FLOOR_UNDECIDED)]


def test_a_session_with_a_sample_gets_no_second_look() -> None:
    judge = Oracle(GOOD)
    Flow(judge).run(conversation(["ask", "ask", "done"]))
    assert not any("<session>" in asked for asked in judge.asked)


@pytest.mark.parametrize("end", ["done", "idle"])
def test_a_session_of_one_answer_is_refused_for_want_of_a_next_state(end: str) -> None:
    log = Flow().run(conversation(["ask", end]))
    (refused,) = log.of(SampleRefused)
    assert (refused.turn_id, refused.judge, refused.reason) == (None, None, RefusalReason.NO_NEXT_STATE)


def test_an_idle_session_gets_its_second_look_and_goes_on_as_before() -> None:
    log = Flow(Oracle(UNDECIDED)).run(conversation(["ask", "ask", "idle", "ask", "ask", "done"]))
    looks = [verdict.turn_id for verdict in log.of(VerdictReached) if verdict.revision == 1]
    assert len(looks) == 1
    assert len(log.of(TurnPaired)) == 3


def test_below_the_quorum_nothing_is_trained_on() -> None:
    judge = Oracle({Question.SCORE: ["no idea"], Question.HINT: ["no idea"]})
    log = Flow(judge, JudgeSettings(votes=3)).run(conversation(["ask", "ask", "done"]))
    assert log.of(SampleAssembled) == []
    assert {(verdict.status, verdict.score) for verdict in log.of(VerdictReached)} == {
        (VerdictStatus.BELOW_QUORUM, None)
    }


def test_a_ballot_whose_vote_is_known_is_not_asked_again() -> None:
    events = conversation(["ask", "ask"])
    flow = Flow()
    flow.run(events)
    asked = len(flow.judge.asked)
    for worker in flow.workers:
        worker.committed = dict.fromkeys(worker.committed, 0)
        if worker.stage.name == "judging":
            worker.committed[VOTES] = len(flow.log.topics[VOTES])
        worker.restart()
    flow.run([])
    assert (asked, len(flow.judge.asked)) == (6, 6)


@pytest.mark.parametrize(("hint_quorum", "expected"), [(None, {2, 3}), (1, {1, 2, 3}), (3, {3})])
def test_a_hint_that_too_few_votes_offer_is_none_and_says_how_many_did(
    hint_quorum: int | None, expected: set[int]
) -> None:
    replies = {
        Question.SCORE: ["\\boxed{1}"],
        Question.HINT: ["\\boxed{1} [HINT_START]Say it in plain words.[HINT_END]", "\\boxed{-1}"],
    }
    settings = JudgeSettings(votes=3, hint_quorum=hint_quorum)
    log = Flow(Oracle(replies), settings).run(conversation(["ask"] * 40 + ["done"]))
    outvoted = [absent.num_offered for absent in log.of(HintAbsent) if absent.reason is HintAbsence.OUTVOTED]
    assert {found.num_offered for found in log.of(HintFound)} == expected
    assert set(outvoted) == {1, 2, 3} - expected
    assert {absent.num_offered for absent in log.of(HintAbsent) if absent.reason is HintAbsence.NONE_OFFERED} == {0}
