"""Tells which family's template a model folder has, and gives the renderers package what it lacks.

It lacks GPT-OSS's vocabulary, which is taken from the folder, a parser of Mistral's calls, and plain ChatML.

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal

from jinja2 import TemplateError
from openai_harmony import HarmonyEncodingName, HarmonyError, load_harmony_encoding
from pydantic import BaseModel
from renderers import (
    DefaultRendererConfig,
    ParsedResponse,
    ParsedToolCall,
    RenderedTokens,
    ToolCallParseStatus,
    config_from_name,
    create_renderer,
    gpt_oss,
)
from renderers.parsers import TOOL_PARSERS
from transformers.convert_slow_tokenizer import bytes_to_unicode

from clawstream.conversation.pictures import Sight
from clawstream.errors import ConfigError

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


CHATML: Final = "chatml"
_START, _END = "<|im_start|>", "<|im_end|>"
_DEFAULT_SYSTEM = re.compile(r"<\|im_start\|>system\n(.*?)<\|im_end\|>\n<\|im_start\|>user\n", re.DOTALL)
_SHOWN_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
_SPACED_PROBE = tuple(
    {"role": role, "content": f" {role}\n"} for role in ("user", "assistant", "tool", "user", "system")
)


class ChatML(BaseModel, frozen=True):
    """How to render plain ChatML: each message is a role and a text between two marks, and there are no calls."""

    name: Literal["chatml"] = CHATML
    system: str | None = None  # what the template says where a conversation has no system message
    thinking_retention: str | None = None  # as renderers' own have it; there is no thinking to retain


class ChatMLRenderer:
    """Renders as templates of plain ChatML do, and goes on from sampled tokens."""

    def __init__(self, tokenizer: Any, config: ChatML) -> None:
        self._tokenizer, self._system = tokenizer, config.system
        self._start, self._end = (int(tokenizer.convert_tokens_to_ids(mark)) for mark in (_START, _END))

    def render_ids(
        self, messages: Sequence[Mapping[str, Any]], *, tools: object = None, add_generation_prompt: bool = False
    ) -> list[int]:
        """Return the ids of the messages; the template shows no tools."""
        del tools
        ids: list[int] = []
        if self._system is not None and messages[0]["role"] != "system":
            ids += self._message("system", self._system)
        for message in messages:
            ids += self._message(message["role"], message["content"])
        return ids + self._header() if add_generation_prompt else ids

    def bridge_to_next_turn(
        self, prompt: Sequence[int], answer: Sequence[int], new_messages: Sequence[Mapping[str, Any]], **_: object
    ) -> RenderedTokens | None:
        """Return what was sampled, closed where it was cut, and the messages behind it; None: one is an assistant's."""
        if any(message["role"] == "assistant" for message in new_messages):
            return None
        ids = [*prompt, *answer, *([] if answer and answer[-1] == self._end else [self._end]), *self._encode("\n")]
        for message in new_messages:
            ids += self._message(message["role"], message["content"])
        return RenderedTokens(token_ids=ids + self._header())

    def parse_response(self, ids: Sequence[int], **_: object) -> ParsedResponse:
        """Return the text up to the first token that ends an answer."""
        stops = self.get_stop_token_ids()
        end = next((at for at, token in enumerate(ids) if token in stops), len(ids))
        return ParsedResponse(content=self._tokenizer.decode(list(ids[:end]), skip_special_tokens=False) if end else "")

    def get_stop_token_ids(self) -> list[int]:
        """Return the tokens that end an answer."""
        return [*dict.fromkeys((self._end, self._tokenizer.eos_token_id))]

    def _message(self, role: str, content: str) -> list[int]:
        return [self._start, *self._encode(f"{role}\n{content}"), self._end, *self._encode("\n")]

    def _header(self) -> list[int]:
        return [self._start, *self._encode("assistant\n")]

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def renderer_of(tokenizer: Any, config: Any, chat_template_kwargs: Mapping[str, Any] | None = None) -> Any:
    """Return the renderer of a family under a request's options. Raises ValueError for an option that it has not."""
    if not isinstance(config, ChatML):
        return create_renderer(tokenizer, config, chat_template_kwargs=chat_template_kwargs)
    if unknown := sorted({*(chat_template_kwargs or ())} - {"enable_thinking"}):
        raise ValueError(f"{unknown[0]} is no variable of a ChatML template, which has none")
    return ChatMLRenderer(tokenizer, config)


def _plain_chatml(tokenizer: Any) -> ChatML:
    """Return how to render the tokenizer's template. Raises ValueError where that is not plain ChatML.

    A template that shows tools, that changes a text or that refuses a role is not.
    """
    known, template = tokenizer.get_vocab(), tokenizer.chat_template
    if not (template and {_START, _END} <= known.keys()):
        raise ValueError(f"it has no template, or {_START} and {_END} are no tokens")
    try:
        said = tokenizer.apply_chat_template(list(_PROBE[1:]), tokenize=False)
        spaced = tokenizer.apply_chat_template(list(_SPACED_PROBE), tokenize=False, tools=[_SHOWN_TOOL])
    except TemplateError as error:
        raise ValueError(f"its template refuses a conversation that ChatML can write ({error})") from error
    system = _DEFAULT_SYSTEM.match(said)
    config = ChatML(system=None if system is None else system[1])
    written = ChatMLRenderer(tokenizer, config).render_ids(_SPACED_PROBE)
    if not _agrees(tokenizer, config, {}) or tokenizer.encode(spaced, add_special_tokens=False) != written:
        raise ValueError("its template is not plain ChatML")
    return config


# Families by the architecture in config.json, where that decides the template; checked against the template itself.
_FAMILIES: Mapping[str, str] = {
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "qwen3_5": "qwen3.5",
    "glm4_moe": "glm-4.5",
    "deepseek_v3": "deepseek-v3",
    "gpt_oss": "gpt-oss",
    "kimi_k2": "kimi-k2",
    "qwen3_vl": "qwen3-vl",
    "llama": "llama-3",
    "minimax_m2": "minimax-m2",
}


_SEE = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl"})  # all by the processor of the first


def config_named(name: str, thinking: Mapping[str, bool], tokenizer: Any) -> Any:
    config = _plain_chatml(tokenizer) if name == CHATML else config_from_name(name)
    assert config is not None  # only "auto" has none, and it is resolved before
    unknown = set(thinking) - type(config).model_fields.keys()
    if unknown and name != "default":
        raise ValueError(f"the family {name} has no enable_thinking; leave policy.enable_thinking out")
    return type(config)(**thinking) if name != CHATML else config


def family_config(tokenizer: Any, model_path: Path, thinking: Mapping[str, bool]) -> Any:
    """The family that the folder's architecture suggests, if it renders as the folder's own template does."""
    model_type = _model_type(model_path)
    family = _FAMILIES.get(model_type or "")
    if family is not None and _agrees(tokenizer, config := config_named(family, thinking, tokenizer), thinking):
        return config
    with suppress(ValueError):
        return _plain_chatml(tokenizer)
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
    try:
        ours = renderer_of(tokenizer, config).render_ids(probe, add_generation_prompt=True)
    except AssertionError:  # the tokenizer lacks the family's marks: SmolLM2's architecture is Llama, its template not
        return False
    return bool(ours == list(theirs))


def _model_type(folder: Path) -> str | None:
    """Return what config.json calls the model's architecture; None: it can't be read."""
    try:
        found = json.loads((folder / "config.json").read_bytes()).get("model_type")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None


def sight_of(folder: Path) -> Sight | None:
    """Return how the folder's model sees pictures; None: it sees none, or by another processor than Qwen-VL's."""
    if _model_type(folder) not in _SEE:
        return None
    try:
        said = json.loads((folder / "preprocessor_config.json").read_bytes())
        size = said.get("size") or {}
        cell = int(said["patch_size"]) * int(said["merge_size"])
        least, most = (
            said.get(name) or size[edge]
            for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))
        )
        return Sight(
            begin="<|vision_start|>", pad="<|image_pad|>", end="<|vision_end|>", cell=cell,
            least_pixels=int(least), most_pixels=int(most),
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{folder}: its model sees pictures, and preprocessor_config.json can't be read ({error!r}); expected "
            "patch_size, merge_size and the least and most pixels. Copy the model's whole folder"
        ) from error
