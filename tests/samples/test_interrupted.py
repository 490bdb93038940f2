"""An answer that its client left is judged as it was got, and trained on only where the settings say so."""

import pytest

from clawstream.events import Question, RefusalReason, SampleAssembled, SampleRefused, TurnPaired, VerdictReached
from tests.flow import Flow, Log, Oracle
from tests.sessions import Session, assistant, tokens, user

BAD = "\\boxed{-1}"
ASKED = [user("hello"), assistant("hi"), user("Please talk for long.")]


def stopped(*, interrupted: bool) -> tuple[Log, Oracle, str]:
    """What comes of an answer that was stopped, and complained of."""
    session = Session("s")
    session.ask(ASKED[:1], "hi")
    cut = session.fail(ASKED, "and so on and", num_unsent=3)
    session.ask([*ASKED, user("That is wrong, shorter.")], "Sorry.")
    judge = Oracle({Question.SCORE: [BAD], Question.HINT: [BAD]})
    return Flow(judge, interrupted=interrupted).run(session.written), judge, cut.exchange_id


def test_judges_see_what_the_client_had_got_and_that_it_was_interrupted() -> None:
    log, judge, cut = stopped(interrupted=False)
    asked, *_ = (one for one in judge.asked if "<answer interrupted" in one and "You judge single answers" in one)
    assert '<answer interrupted="yes">\nand so on and\n</answer>' in asked
    assert "[user]\nPlease talk for long.\n</request>" in asked
    assert '<next_state role="user">\nThat is wrong, shorter.\n</next_state>' in asked
    assert [verdict.score for verdict in log.of(VerdictReached) if verdict.turn_id == cut] == [-1]
    assert [turn.interrupted for turn in log.of(TurnPaired)] == [False, True]


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
