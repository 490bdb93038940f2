"""Turns with pictures: they are judged in words, and no sample comes of them, as no trainer sees them yet."""

from collections.abc import Iterator

from clawstream.conversation.pictures import END, Picture
from clawstream.events import Event, Question, RefusalReason, SampleAssembled, SampleRefused
from clawstream.judging.prompts import Case, rated_prompt, score_prompt
from clawstream.samples.hinted import with_hint
from tests.flow import Flow, Log, Oracle
from tests.sessions import Session, assistant, user

SHOWN = Picture(sha256="ab" * 32, width=60, height=40)
GOOD = "\\boxed{1}"


def learned(said: str) -> Log:
    """What comes of a turn that asks so, and of its hint."""
    session = Session("s")
    session.ask([user(said)], "an answer")
    session.ask([user(said), assistant("an answer"), user("no, shorter")], "another")
    replies = {Question.SCORE: [GOOD], Question.HINT: [f"{GOOD} [HINT_START]be brief[HINT_END]"]}
    events: list[Event] = list(session.written)
    return Flow(Oracle(replies)).run(events)


def test_no_sample_comes_of_a_prompt_with_a_picture_and_the_reason_is_on_record() -> None:
    log = learned(f"what is on {SHOWN.mark}?")
    assert log.of(SampleAssembled) == []
    assert {refused.reason for refused in log.of(SampleRefused)} == {RefusalReason.PICTURES}
    assert log.of(SampleRefused)
    assert learned("what is on the table?").of(SampleAssembled)


def test_a_judge_and_a_reward_model_read_words_in_place_of_a_mark() -> None:
    request = ({"role": "user", "content": [{"type": "text", "text": "see "}, {"type": "text", "text": SHOWN.mark}]},)
    tool = ({"role": "tool", "tool_call_id": "t", "content": f"screen: {SHOWN.mark}"},)
    case = Case(request=request, answer={"role": "assistant", "content": "a cat"}, next_state=tool)
    asked = score_prompt(case, 2000).user
    assert "[user]\nsee\n\n[user]\n[picture]" in asked
    assert "screen: [picture]" in asked
    rated = str(rated_prompt(case, 2000))
    assert "[picture]" in rated
    assert all(SHOWN.sha256 not in text and END not in text for text in (asked, rated))


def test_a_hint_that_repeats_a_mark_shows_no_picture() -> None:
    def texts() -> Iterator[str]:
        for message in with_hint([{"role": "user", "content": "see"}], f"Look at {SHOWN.mark} again."):
            yield str(message["content"])

    assert END not in "".join(texts())
    assert SHOWN.sha256 in "".join(texts())
