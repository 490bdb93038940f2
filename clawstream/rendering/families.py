"""Tells which family's template a model folder has, and gives the renderers package what it lacks.

It lacks GPT-OSS's vocabulary, which is taken from the folder, and a parser of Mistral's calls.

Mistral writes calls in two formats. The older one is a `[TOOL_CALLS]` and a JSON list of `{"name", "arguments", "id"}`.
In the newer one each call has a `[TOOL_CALLS]` of its own and is `name[ARGS]{...}`; some versions put `[CALL_ID]id`
before `[ARGS]`.
"""

import base64
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from openai_harmony import HarmonyEncodingName, HarmonyError, load_harmony_encoding
from renderers import (
    DefaultRendererConfig,
    ParsedToolCall,
    ToolCallParseStatus,
    config_from_name,
    create_renderer,
    gpt_oss,
)
from renderers.parsers import TOOL_PARSERS
from transformers.convert_slow_tokenizer import bytes_to_unicode

_FOLDER_SETTING = "TIKTOKEN_ENCODINGS_BASE"
NAME = "mistral"
MARK = "[TOOL_CALLS]"
_NAMED = re.compile(
    r"\s*(?P<name>[^\s\[\]{}]+?)\s*(\[CALL_ID\]\s*(?P<id>\w+)\s*)?\[ARGS\]\s*(?P<arguments>.*)", re.DOTALL
)
_BETWEEN = re.compile(r"[\s,]*")
_DECODER = json.JSONDecoder()
LOG = logging.getLogger(__name__)
_PROBE = (
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": "v"},
)


def use_vocabulary_of(tokenizer: Any) -> None:
    """Have every GPT-OSS renderer made from now on encode with the vocabulary of `tokenizer`.

    Raises ValueError where that vocabulary is not GPT-OSS's; the encoder checks its hash.
    """
    before = os.environ.get(_FOLDER_SETTING)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "o200k_base.tiktoken").write_bytes(_as_tiktoken(tokenizer))
        os.environ[_FOLDER_SETTING] = folder
        try:
            encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
        except HarmonyError as error:
            raise ValueError(f"its tokenizer does not have GPT-OSS's vocabulary ({error})") from error
        finally:
            del os.environ[_FOLDER_SETTING]
            if before is not None:
                os.environ[_FOLDER_SETTING] = before
    gpt_oss.load_harmony_encoding = lambda _name: encoding  # else each renderer loads it again, which takes a second


def _as_tiktoken(tokenizer: Any) -> bytes:
    letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
    added = tokenizer.get_added_vocab()
    ranks = sorted((rank, token) for token, rank in tokenizer.get_vocab().items() if token not in added)
    try:
        spelt = [(bytes(letters[letter] for letter in token), rank) for rank, token in ranks]
    except KeyError as error:
        raise ValueError(f"its tokenizer is not byte-level: a token holds {error}") from error
    return b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in spelt)


class MistralToolParser:
    """Finds the calls after each mark; other text becomes a failed call, so that it is not lost."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._mark: int = tokenizer.convert_tokens_to_ids(MARK)

    def extract(self, ids: list[int]) -> tuple[list[int], list[ParsedToolCall]]:
        """Return the ids before the first mark, and every attempt at a call after it."""
        marks = [at for at, token in enumerate(ids) if token == self._mark]
        if not marks:
            return ids, []
        calls: list[ParsedToolCall] = []
        for start, end in zip(marks, [*marks[1:], len(ids)], strict=True):
            text = self._tokenizer.decode(ids[start + 1 : end], skip_special_tokens=False)
            calls.extend(_listed(text) if text.lstrip().startswith("[{") else [_named(text)])
        return ids[: marks[0]], calls


def _listed(text: str) -> Iterator[ParsedToolCall]:
    """Yield the calls of a JSON list, up to the place where the JSON breaks."""
    at = text.index("[") + 1
    while not text.startswith("]", at := _end_of(_BETWEEN, text, at)):
        try:
            item, end = _DECODER.raw_decode(text, at)
        except json.JSONDecodeError:
            yield _failed(text[at:])
            return
        yield _call(item, text[at:end])
        at = end
    if text[at + 1 :].strip():
        yield _failed(text[at + 1 :])


def _named(text: str) -> ParsedToolCall:
    found = _NAMED.fullmatch(text)
    if found is None:
        return _failed(MARK + text)
    try:
        arguments = json.loads(found["arguments"])
    except json.JSONDecodeError:
        return _failed(MARK + text)
    return _call({"name": found["name"], "arguments": arguments, "id": found["id"]}, text)


def _call(item: Any, text: str) -> ParsedToolCall:
    name = item.get("name") if isinstance(item, dict) else None
    if not isinstance(name, str) or not name:
        return ParsedToolCall(raw=text, status=ToolCallParseStatus.MISSING_NAME)
    native = item.get("id")
    return ParsedToolCall(
        raw=text, name=name, arguments=item.get("arguments", {}), id=native if isinstance(native, str) else None
    )


def _failed(text: str) -> ParsedToolCall:
    return ParsedToolCall(raw=text, status=ToolCallParseStatus.UNCLOSED_BLOCK)


def _end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    assert found is not None  # the pattern matches the empty text too
    return found.end()


TOOL_PARSERS[NAME] = MistralToolParser


# Families by the architecture in config.json, where that decides the template; checked against the template itself.
_FAMILIES: Mapping[str, str] = {
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "qwen3_5": "qwen3.5",
    "glm4_moe": "glm-4.5",
    "deepseek_v3": "deepseek-v3",
    "gpt_oss": "gpt-oss",
    "kimi_k2": "kimi-k2",
    "llama": "llama-3",
    "minimax_m2": "minimax-m2",
}


def config_named(name: str, thinking: Mapping[str, bool]) -> Any:
    config = config_from_name(name)
    assert config is not None  # only "auto" has none, and it is resolved before
    unknown = set(thinking) - type(config).model_fields.keys()
    if unknown and name != "default":
        raise ValueError(f"the family {name} has no enable_thinking; leave policy.enable_thinking out")
    return type(config)(**thinking)


def family_config(tokenizer: Any, model_path: Path, thinking: Mapping[str, bool]) -> Any:
    """The family that the folder's architecture suggests, if it renders as the folder's own template does."""
    try:
        model_type = json.loads((model_path / "config.json").read_text()).get("model_type")
    except (OSError, ValueError):
        model_type = None
    family = _FAMILIES.get(model_type or "")
    if family is not None and _agrees(tokenizer, config_named(family, thinking), thinking):
        return config_named(family, thinking)
    known = tokenizer.get_vocab()
    parser = NAME if MARK in known else "qwen3" if "<tool_call>" in known else None
    LOG.warning(
        "renderer=default tool_parser=%s model_type=%s reason=%s",
        parser,
        model_type,
        "unknown architecture" if family is None else f"the template in {model_path} is not {family}'s",
    )
    return DefaultRendererConfig(tool_parser=parser, reasoning_parser="think", **thinking)


def _agrees(tokenizer: Any, config: Any, thinking: Mapping[str, bool]) -> bool:
    if not tokenizer.chat_template:
        return True
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
    probe = list(_PROBE[-1:] if thinking.get("enable_thinking") is False else _PROBE)
    theirs = tokenizer.apply_chat_template(probe, **options, **thinking)
    return bool(create_renderer(tokenizer, config).render_ids(probe, add_generation_prompt=True) == list(theirs))
