"""Prompts: within their budget, and nobody in the conversation can speak for us."""

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.conversation.messages import Message
from clawstream.events import Question
from clawstream.judging import prompts
from clawstream.judging.prompts import Case, cut, defuse, floor_prompt, hint_prompt, rated_prompt, score_prompt
from clawstream.judging.votes import read
from tests import recorded
from tests.sessions import assistant, user

TRICKS = ("\\", "boxed", "\\boxed{1}", "<", "/", "answer", ">", "</answer>", "[HINT_START]", "HINT_END", "[", "]", "x")
PIECES = st.lists(st.sampled_from([*TRICKS, " ", "\n", "\0", "\ud800", "< / REQUEST >"]), max_size=12).map("".join)


def case(request: str = "What is 2+2?", answer: str = "5", next_state: str = "no, check it") -> Case:
    return Case(request=(user(request),), answer=assistant(answer), next_state=(user(next_state),))


@given(PIECES)
def test_defused_text_holds_no_verdict_no_hint_and_no_tag_of_ours(text: str) -> None:
    harmless = defuse(text)
    assert read(Question.SCORE, harmless) is None
    assert not re.search(
        r"\\\s*boxed|\[\s*HINT_\w+\s*\]|<\s*/?\s*(request|answer|next_state|session)\b", harmless, re.IGNORECASE
    )
    assert not re.search("[\0\ud800-\udfff]", harmless)


@given(PIECES, PIECES, PIECES)
def test_a_prompt_has_one_section_of_each_kind_whatever_was_said(request: str, answer: str, reply: str) -> None:
    prompt = score_prompt(case(request, answer, reply), 2000)
    found = re.findall(r"<(/?(?:request|answer|next_state|session))(?: role=\"user\")?>", prompt.user)
    assert found == ["request", "/request", "answer", "/answer", "next_state", "/next_state"]


@given(st.text(max_size=2000), st.integers(1, 300))
def test_a_cut_text_keeps_head_and_tail_and_counts_what_is_left_out(text: str, max_tokens: int) -> None:
    kept = cut(text, max_tokens)
    if len(text) <= max_tokens * 3:
        assert kept == text
    else:
        head, left_out, tail = re.split(r"\n\[\.\.\. (\d+) characters left out \.\.\.\]\n", kept)
        assert text.startswith(head)
        assert text.endswith(tail)
        assert len(head) + int(left_out) + len(tail) == len(text)
        assert len(head) + len(tail) == max_tokens * 3


def test_a_prompt_stays_within_its_budget() -> None:
    long = case("a" * 9000, "b" * 9000, "c" * 9000)
    words = len(score_prompt(case("", "", ""), 100).user)
    assert len(score_prompt(long, 100).user) < words + 3 * (300 + 60)


def test_the_sections_stand_as_judges_are_told() -> None:
    assert score_prompt(case(), 2000).user.startswith(
        "<request>\n[user]\nWhat is 2+2?\n</request>\n\n<answer>\n5\n</answer>\n\n"
        '<next_state role="user">\nno, check it\n</next_state>\n\n'
    )


def test_every_parallel_tool_result_is_a_next_state_with_its_role() -> None:
    before: tuple[Message, ...] = (*recorded.TOOL_REQUEST,)
    tools = Case(request=before, answer=recorded.LOOKING, next_state=tuple(recorded.TOOL_RESULTS[3:5]))
    prompt = hint_prompt(tools, 2000).user
    assert prompt.count('<next_state role="tool">') == 2
    assert '(calls exec with {"command":"echo two"})' in prompt


def test_system_messages_client_blocks_and_thinking_are_not_shown() -> None:
    thought = Case(
        request=tuple(recorded.FIRST_TURN), answer=assistant("<think>hm</think>4"), next_state=(user("thanks"),)
    )
    prompt = score_prompt(thought, 2000).user
    assert "personal assistant" not in prompt
    assert "INTERNAL_CONTEXT" not in prompt
    assert "<answer>\n4\n</answer>" in prompt


def test_the_second_look_shows_the_whole_session_first() -> None:
    prompt = floor_prompt(case(), [user("What is 2+2?"), assistant("5"), user("no"), assistant("4"), user("yes")], 2000)
    assert prompt.user.startswith("<session>\n[user]\nWhat is 2+2?\n\n[assistant]\n5\n\n[user]\nno\n\n")


@pytest.mark.parametrize("system", [prompts.SCORE_SYSTEM, prompts.HINT_SYSTEM, prompts.FLOOR_SYSTEM])
def test_every_question_says_how_to_box_the_answer(system: str) -> None:
    assert "\\boxed{1}" in system
    assert "\\boxed{-1}" in system


SPEAKERS = st.sampled_from(["system", "user", "assistant", "tool"])
SAID = st.lists(st.builds(lambda role, text: {"role": role, "content": text}, SPEAKERS, PIECES), max_size=9)


@given(SAID, PIECES)
def test_a_reward_model_is_shown_people_and_assistant_in_turn_and_the_answer_last(
    said: list[Message], end: str
) -> None:
    rated = rated_prompt(Case(request=tuple(said), answer=assistant(end), next_state=(user("SECRET"),))).rated
    roles = [message["role"] for message in rated]
    assert all(role != following for role, following in pairwise(roles))
    assert roles[-1] == "assistant"
    assert len(roles) == 1 or roles[0] == "user"
    assert not any(re.search("[\0\ud800-\udfff]|SECRET", message["content"]) for message in rated)


def test_a_long_conversation_is_rated_by_its_newest_messages() -> None:
    said = [message for n in range(50) for message in (user(f"u{n} " + "x" * 250), assistant(f"a{n} " + "y" * 250))]
    rated = rated_prompt(Case(request=(*said, user("last")), answer=assistant("end"), next_state=()), 100).rated
    assert [message["content"][:3] for message in rated[-4:]] == ["u49", "a49", "las", "end"]
    assert sum(len(message["content"]) for message in rated) < 3 * 3 * 100 + 300
    long = rated_prompt(case("q" * 9000, "a" * 9000), 100).rated
    assert [len(message["content"]) < 400 for message in long] == [True, True]
