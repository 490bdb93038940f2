"""What language models are told that play people or grade answers, and how their replies are read."""

import pytest

from clawstream.errors import ConfigError
from clawstream.simulation.everyday import personas, wish_of
from clawstream.simulation.roles import Remark, Roles, grade_in, grade_prompt, person_prompt, remark_in, settings_of
from clawstream.simulation.runs.scenarios import SCENARIOS

ANSWERED = [{"role": "user", "content": "what's 27 + 48?"}, {"role": "assistant", "content": "## 75"}]


@pytest.mark.parametrize(
    ("reply", "grade"),
    [
        ("\\boxed{0.7}", 0.7),
        ("\\boxed{ 1 }", 1.0),
        ("\\boxed{0}", 0.0),
        ("I thought of \\boxed{0.2} at first. \\boxed{0.9}", 0.9),
        ("<think>0.1, or \\boxed{0.3}?</think>\n\\boxed{0.8}", 0.8),
        ("<think>it may be 0.1, which nobody ends", None),
        ("it may be 0.1, opened by a template</think>0.6", 0.6),
        ("\\boxed{.5}", 0.5),
        (".5", 0.5),
        ("0.5", 0.5),
        ("0.25.", 0.25),
        ("My grade is 0.25.", None),
        ("-1", None),
        ("-0.5", None),
        ("Step 1 is wrong.", None),
        ("8 out of 10", None),
        ("\\boxed{7}", None),
        ("\\boxed{-1}", None),
        ("\\boxed{good} 0.5", None),
        ("quite good", None),
        ("", None),
    ],
)
def test_a_grade_is_a_number_from_0_to_1_and_what_can_not_be_read_is_none_and_not_0(
    reply: str, grade: float | None
) -> None:
    assert grade_in(reply) == grade


@pytest.mark.parametrize(
    ("reply", "remark"),
    [
        ("no bold please", Remark(text="no bold please", is_last=False)),
        ("Great, thanks! DONE", Remark(text="Great, thanks", is_last=True)),
        ("**DONE**", Remark(text="Thanks, that's it.", is_last=True)),
        ("are we done?", Remark(text="are we done?", is_last=False)),
        ("I'm not DONE yet, shorter!", Remark(text="I'm not DONE yet, shorter!", is_last=False)),
        ("DONE is too early.</think>plain please", Remark(text="plain please", is_last=False)),
        ("<think>It is DONE.</think>shorter, please", Remark(text="shorter, please", is_last=False)),
        ("<think>hm</think>", None),
        (" \n", None),
    ],
)
def test_a_person_is_content_where_the_model_says_so_and_silence_is_no_remark(
    reply: str, remark: Remark | None
) -> None:
    assert remark_in(reply) == remark


def test_a_person_is_told_their_wish_and_shown_the_conversation_from_their_side() -> None:
    told, asked = person_prompt("student", "student", None, ANSWERED)
    flipped, _ = person_prompt("student", "ta", None, ANSWERED)

    assert "without headings or bold" in told
    assert "verdict first" in flipped
    assert "verdict" not in told
    assert asked == "You:\nwhat's 27 + 48?\n\nThe assistant:\n## 75\n\nYou:"


def test_a_person_with_everyday_requests_is_told_what_their_assistant_is_and_how_they_want_answers() -> None:
    for who in personas():
        said = [{"role": "system", "content": who.system}, *ANSWERED]
        told, asked = person_prompt(who.name, who.wish, who.system, said)
        assert who.system in told
        assert wish_of(who).wanted in told
        assert who.system not in asked


def test_each_person_of_the_simulation_can_be_played() -> None:
    for persona in (who.name for scenario in SCENARIOS.values() for who in scenario.personas):
        for wish in (who.name for scenario in SCENARIOS.values() for who in scenario.personas):
            assert person_prompt(persona, wish, None, ANSWERED)


def test_who_grades_sees_the_request_the_wish_the_answer_and_the_result_where_there_is_one() -> None:
    _, of_sum = grade_prompt("27 + 48, carry?", "Carry: 75", wanted="verdict first", result="75")
    _, of_request = grade_prompt("Why?", "Parce que.", wanted="in French", result=None)

    assert all(words in of_sum for words in ("27 + 48, carry?", "verdict first", "result is 75", "Carry: 75"))
    assert all(words in of_request for words in ("Why?", "in French", "Parce que."))
    assert "right result" not in of_request


def test_a_role_is_named_by_its_model_and_address_and_shows_the_key_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k-1")
    found = settings_of("org/model-7b@https://host:8000/v1")

    assert (found.model, found.url) == ("org/model-7b", "https://host:8000/v1")
    assert found.api_key is not None
    assert found.api_key.get_secret_value() == "k-1"
    with pytest.raises(ValueError, match="expected MODEL@URL"):
        settings_of("http://host:8000/v1")


@pytest.mark.parametrize(
    "at",
    ["m@http://me:secret@host/v1", "http://me:secret@host/v1", "http://host:port/v1", "m@ftp://me:secret@host", "what"],
)
def test_an_address_that_can_not_be_asked_is_refused_and_a_password_in_it_is_not_shown(at: str) -> None:
    with pytest.raises(ConfigError, match="--people: ") as found:
        Roles(people=at).named()
    assert "secret" not in str(found.value)
