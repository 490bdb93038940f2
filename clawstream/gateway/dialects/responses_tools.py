"""The Responses API's tools as functions of Chat Completions and back, and reasoning as `encrypted_content`. Pure.

The policy calls only functions with JSON. A `custom` tool, which takes bare text, becomes a function with one string,
`input`; a function in a namespace gets both names. A call goes back in the form in which the client offered the tool.
Tools that OpenAI's servers run are refused by name; those that Codex always offers are left out. The encrypted content
is no secret, since the client has the text beside it; it exists because clients that ask for it send it back whole.
"""

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from clawstream.gateway.requests.fields import BadRequest, items, mapping, text

SEALED = "clawstream-"
_CUSTOM, _NAMESPACED = "custom", "namespaced"


class Offered(NamedTuple):
    """A function as the client offered it: whether it takes bare text, and its namespace."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


def flat_name(namespace: object, name: str) -> str:
    """Return the policy's name of a function that may be in a namespace."""
    return f"{namespace.removesuffix('__')}__{name}" if isinstance(namespace, str) and namespace else name


def read_tools(found: object, *, may_leave_out: bool) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the tools as functions, and, for `offered`, which of them the client offered in another form.

    `may_leave_out`: the client offers tools of OpenAI's servers to any server. Raises BadRequest.
    """
    functions: list[dict[str, Any]] = []
    custom: list[str] = []
    namespaced: dict[str, list[str]] = {}
    for at, tool in enumerate(items(found, "tools")):
        where = f"tools[{at}]"
        named = tool.get("type") if isinstance(tool, dict) else None
        if named == "function":
            functions.append(_function(tool, where))
        elif named == "custom":
            functions.append(_custom(tool, where))
            custom.append(tool["name"])
        elif named == "namespace":
            within = _name(tool, where)
            for number, inner in enumerate(items(tool.get("tools"), f"{where}.tools")):
                if not isinstance(inner, dict) or inner.get("type") != "function":
                    raise BadRequest(f"{where}.tools[{number}] is not a function.", param=where)
                function = _function(inner, f"{where}.tools[{number}]")
                name, flat = function["function"]["name"], flat_name(within, function["function"]["name"])
                function["function"]["name"] = flat
                functions.append(function)
                namespaced[flat] = [within, name]
        elif not (may_leave_out and isinstance(named, str)):
            found = f"{where} is a {json.dumps(named)[:60]} tool; expected function, custom or namespace"
            message = f"{found}: only tools of the client's own are called."
            raise BadRequest(message, code="unsupported_value", param=where)
    known = {_CUSTOM: custom, _NAMESPACED: namespaced}
    return functions, {key: value for key, value in known.items() if value}


def read_choice(found: object) -> Any:
    """Return `tool_choice` as Chat Completions has it."""
    if not isinstance(found, dict):
        return found
    if found.get("type") in ("function", "custom"):
        return {"type": "function", "function": {"name": found.get("name")}}
    if found.get("type") == "allowed_tools":
        named = [
            read_choice(tool) if isinstance(tool, dict) else tool
            for tool in items(found.get("tools"), "tool_choice.tools")
        ]
        return {"type": "allowed_tools", "allowed_tools": {"mode": found.get("mode"), "tools": named}}
    return dict(found)


def offered(name: str, known: Mapping[str, Any]) -> Offered:
    """Return the function as the client offered it; `known` is what `read_tools` returned beside the functions."""
    if name in known.get(_CUSTOM, ()):
        return Offered(name, is_custom=True)
    within: Sequence[str] | None = known.get(_NAMESPACED, {}).get(name)
    return Offered(name) if within is None else Offered(within[1], within[0])


def custom_arguments(given: str) -> str:
    """Return bare text as the arguments of the function that stands for a custom tool."""
    return json.dumps({"input": given}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """Return the text that `custom_arguments` was given; arguments of another form unchanged."""
    try:
        found = json.loads(arguments)
    except ValueError:
        return arguments
    given = found.get("input") if isinstance(found, dict) else None
    return given if isinstance(given, str) else arguments


def _function(tool: object, where: str) -> dict[str, Any]:
    name = _name(tool, where)
    assert isinstance(tool, dict)
    said = {key: tool[key] for key in ("description", "parameters", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": {"name": name, **said}}


def _custom(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    name = _name(tool, where)
    shape = mapping(tool, "format")
    wanted = {"type": "string"}
    if shape.get("type") == "grammar":
        wanted["description"] = f"Text that follows this {shape.get('syntax')} grammar:\n{shape.get('definition')}"
    parameters = {"type": "object", "properties": {"input": wanted}, "required": ["input"]}
    about = text(tool, "description")
    described = {} if about is None else {"description": about}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters}}


def _name(tool: object, where: str) -> str:
    name = tool.get("name") if isinstance(tool, dict) else None
    if not isinstance(name, str) or not name:
        raise BadRequest(f"{where} is not a tool with a name.", param=where)
    return name


def sealed(thought: str) -> str:
    """Return the thought as an opaque string."""
    return SEALED + base64.b64encode(thought.encode("utf-8", "surrogatepass")).decode("ascii")


def opened(text: str, where: str) -> str:
    """Return the thought that `sealed` was given. Raises BadRequest for a string that `sealed` did not make."""
    try:
        return base64.b64decode(text.removeprefix(SEALED), validate=True).decode("utf-8", "surrogatepass")
    except (binascii.Error, UnicodeDecodeError) as error:
        raise BadRequest(f"{where} was changed since it was sent; send reasoning as it came.", param=where) from error
