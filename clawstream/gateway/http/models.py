"""The served model, described for OpenAI's and for Anthropic's clients. Pure."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any


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
