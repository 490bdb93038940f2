"""An answer that its client left is judged as it was got, and trained on only where the settings say so."""

import pytest

from clawstream.events import Question, RefusalReason, SampleAssembled, SampleRefused, TurnPaired, VerdictReached
from tests.flow import Flow, Log, Oracle
from tests.recorded import parts
from tests.sessions import Json, Session, assistant, tokens, user

BAD = "\\boxed{-1}"
ASKED = [user("hello"), assistant("hi"), user("Please talk for long.")]


def written() -> tuple[Session, str]:
    """A session with an answer that was stopped, and complained of."""
    session = Session("s")
    session.ask(ASKED[:1], "hi")
    cut = session.fail(ASKED, "and so on and", num_unsent=3)
    session.ask([*ASKED, user("That is wrong, shorter.")], "Sorry.")
    return session, cut.exchange_id


def complaining() -> Oracle:
    return Oracle({Question.SCORE: [BAD], Question.HINT: [BAD]})


def stopped(*, interrupted: bool) -> tuple[Log, Oracle, str]:
    session, cut = written()
    judge = complaining()
    return Flow(judge, interrupted=interrupted).run(session.written), judge, cut


def test_judges_see_what_the_client_had_got_and_that_it_was_interrupted() -> None:
    log, judge, cut = stopped(interrupted=False)
    asked, *_ = (one for one in judge.asked if "<answer interrupted" in one and "You judge single answers" in one)
    assert '<answer interrupted="yes">\nand so on and\n</answer>' in asked
    assert "[user]\nPlease talk for long.\n</request>" in asked
    assert '<next_state role="user">\nThat is wrong, shorter.\n</next_state>' in asked
    assert [verdict.score for verdict in log.of(VerdictReached) if verdict.turn_id == cut] == [-1]
    assert [turn.interrupted for turn in log.of(TurnPaired)] == [False, True]


@pytest.mark.parametrize("joined", [parts("Please talk for long.", "No."), user("Please talk for long.\n\nNo.")])
def test_judges_see_of_a_reaction_that_was_joined_to_the_stopped_question_what_is_new(joined: Json) -> None:
    session, judge = Session("s"), complaining()
    session.fail(ASKED, "and so on and", num_unsent=3)
    session.ask([*ASKED[:2], joined], "Sorry.")
    Flow(judge).run(session.written)
    asked, *_ = (one for one in judge.asked if "You judge single answers" in one)
    assert '</answer>\n\n<next_state role="user">\nNo.\n</next_state>' in asked


@pytest.mark.parametrize("interrupted", [False, True])
def test_what_was_sent_of_it_is_trained_on_only_where_the_settings_say_so(interrupted: bool) -> None:
    log, _, cut = stopped(interrupted=interrupted)
    samples = [sample for sample in log.of(SampleAssembled) if sample.turn_id == cut]
    refused = [refusal.reason for refusal in log.of(SampleRefused) if refusal.turn_id == cut]
    if not interrupted:
        assert (samples, refused) == ([], [RefusalReason.INTERRUPTED])
        return
    assert refused == []
    [sample] = samples
    sent = tokens(b"and so on and")
    assert (sample.response_ids, len(sample.response_logprobs), sample.reward) == (sent, len(sent), -1)
    assert [span.num_tokens for span in sample.versions] == [len(sent)]


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_sample_is_made_of_it_although_its_record_is_read_last(interrupted: bool) -> None:
    session, _ = written()
    flow = Flow(complaining(), interrupted=interrupted)
    *before, samples = flow.workers
    for event in session.written:
        flow.write(event)
    while busy := next((worker for worker in before if worker.choices()), None):
        busy.act(busy.choices()[0])
    for topic in sorted(samples.stage.reads, key=lambda name: "exchanges" in name):
        while topic in samples.choices():
            samples.act(topic)
    live, _, _ = stopped(interrupted=interrupted)
    for kind in (SampleAssembled, SampleRefused):
        assert {event.event_id for event in flow.log.of(kind)} == {event.event_id for event in live.of(kind)}
