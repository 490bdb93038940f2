"""The gateway's refusals: OpenAI's error object, with a message that a person can act on. Pure."""

import json
from typing import Any

import orjson

from clawstream.conversation.messages import dump
from clawstream.errors import ClawstreamError


class BadRequest(ClawstreamError):
    """The request is refused with `status`, as OpenAI's error object."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
        kind: str = "invalid_request_error",
        retry_after_s: int | None = None,
        allow: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.kind = kind
        self.retry_after_s = retry_after_s
        self.allow = allow

    def as_json(self) -> bytes:
        """Return OpenAI's error object."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return to_json({"error": error})


class TooLong(BadRequest):
    """The conversation does not fit into the context, in the words that clients of OpenAI's API recognise.

    `prompt_tokens` is None where the refusal came before tokenizing.
    """

    def __init__(self, found: str, context_length_tokens: int, *, prompt_tokens: int | None = None) -> None:
        super().__init__(
            f"This model's maximum context length is {context_length_tokens} tokens, the answer included. Input "
            f"tokens exceed the configured limit: {found}. Shorten the conversation.",
            code="context_length_exceeded",
            param="messages",
        )
        self.found = found
        self.context_length_tokens = context_length_tokens
        self.prompt_tokens = prompt_tokens


def unsupported(param: str, found: object, expected: str) -> BadRequest:
    """Return the refusal of a field's value that OpenAI's API supports and this gateway does not."""
    return BadRequest(
        f"{param} is {json.dumps(found)[:100]}, which is not supported; expected {expected}.",
        code="unsupported_value",
        param=param,
    )


def to_json(value: Any) -> bytes:
    """Return `value` as JSON, in ASCII where it holds lone surrogates."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return dump(value)
