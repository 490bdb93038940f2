"""What a thumb comes to: the reward of a turn's next revision, whatever is read first, however often, however late."""

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from clawstream.errors import UnusableEvent
from clawstream.events import (
    EVERYTHING,
    NOBODY,
    Event,
    ExchangeCompleted,
    FeedbackGiven,
    FeedbackSource,
    LearnsFrom,
    Question,
    RefusalReason,
    RewardWeights,
    SampleAssembled,
    SampleRefused,
    SessionIdle,
)
from clawstream.samples.joining import SampleRules, observe
from clawstream.samples.session import MAX_UNPLACED, PAST_LIVES, Opinions, Parts, heard, parts_of, reward_of
from clawstream.samples.session import JoiningState as State
from clawstream.stream.topics import FEEDBACK, SAMPLES
from tests.examples import examples
from tests.flow import HOWEVER_DRAWN, Flow, Log, Oracle
from tests.sessions import Letters, Session, assistant, user
from tests.unit.samples.test_flow import GOOD, MOVES, SEEDS, UNDECIDED, conversation

PERSON, ENVIRONMENT = FeedbackSource.PERSON, FeedbackSource.ENVIRONMENT
THUMBS = st.lists(
    st.tuples(
        st.floats(0, 1),  # where in the session
        st.integers(0, 11),  # on which of the answers before
        st.sampled_from([1.0, -1.0, 0.5, 0.0, None]),
        st.sampled_from(FeedbackSource),
    ),
    max_size=8,
)
BAD = {Question.SCORE: ["\\boxed{-1}"], Question.HINT: ["\\boxed{-1}"]}


def thumb(turn_id: str, score: float | None, name: str, source: FeedbackSource = PERSON) -> FeedbackGiven:
    return Session().rate(turn_id, score, source, name=name)


def rated(events: list[Event], thumbs: Iterable[tuple[float, int, float | None, FeedbackSource]]) -> list[Event]:
    """The session with thumbs in it, each after the answer that it is on."""
    for number, (where, back, score, source) in enumerate(thumbs):
        at = round(where * len(events))
        answers = [event.exchange_id for event in events[:at] if isinstance(event, ExchangeCompleted)]
        if answers:
            events = [*events[:at], thumb(answers[-1 - back % len(answers)], score, f"f{number}", source), *events[at:]]
    return events


def newest(log: Log) -> dict[str, SampleAssembled]:
    """Each turn's sample that holds."""
    found: dict[str, SampleAssembled] = {}
    for sample in log.of(SampleAssembled):
        if sample.turn_id not in found or place(found[sample.turn_id]) < place(sample):
            found[sample.turn_id] = sample
    return found


def place(sample: SampleAssembled) -> tuple[bool, int, int]:
    return sample.judge != NOBODY, sample.revision, sample.num_feedback or 0


def asked_twice(*, after: Iterable[tuple[int, float | None]] = (), before: Iterable[float] = ()) -> list[Event]:
    """Two answers, of which the first has a next state, and thumbs on them in between and at the end."""
    session = Session()
    first = session.ask([user("2+2?")], "4")
    for thumbed in before:
        session.rate(first.exchange_id, thumbed)
    second = session.ask([user("2+2?"), assistant("4"), user("thanks")], "welcome")
    for number, score in after:
        session.rate((first, second)[number].exchange_id, score)
    return session.written


@examples(2)
@given(MOVES, THUMBS, SEEDS)
def test_any_interleaving_and_any_restart_comes_to_the_same_sample_of_each_turn(
    moves: list[str], thumbs: list[tuple[float, int, float | None, FeedbackSource]], seed: int
) -> None:
    moves = [move for n, move in enumerate(moves) if move != "done" or moves[:n].count("done") < PAST_LIVES]
    events = rated(conversation(moves), thumbs)
    calm = Flow().run(events)
    wild = Flow().run(events, random.Random(seed), restarts=0.15)
    assert newest(wild) == newest(calm)


@examples(1)
@given(MOVES, THUMBS, SEEDS)
def test_of_one_id_there_is_one_sample_however_often_it_is_written(
    moves: list[str], thumbs: list[tuple[float, int, float | None, FeedbackSource]], seed: int
) -> None:
    log = Flow().run(rated(conversation(moves), thumbs), random.Random(seed), restarts=0.2)
    for record in log.topics[SAMPLES]:
        if isinstance(record.event, SampleAssembled):
            assert record.event == log.first_by_id(SAMPLES)[record.event.event_id]


@given(MOVES, THUMBS, SEEDS)
def test_feedback_that_is_written_again_is_no_news(
    moves: list[str], thumbs: list[tuple[float, int, float | None, FeedbackSource]], seed: int
) -> None:
    flow, rng = Flow(), random.Random(seed)
    flow.run(rated(conversation(moves), thumbs), rng)
    before = len(flow.log.topics[SAMPLES])
    for record in list(flow.log.topics[FEEDBACK]):
        flow.log.append(FEEDBACK, record.event)
    flow.run([], rng)
    assert len(flow.log.topics[SAMPLES]) == before


def test_a_thumb_before_the_verdict_is_in_the_first_revision_and_one_after_it_in_the_next() -> None:
    [first] = Flow(Oracle(BAD)).run(asked_twice(before=[1.0])).of(SampleAssembled)
    assert (first.num_feedback, first.reward, first.person_reward, first.total_reward) == (1, -1, 1.0, 1.0)
    plain, revised = Flow(Oracle(GOOD)).run(asked_twice(after=[(0, 1.0)])).of(SampleAssembled)
    assert (plain.num_feedback, plain.person_reward, plain.total_reward) == (None, None, 1.0)
    assert (revised.num_feedback, revised.person_reward, revised.total_reward) == (1, 1.0, 1.0)
    assert plain.sample_id != revised.sample_id


def test_samples_that_know_the_same_number_of_scores_but_not_the_same_scores_are_two() -> None:
    """What was heard too long ago is forgotten, so that a count may begin again."""
    [first] = Flow(Oracle(BAD)).run(asked_twice(before=[1.0])).of(SampleAssembled)
    assert replace(first, person_reward=-1.0).sample_id != first.sample_id
    assert replace(first, person_reward=None, environment_reward=1.0).sample_id != first.sample_id
    assert replace(first, num_feedback=2).sample_id != first.sample_id


def test_up_down_up_ends_with_up() -> None:
    log = Flow(Oracle(UNDECIDED)).run(asked_twice(after=[(0, 1.0), (0, -1.0), (0, 1.0)]))
    assert [sample.total_reward for sample in log.of(SampleAssembled)] == [1.0, -1.0, 1.0]
    [last] = newest(log).values()
    assert (last.num_feedback, last.total_reward, last.reward) == (3, 1.0, None)


def test_a_thumb_makes_a_sample_of_a_turn_that_was_refused_for_want_of_a_signal() -> None:
    log = Flow(Oracle(UNDECIDED)).run(asked_twice(after=[(0, -1.0)]))
    [refused] = log.of(SampleRefused)
    [sample] = log.of(SampleAssembled)
    assert (refused.reason, refused.turn_id) == (RefusalReason.NO_SIGNAL, sample.turn_id)
    assert (sample.reward, sample.total_reward, sample.hint) == (None, -1.0, None)


def test_words_alone_are_no_part_of_a_reward() -> None:
    log = Flow(Oracle(UNDECIDED)).run(asked_twice(after=[(0, None), (1, None)]))
    assert log.of(SampleAssembled) == []


def test_a_thumb_that_is_taken_back_leaves_a_sample_that_says_nothing() -> None:
    *_, last = Flow(Oracle(UNDECIDED)).run(asked_twice(after=[(0, 1.0), (0, 0.0)])).of(SampleAssembled)
    assert (last.num_feedback, last.person_reward, last.total_reward, last.hint) == (2, 0.0, None, None)


@pytest.mark.parametrize("end", ["idle", "done", "reset"])
@pytest.mark.parametrize("late", [True, False])
def test_a_thumb_on_an_answer_without_a_next_state_makes_a_sample_of_feedback_alone(end: str, *, late: bool) -> None:
    session = Session()
    only = session.ask([user("hello")], "hi")
    if not late:
        session.rate(only.exchange_id, 1.0)
    if end == "idle":
        session.written.append(SessionIdle(session_id="s", after_exchange_id=only.exchange_id, idle_s=1800))
    elif end == "done":
        session.done()
    else:
        session.ask([user("something else")], "as you like")
    if late:
        session.rate(only.exchange_id, 1.0)
    [sample] = Flow(Oracle(GOOD)).run(session.written).of(SampleAssembled)
    assert (sample.turn_id, sample.judge, sample.prompt_version) == (only.exchange_id, NOBODY, NOBODY)
    assert (sample.reward, sample.person_reward, sample.total_reward) == (None, 1.0, 1.0)
    assert sample.response_ids == only.output_ids


@pytest.mark.parametrize("early", [True, False])
def test_where_no_judge_is_asked_a_thumb_alone_makes_the_sample_at_once(*, early: bool) -> None:
    session = Session()
    first = session.ask([user("a")], "b")
    session.ask([user("a"), assistant("b"), user("c")], "d")
    thumb = session.rate(first.exchange_id, -1.0)
    events = [event for event in session.written if event is not thumb]
    state, samples = None, []
    for event in [thumb, *events] if early else [*events, thumb]:
        state, new, _ = observe(state, event, SampleRules(Letters(), judged=False))
        samples += [one for one in new if isinstance(one, SampleAssembled)]
    assert [(one.turn_id, one.judge, one.total_reward) for one in samples] == [(first.exchange_id, NOBODY, -1.0)]


def test_an_answer_that_may_still_be_judged_has_no_sample_of_feedback_alone() -> None:
    assert Flow(Oracle(GOOD)).run(asked_twice(after=[(1, 1.0)])).of(SampleAssembled)[1:] == []


def test_feedback_on_a_session_that_is_over_and_judged_still_counts() -> None:
    session = Session()
    first = session.ask([user("a")], "b")
    session.ask([user("a"), assistant("b"), user("c")], "d")
    session.done()
    flow = Flow(Oracle(GOOD))
    flow.run(session.written)
    log = flow.run([session.rate(first.exchange_id, -1.0)])
    *_, last = log.of(SampleAssembled)
    assert (last.turn_id, last.reward, last.person_reward, last.total_reward) == (first.exchange_id, 1, -1.0, -1.0)


def test_a_floor_look_and_a_thumb_are_both_in_the_turns_last_revision() -> None:
    class Torn(Oracle):
        async def ask(self, system: str, user: str, *, seed: int):  # type: ignore[no-untyped-def]
            self.replies = GOOD if "<session>" in user else UNDECIDED
            return await super().ask(system, user, seed=seed)

    session = Session()
    first = session.ask([user("a")], "b")
    session.ask([user("a"), assistant("b"), user("c")], "d")
    session.rate(first.exchange_id, 0.5)
    session.done()
    log = Flow(Torn()).run(session.written)
    last = newest(log)[first.exchange_id]
    assert (last.revision, last.reward, last.person_reward, last.total_reward) == (1, 1, 0.5, 0.5)


def test_feedback_on_answers_that_are_not_there_is_bounded_and_the_oldest_is_refused_by_name() -> None:
    state: State | None = None
    refused: list[Event] = []
    for number in range(MAX_UNPLACED + 3):
        given = thumb(f"nowhere-{number}", 1.0, f"f{number}")
        state, events, _ = observe(state, given, SampleRules(Letters()))
        refused += events
    assert state is not None
    assert len(state.feedback) == MAX_UNPLACED
    assert [(one.turn_id, one.reason) for one in refused if isinstance(one, SampleRefused)] == [
        (f"nowhere-{number}", RefusalReason.ANSWER_UNKNOWN) for number in range(3)
    ]


@example([1.0, -1.0, 1.0], 4)
@given(st.lists(st.sampled_from([1.0, -1.0, 0.5, None]), max_size=12), st.integers(0, 12))
def test_the_newest_score_of_a_source_counts_and_a_repeat_changes_nothing(scores: list[float | None], cut: int) -> None:
    given_all = [thumb("t", score, f"f{n}") for n, score in enumerate(scores)]
    opinions = Opinions()
    for one in [*given_all, *given_all[:cut]]:
        opinions = heard(opinions, one)
    said = [score for score in scores if score is not None]
    assert parts_of(None, opinions) == Parts(None, said[-1] if said else None, None, None)
    assert opinions.num_changes == sum(a != b for a, b in zip([None, *said], said, strict=False))


@pytest.mark.parametrize(
    ("parts", "weights", "reward"),
    [
        (Parts(None, None, None, None), RewardWeights(), None),
        (Parts(1, None, None, None), RewardWeights(), 1.0),
        (Parts(-1, 1.0, None, None), RewardWeights(), 1.0),
        (Parts(1, -0.25, None, 1.0), RewardWeights(), -0.25),
        (Parts(1, -0.25, 0.5, 1.0), RewardWeights(environment=2.0), 0.75),
        (Parts(1, -1.0, 1.0, None), RewardWeights(), 0.0),
        (Parts(1, 0.0, None, 1.0), RewardWeights(), None),
        (Parts(1, -1.0, None, 0.5), RewardWeights(person=0.0, judge=0.25), 0.75),
        (Parts(1, None, -0.5, None), RewardWeights(judge=0.5), 0.0),
        (Parts(1, None, None, 0.25), RewardWeights(judge=0.0), 0.25),
        (Parts(None, 1.0, None, None), RewardWeights(person=0.0), None),
        (Parts(None, 0.0, None, None), RewardWeights(), None),
        (Parts(-1, -1.0, -1.0, -1.0), RewardWeights(), -1.0),
        (Parts(None, 0.5, 0.25, None), RewardWeights(environment=0.5), 0.625),
    ],
)
def test_a_reward_is_the_clamped_weighted_sum_of_the_parts_that_count_and_people_win(
    parts: Parts, weights: RewardWeights, reward: float | None
) -> None:
    assert reward_of(parts, weights) == reward


@pytest.mark.parametrize("score", [float("nan"), float("inf"), 1.5, -2.0])
def test_a_score_that_is_none_is_set_aside(score: float) -> None:
    with pytest.raises(UnusableEvent, match=r"feedback f: its score is .*expected -1 to 1"):
        heard(Opinions(), thumb("t", score, "f"))


@pytest.mark.parametrize("learns", [EVERYTHING, HOWEVER_DRAWN])
def test_off_the_policys_distribution_a_thumb_is_no_reward(learns: LearnsFrom) -> None:
    events = [
        replace(event, sampling=replace(event.sampling, temperature=0.0))
        if isinstance(event, ExchangeCompleted)
        else event
        for event in asked_twice(after=[(0, 1.0)])
    ]
    assert Flow(Oracle(UNDECIDED), learns=learns).run(events).of(SampleAssembled) == []
