"""What a client writes in the user's place is not the user's word, to pairing and to the judge."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.conversation.authors import Author, written
from clawstream.conversation.messages import said_in, written_in
from clawstream.judging.prompts import Case, score_prompt
from tests import recorded
from tests.openclaw.constants import INSTRUCTIONS, QUEUED, QUEUED_MANY, REPORTS, SYSTEM_TURNS
from tests.sessions import assistant, user

TIME = "[Mon 2026-11-23 17:22 UTC] "


@pytest.mark.parametrize(
    "text",
    [
        *INSTRUCTIONS,
        *(f"[System] {text}" for text in SYSTEM_TURNS),
        "/compact",
        "/compact the whole of it",
        "/stop",
        "/think high",
    ],
)
def test_an_instruction_of_the_client_is_nobodys_word(text: str) -> None:
    for message in (user(text), user(TIME + text)):
        assert [piece.author for piece in written_in(message)] == [Author.CLIENT]
        assert said_in(message) == ()


@pytest.mark.parametrize("text", REPORTS)
def test_a_report_of_the_client_is_the_environments(text: str) -> None:
    for message in (user(text), user(TIME + text), user(f"{recorded.BLOCK['content'][0]['text']}\n\n{text}")):
        assert [piece.author for piece in written_in(message)] == [Author.ENVIRONMENT]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{TIME}That is wrong.", "That is wrong."),
        (f"{QUEUED}\nMake it blue.\n\nAnd red.", "Make it blue.\n\nAnd red."),
        (f"{TIME}{QUEUED_MANY}\n\n---\nQueued #1 (from me)\nBlue.\n\n---\nQueued #2\nRed.", "Blue.\n\nRed."),
        ("Hello\n\nRuntime: agent=main | sessionId=s1 | shell=bash", "Hello"),
        ("/tmp/x is wrong", "/tmp/x is wrong"),
        ("/think No, that is wrong. 2+2 is 4.", None),
        ("/status is wrong", None),
        ("/new That is wrong.", None),
        ("Why does it say: The previous attempt did not produce a user-visible answer.?", None),
    ],
)
def test_frames_around_a_persons_words_are_cut(text: str, words: str | None) -> None:
    assert written(text) == (Author.PERSON, words or text)


@given(st.lists(st.text("abc \n", min_size=1), min_size=1, max_size=4))
def test_messages_say_the_same_together_and_apart(texts: list[str]) -> None:
    apart = [line for text in texts if text.strip() for line in said_in(user(text))]
    together = said_in(recorded.parts(*texts)) if any(map(str.strip, texts)) else ()
    assert list(together) == apart


def test_the_judge_is_told_who_spoke() -> None:
    case = Case(
        request=(user(f"{TIME}Count the moons."), user(INSTRUCTIONS[0]), assistant("I do.")),
        answer=assistant("It is under way."),
        next_state=(
            user(f"{REPORTS[1]}\n\nThere are two."),
            recorded.parts(REPORTS[0], f"{QUEUED}\nThat is wrong."),
        ),
    )
    shown = score_prompt(case, 1000).user
    assert "<request>\n[user]\nCount the moons.\n\n[assistant]\nI do.\n</request>" in shown
    assert f'<next_state role="environment">\n{REPORTS[1]}\n\nThere are two.\n</next_state>' in shown
    assert f'<next_state role="environment">\n{REPORTS[0]}\n</next_state>' in shown
    assert '<next_state role="user">\nThat is wrong.\n</next_state>' in shown
    assert shown.count('role="user"') == 1
