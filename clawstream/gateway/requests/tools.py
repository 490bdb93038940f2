"""The tools that a client offers, and which of them it wants called, checked. Pure."""

from collections.abc import Mapping
from typing import Any

from clawstream.gateway.requests.fields import boolean, items, mapping
from clawstream.gateway.requests.refusal import BadRequest, unsupported

_EXPECTED = '"auto", "none", "required", {"type": "function", "function": {"name": "..."}} or allowed_tools'


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
