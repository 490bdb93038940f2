"""Chat messages to prompt tokens, and sampled tokens back to a message, by the model family's own template.

The one rule: whoever needs a prompt of the policy renders it here (the gateway what it serves, the samples their hinted
prompts), so equal messages and options are equal token ids everywhere. Nothing is fetched: tokenizer and template lie
in the model's folder.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from renderers import DefaultRendererConfig, ToolCallParseStatus, config_from_name, create_renderer
from transformers import AutoTokenizer

from clawstream.errors import ClawstreamError, ConfigError
from clawstream.events.conversation import role_of, text_of
from clawstream.inference.encoding import RememberingTokenizer

LOG = logging.getLogger(__name__)

# What a config.json calls the architecture, where that decides the template; checked against the template itself.
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
# Families whose code asks a tokenizer for ids and text and for nothing else; the others get the tokenizer itself.
_REMEMBERED = frozenset({"qwen3", "glm-4.5", "glm-5", "glm-5.1", "deepseek-v3", "deepseek-r1", "kimi-k2"})
_PROBE = (
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": "v"},
)
_PROMPT_TAIL_TOKENS = 256  # enough to hold any family's generation prompt
_MAX_VARIANTS = 32
_UNPRINTABLE = {0: "\ufffd"} | dict.fromkeys(range(0xD800, 0xE000), "\ufffd")


class UnrenderableRequest(ClawstreamError):
    """The template can't express these messages or options; the client has to change them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalledTool:
    """A tool call that was sampled whole."""

    native_id: str | None  # where the family's format carries one
    name: str
    arguments: str  # JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedAnswer:
    """What sampled tokens say. `unfinished` is tool markup that is no call, so far."""

    content: str
    reasoning: str
    tool_calls: tuple[CalledTool, ...]
    unfinished: str = ""


class PromptRenderer:
    """One model folder's template and tokenizer, both ways."""

    def __init__(self, tokenizer: Any, config: Any) -> None:
        self._tokenizer = tokenizer
        self._config = config
        self._variants: dict[bytes, Any] = {}
        self._encoder = RememberingTokenizer(tokenizer) if config.name in _REMEMBERED else tokenizer
        self._renderer = create_renderer(self._encoder, config)
        self.stop_token_ids: tuple[int, ...] = tuple(self._renderer.get_stop_token_ids())
        self.marker_ids: frozenset[int] = frozenset(tokenizer.get_added_vocab().values())
        self.bare_tool_calls: bool = config.name == "llama-3"  # nothing but JSON tells a call from an answer

    @classmethod
    def load(cls, model_path: Path, renderer: str = "auto", enable_thinking: bool | None = None) -> "PromptRenderer":
        """Return the renderer of the model in `model_path`; `renderer` names the family, or "auto".

        Raises ConfigError where the folder has no tokenizer, or the family is unknown or has no such option.
        """
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(model_path), local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{model_path}: no tokenizer could be loaded ({error}); name a model folder") from error
        thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        try:
            named = (
                _family_config(tokenizer, model_path, thinking) if renderer == "auto" else _config(renderer, thinking)
            )
            return cls(tokenizer, named)
        except (ValueError, TypeError, AssertionError) as error:
            raise ConfigError(
                f"policy.renderer = {renderer!r} with enable_thinking = {enable_thinking} does not fit "
                f"{model_path}: {error}"
            ) from error

    @property
    def family(self) -> str:
        """The template's family, as the renderers package names it."""
        return str(self._config.name)

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the prompt that asks for an answer to `messages`; `options` is the request's body without them.

        Of the options, `tools`, `tool_choice` and `chat_template_kwargs` shape a prompt. NUL and lone surrogates are
        shown to the model as U+FFFD. Raises UnrenderableRequest.
        """
        shown = [_shown(message) for message in messages]
        try:
            ids = self._variant(options).render_ids(shown, tools=_tools(options), add_generation_prompt=True)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UnrenderableRequest(f"the {self.family} template can't render this conversation: {error}") from error
        return tuple(ids)

    def parse(
        self, output_ids: Sequence[int], prompt_ids: Sequence[int], options: Mapping[str, Any], *, ended: bool = True
    ) -> ParsedAnswer:
        """Return what `output_ids`, sampled after `prompt_ids`, say so far.

        A tool call that can't be read, or that is cut short by the end, is content: nothing sampled vanishes.
        """
        ids, tail = list(output_ids), list(prompt_ids[-_PROMPT_TAIL_TOKENS:])
        parsed = self._variant(options).parse_response(ids, tools=_tools(options), prompt_ids=tail)
        calls: list[CalledTool] = []
        content, unfinished = parsed.content.strip(), ""
        for call in parsed.tool_calls:
            text = self.decode(ids[slice(*call.token_span)]) if call.token_span else call.raw
            if call.status is ToolCallParseStatus.OK and call.name and offers_tools(options):
                calls.append(CalledTool(native_id=call.id, name=call.name, arguments=_arguments(call.arguments)))
            elif not ended:
                unfinished += text
            else:
                content = f"{content}\n{text.strip()}".strip()
        reasoning = (parsed.reasoning_content or "").strip()
        return ParsedAnswer(content=content, reasoning=reasoning, tool_calls=tuple(calls), unfinished=unfinished)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`, markup and special tokens included."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False)) if token_ids else ""

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of `text` alone, without a template."""
        return tuple(self._tokenizer.encode(text.translate(_UNPRINTABLE), add_special_tokens=False))

    def _variant(self, options: Mapping[str, Any]) -> Any:
        kwargs = options.get("chat_template_kwargs")
        if not kwargs:
            return self._renderer
        if not isinstance(kwargs, Mapping):
            raise UnrenderableRequest("chat_template_kwargs is not an object; send one, or leave it out")
        key = orjson.dumps(kwargs, option=orjson.OPT_SORT_KEYS)
        if key not in self._variants:
            if len(self._variants) >= _MAX_VARIANTS:
                self._variants.clear()
            try:
                self._variants[key] = create_renderer(self._encoder, self._config, chat_template_kwargs=kwargs)
            except (ValueError, TypeError) as error:
                raise UnrenderableRequest(f"chat_template_kwargs: {error}") from error
        return self._variants[key]


def offers_tools(options: Mapping[str, Any]) -> bool:
    """Whether the model may call tools under these options."""
    return bool(options.get("tools")) and options.get("tool_choice") != "none"


def _tools(options: Mapping[str, Any]) -> list[Any] | None:
    return list(options["tools"]) if offers_tools(options) else None


def _shown(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as templates expect it: text content, system for developer, no unprintable characters."""
    shown: dict[str, Any] = {"role": role_of(message), "content": text_of(message).translate(_UNPRINTABLE)}
    for key in ("reasoning_content", "name", "tool_call_id"):
        if isinstance(message.get(key), str):
            shown[key] = message[key].translate(_UNPRINTABLE)
    if message.get("tool_calls"):
        shown["tool_calls"] = [_printable(call) for call in message["tool_calls"]]
    return shown


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return value.translate(_UNPRINTABLE)
    if isinstance(value, Mapping):
        return {_printable(key): _printable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_printable(item) for item in value]
    return value


def _arguments(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _config(name: str, thinking: Mapping[str, bool]) -> Any:
    config = config_from_name(name)
    assert config is not None  # only "auto" has none, and it is resolved before
    unknown = set(thinking) - type(config).model_fields.keys()
    if unknown and name != "default":
        raise ValueError(f"the family {name} has no enable_thinking; leave policy.enable_thinking out")
    return type(config)(**thinking)


def _family_config(tokenizer: Any, model_path: Path, thinking: Mapping[str, bool]) -> Any:
    """The family that the folder's architecture suggests, if it renders as the folder's own template does."""
    try:
        model_type = json.loads((model_path / "config.json").read_text()).get("model_type")
    except (OSError, ValueError):
        model_type = None
    family = _FAMILIES.get(model_type or "")
    if family is not None and _agrees(tokenizer, _config(family, thinking), thinking):
        return _config(family, thinking)
    parser = "qwen3" if "<tool_call>" in tokenizer.get_vocab() else None
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
    probe = list(_PROBE)[-1:] if thinking.get("enable_thinking") is False else list(_PROBE)
    theirs = tokenizer.apply_chat_template(probe, **options, **thinking)
    return bool(create_renderer(tokenizer, config).render_ids(probe, add_generation_prompt=True) == list(theirs))
