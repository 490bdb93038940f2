"""Messages to prompt tokens and back, by the family's own template."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.errors import ConfigError, UnrenderableRequest
from clawstream.rendering.encoding import LONG_TOKENS, PlainText, RememberingTokenizer, TemplateTokenizer, spread
from clawstream.rendering.renderer import CalledTool, PromptRenderer
from tests.parts.engine.tiny_model import make_tokenizer
from tests.renderers import load_renderer

TOOLS = {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer and Qwen3's architecture, without a template of its own."""
    path = tmp_path_factory.mktemp("qwen3")
    make_tokenizer(path)
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return path


@pytest.fixture(scope="module")
def renderer(folder: Path) -> PromptRenderer:
    return load_renderer(folder)


def test_a_prompt_ends_where_the_answer_begins(renderer: PromptRenderer) -> None:
    ids = renderer.prompt_ids([{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}], {})
    assert renderer.family == "qwen3"
    assert renderer.decode(ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_text_parts_are_one_text_and_unprintable_characters_are_shown_as_such(renderer: PromptRenderer) -> None:
    parts = [{"type": "text", "text": "a\ud800"}, {"type": "text", "text": "b\x00"}]
    assert renderer.prompt_ids([{"role": "user", "content": parts}], {}) == renderer.prompt_ids(
        [{"role": "user", "content": "a\ufffdb\ufffd"}], {}
    )


def test_thinking_is_turned_off_by_settings_and_by_request_alike(folder: Path, renderer: PromptRenderer) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    off = load_renderer(folder, "qwen3", enable_thinking=False)
    ids = renderer.prompt_ids(messages, {"chat_template_kwargs": {"enable_thinking": False}})
    assert ids == off.prompt_ids(messages, {})
    assert renderer.decode(ids).endswith("<think>\n\n</think>\n\n")


def test_tools_are_shown_unless_they_may_not_be_called(renderer: PromptRenderer) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    assert "# Tools" in renderer.decode(renderer.prompt_ids(messages, TOOLS))
    assert renderer.prompt_ids(messages, TOOLS | {"tool_choice": "none"}) == renderer.prompt_ids(messages, {})


def test_tool_calls_and_their_results_go_back_in(renderer: PromptRenderer) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "two", "tool_call_id": "c"},
    ]
    text = renderer.decode(renderer.prompt_ids(messages, TOOLS))
    assert CALL in text
    assert "<tool_response>\ntwo\n</tool_response>" in text


def test_an_answer_is_read_back_as_reasoning_content_and_calls(renderer: PromptRenderer) -> None:
    prompt = renderer.prompt_ids([{"role": "user", "content": "Hi"}], TOOLS)
    parsed = renderer.parse(renderer.encode(f"<think>\nhm\n</think>\n\nSure. {CALL}<|im_end|>"), prompt, TOOLS)
    assert (parsed.reasoning, parsed.content) == ("hm", "Sure.")
    assert parsed.tool_calls == (CalledTool(native_id=None, name="f", arguments='{"a": 1}'),)


def test_a_call_that_can_not_be_read_is_content(renderer: PromptRenderer) -> None:
    parsed = renderer.parse(renderer.encode("<tool_call>{oops</tool_call>"), (), TOOLS)
    assert (parsed.content, parsed.tool_calls) == ("<tool_call>{oops</tool_call>", ())


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "f", "arguments": ' + "[" * 5000 + "]" * 5000 + "}",
        '{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}",
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": "a"}',
        '{"name": "f", "arguments": [1]}',
        '{"name": 5, "arguments": {}}',
        '{"name": "f"',
    ],
    ids=["too deep", "too many digits", "not JSON", "text", "a list", "a number for a name", "half"],
)
def test_a_call_that_nobody_could_make_is_content(renderer: PromptRenderer, call: str) -> None:
    parsed = renderer.parse(renderer.encode(f"<tool_call>{call}</tool_call><|im_end|>"), (), TOOLS)
    assert (parsed.content, parsed.tool_calls) == (f"<tool_call>{call}</tool_call>", ())


@pytest.mark.parametrize("arguments", ['"{\\"a\\": 1}"', '{"a": 1}'])
def test_arguments_are_an_object_in_json(renderer: PromptRenderer, arguments: str) -> None:
    call = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert renderer.parse(renderer.encode(call), (), TOOLS).tool_calls[0].arguments == '{"a": 1}'


def test_half_a_surrogate_in_a_call_is_shown_as_such(renderer: PromptRenderer) -> None:
    call = '<tool_call>{"name": "f\\udc00", "arguments": {"a": "\\ud800"}}</tool_call>'
    parsed = renderer.parse(renderer.encode(call), (), TOOLS).tool_calls[0]
    assert (parsed.name, parsed.arguments) == ("f\ufffd", '{"a": "\ufffd"}')


def test_a_call_that_still_grows_is_not_content_yet(renderer: PromptRenderer) -> None:
    ids = renderer.encode('Sure. <tool_call>\n{"name"')
    assert renderer.parse(ids, (), TOOLS, ended=False).unfinished == '<tool_call>\n{"name"'
    assert renderer.parse(ids, (), TOOLS, ended=False).content == "Sure."
    assert renderer.parse(ids, (), TOOLS).content == 'Sure.\n<tool_call>\n{"name"'


def test_a_template_option_that_the_family_lacks_is_refused(renderer: PromptRenderer) -> None:
    with pytest.raises(UnrenderableRequest, match="no_such"):
        renderer.prompt_ids([{"role": "user", "content": "Hi"}], {"chat_template_kwargs": {"no_such": 1}})


@pytest.mark.parametrize(("family", "thinking"), [("no-such-family", None), ("llama-3", None), ("kimi-k2.5", False)])
def test_a_family_that_does_not_fit_is_an_error_that_names_it(folder: Path, family: str, thinking: bool | None) -> None:
    with pytest.raises(ConfigError, match=family):
        load_renderer(folder, family, thinking)


@given(texts=st.lists(st.text(st.sampled_from("ab <|im_end|>é😀"), max_size=30), min_size=1, max_size=8))
def test_what_is_remembered_are_the_tokenizer_s_own_ids(folder: Path, texts: list[str]) -> None:
    tokenizer = make_tokenizer(folder)
    remembering = RememberingTokenizer(tokenizer, max_tokens=64)
    for text in [*texts, *texts]:
        assert remembering.encode(text) == tokenizer.encode(text, add_special_tokens=False)


def test_a_remembered_text_is_not_changed_by_who_got_it(folder: Path) -> None:
    remembering = RememberingTokenizer(make_tokenizer(folder))
    remembering.encode("abc").append(7)
    remembering.encode("abc").append(7)
    assert remembering.decode(remembering.encode("abc")) == "abc"


def test_a_long_text_goes_through_a_template_as_one_id_and_a_short_one_as_it_is(folder: Path) -> None:
    plain = PlainText(make_tokenizer(folder))
    template = TemplateTokenizer(plain, plain)
    template.seal()
    for text in ("ab " * LONG_TOKENS, "ab"):
        ids = plain.encode(text)
        assert len(template.encode(text)) == (1 if len(ids) >= LONG_TOKENS else len(ids))
        assert spread([7, *template.encode(text), 7, *template.encode(text)]) == (7, *ids, 7, *ids)


def test_a_template_of_its_own_goes_before_the_architecture(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path)
    tokenizer.chat_template = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    own = load_renderer(tmp_path)
    assert own.family == "default"
    assert own.decode(own.prompt_ids([{"role": "user", "content": "Hi"}], {})) == "[user]Hi"
    assert own.parse(own.encode(CALL), (), TOOLS).tool_calls[0].name == "f"
