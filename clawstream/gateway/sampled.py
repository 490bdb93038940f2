"""The log-probs that a client asked for, in OpenAI's shape: of every token that was sampled but the one that ends it.

They are the engine's own, at the sampling temperature, those of thoughts and marks among them. Pure.
"""

from typing import Any

from clawstream.inference.engine import Chunk
from clawstream.inference.rendering import HALF_CHARACTER, PromptRenderer


class SampledTokens:
    """What was sampled since it was last taken; one for each answer."""

    def __init__(self, renderer: PromptRenderer) -> None:
        self._renderer = renderer
        self._waiting: list[dict[str, Any]] = []

    def another(self) -> "SampledTokens":
        """Return one for another answer."""
        return SampledTokens(self._renderer)

    def add(self, chunk: Chunk) -> None:
        """Take in what an engine sampled."""
        top = chunk.top_logprobs or ((),) * len(chunk.token_ids)
        for token, value, others in zip(chunk.token_ids, chunk.logprobs_nats, top, strict=True):
            if token not in self._renderer.stop_token_ids:
                likeliest = [self._entry(other, other_value) for other_value, other in others]
                self._waiting.append(self._entry(token, value) | {"top_logprobs": likeliest})

    def take(self) -> dict[str, Any] | None:
        """Return what is new, as a choice holds it; None: nothing is."""
        found, self._waiting = self._waiting, []
        return {"content": found, "refusal": None} if found else None

    def _entry(self, token: int, value: float | None) -> dict[str, Any]:
        text = self._renderer.decode((token,))
        return {"token": text, "logprob": value, "bytes": None if HALF_CHARACTER in text else list(text.encode())}
