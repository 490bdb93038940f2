"""A policy that says what it is told: a tokenizer of its own, Qwen3's markers, and known log-probs.

What it says is sampled byte by byte, as no tokenizer would write it: a prompt that holds an answer in other tokens than
the sampled ones was rendered again.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from clawstream.rendering.renderer import PromptRenderer
from tests.fakes.scripted_engine import ScriptedAnswer
from tests.parts.engine.disjoint_models import save_model_that_says
from tests.parts.engine.tiny_model import SPECIAL_TOKENS

VOCABULARY = 16_384
BLOCK = re.compile(r"<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>.*?<<<END_OPENCLAW_INTERNAL_CONTEXT>>>", re.DOTALL)
_WORD = re.compile("\u0120[a-z]{3,}")  # a space and letters, as byte-level tokenizers write them
_MARKERS = re.compile(f"({'|'.join(re.escape(token) for token in SPECIAL_TOKENS)})")


def make_tokenizer(folder: Path, texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that knows the words of `texts`, in a model folder without weights."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    make_trainer: Any = trainers.BpeTrainer  # whose stub has no types
    trainer = make_trainer(vocab_size=VOCABULARY, initial_alphabet=letters, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.add_special_tokens({"additional_special_tokens": list(SPECIAL_TOKENS)})
    fast.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return fast


def make_talker(folder: Path, texts: Iterable[str], *, context_length_tokens: int) -> Path:
    """A model folder with random weights, whose nonsense is made of whole words: a client shows it as it is."""
    tokenizer = make_tokenizer(folder, texts)
    pieces = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    said = torch.tensor([_WORD.fullmatch(piece) is not None for piece in pieces])
    save_model_that_says(folder, tokenizer, said, context_length_tokens=context_length_tokens)
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What the policy answers when `heard` is in what was said to it since its last answer.

    One that `stalls` never ends by itself: its client has to go.
    """

    heard: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()  # name and arguments, JSON
    stalls: bool = False

    def sampled(self) -> str:
        """The answer in Qwen3's markup."""
        calls = [
            f"<tool_call>\n{json.dumps({'name': n, 'arguments': json.loads(a)})}\n</tool_call>" for n, a in self.calls
        ]
        thought = f"<think>\n{self.reasoning}\n</think>\n\n" if self.reasoning else ""
        return thought + "\n".join([self.content, *calls] if self.content else calls)


@dataclass(slots=True)
class Script:
    """The policy's lines; the first that fits what it hears is said."""

    renderer: PromptRenderer
    lines: Sequence[Line]
    unexpected: list[str] = field(default_factory=list)

    def __call__(self, input_ids: Sequence[int]) -> ScriptedAnswer:
        heard = self.heard(input_ids)
        line = next((line for line in self.lines if line.heard in heard), None)
        if line is None:
            self.unexpected.append(heard)
            line = Line(heard="", content="I did not expect that.")
        tokens = self.ids(line.sampled())
        return ScriptedAnswer(token_ids=tokens, stall_after_tokens=len(tokens) - 1 if line.stalls else None)

    def heard(self, input_ids: Sequence[int]) -> str:
        """What was said since the last answer, the system prompt and the client's own block aside."""
        before = self.renderer.decode(input_ids).split("<|im_start|>assistant\n")[:-1]
        new = before[-1].split("<|im_end|>\n", 1)[1]
        return BLOCK.sub("", new)

    def ids(self, text: str) -> tuple[int, ...]:
        """The tokens of a whole answer: markers as such, all else byte by byte."""
        pieces = [piece for piece in _MARKERS.split(text) if piece]
        spelt = [piece if _MARKERS.fullmatch(piece) else list(piece) for piece in pieces]
        one = [
            token
            for piece in spelt
            for part in ([piece] if isinstance(piece, str) else piece)
            for token in self.renderer.encode(part)
        ]
        return (*one, self.renderer.stop_token_ids[0])
