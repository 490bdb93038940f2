"""Chat messages to prompt tokens, and sampled tokens back to a message, by the model family's own template.

Every prompt of the policy is rendered here, the gateway's as well as the hinted ones of samples, so equal messages and
options give equal token ids everywhere. Nothing is fetched: tokenizer and template lie in the model's folder.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from jinja2 import TemplateError
from renderers import ParsedResponse, ToolCallParseStatus
from tokenizers.decoders import ByteLevel

from clawstream.config import PolicySettings
from clawstream.conversation.pictures import END, Sight, without_marks
from clawstream.errors import ConfigError, UnrenderableRequest
from clawstream.rendering import families
from clawstream.rendering.calling import (
    answer_grammar,
    call_ends,
    functions_to_call,
    makes_calls,
    offers_tools,
    schema_to_follow,
    wants_one_call,
)
from clawstream.rendering.encoding import (
    ANSWER_HEADERS,
    PlainText,
    RememberingTokenizer,
    TemplateTokenizer,
    load_tokenizer,
    spread,
)
from clawstream.rendering.families import CHATML, config_named, family_config, renderer_of, sight_of
from clawstream.rendering.history import (
    UNPRINTABLE,
    fitted,
    placed,
    probed,
    shown,
    template_options,
    template_variables,
    unmarked,
)

# Families whose code asks a tokenizer only for ids and text, and writes marks by their ids. For the others the
# tokenizer itself encodes, so marks in a user's text act as marks (except for gpt-oss, whose own encoder splits them).
_REMEMBERED = frozenset(
    {
        "qwen3",
        "qwen3.5",
        "qwen3-vl",
        "llama-3",
        "glm-4.5",
        "glm-5",
        "glm-5.1",
        "deepseek-v3",
        "deepseek-r1",
        "kimi-k2",
        CHATML,
    }
)
HALF_CHARACTER = "\ufffd"  # how bytes are shown that form no character, or none yet
_THINKING_MARKS = ("<think>", "</think>")
_THOUGHTS = ("<think>", "[THINK]", "<seed:think>", "◁think▷")
_LLAMA_MARKS = ("<|python_tag|>", "<|start_header_id|>", "<|end_header_id|>")
_HARMONY_DATE = "2025-08-05"  # GPT-OSS's release; today's date would change a prompt's ids each day
_PROMPT_TAIL_TOKENS = 256  # enough to hold any family's generation prompt
_MAX_VARIANTS = 32
_REFUSALS = (ValueError, TypeError, KeyError, AttributeError, TemplateError)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalledTool:
    """A tool call that was sampled whole."""

    native_id: str | None  # None: the family's format has no ids, or this call has none
    name: str
    arguments: str  # JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedAnswer:
    """The parsed answer. `unfinished` is tool markup that is no complete call so far."""

    content: str
    reasoning: str
    tool_calls: tuple[CalledTool, ...]
    unfinished: str = ""


@dataclass(frozen=True, slots=True)
class _Template:
    """A family's template under one set of options: `writer` encodes text without marks, `reader` knows all marks.

    `bridger` writes like `writer` but keeps a history's reasoning; None: the template can't, or the options forbid it.
    """

    writer: Any
    reader: Any
    bridger: Any


class PromptRenderer:
    """One model folder's template and tokenizer, both ways."""

    def __init__(self, tokenizer: Any, config: Any, sight: Sight | None = None) -> None:
        self._tokenizer = tokenizer
        self.sight = sight if config.name in _REMEMBERED else None  # None: pictures are no part of a prompt
        self.picture_id = None if self.sight is None else int(tokenizer.convert_tokens_to_ids(self.sight.pad))
        # For the few tokens of a chunk transformers takes four times as long; without clean-up the text is the same.
        fast = None if tokenizer.clean_up_tokenization_spaces else getattr(tokenizer, "backend_tokenizer", None)
        self._text_of = tokenizer.decode if fast is None else fast.decode
        self._bytes_add_up = fast is not None and isinstance(fast.decoder, ByteLevel)
        self._pieces: dict[int, str | None] = {}  # at most as many as the vocabulary has
        self._config = config
        template = tokenizer.chat_template
        self._template_text = template if isinstance(template, str) else json.dumps(template, ensure_ascii=False)
        self._marked = RememberingTokenizer(tokenizer) if config.name in _REMEMBERED else tokenizer
        self._plain = (
            RememberingTokenizer(PlainText(tokenizer, self.sight)) if config.name in _REMEMBERED else self._marked
        )
        self._variants: dict[bytes, _Template] = {}
        special = {*tokenizer.SPECIAL_TOKENS_ATTRIBUTES, *tokenizer.special_tokens_map}
        apply = tokenizer.apply_chat_template
        self._variables = None if self.bridges else template_variables(template, special, apply)
        self._template = self._made()
        marks = tokenizer.get_added_vocab()
        self.stop_token_ids: tuple[int, ...] = tuple(self._template.reader.get_stop_token_ids())
        self.marker_ids: frozenset[int] = frozenset(marks.values())
        # Marks that are several tokens in this vocabulary, so that they come in parts.
        self.text_marks: tuple[str, ...] = tuple(mark for mark in _THINKING_MARKS if mark not in marks)
        self.bare_tool_calls: bool = config.name == "llama-3"  # nothing but JSON tells a call from an answer
        # Left out of an answer: the reader would take the text behind a header for the whole answer.
        self._passed_over = {marks.get(mark) for mark in _LLAMA_MARKS} if self.bare_tool_calls else set()
        self.listed_tool_calls: bool = getattr(config, "tool_parser", None) == families.NAME  # no mark closes them
        self._call_form = "qwen3" if getattr(config, "tool_parser", None) == "qwen3" else config.name
        # Always encoded as headers, so a history with a message that is exactly one of these can't be bridged.
        self._headers = {header.strip() for header in ANSWER_HEADERS if any(mark in header for mark in marks)}
        self._capabilities = probed(self._text_of_prompt)

    @classmethod
    def of(cls, policy: PolicySettings, model_path: Path) -> "PromptRenderer":
        """Return the renderer of `policy`, whose model is in `model_path`.

        Raises ConfigError where the folder has no tokenizer, or one whose code is not trusted, or where the family is
        unknown or has no `enable_thinking`.
        """
        tokenizer = load_tokenizer(model_path, trust_code=policy.trust_tokenizer_code)
        thinking = {} if policy.enable_thinking is None else {"enable_thinking": policy.enable_thinking}
        try:
            if policy.renderer == "auto":
                config = family_config(tokenizer, model_path, thinking)
            else:
                config = config_named(policy.renderer, thinking, tokenizer)
            if config.name == "gpt-oss":
                families.use_vocabulary_of(tokenizer)
                config = config.model_copy(update={"conversation_start_date": _HARMONY_DATE})
            return cls(tokenizer, config, sight_of(model_path))
        except (ValueError, TypeError, AssertionError) as error:
            raise ConfigError(
                f"policy.renderer = {policy.renderer!r} with enable_thinking = {policy.enable_thinking} does not fit "
                f"{model_path}: {error}"
            ) from error

    @property
    def family(self) -> str:
        """The template's family, as the renderers package names it; or `chatml`."""
        return str(self._config.name)

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the prompt that asks for an answer to `messages`; `options` is the request's body without them.

        Of the options, `tools`, `tool_choice` and `chat_template_kwargs` shape a prompt. NUL and lone surrogates are
        shown to the model as U+FFFD. Raises UnrenderableRequest.
        """
        template = self._variant(options)
        try:
            ids = template.writer.render_ids(self._fitted(messages), tools=_tools(options), add_generation_prompt=True)
        except _REFUSALS as error:
            said = str(error).rstrip(".")
            raise UnrenderableRequest(f"the {self.family} template can't render this conversation: {said}") from error
        return spread(ids)

    def grammar(self, options: Mapping[str, Any], prompt_ids: Sequence[int]) -> str | None:
        """Return the EBNF of calls, or of JSON with a thought or calls; None: the answer needs no grammar of ours.

        JSON alone needs none, since the engine follows a schema itself. Raises UnrenderableRequest for a family whose
        calls no grammar can write.
        """
        if not self.follows_grammar(options, prompt_ids):
            return None
        try:
            return answer_grammar(self._call_form, options, thinks=self._opens_thought(prompt_ids))
        except ValueError as error:
            raise UnrenderableRequest(f"the {self.family} template {error}") from error

    def follows_grammar(self, options: Mapping[str, Any], prompt_ids: Sequence[int]) -> bool:
        """Whether the answer to a prompt follows a grammar that is made here."""
        if functions_to_call(options):
            return True
        schema = schema_to_follow(options)
        return schema is not None and (offers_tools(options) or self._opens_thought(prompt_ids))

    def _opens_thought(self, prompt_ids: Sequence[int]) -> bool:
        return self.decode(prompt_ids[-_PROMPT_TAIL_TOKENS:]).rstrip().endswith(_THINKING_MARKS[0])

    def stop_ids(self, options: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the tokens that end an answer: the model's own, and a call's end mark where one call is the most.

        Raises UnrenderableRequest for a family that marks no call's end.
        """
        by_grammar = bool(functions_to_call(options)) or schema_to_follow(options) is not None  # it ends the answer
        if by_grammar or not (wants_one_call(options) and offers_tools(options)):
            return self.stop_token_ids
        mark = call_ends(self._call_form)
        ends = self._tokenizer.get_added_vocab().get(mark)
        if mark is None or (mark and ends is None):
            raise UnrenderableRequest(f"the {self.family} template marks no call's end; leave parallel_tool_calls out")
        return self.stop_token_ids if ends is None else (*self.stop_token_ids, ends)

    @property
    def thinks(self) -> bool:
        """Whether the model's answers may begin with reasoning, as its own template shows."""
        if getattr(self._config, "enable_thinking", None) is False:
            return False
        return self.family == "gpt-oss" or any(mark in self._template_text for mark in _THOUGHTS)

    @property
    def bridges(self) -> bool:
        """Whether the family's template can go on from sampled tokens."""
        return self.family != "default"

    def bridge_ids(
        self,
        prompt_ids: Sequence[int],
        answer: Mapping[str, Any],
        output_ids: tuple[int, ...],
        between: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
    ) -> tuple[int, ...] | None:
        """Return what follows `prompt_ids`: `output_ids`, sampled there as `answer`, then the rest of the next prompt.

        The rest closes the answer where it was cut, shows the messages `between`, and asks for the next answer. Of
        `prompt_ids` only the end is read. None: the template can't go on from this answer, or not under these options.
        """
        tail = list(prompt_ids[-_PROMPT_TAIL_TOKENS:])
        try:
            fitting = self._fitted((answer, *between))
            if any(message["content"].strip() in self._headers for message in fitting):
                return None
            bridger = self._variant(options).bridger
            new = fitting[1:]
            bridged = bridger and bridger.bridge_to_next_turn(tail, list(output_ids), new, tools=_tools(options))
        except (UnrenderableRequest, *_REFUSALS):
            return None
        following = spread(bridged.token_ids[len(tail) :]) if bridged is not None else ()
        return following if output_ids and following[: len(output_ids)] == output_ids else None

    def parse(
        self, output_ids: Sequence[int], prompt_ids: Sequence[int], options: Mapping[str, Any], *, ended: bool = True
    ) -> ParsedAnswer:
        """Return what `output_ids`, sampled after `prompt_ids`, say so far.

        A tool call that can't be read, or that is cut short by the end, is content: nothing sampled vanishes.
        """
        if self.follows_grammar(options, prompt_ids):  # under a grammar a model may spell marks in letters
            answered = None if functions_to_call(options) else self._json(output_ids, prompt_ids, options)
            if answered is not None:
                return answered
            output_ids = self._tokenizer.encode(self.decode(output_ids), add_special_tokens=False)
        ids = [token for token in output_ids if token not in self._passed_over]
        tail = list(prompt_ids[-_PROMPT_TAIL_TOKENS:])
        parsed = self._read(ids, tail, options)
        calls: list[CalledTool] = []
        content, unfinished = parsed.content.strip(), ""
        for call in parsed.tool_calls:
            text = self.decode(ids[slice(*call.token_span)]) if call.token_span else call.raw
            called = _called(call) if offers_tools(options) else None
            if called is not None:
                calls.append(called)
            elif not ended:
                unfinished += text
            else:
                content = f"{content}\n{text.strip()}".strip()
        reasoning = (parsed.reasoning_content or "").strip()
        return ParsedAnswer(content=content, reasoning=reasoning, tool_calls=tuple(calls), unfinished=unfinished)

    def _json(
        self, output_ids: Sequence[int], prompt_ids: Sequence[int], options: Mapping[str, Any]
    ) -> ParsedAnswer | None:
        """Return an answer that is JSON by a schema, in which marks are text; None: the answer made calls."""
        said = self.decode([token for token in output_ids if token not in self.stop_token_ids])
        thought, _, rest = said.partition(_THINKING_MARKS[1]) if self._opens_thought(prompt_ids) else ("", "", said)
        if makes_calls(self._call_form, options, rest):
            return None
        return ParsedAnswer(content=rest.strip(), reasoning=thought.strip(), tool_calls=())

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`, markup and special tokens included."""
        return without_marks(self._text_of(list(token_ids), skip_special_tokens=False)) if token_ids else ""

    def piece(self, token_id: int) -> str | None:
        """Return the text of a plain token; None where it depends on the neighbouring tokens."""
        if token_id not in self._pieces:
            text = self.decode((token_id,)) if self._bytes_add_up else HALF_CHARACTER
            self._pieces[token_id] = None if HALF_CHARACTER in text else text
        return self._pieces[token_id]

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of `text` alone, without a template."""
        return tuple(self._tokenizer.encode(text.translate(UNPRINTABLE), add_special_tokens=False))

    def _fitted(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        standing = placed([shown(message) for message in messages], self._capabilities)
        return fitted(standing, families.NAME if self.listed_tool_calls else self.family)

    def _text_of_prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> str | None:
        try:
            ids = self._template.reader.render_ids(list(messages), tools=tools, add_generation_prompt=True)
        except _REFUSALS:
            return None
        return self.decode(ids)

    def _read(self, ids: list[int], prompt_tail: list[int], options: Mapping[str, Any]) -> ParsedResponse:
        reader = self._variant(options).reader
        try:
            return reader.parse_response(ids, tools=_tools(options), prompt_ids=prompt_tail)
        except (ValueError, RecursionError):
            # JSON that is nested too deeply, or a number with too many digits: the sampled text is then content.
            ends = [at for at, token in enumerate(ids) if token in self.stop_token_ids]
            return ParsedResponse(content=self.decode(ids[: ends[0]] if ends else ids))

    def _made(self, **kwargs: Any) -> _Template:
        reader = renderer_of(self._marked, self._config, **kwargs)
        writer = reader if self._plain is self._marked else self._writer(self._config, kwargs)
        bridger = None
        if self.bridges:
            keeping = self._config.model_copy(update={"thinking_retention": "all"})
            with suppress(ValueError):  # the request's own options say that reasoning is dropped
                bridger = self._writer(keeping, kwargs, ANSWER_HEADERS)
        return _Template(writer, reader, bridger)

    def _writer(self, config: Any, kwargs: Mapping[str, Any], headers: frozenset[str] = frozenset()) -> Any:
        if self._plain is self._marked:
            return renderer_of(self._marked, config, **kwargs)
        tokenizer = TemplateTokenizer(self._marked, self._plain, headers)
        writer = renderer_of(tokenizer, config, **kwargs)
        tokenizer.seal()
        return writer

    def _variant(self, options: Mapping[str, Any]) -> _Template:
        kwargs = template_options(options.get("chat_template_kwargs"), self._variables)
        if not kwargs:
            return self._template
        key = orjson.dumps(kwargs, option=orjson.OPT_SORT_KEYS)
        if key not in self._variants:
            if len(self._variants) >= _MAX_VARIANTS:
                self._variants.clear()
            try:
                self._variants[key] = self._made(chat_template_kwargs=kwargs)
            except (ValueError, TypeError) as error:
                raise UnrenderableRequest(f"chat_template_kwargs: {error}") from error
        return self._variants[key]


def _tools(options: Mapping[str, Any]) -> list[Any] | None:
    if not offers_tools(options):
        return None
    tools = list(options["tools"])
    return unmarked(tools) if END in str(tools) else tools


def _called(call: Any) -> CalledTool | None:
    """The call, if it can be made: with a name, and arguments that are an object in JSON."""
    # INVALID_JSON: a value is text, in a family that writes values without quotes. In other families the call then has
    # no arguments.
    if call.status not in (ToolCallParseStatus.OK, ToolCallParseStatus.INVALID_JSON):
        return None
    given = {} if call.arguments is None and call.status is ToolCallParseStatus.OK else call.arguments
    try:
        arguments = json.loads(given) if isinstance(given, str) else given
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call.name, str) or not call.name or not isinstance(arguments, Mapping):
        return None
    name, arguments, native_id = (part.translate(UNPRINTABLE) for part in (call.name, text, call.id or ""))
    return CalledTool(native_id=native_id or None, name=name, arguments=arguments)
