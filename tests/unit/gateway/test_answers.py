"""What the gateway keeps of what was sampled, and for how long."""

from clawstream.conversation.continuing import Continued, PromptOrigin, ShownAnswer, answered
from clawstream.gateway.outbox.recorder import PARENT_FOR_MS
from clawstream.gateway.sessions import MAX_ANSWERS, SampledAnswers
from tests.sessions import assistant, user


def an_answer(text: str, num_tokens: int = 1) -> ShownAnswer:
    return answered([user("a")], {}, assistant(text), (7,) * num_tokens)


def a_prompt(number: int, num_tokens: int = 1) -> Continued:
    ids = (number,) * num_tokens
    return Continued(
        token_ids=ids, num_spliced=0, made=PromptOrigin.RENDERED, beginning=b"", steps=(), ends=(num_tokens,)
    )


def test_a_session_s_answers_are_kept_in_their_order() -> None:
    answers = SampledAnswers()
    answers.answered("s", an_answer("one"), 1)
    answers.answered("other", an_answer("theirs"), 2)
    answers.answered("s", an_answer("two"), 3)
    assert [answer.message["content"] for answer in answers.of("s", 4).answers] == ["one", "two"]


def test_the_two_newest_prompts_are_kept_each_once() -> None:
    answers = SampledAnswers()
    for number in (1, 2, 3, 2, 2):
        answers.asked("s", a_prompt(number), number)
    assert [prompt.token_ids for prompt in answers.of("s", 4).prompts] == [(3,), (2,)]


def test_of_very_many_answers_the_newest_are_kept() -> None:
    answers = SampledAnswers()
    for number in range(MAX_ANSWERS + 1):
        answers.answered("s", an_answer(str(number)), number)
    kept = answers.of("s", 1).answers
    assert (len(kept), kept[0].message["content"]) == (MAX_ANSWERS, "1")


def test_the_sessions_silent_longest_make_room() -> None:
    answers = SampledAnswers(max_tokens=10)
    answers.answered("old", an_answer("one", 4), 1)
    answers.asked("older", a_prompt(1, 4), 2)
    answers.answered("old", an_answer("two", 1), 3)
    answers.answered("new", an_answer("three", 4), 4)
    assert [len(answers.of(name, 5).answers) for name in ("old", "older", "new")] == [2, 0, 1]
    assert answers.of("older", 5).prompts == ()
    answers.forget("old")
    answers.answered("one more", an_answer("four", 6), 5)
    assert len(answers) == 2


def test_a_session_larger_than_all_room_is_kept_while_it_is_the_only_one() -> None:
    answers = SampledAnswers(max_tokens=10)
    answers.answered("s", an_answer("one", 100), 1)
    assert len(answers.of("s", 1).answers) == 1


def test_a_session_that_ended_or_was_silent_for_too_long_is_forgotten() -> None:
    answers = SampledAnswers()
    answers.answered("done", an_answer("one"), 1)
    answers.answered("silent", an_answer("two"), 1)
    answers.forget("done")
    answers.forget("unknown")
    assert answers.of("done", 2).answers == ()
    assert len(answers.of("silent", 1 + PARENT_FOR_MS).answers) == 1
    assert answers.of("silent", 2 + PARENT_FOR_MS).answers == ()
    answers.answered("new", an_answer("three"), 2 + PARENT_FOR_MS)
    assert len(answers) == 1
