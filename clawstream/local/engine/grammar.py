"""Grammars that answers follow: which tokens may come next, by llguidance. A token counts by its text, not by its id.

A grammar may produce the special tokens that templates write as text, but no others; tokens that end an answer are
allowed where the grammar may end. llguidance is imported when the first grammar is asked for.
"""

import json
import math
from collections.abc import Iterable, Iterator
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

import torch
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper, grammar_from
from tokenizers import Tokenizer
from torch import Tensor

from clawstream.events import Shaping
from clawstream.inference.engines.dialect import RequestRefused
from clawstream.rendering.tokenizer import token_bytes

_MAX_REMAINDERS = 10_000  # llguidance makes a state of each: 2 million took 52 s and 1.4 GB


class GrammarTokenizer:
    """The vocabulary as llguidance needs it: each token's bytes, and which tokens are no text."""

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_id
        self.bos_token_id: int | None = None
        found = token_bytes(tokenizer)
        self.special_token_ids = [number for number, said in enumerate(found) if said is None] + [eos_token_id]
        self.tokens = [b"" if said is None else said for said in found]

    def __call__(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


class Grammars:
    """One model's vocabulary, in the form that grammars use."""

    def __init__(self, file: Path, eos_token_id: int) -> None:
        wrapped = TokenizerWrapper(GrammarTokenizer(Tokenizer.from_file(str(file)), eos_token_id))
        self._tokenizer = LLTokenizer(wrapped)

    def matcher(self, shaping: Shaping, stop_ids: frozenset[int]) -> "Matcher":
        """Return a matcher at the grammar's beginning; raises RequestRefused for an invalid grammar."""
        kind, said = next(
            (kind, said)
            for kind, said in (("json_schema", shaping.json_schema), ("regex", shaping.regex), ("ebnf", shaping.ebnf))
            if said is not None
        )
        if kind == "json_schema":
            _check_multiples(said)
        try:
            matcher = LLMatcher(self._tokenizer, grammar_from(kind, said), log_level=0)
            problem = matcher.get_error()
        except ValueError as error:
            problem = str(error)
        if problem:
            raise RequestRefused(f"{kind} is no grammar that this engine can follow: {problem[:500]}")
        return Matcher(matcher, stop_ids)


class Matcher:
    """One answer's place in its grammar."""

    def __init__(self, matcher: LLMatcher, stop_ids: Iterable[int]) -> None:
        self._matcher = matcher
        self._stop_ids = list(stop_ids)

    def mask(self, logits_V: Tensor) -> None:
        """Make every token impossible that can't come next."""
        allowed_V = torch.zeros(len(logits_V), dtype=torch.bool)
        if not self._matcher.is_stopped():
            found = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8).bool()
            size = min(len(found), len(allowed_V))
            allowed_V[:size] = found[:size]
        if self._matcher.is_stopped() or self._matcher.is_accepting() or not allowed_V.any():
            allowed_V[[token for token in self._stop_ids if token < len(allowed_V)]] = True
        logits_V.masked_fill_(~allowed_V, -torch.inf)

    def take(self, token: int) -> None:
        """Take in the answer's next token."""
        if token not in self._stop_ids:
            self._matcher.consume_token(token)


def _check_multiples(schema: str) -> None:
    """Raise RequestRefused where `multipleOf` needs more states than can be made while other requests wait."""
    try:
        steps = [*_multiples(json.loads(schema))]
    except ValueError:
        return  # llguidance says what is wrong with it
    scale = math.lcm(*(step.denominator for step in steps))
    if math.lcm(*(int(step * scale) for step in steps)) > _MAX_REMAINDERS:
        raise RequestRefused(
            f"json_schema is no grammar that this engine can follow: the least common multiple of its multipleOf is "
            f"over {_MAX_REMAINDERS}; ask for a smaller step, or check the number yourself"
        )


def _multiples(schema: object) -> Iterator[Fraction]:
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            step = part.get("multipleOf")
            if isinstance(step, int | float) and math.isfinite(step) and step > 0:
                yield Fraction(str(step))
            left += part.values()
        elif isinstance(part, list):
            left += part


@lru_cache(maxsize=1)
def grammars_of(model_path: str, eos_token_id: int) -> Grammars:
    """Return the grammars of the model in a folder, made once."""
    return Grammars(Path(model_path) / "tokenizer.json", eos_token_id)
