"""The gateway's routes, the likely meaning of a path that is none of them, and the served model's description. Pure."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

CHAT_PATH = "/v1/chat/completions"
RESPONSES_PATH = "/v1/responses"
MESSAGES_PATH = "/v1/messages"
COUNT_PATH = f"{MESSAGES_PATH}/count_tokens"
FEEDBACK_PATH = "/v1/feedback"
MODELS_PATH = "/v1/models"

_OFFERED = (CHAT_PATH, RESPONSES_PATH, MESSAGES_PATH, COUNT_PATH, FEEDBACK_PATH, MODELS_PATH)
_NOT_OFFERED = {
    "/completions": f"completions of bare text are not offered; use {CHAT_PATH}",
    "/complete": f"Anthropic's text completions are not offered; use {MESSAGES_PATH}",
    "/responses/compact": f"a client compacts by itself here, by a request to {RESPONSES_PATH}",
    "/responses/input_tokens": f"tokens are counted at {COUNT_PATH}",
    "/embeddings": "the policy answers and has no embeddings",
    "/conversations": f"conversations are known by their session; send the history, or previous_response_id, to "
    f"{RESPONSES_PATH}",
}
_OF_OTHER_MODELS = {
    "/images/": "the policy writes text and makes no pictures",
    "/audio/": "the policy reads and writes text, and no sound",
    "/realtime": "the policy reads and writes text, and no sound",
    "/videos": "the policy writes text and makes no films",
    "/moderations": "the policy answers and moderates nothing",
}
_PREFIXES = ("/v1", "/api", "/openai", "/anthropic")


def wrong_path(method: str, path: str) -> str:
    """Return why there is nothing at `path`, and what to use in its place."""
    found = f"There is no {method} {path[:200]} here"
    rest = _without_prefixes(path.rstrip("/"))
    for offered in _OFFERED:
        if rest == offered.removeprefix("/v1"):
            return f"{found}; it is {offered}: {_mend(path)}."
    if rest in _NOT_OFFERED:
        return f"{found}: {_NOT_OFFERED[rest]}."
    for of_another, why in _OF_OTHER_MODELS.items():
        if rest.startswith(of_another):
            return f"{found}: {why}."
    if rest.startswith("/responses/"):
        return f"{found}: responses are asked for by POST {RESPONSES_PATH} and not fetched, listed or deleted."
    return (
        f"{found}; OpenAI's clients ask {CHAT_PATH} and {RESPONSES_PATH} (base URL ending in /v1), Anthropic's "
        f"{MESSAGES_PATH} (base URL without /v1). GET /openapi.json lists all."
    )


def _without_prefixes(path: str) -> str:
    for prefix in _PREFIXES:
        if path.startswith(f"{prefix}/"):
            return _without_prefixes(path.removeprefix(prefix))
    return path


def _mend(path: str) -> str:
    """Return what is to be done about a base URL that led to `path`."""
    if "/v1/v1/" in path:
        return "/v1 stands in the base URL and in the path; an Anthropic client's base URL has none"
    if path.endswith("/"):
        return "leave out the slash at the end"
    if path.startswith("/v1/"):
        return "ask for exactly that path"
    return "set the base URL to this gateway's address and /v1, or to the address alone for Anthropic's clients"


def asks_as_anthropic(headers: Mapping[str, str]) -> bool:
    """Return whether a request has the header that all of Anthropic's clients send."""
    return "anthropic-version" in headers


def openai_model(model: str, since_s: int, context_length_tokens: int | None, *, thinks: bool) -> dict[str, Any]:
    """Return OpenAI's model object, with the context length as SGLang and vLLM name it, and whether it thinks."""
    told = {"id": model, "object": "model", "created": since_s, "owned_by": "clawstream"}
    return told | {"max_model_len": context_length_tokens, "reasoning": thinks}


def anthropic_model(model: str, since_s: int) -> dict[str, Any]:
    """Return Anthropic's model object."""
    created = datetime.fromtimestamp(since_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "model", "id": model, "display_name": model, "created_at": created}


def anthropic_models(model: dict[str, Any]) -> dict[str, Any]:
    """Return Anthropic's list of this one model."""
    return {"data": [model], "has_more": False, "first_id": model["id"], "last_id": model["id"]}
