"""What a client may set of the model's own chat template, where no family's code renders it."""

from pathlib import Path
from typing import Any

import pytest

from clawstream.errors import UnrenderableRequest
from clawstream.rendering.history import template_options
from clawstream.rendering.renderer import PromptRenderer
from tests.parts.engine.tiny_model import make_tokenizer
from tests.renderers import load_renderer

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% generation %}{{ message.content }}{% endgeneration %}"
    "{% if loop.last %}{% break %}{% endif %}{% endfor %}"
    "{% if tools %}{{ tools }}{% endif %}{% if documents %}{{ documents }}{% endif %}"
    "{% if effort is defined %} [{{ effort }}]{% endif %}{% if strftime_now is defined %}{% endif %}"
)
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> PromptRenderer:
    return made(tmp_path_factory.mktemp("own"), TEMPLATE)


def made(folder: Path, template: str) -> PromptRenderer:
    tokenizer = make_tokenizer(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return load_renderer(folder, "default")


def prompt(renderer: PromptRenderer, kwargs: Any) -> str:
    return renderer.decode(renderer.prompt_ids(MESSAGES, {"chat_template_kwargs": kwargs}))


@pytest.mark.parametrize("effort", ["high", "x" * 4096, 3, -0.5, True, None])
def test_a_variable_that_the_models_template_names_is_the_clients_to_set(renderer: PromptRenderer, effort: Any) -> None:
    assert prompt(renderer, {"effort": effort}) == f"Hi [{effort}]"


@pytest.mark.parametrize(
    "kwargs",
    [
        {"chat_template": "{{ 'x' * 10 }}"},
        {"chat_template": "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"},
        {"padding": "max_length", "max_length": 10_000},
        {"max_length": 10_000},
        {"truncation": True, "max_length": 1},
        {"tokenizer_kwargs": {"padding": "max_length"}},
        {"return_tensors": "np"},
        {"tokenize": False},
        {"conversation": "x"},
        {"continue_final_message": True},
        {"bos_token": "x"},
        {"eos_token": "x"},
        {"messages": "x"},
        {"tools": "x"},
        {"documents": "x"},
        {"add_generation_prompt": False},
        {"raise_exception": 1},
        {"strftime_now": 1},
        {"loop": 1},
        {"message": "x"},
        {"no_such": 1},
    ],
    ids=lambda kwargs: ",".join(kwargs),
)
def test_what_the_models_template_does_not_ask_for_reaches_nothing(
    renderer: PromptRenderer, kwargs: dict[str, Any]
) -> None:
    with pytest.raises(UnrenderableRequest, match=r"no variable of the model's own template, which has: effort"):
        prompt(renderer, kwargs)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("x" * 4097, "4097 characters"),
        (10**7, "a number beyond"),
        (float("inf"), "a number beyond"),
        (["x"], "neither text"),
        ({"x": 1}, "neither text"),
        ("a\ud800", "lone surrogate"),
        ("a\x00", "NUL"),
    ],
    ids=["long", "large", "infinite", "list", "object", "half", "nul"],
)
def test_a_value_is_plain_and_bounded(renderer: PromptRenderer, value: Any, words: str) -> None:
    with pytest.raises(UnrenderableRequest, match=words):
        prompt(renderer, {"effort": value})


def test_names_are_bounded_in_number(renderer: PromptRenderer) -> None:
    with pytest.raises(UnrenderableRequest, match="17 names"):
        prompt(renderer, {f"n{number}": 1 for number in range(17)})


def test_a_switch_for_thinking_is_left_out_where_the_template_has_none(
    renderer: PromptRenderer, tmp_path: Path
) -> None:
    assert prompt(renderer, {"enable_thinking": False}) == "Hi"
    assert template_options({"enable_thinking": False, "effort": 1}, frozenset({"effort"})) == {"effort": 1}
    thinks = made(tmp_path, "{{ messages[0].content }}{% if enable_thinking %}<think>{% endif %}")
    assert [prompt(thinks, {"enable_thinking": on}) for on in (True, False)] == ["Hi<think>", "Hi"]


def test_values_are_bounded_in_families_too(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    family = load_renderer(tmp_path, "qwen3")
    with pytest.raises(UnrenderableRequest, match="neither text"):
        prompt(family, {"enable_thinking": True, "other": []})
    with pytest.raises(UnrenderableRequest, match="lone surrogate"):
        prompt(family, {"other": "\ud800"})
