"""The recipe, the tokenizer and the folder of the tiny policy that simulates a large one.

Every change to the policy changes `digest`, so that a cached policy is never taken for another. Encoded text decodes to
itself, for printable ASCII, tabs and line feeds; any other character becomes <unk>. Special tokens and chat template
have Qwen3's names, so that `renderers` and SGLang treat it as Qwen3.

The folder is unpacked from the package, or built by a process whose end frees torch's memory. `pack` makes the shipped
files from a built policy. `unpack` makes a model folder from these files, with weights in float32 as a built policy has
them. `python -m clawstream.simulation.policy.build --pack FOLDER` makes the files again.
"""

import hashlib
import json
import random
import re
import shutil
import string
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from clawstream.errors import PartUnavailable
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
SHIPPED = Path(__file__).parent / "shipped"
_WEIGHTS, _SEAL = "model.safetensors", "made_by.json"
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


Base = Literal["demo", "standard", "standard_2", "standard_3", "hard", "tools"]
RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "demo": Recipe(),
        "standard": Recipe(steps=900, mix=Conflict()),
        "standard_2": Recipe(seed=1, steps=900, mix=Conflict()),  # the same people, other dialogues and first weights
        "standard_3": Recipe(seed=2, steps=900, mix=Conflict()),
        "hard": Recipe(steps=900, mix=Conflict(own=0.06, next_one=0.8)),
        "tools": Recipe(steps=1000, batch_dialogues=24, mix=Calls()),
    }
)


def folder_of(cache_dir: Path, recipe: Recipe) -> Path:
    """Return where the policy of this recipe is kept, whether it is there or not."""
    return cache_dir / f"simulated-policy-{recipe.digest()}"


def pack(folder: Path, into: Path, *, recipe: str) -> None:
    """Write the policy in `folder` to `into` in the form that the package ships; `recipe` is its recipe's digest."""
    into.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        shutil.copyfile(file, into / file.name)
    half = {name: tensor.astype(np.float16) for name, tensor in load_file(folder / _WEIGHTS).items()}
    save_file(half, into / _WEIGHTS, metadata={"format": "pt"})
    seal = {"recipe": recipe, "sha256": hashlib.sha256((into / _WEIGHTS).read_bytes()).hexdigest()}
    (into / _SEAL).write_text(json.dumps(seal, indent=1) + "\n")


def made_by() -> str:
    """Return the digest of the recipe that made what is shipped."""
    return str(_seal()["recipe"])


def unpack(folder: Path) -> None:
    """Make `folder` a whole model folder, if it is missing; raises PartUnavailable where the package is damaged."""
    shipped = (SHIPPED / _WEIGHTS).read_bytes()
    sha256, expected = hashlib.sha256(shipped).hexdigest(), _seal()["sha256"]
    if sha256 != expected:
        raise PartUnavailable(
            f"{SHIPPED / _WEIGHTS} has SHA-256 {sha256}, and {expected} is expected. Nothing was started. Install "
            "clawstream again, or check this file out again"
        )
    with drafted(folder) as draft:
        for file in SHIPPED.iterdir():
            if file.name not in (_WEIGHTS, _SEAL):
                shutil.copyfile(file, draft / file.name)
        whole = {name: tensor.astype(np.float32) for name, tensor in load_file(SHIPPED / _WEIGHTS).items()}
        save_file(whole, draft / _WEIGHTS, metadata={"format": "pt"})


@contextmanager
def drafted(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that is renamed to `folder` after the block; where the block fails, it is deleted.

    Of two processes that make the same folder at once, the first one's stays.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        yield draft
        try:
            draft.replace(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _seal() -> dict[str, str]:
    return dict(json.loads((SHIPPED / _SEAL).read_text()))


def base_policy(cache_dir: Path, base: str = "demo") -> Path:
    """Return the folder of the policy by a recipe; where it has to be built, progress goes to stderr."""
    folder = folder_of(cache_dir, RECIPES[base])
    if folder.is_dir():
        return folder
    if RECIPES[base].digest() == made_by():
        unpack(folder)
        return folder
    build = [sys.executable, "-m", "clawstream.simulation.policy.build", "--cache-dir", str(cache_dir), "--base", base]
    found = subprocess.run(build, stdout=subprocess.DEVNULL, check=False)
    if found.returncode != 0 or not folder.is_dir():
        raise PartUnavailable(
            f"the tiny policy could not be built (exit code {found.returncode}; its output is above). "
            "Nothing was started"
        )
    return folder
