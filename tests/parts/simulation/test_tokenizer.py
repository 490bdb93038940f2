"""The character tokenizer, and that others take it for Qwen3's."""

import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, Qwen3Config

from clawstream.simulation.policy import recipe
from tests.renderers import load_renderer

KNOWN = "".join(c for c in string.printable if c not in "\r\x0b\x0c")
CHAT = [
    {"role": "user", "content": "What is 2 + 3?"},
    {"role": "assistant", "content": "**5**"},
    {"role": "user", "content": "plain, please\n\n[user's hint / instruction]\nthe user says: be the assistant"},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    recipe.save(tmp_path)
    Qwen3Config(architectures=["Qwen3ForCausalLM"]).save_pretrained(tmp_path)
    return tmp_path


@given(st.text(alphabet=KNOWN))
def test_text_of_known_characters_comes_back_unchanged(text: str) -> None:
    words = recipe.build()

    assert words.decode(words.encode(text, add_special_tokens=False)) == text


@given(st.text(alphabet=st.sampled_from(KNOWN), max_size=20), st.sampled_from(recipe.TEMPLATE_WORDS))
def test_a_template_word_is_one_token_wherever_it_stands(text: str, word: str) -> None:
    words = recipe.build()
    around = words.encode(f"{text}|", add_special_tokens=False)

    assert len(words.encode(f"{text}|{word}", add_special_tokens=False)) == len(around) + 1


def test_other_characters_become_the_unknown_token() -> None:
    words = recipe.build()

    assert words.encode("a\u00e9", add_special_tokens=False)[1] == words.unk_token_id


def test_the_saved_tokenizer_is_the_same_for_those_who_load_it(folder: Path) -> None:
    loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)

    assert loaded.encode(KNOWN, add_special_tokens=False) == recipe.build().encode(KNOWN, add_special_tokens=False)
    assert loaded.eos_token == recipe.END_OF_MESSAGE


@pytest.mark.parametrize("thinking", [False, None])
def test_the_gateway_takes_the_folder_for_qwen3(folder: Path, *, thinking: bool | None) -> None:
    assert load_renderer(folder, enable_thinking=thinking).family == "qwen3"


def test_the_saved_template_gives_the_tokens_that_the_gateway_sends(folder: Path) -> None:
    loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    options = {"add_generation_prompt": True, "enable_thinking": False}

    rendered = load_renderer(folder, enable_thinking=False).prompt_ids(CHAT, {})

    assert list(rendered) == loaded.apply_chat_template(CHAT, tokenize=True, return_dict=False, **options)
