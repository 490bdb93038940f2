"""Turns a client's JSON into checked, frozen values, and decides how its answer is to be sampled. Pure.

No field is dropped in silence. A wish that can't be met is refused with a message that names the field, its value and
what is expected. Fields that only label a request (`user`, `metadata`, ...) are kept.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from clawstream.conversation.messages import Message
from clawstream.events import Sampling, Shaping
from clawstream.events.exchanges import GREEDY_BELOW
from clawstream.gateway.requests.fields import (
    DOCUMENTS,
    MOST,
    PICTURES,
    SHOWN_BY_A_TOOL,
    SHOWN_BY_THE_USER,
    BadRequest,
    TooLong,
    boolean,
    check_shown,
    integer,
    items,
    kind,
    labels,
    mapping,
    number,
    text,
    to_json,
    too_many,
    typed,
    unsupported,
    with_words,
    wrong,
)
from clawstream.gateway.requests.shaping import (
    MAX_GRAMMAR_BYTES,
    called_name,
    check_tools,
    narrowed,
    read_shaping,
    refuse_halves,
)

# The gateway's own fields, not the model's: they name the session, and a retry need not repeat them.
PRIVATE_KEYS = frozenset({"session_id", "session_done", "turn_type"})
_HOW_TO_SEND = frozenset({"stream", "stream_options"})
_ROLES = ("system", "developer", "user", "assistant", "tool")
_MAY_SHOW = {"user": SHOWN_BY_THE_USER, "tool": SHOWN_BY_A_TOOL}  # words for pictures, by role
_NO_TEXT = PICTURES.keys() | DOCUMENTS.keys()
_MAX_STOPS = 16
_MAX_TOP_LOGPROBS = 20
_MAX_CHOICES = 8
_MAX_STOP_CHARACTERS = 1024  # the stop string is recorded a second time, beside its request
_DIGITS_OF_64_BITS = 20  # with a sign
_MAX_LENIENT_BYTES = 2 * 2**20
_MAX_OPENED = 300_000  # brackets and braces, also within strings: counting so many takes 10 ms, parsing them a second
_LEFT_OUT = (
    *("audio", "functions", "function_call", "ignore_eos", "stop_token_ids"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
)
_TRUE = frozenset({"1", "true", "yes", "on"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyOptions:
    """The client's wishes for the answer; None: it did not say."""

    stream: bool
    include_usage: bool
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    seed: int | None
    stop: tuple[str, ...]
    shaping: Shaping | None
    top_logprobs: int | None  # how many likeliest tokens beside each token's log-prob; None: no log-probs
    num_choices: int  # answers to this request


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A request that can be answered, or, without messages, one that only ends its session."""

    model: str | None
    messages: tuple[Message, ...]
    messages_json: tuple[bytes, ...]
    options: Mapping[str, Any]  # the body without messages and private keys
    options_json: bytes
    sha256: str  # of messages and options, except those on how to send the answer; equal for a retry
    asked: ReplyOptions
    session_id: str | None
    turn_type: str | None
    session_done: bool
    scope: str  # of `user` and `prompt_cache_key`: histories are looked up within it only
    metadata: Mapping[str, str]  # all labels, also those that `options` has not


def parse_body(raw: bytes) -> dict[str, Any]:
    """Return the JSON object in `raw`; NUL and lone surrogates survive. Raises BadRequest."""
    num_opened = raw.count(b"[") + raw.count(b"{")
    if num_opened > _MAX_OPENED:
        raise BadRequest(
            f"The body's JSON opens {num_opened} brackets and braces; expected at most {_MAX_OPENED}. Shorten it."
        )
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        if len(raw) > _MAX_LENIENT_BYTES:
            raise BadRequest(
                f"The body is not JSON in UTF-8: {error}. Numbers out of range, deep nesting and halves of characters "
                f"(lone surrogates) are read only in a body of up to {_MAX_LENIENT_BYTES} bytes; this one has "
                f"{len(raw)}."
            ) from error
        body = _lenient(raw)
    if not isinstance(body, dict):
        raise BadRequest(f"The body is {kind(body)}; expected a JSON object with model and messages.")
    return body


def read_request(body: Mapping[str, Any], ends_session: bool = False) -> ChatRequest:
    """Return what the body asks for; `ends_session` says that a header ends the session. Raises BadRequest."""
    body = narrowed(body)
    session_done = truthy(body.get("session_done")) or ends_session
    messages = _messages(body.get("messages"), may_be_absent=session_done)
    _refuse_what_is_not_there(body)
    options = {key: value for key, value in body.items() if key != "messages" and key not in PRIVATE_KEYS}
    metadata = labels(body, "metadata")
    if "session_id" in metadata:
        options["metadata"] = {key: value for key, value in metadata.items() if key != "session_id"}
    messages_json = tuple(map(to_json, messages))
    return ChatRequest(
        model=typed(body.get("model"), str, "model"),
        messages=messages,
        messages_json=messages_json,
        options=options,
        options_json=to_json(options),
        sha256=_sha256(messages_json, options),
        asked=_asked(body),
        session_id=text(body, "session_id") or text(metadata, "session_id"),
        turn_type=text(body, "turn_type"),
        session_done=session_done,
        scope=scope_of(options),
        metadata=metadata,
    )


def scope_of(options: Mapping[str, Any], asker: str | None = None) -> str:
    """Return the scope in which a conversation without a session id is looked up: who asks, as far as that is known.

    That is `user`, `prompt_cache_key`, and the API key or whose policy is asked (`events.asker_of`).
    """
    return json.dumps([options.get("user"), options.get("prompt_cache_key"), asker], sort_keys=True)


def truthy(value: object) -> bool:
    """Return whether a header's or body's value means yes."""
    return value is True or value == 1 or (isinstance(value, str) and value.strip().lower() in _TRUE)


def _lenient(raw: bytes) -> Any:
    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(raw, parse_constant=refuse, parse_float=_finite, parse_int=_whole)
    except RecursionError as error:
        raise BadRequest("The body is nested too deeply to be read; expected a JSON object.") from error
    except ValueError as error:  # UnicodeDecodeError is one too
        raise BadRequest(f"The body is not JSON: {error}. Send a JSON object with model and messages.") from error


def _finite(written: str) -> float:
    value = float(written)
    if not math.isfinite(value):
        raise ValueError(f"{written[:20]} is larger than any number that can be kept")
    return value


def _whole(written: str) -> int | float:
    """Return the number as orjson reads it: exact up to 64 bits, else a float; int() takes quadratic time."""
    return int(written) if len(written) <= _DIGITS_OF_64_BITS else _finite(written)


def _sha256(messages_json: tuple[bytes, ...], options: Mapping[str, Any]) -> str:
    said = {key: value for key, value in options.items() if key not in _HOW_TO_SEND}
    try:
        options_json = orjson.dumps(said, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        options_json = json.dumps(said, sort_keys=True).encode("ascii")
    return hashlib.sha256(b"\x1e".join((options_json, *messages_json))).hexdigest()


def _messages(found: object, *, may_be_absent: bool) -> tuple[Message, ...]:
    if may_be_absent and (found is None or found == []):
        return ()
    if not isinstance(found, list) or not found:
        raise wrong("messages", found, "a list with at least one message")
    for index, message in enumerate(found):
        _check_message(message, f"messages[{index}]")
    return tuple(map(_in_words, found))


def _in_words(message: Message) -> Message:
    """Return the message with words in place of its pictures and documents."""
    content = message["content"] if message["role"] in _MAY_SHOW else None
    if not isinstance(content, list) or not any(part["type"] in _NO_TEXT for part in content):
        return message
    return {**message, "content": with_words(content, _MAY_SHOW[message["role"]])}


def _check_message(message: object, where: str) -> None:
    if not isinstance(message, dict):
        raise wrong(where, message, "an object with role and content")
    role = message.get("role")
    if role not in _ROLES:
        raise BadRequest(f"{where}.role is {role!r}; expected one of {', '.join(_ROLES)}.", param=f"{where}.role")
    content = message.get("content")
    if isinstance(content, list):
        for number, part in enumerate(content):
            _check_part(part, f"{where}.content[{number}]", may_show=role in _MAY_SHOW)
    elif not isinstance(content, str) and not (content is None and role == "assistant"):
        raise wrong(f"{where}.content", content, "a string or a list of text parts")
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        raise BadRequest(f"{where}.tool_call_id is missing; name the call that this answers.", param=where)
    for number, call in enumerate(items(message.get("tool_calls"), f"{where}.tool_calls")):
        if called_name(call) is None:
            raise BadRequest(f"{where}.tool_calls[{number}] has no function name.", param=f"{where}.tool_calls")
        if not isinstance(call["function"].get("arguments", ""), str | dict):
            raise BadRequest(f"{where}.tool_calls[{number}]: arguments is not a string.", param=f"{where}.tool_calls")


def _check_part(part: object, where: str, *, may_show: bool) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    if may_show and isinstance(part, dict) and kind in ("image_url", "file"):
        check_shown(part, where)
        return
    if kind != "text":
        found = f"{kind!r} content" if isinstance(kind, str) else "content without a type"
        raise BadRequest(f"{where} is {found}; this policy reads text only.", code="unsupported_content", param=where)
    assert isinstance(part, dict)
    if not isinstance(part.get("text"), str):
        raise BadRequest(f"{where}.text is not a string.", param=where)


def _refuse_what_is_not_there(body: Mapping[str, Any]) -> None:
    """Raise BadRequest for fields that OpenAI's API supports and this gateway does not."""
    check_tools(body)
    if body.get("modalities") not in (None, ["text"]):
        raise unsupported("modalities", body["modalities"], '["text"]')
    for key in _LEFT_OUT:
        if body.get(key):
            raise unsupported(key, body[key], f"no {key}")


def _asked(body: Mapping[str, Any]) -> ReplyOptions:
    newer = integer(body, "max_completion_tokens", low=1)
    older = integer(body, "max_tokens", low=1)
    top_k = body.get("top_k")
    return ReplyOptions(
        stream=boolean(body, "stream"),
        include_usage=boolean(mapping(body, "stream_options"), "include_usage"),
        max_tokens=older if newer is None else newer,
        temperature=number(body, "temperature", 0, 2),
        top_p=number(body, "top_p", math.ulp(0), 1, limits="above 0, at most 1"),
        top_k=None if top_k == -1 else integer(body, "top_k", low=1),
        seed=integer(body, "seed", low=-(2**63), high=MOST),
        stop=read_stops(body.get("stop"), "stop"),
        shaping=read_shaping(body),
        top_logprobs=_top_logprobs(body),
        num_choices=integer(body, "n", low=1, high=_MAX_CHOICES) or 1,
    )


def _top_logprobs(body: Mapping[str, Any]) -> int | None:
    number = integer(body, "top_logprobs", low=0, high=_MAX_TOP_LOGPROBS)
    if boolean(body, "logprobs"):
        return number or 0
    if number:
        raise BadRequest(f"top_logprobs is {number} without logprobs; send logprobs true.", param="top_logprobs")
    return None


def read_stops(found: object, key: str) -> tuple[str, ...]:
    """Return the strings that end an answer. Raises BadRequest."""
    stops = [found] if isinstance(found, str) else found if isinstance(found, list) else [] if found is None else None
    if stops is None or len(stops) > _MAX_STOPS or not all(isinstance(stop, str) and stop for stop in stops):
        raise wrong(key, found, f"up to {_MAX_STOPS} strings, none empty")
    if (longest := max(map(len, stops), default=0)) > _MAX_STOP_CHARACTERS:
        raise too_many(f"{key} holds a string of {longest} characters", _MAX_STOP_CHARACTERS, key)
    for stop in stops:
        refuse_halves(stop, key)
    return tuple(stops)


def assistant_message(said: Iterable[str], thought: Sequence[str], calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return an answer as it is recorded, from the pieces that it came in."""
    message: dict[str, Any] = {"role": "assistant", "content": "".join(said) or (None if calls else "")}
    if thought:
        message["reasoning_content"] = "".join(thought)
    return message | ({"tool_calls": calls} if calls else {})


def plain(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return the parts, or a single text as a string: clients send either form, even of the same message."""
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def sampling_of(
    asked: ReplyOptions,
    *,
    grammar: str | None,
    num_prompt_tokens: int,
    context_length_tokens: int,
    default_max_tokens: int | None,
    default_temperature: float,
) -> Sampling:
    """Return the answer's sampling, in which `grammar` replaces the requested schema. Raises BadRequest."""
    room = context_length_tokens - num_prompt_tokens
    if room < 1:
        raise TooLong(
            f"the messages are {num_prompt_tokens} tokens long", context_length_tokens, prompt_tokens=num_prompt_tokens
        )
    shaping = asked.shaping
    if grammar is not None:
        if (num_bytes := len(grammar.encode())) > MAX_GRAMMAR_BYTES:
            raise BadRequest(
                f"The tools, and a schema that the answer is to follow, make a grammar of {num_bytes} bytes; expected "
                f"at most {MAX_GRAMMAR_BYTES}. Offer fewer tools, or name one of them in tool_choice.",
                param="tool_choice",
            )
        shaping = replace(shaping or Shaping(), json_schema=None, ebnf=grammar)
    max_tokens = min(asked.max_tokens or default_max_tokens or room, room)
    if shaping is not None and shaping.min_new_tokens > max_tokens:
        raise BadRequest(
            f"min_tokens is {shaping.min_new_tokens}; the answer has at most {max_tokens} tokens. "
            "Ask for fewer, or shorten the messages.",
            param="min_tokens",
        )
    return Sampling(
        temperature=default_temperature if asked.temperature is None else asked.temperature,
        top_p=1.0 if asked.top_p is None else asked.top_p,
        top_k=asked.top_k,
        max_tokens=max_tokens,
        seed=asked.seed,
        stop=asked.stop,
        shaping=shaping,
        limit_by_client=asked.max_tokens is not None and asked.max_tokens <= max_tokens,
    )


def of_the_policy(sampling: Sampling, *, default_temperature: float) -> Sampling:
    """Return the closest sampling from the policy's whole distribution.

    Raises BadRequest for a grammar, since without it the client could not read the answer.
    """
    if sampling.of_the_policy:
        return sampling
    if sampling.shaping is not None and sampling.shaping.has_grammar:
        raise BadRequest(
            "The answer is to follow a grammar (response_format, json_schema, regex, ebnf, or a tool_choice that has "
            "a tool called), and this gateway samples main turns from the policy's whole distribution "
            "(samples.off_distribution = gateway_override); nothing was generated. Leave the grammar out, or ask in a "
            "side turn (X-Turn-Type: side).",
            code="unsupported_value",
        )
    warm = (value for value in (sampling.temperature, default_temperature, 1.0) if value >= GREEDY_BELOW)
    return replace(sampling, temperature=next(warm), top_p=1.0, top_k=None, shaping=None)
