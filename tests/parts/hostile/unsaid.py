"""What the description says in words alone, for schemathesis: bodies are made to hold to it, whatever else they break.

They ask for the model that is served, one grammar at most, tokens that there are, and for likeliest tokens beside
log-probs alone. The size of a group and the index of a step come with the group's name, and that beside one answer
alone. No call is forced, which needs tools and a family with a form for it, and no tools are allowed by name. For
/v1/messages, results come before text and the last message is no answer. Reasoning for /v1/responses is not encrypted
by another model.
"""

from typing import Any

import schemathesis

SERVED = "policy"
_GRAMMARS = (dict, str)
_DIGITS = 9  # of a token id, at most


@schemathesis.hook
def map_case(context: schemathesis.HookContext, case: Any) -> Any:  # noqa: ARG001  # schemathesis passes it by name
    """The case, as what is said in words alone allows it."""
    if case.headers is not None and isinstance(case.body, dict) and case.body.get("n") not in (None, 1):
        case.headers.pop("X-Group-Id", None)
    if case.headers is not None and not case.headers.get("X-Group-Id"):
        for name in ("X-Group-Size", "X-Step-Index"):
            case.headers.pop(name, None)
    if isinstance(case.body, dict):
        case.body = {**_shaping(case.body), **_model(case.body), **_choice(case.body)}
        if case.operation.path.startswith("/v1/messages"):
            case.body |= _messages(case.body)
        if case.operation.path == "/v1/responses" and isinstance(case.body.get("input"), list):
            case.body["input"] = [_readable(item) for item in case.body["input"]]
    return case


def _model(body: dict[str, Any]) -> dict[str, Any]:
    return {"model": SERVED} if isinstance(body.get("model"), str) else {}


def _choice(body: dict[str, Any]) -> dict[str, Any]:
    """A choice that forces no call, in the place of one that does."""
    found = body.get("tool_choice")
    named = found.get("type") if isinstance(found, dict) else None
    if found == "required" or named in ("function", "custom", "allowed_tools"):
        return {"tool_choice": "auto"}
    if isinstance(found, dict) and named in ("any", "tool"):
        return {"tool_choice": {**found, "type": "auto"}}
    return {}


def _shaping(body: dict[str, Any]) -> dict[str, Any]:
    """The body with one grammar at most, no more tokens than an answer has, beside a grammar none, and biases of tokens
    that there are.
    """
    grammars = [
        name
        for name in ("response_format", "text", "output_config", "json_schema", "regex", "ebnf")
        if isinstance(body.get(name), _GRAMMARS) and (name != "output_config" or "format" in body[name])
    ]
    kept = {key: value for key, value in body.items() if key not in grammars[1:]}
    if type(kept.get("min_tokens")) in (int, float) and kept["min_tokens"] > 0:
        kept["min_tokens"] = 0 if grammars else 1
    if kept.get("logprobs") is not True and kept.get("top_logprobs") in range(1, 21):
        kept["top_logprobs"] = 0
    if isinstance(kept.get("logit_bias"), dict):
        kept["logit_bias"] = {_small(token): bias for token, bias in kept["logit_bias"].items()}
    return kept


def _small(token: str) -> str:
    return token[:3] if token.isdecimal() and len(token) <= _DIGITS else token


def _messages(body: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(body.get("messages"), list) or not body["messages"]:
        return {}
    messages = [_results_first(message) for message in body["messages"]]
    if isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant":
        messages.append({"role": "user", "content": "Go on."})
    return {"messages": messages}


def _readable(item: Any) -> Any:
    """The item without reasoning that another model encrypted."""
    if not isinstance(item, dict) or not isinstance(item.get("encrypted_content"), str):
        return item
    return {**item, "encrypted_content": None}


def _results_first(message: Any) -> Any:
    if not isinstance(message, dict) or message.get("role") != "user" or not isinstance(message.get("content"), list):
        return message
    return {**message, "content": sorted(message["content"], key=lambda block: not _is_result(block))}


def _is_result(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "tool_result"
