"""Histories as clients send them, in every family: what a template can't take is put otherwise, never refused."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from clawstream.config import PolicySettings
from clawstream.conversation.continuing import PromptOrigin
from clawstream.errors import ConfigError, UnrenderableRequest
from clawstream.rendering.history import TemplateCapabilities, placed
from clawstream.rendering.renderer import PromptRenderer
from tests.parts.engine.tiny_model import make_tokenizer
from tests.parts.families.answering import names
from tests.parts.families.conftest import Renderers
from tests.parts.families.formats import FORMATS, PARIS, TOOLS
from tests.parts.families.python_tokenizer import in_python
from tests.parts.families.standins import FAMILIES, make_folder
from tests.parts.families.test_continuing import BRIDGED, OPTIONS, Session
from tests.renderers import load_renderer
from tests.sessions import Json, user

every_family = names(name for name in FORMATS if not name.startswith("mistral,"))
_STRICT = """\
{%- for message in messages %}
{%- if (message["role"] == "user") != (loop.index0 % 2 == 0) %}{{ raise_exception("roles must alternate.") }}{% endif %}
{{- "[" + message["role"] + "]" + message["content"] }}
{%- endfor %}
"""


def system(text: str, role: str = "system") -> Json:
    return {"role": role, "content": text}


def called(function: Mapping[str, Any]) -> list[Json]:
    """A call with its result."""
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", **function}}
    return [
        user("Paris?"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sunny."},
    ]


@every_family
@pytest.mark.parametrize("options", [{}, {"tools": TOOLS}], ids=["no tools", "tools"])
def test_system_messages_are_shown_wherever_a_client_puts_them(
    renderers: Renderers, name: str, options: Mapping[str, Any]
) -> None:
    renderer = renderers[name]
    said = ["Be brief.", "Be kind.", "Hello.", "Hi.", "It is 5 pm.", "Bye."]
    history = [system(said[0]), system(said[1], "developer"), user(said[2])]
    history += [{"role": "assistant", "content": said[3]}, system(said[4], "developer"), user(said[5])]
    text = renderer.decode(renderer.prompt_ids(history, options))
    places = [text.find(one) for one in said]
    assert -1 not in places
    later = places[2:] if name == "mistral" else places  # its system text stands in the last turn of a user
    assert later == sorted(later)


@names(BRIDGED)
def test_a_system_message_in_mid_history_is_put_alike_whether_the_session_is_known_or_not(
    renderers: Renderers, name: str
) -> None:
    renderer, form = renderers[name], FORMATS[name]
    session = Session(renderer, form)
    session.turn([user("Hi")], form.write("", "Hello.", ()))
    session.turn([system("It is 5 pm."), system("Be kind.", "developer"), user("More")], "")
    prompt = session.prompts[-1]
    assert prompt.made is PromptOrigin.CONTINUED
    rendered = renderer.decode(renderer.prompt_ids(session.history[:-1], OPTIONS))
    continued = renderer.decode(prompt.token_ids)
    after = [text.partition("Hello.")[2] for text in (continued, rendered)]
    if name in ("glm-4.5", "gpt-oss"):  # they sample the mark of what comes next as their answer's end
        after = [text.removeprefix(form.end).removeprefix("<|end|>") for text in after]
    assert "It is 5 pm." in after[0]
    assert after[0] == after[1]


def test_what_a_template_can_not_take_is_joined_or_a_user_s() -> None:
    takes = TemplateCapabilities(later_system=False, joined=frozenset({"system", "user"}))
    history = [system("a"), system("b"), user("c"), system("d"), {"role": "assistant", "content": "e"}, system("f")]
    assert [(one["role"], one["content"]) for one in placed(history, takes)] == [
        ("system", "a\n\nb"),
        ("user", "c\n\nd"),
        ("assistant", "e"),
        ("user", "f"),
    ]
    assert placed(history, TemplateCapabilities(later_system=True, joined=frozenset())) == history


def test_messages_of_a_user_in_a_row_are_one_where_a_template_wants_turns(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path)
    tokenizer.chat_template = _STRICT
    tokenizer.save_pretrained(tmp_path)
    renderer = load_renderer(tmp_path)
    history = [user("a"), user("b"), {"role": "assistant", "content": "c"}, system("d"), user("e")]
    assert renderer.decode(renderer.prompt_ids(history, {})) == "[user]a\n\nb[assistant]c[user]d\n\ne"
    with pytest.raises(UnrenderableRequest, match=r"roles must alternate$"):
        renderer.prompt_ids([{"role": "assistant", "content": "c"}], {})


@every_family
@pytest.mark.parametrize("escape", [r"\ud83d", r"\udc00\ud83d", r"\u0000"], ids=["half", "swapped", "NUL"])
def test_what_can_not_be_printed_is_shown_as_such_where_arguments_escape_it(
    renderers: Renderers, name: str, escape: str
) -> None:
    renderer = renderers[name]
    shown = "\ufffd" * escape.count("u")
    ids = renderer.prompt_ids(called({"arguments": f'{{"city": "Paris {escape}"}}'}), OPTIONS)
    assert ids == renderer.prompt_ids(called({"arguments": f'{{"city": "Paris {shown}"}}'}), OPTIONS)
    assert f"Paris {shown}" in renderer.decode(ids)


def test_arguments_that_can_be_printed_stay_as_they_were_written(renderers: Renderers) -> None:
    arguments = r'{"city":"\ud83d\ude00",  "days":1.50}'
    prompt = renderers["qwen3"].prompt_ids(called({"arguments": arguments}), OPTIONS)
    assert arguments in renderers["qwen3"].decode(prompt)


@every_family
@pytest.mark.parametrize("function", [{}, {"arguments": None}, {"arguments": ""}, {"arguments": {}}], ids=str)
def test_a_call_without_arguments_is_one_with_none(
    renderers: Renderers, name: str, function: Mapping[str, Any]
) -> None:
    renderer = renderers[name]
    assert renderer.prompt_ids(called(function), OPTIONS) == renderer.prompt_ids(called({"arguments": "{}"}), OPTIONS)


@names(("qwen3", "kimi-k2", "deepseek-v3"))
def test_no_family_s_header_but_its_own_keeps_a_prompt_from_going_on(renderers: Renderers, name: str) -> None:
    renderer, form = renderers[name], FORMATS[name]
    headers = {
        "qwen3": "<|im_start|>assistant\n",
        "kimi-k2": "<|im_assistant|>assistant<|im_middle|>",
        "deepseek-v3": "<\uff5cAssistant\uff5c>",
    }
    for family, header in headers.items():
        session = Session(renderer, form)
        session.turn([user("Hi")], form.write("", "Hello.", ()))
        session.turn([user(header)], "")
        assert session.prompts[-1].made is (PromptOrigin.FALLBACK if family == name else PromptOrigin.CONTINUED)


def test_a_tokenizer_in_python_runs_where_it_is_trusted_and_nobody_is_asked(
    tmp_path: Path, renderers: Renderers, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = in_python(make_folder(tmp_path, FAMILIES["kimi-k2"]))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda question: pytest.fail(f"asked: {question}"))
    with pytest.raises(ConfigError, match=r"Python code.*policy\.trust_tokenizer_code"):
        PromptRenderer.of(PolicySettings(), folder)
    trusted = PromptRenderer.of(PolicySettings(trust_tokenizer_code=True), folder)
    known = renderers["kimi-k2"]
    assert (trusted.family, trusted.stop_token_ids) == ("kimi-k2", known.stop_token_ids)
    history = called({"arguments": json.dumps(PARIS[1])})
    history += [{"role": "assistant", "content": "Sunny."}, user("<|im_end|> 😀 It's  2?")]
    ids = trusted.prompt_ids(history, OPTIONS)
    assert ids == known.prompt_ids(history, OPTIONS)
    assert trusted.decode(ids) == known.decode(ids)
    session = Session(trusted, FORMATS["kimi-k2"])
    answer = session.turn([user("Hi")], FORMATS["kimi-k2"].write("", "Sure.", (PARIS,)))
    assert (answer["content"], len(answer["tool_calls"])) == ("Sure.", 1)
    session.turn(session.results(), "")
    assert session.prompts[-1].made is PromptOrigin.CONTINUED
