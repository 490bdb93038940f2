"""Checks that an engine's answer is possible for its request. Pure.

The one rule: a value that no engine can have computed is not passed on, so it is neither shown nor recorded.
"""

from typing import NoReturn

from clawstream.inference.engines.engine import Chunk, GenerateRequest

MOST_TOKEN_IDS = 2**31  # what the log can hold
MOST_NAME_CHARACTERS = 200
_ROUNDING_NATS = 1e-3  # how far above 0 rounding may put the log-prob of a certain token
_LEAST_NATS = -3.4e38  # what the log can hold


class Plausible:
    """One streamed answer to `request` by a model of so many token ids."""

    def __init__(self, request: GenerateRequest, num_token_ids: int) -> None:
        self._most_tokens = request.sampling.max_new_tokens
        self._prompt_tokens = len(request.input_ids)
        self._stop = request.sampling.stop
        self._num_token_ids = num_token_ids
        self.num_tokens = 0

    def take(self, chunk: Chunk) -> None:
        """Take the next chunk; raises ValueError where it is impossible."""
        limit = self._num_token_ids
        for token in chunk.token_ids:
            if type(token) is not int or not 0 <= token < limit:
                _wrong("token id", token, f"an integer from 0 to {limit - 1}")
        for value in chunk.logprobs_nats:
            # The usual case is spelled out, since this runs for every token.
            if value is not None and not (type(value) is float and _LEAST_NATS <= value <= 0.0):
                check_logprob(value)
        self.num_tokens += len(chunk.token_ids)
        if self.num_tokens > self._most_tokens:
            raise ValueError(f"{self.num_tokens} tokens, expected at most the {self._most_tokens} that were asked for")
        read_version(chunk.weight_version)
        _check_count("prompt_tokens", chunk.prompt_tokens, self._prompt_tokens)
        # A request that was retracted for others finds its own tokens cached when it goes on.
        _check_count("cached_tokens", chunk.cached_tokens, self._prompt_tokens + self._most_tokens)
        if chunk.finish is not None:
            self._check_end(chunk)

    def _check_end(self, chunk: Chunk) -> None:
        matched = chunk.finish and chunk.finish.matched
        if isinstance(matched, str) and matched not in self._stop:
            _wrong("matched stop", matched, "one of the stop strings that were asked for")
        if not (matched is None or isinstance(matched, str) or type(matched) is int):
            _wrong("matched stop", matched, "a token id or a string")


def check_logprob(value: object) -> None:
    """Raise ValueError where the value is no log-prob."""
    if type(value) is not float and type(value) is not int:
        _wrong("log-prob", value, "a number")
    if not _LEAST_NATS <= value <= _ROUNDING_NATS:
        _wrong("log-prob", value, "a number that is not above 0")


def _check_count(name: str, count: object, most: int) -> None:
    if count is not None and (type(count) is not int or not 0 <= count <= most):
        _wrong(name, count, f"an integer from 0 to {most}")


def read_version(name: object) -> str | None:
    """Return the name of an engine's weights; raises ValueError where it is no name."""
    if name is not None and (not isinstance(name, str) or len(name) > MOST_NAME_CHARACTERS):
        raise ValueError(
            f"weight_version is {repr(name)[:100]}, expected a text of at most {MOST_NAME_CHARACTERS} characters"
        )
    return name


def _wrong(name: str, found: object, expected: str) -> NoReturn:
    raise ValueError(f"{name} is {repr(found)[:100]}, expected {expected}")
