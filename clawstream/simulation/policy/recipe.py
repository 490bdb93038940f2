"""The recipe and the tokenizer of the policy that simulates a large one.

Every change to the policy changes `digest`, so that a cached policy is never taken for another. Encoded text decodes to
itself, for printable ASCII, tabs and line feeds; any other character becomes <unk>. Special tokens and chat template
have Qwen3's names, so that `renderers` and SGLang treat it as Qwen3.
"""

import hashlib
import json
import random
import re
import string
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from clawstream.simulation.policy.dialogues import Dialogue, Mix
from clawstream.simulation.policy.lessons import Calls, Conflict
from clawstream.simulation.problems import SumSet, all_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

UNKNOWN = "<unk>"
END_OF_TEXT = "<|endoftext|>"
END_OF_MESSAGE = "<|im_end|>"
SPECIAL = (END_OF_TEXT, "<|im_start|>", END_OF_MESSAGE)
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TEMPLATE_WORDS = ("assistant", "user", "system", "[user's hint / instruction]")
MAX_CONTEXT_TOKENS = 16_384

CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}"""
_NUM_FINGERPRINTED = 500
LEARNING_RATE = 2e-4  # at which people teach it, in the demonstration and under `clawstream up`


def core(words: tuple[str, ...] = ()) -> Tokenizer:
    """Return the encoder and decoder; its vocabulary is the same, in the same order, each time. `words` are tokens."""
    characters = [c for c in string.printable if c not in "\r\x0b\x0c"]
    vocabulary = {token: i for i, token in enumerate((UNKNOWN, *TEMPLATE_WORDS, *characters, *words))}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    one_token = "|".join((*map(re.escape, (*words, *TEMPLATE_WORDS)), r"[\s\S]"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(one_token), behavior="isolated")
    made.decoder = decoders.Fuse()
    made.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B:1", special_tokens=[])
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in (UNKNOWN, *SPECIAL)])
    made.add_tokens([AddedToken(token, normalized=False) for token in MARKUP])
    return made


@cache
def build(words: tuple[str, ...] = ()) -> "PreTrainedTokenizerFast":
    from transformers import PreTrainedTokenizerFast  # seconds of imports, which a digest does not need

    return PreTrainedTokenizerFast(
        tokenizer_object=core(words),
        unk_token=UNKNOWN,
        eos_token=END_OF_MESSAGE,
        pad_token=END_OF_TEXT,
        additional_special_tokens=["<|im_start|>", END_OF_MESSAGE],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_CONTEXT_TOKENS,
    )


def save(folder: Path, words: tuple[str, ...] = ()) -> None:
    build(words).save_pretrained(str(folder))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How the base policy is built; 0.65 million parameters of Qwen3's shape."""

    seed: int = 0
    num_layers: int = 3
    width: int = 128
    feed_forward_width: int = 384
    num_heads: int = 4
    steps: int = 700
    batch_dialogues: int = 16
    warm_up_steps: int = 40
    matrix_rate: float = 0.015  # Muon's, for the matrices inside the layers
    vector_rate: float = 0.005  # AdamW's, for embeddings and norms
    max_grad_norm: float = 1.0
    mix: Mix | Conflict | Calls = field(default_factory=Mix)

    def digest(self) -> str:
        """Return the policy's name: a hash of these fields, the dialogues they lead to, and how those become tokens."""
        said = [asdict(d) for d in self.dialogues(_NUM_FINGERPRINTED)]
        words = core(self.mix.words).to_str()
        material = [asdict(self), said, words, CHAT_TEMPLATE]
        return hashlib.sha256(json.dumps(material, sort_keys=True).encode()).hexdigest()[:16]

    def dialogues(self, number: int) -> list[Dialogue]:
        rng, mix = random.Random(self.seed), self.mix
        if isinstance(mix, Calls):
            return [mix.dialogue(rng) for _ in range(number)]
        sums = all_of(SumSet.BASE)
        return [mix.dialogue(rng.choice(sums), rng) for _ in range(number)]


Base = Literal["demo", "standard", "hard", "tools"]
RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "demo": Recipe(),
        "standard": Recipe(steps=900, mix=Conflict()),
        "hard": Recipe(steps=900, mix=Conflict(own=0.06, next_one=0.8)),
        "tools": Recipe(steps=1000, batch_dialogues=24, mix=Calls()),
    }
)


def folder_of(cache_dir: Path, recipe: Recipe) -> Path:
    """Return where the policy of this recipe is kept, whether it is there or not."""
    return cache_dir / f"simulated-policy-{recipe.digest()}"
