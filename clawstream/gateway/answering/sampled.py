"""The log-probs that a client asked for, in OpenAI's shape, of every sampled token except the one that ends the answer.

They are the engine's own, at the sampling temperature. Chat Completions includes those of thoughts and marks, the
Responses API has those of the text alone. Pure.
"""

from typing import Any

from clawstream.inference.engines.engine import Chunk
from clawstream.rendering.renderer import HALF_CHARACTER, PromptRenderer


class SampledTokens:
    """The tokens sampled since the last take; one object for each answer."""

    def __init__(self, renderer: PromptRenderer) -> None:
        self._renderer = renderer
        self._waiting: list[tuple[int, dict[str, Any]]] = []  # with the token's number in the answer
        self._num_tokens = 0
        self.said: set[int] = set()  # the numbers of the text's tokens, as far as known

    def another(self) -> "SampledTokens":
        """Return one for another answer."""
        return SampledTokens(self._renderer)

    def add(self, chunk: Chunk) -> None:
        """Take in what an engine sampled."""
        top = chunk.top_logprobs or ((),) * len(chunk.token_ids)
        values = zip(chunk.token_ids, chunk.logprobs_nats, top, strict=True)
        for number, (token, value, others) in enumerate(values, self._num_tokens):
            if token not in self._renderer.stop_token_ids:
                likeliest = [self._entry(other, other_value) for other_value, other in others]
                self._waiting.append((number, self._entry(token, value) | {"top_logprobs": likeliest}))
        self._num_tokens += len(chunk.token_ids)

    def take(self) -> dict[str, Any] | None:
        """Return the new log-probs, as a choice holds them; None: there are none."""
        found, self._waiting = self._waiting, []
        return {"content": [entry for _, entry in found], "refusal": None} if found else None

    def take_said(self) -> list[dict[str, Any]]:
        """Return the text's new log-probs; drop other tokens before its last one, and keep those behind it."""
        found = [entry for number, entry in self._waiting if number in self.said]
        last = max(self.said, default=-1)
        self._waiting = [(number, entry) for number, entry in self._waiting if number > last]
        self.said.clear()
        return found

    def _entry(self, token: int, value: float | None) -> dict[str, Any]:
        text = self._renderer.decode((token,))
        return {"token": text, "logprob": value, "bytes": None if HALF_CHARACTER in text else list(text.encode())}
