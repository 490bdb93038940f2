"""Reads and checks the parts of a request that shape its answer: the sampling distribution and the tools. Pure."""

import re
from collections.abc import Mapping
from typing import Any

import orjson

from clawstream.events import Shaping, TokenBias
from clawstream.gateway.requests.fields import (
    BadRequest,
    boolean,
    integer,
    items,
    mapping,
    number,
    text,
    to_json,
    too_many,
    unsupported,
    wrong,
)

_EXPECTED = '"auto", "none", "required", {"type": "function", "function": {"name": "..."}} or allowed_tools'
_HALF = re.compile("[\ud800-\udfff]")  # of a character
_ANY_OBJECT = '{"type": "object"}'  # as a JSON schema: what SGLang makes of json_object
_MAX_BIASES = 1024
MAX_GRAMMAR_BYTES = 128 * 2**10  # the grammar is recorded a second time, beside its request
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,8}")
_LEAST_REPETITION = 0.01  # SGLang divides by it; values nearer to 0 turn logits into NaN or infinity


def narrowed(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the body with only those tools that its tool_choice allows.

    Raises BadRequest where it allows a tool that is not offered.
    """
    choice = body.get("tool_choice")
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return body
    where, allowed = "tool_choice.allowed_tools", mapping(choice, "allowed_tools")
    mode = allowed.get("mode")
    if mode not in ("auto", "required"):
        raise unsupported("tool_choice", choice, 'allowed_tools with mode "auto" or "required"')
    named = items(allowed.get("tools"), f"{where}.tools")
    wanted = {_name(tool, f"{where}.tools[{index}]") for index, tool in enumerate(named)}
    offered = {_name(tool, f"tools[{index}]"): tool for index, tool in enumerate(items(body.get("tools"), "tools"))}
    for name in sorted(wanted - offered.keys()):
        raise BadRequest(f"{where} names {name[:100]!r}, which is none of the tools.", param="tool_choice")
    tools = [tool for name, tool in offered.items() if name in wanted]
    return {**body, "tools": tools, "tool_choice": mode}


def check_tools(body: Mapping[str, Any]) -> None:
    """Raise BadRequest where a tool is no function with a name, or tool_choice names one that is not offered."""
    names = [_name(tool, f"tools[{index}]") for index, tool in enumerate(items(body.get("tools"), "tools"))]
    boolean(body, "parallel_tool_calls")
    choice = body.get("tool_choice")
    if choice in (None, "auto", "none"):
        return
    if choice != "required":
        wanted = called_name(choice) if isinstance(choice, dict) and choice.get("type") == "function" else None
        if wanted is None:
            raise unsupported("tool_choice", choice, _EXPECTED)
        if wanted not in names:
            raise BadRequest(f"tool_choice names {wanted[:100]!r}, which is none of the tools.", param="tool_choice")
    if not names:
        raise BadRequest("tool_choice is required, and there are no tools to call; send tools.", param="tool_choice")


def forces_calls(body: Mapping[str, Any]) -> bool:
    """Whether the answer has to call a tool."""
    return body.get("tool_choice") not in (None, "auto", "none")


def called_name(found: object) -> str | None:
    """Return the name of the function in a tool, a choice or a call; None: it has none."""
    function = found.get("function") if isinstance(found, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _name(tool: object, where: str) -> str:
    named = tool.get("type") if isinstance(tool, dict) else None
    if named == "custom":
        raise BadRequest(
            f"{where} is a custom tool, which /v1/responses takes; offer a function with one string here.",
            code="unsupported_value",
            param=where,
        )
    name = called_name(tool) if named == "function" else None
    if name is None:
        raise BadRequest(f"{where} is not a function with a name.", param=where)
    return name


def read_shaping(body: Mapping[str, Any]) -> Shaping | None:
    """Return what changes the distribution from the policy's own; None: nothing does."""
    grammars = {
        "response_format": _schema_of(body.get("response_format")),
        "json_schema": _schema(body.get("json_schema"), "json_schema"),
        "regex": text(body, "regex"),
        "ebnf": text(body, "ebnf"),
    }
    asked = {name: grammar for name, grammar in grammars.items() if grammar is not None}
    forced = forces_calls(body)  # by a grammar of calls: it replaces a JSON schema, and excludes regex and ebnf
    by = [*asked, *["tool_choice"] * forced]
    if len(asked) > 1 or (forced and asked.keys() & {"regex", "ebnf"}):
        raise BadRequest(f"{' and '.join(by)} are both there; expected one grammar at most.", param=by[1])
    for name, grammar in asked.items():
        refuse_halves(grammar, name)
        if (num_bytes := len(grammar.encode())) > MAX_GRAMMAR_BYTES:
            raise too_many(f"{name} is a grammar of {num_bytes} bytes", MAX_GRAMMAR_BYTES, name)
    least = integer(body, "min_tokens", low=0) or 0
    if by and least:
        raise BadRequest(
            f"min_tokens is {least} beside {by[0]}; an answer that follows a grammar ends where the "
            "grammar does. Leave one of them out.",
            param="min_tokens",
        )
    limits = f"{_LEAST_REPETITION} to 2; 1 changes nothing"
    repetition = number(body, "repetition_penalty", _LEAST_REPETITION, 2, limits=limits)
    shaping = Shaping(
        frequency_penalty=number(body, "frequency_penalty", -2, 2) or 0.0,
        presence_penalty=number(body, "presence_penalty", -2, 2) or 0.0,
        repetition_penalty=1.0 if repetition is None else repetition,
        min_p=number(body, "min_p", 0, 1) or 0.0,
        min_new_tokens=least,
        logit_bias=_biases(body),
        json_schema=grammars["response_format"] or grammars["json_schema"],
        regex=grammars["regex"],
        ebnf=grammars["ebnf"],
    )
    return None if shaping == Shaping() else shaping


def refuse_halves(words: str, key: str) -> None:
    """Raise BadRequest for half a character."""
    if _HALF.search(words):
        raise BadRequest(f"{key} holds half a character (a lone surrogate); no answer can contain it.", param=key)


def _biases(body: Mapping[str, Any]) -> tuple[TokenBias, ...]:
    found = mapping(body, "logit_bias")
    if len(found) > _MAX_BIASES:
        raise too_many(f"logit_bias has {len(found)} tokens", _MAX_BIASES, "logit_bias")
    for token in found:
        if not _TOKEN_ID.fullmatch(token):
            raise BadRequest(
                f"logit_bias names {token[:20]!r}; expected token ids of the model's vocabulary.", param="logit_bias"
            )
    named = {f"logit_bias.{token}": bias for token, bias in found.items()}
    biases = ((int(token), number(named, f"logit_bias.{token}", -100, 100)) for token in found)
    return tuple(TokenBias(token_id=token_id, bias=bias) for token_id, bias in biases if bias)


def _schema_of(shape: object) -> str | None:
    """Return the JSON schema that a response_format stands for, as text; None: any text will do."""
    if shape is None:
        return None
    wanted = shape.get("type") if isinstance(shape, dict) else None
    if wanted == "json_object":
        return _ANY_OBJECT
    if isinstance(shape, dict) and wanted == "json_schema":
        where = "response_format.json_schema"
        return _schema(mapping(shape, "json_schema").get("schema"), f"{where}.schema", required=True)
    if wanted != "text":
        raise unsupported("response_format", shape, "an object whose type is text, json_object or json_schema")
    return None


def _schema(found: object, where: str, *, required: bool = False) -> str | None:
    """Return a JSON schema as text; it may come as text or as an object."""
    if found is None and not required:
        return None
    try:
        schema = orjson.loads(found) if isinstance(found, str) else found
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"{where} is no JSON: {error}. Send the schema as an object.", param=where) from error
    if not isinstance(schema, dict):
        raise wrong(where, found, "a JSON schema, as an object")
    return to_json(schema).decode()
