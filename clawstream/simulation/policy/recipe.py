"""The recipe of the policy that simulates a large one: sizes, data and optimizer, and the hash that names the result.

The one rule: every change to the policy changes `digest`, so that a cached policy is never taken for another.
"""

import hashlib
import json
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from clawstream.simulation.policy import tokenizer
from clawstream.simulation.policy.calls import Calls
from clawstream.simulation.policy.conflicts import Conflict
from clawstream.simulation.policy.dialogues import Dialogue, Mix
from clawstream.simulation.problems import SumSet, all_of

_NUM_FINGERPRINTED = 500
LEARNING_RATE = 2e-4  # at which people teach it, in the demonstration and under `clawstream up`


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
        """Return the name of the policy: of these fields, the dialogues they lead to, and how those become tokens."""
        said = [asdict(d) for d in self.dialogues(_NUM_FINGERPRINTED)]
        words = tokenizer.core(self.mix.words).to_str()
        material = [asdict(self), said, words, tokenizer.CHAT_TEMPLATE]
        return hashlib.sha256(json.dumps(material, sort_keys=True).encode()).hexdigest()[:16]

    def dialogues(self, number: int) -> list[Dialogue]:
        """Return the first `number` dialogues that the policy is built on."""
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


def place(cache_dir: Path, recipe: Recipe) -> Path:
    """Return where the policy of this recipe is kept, whether it is there or not."""
    return cache_dir / f"simulated-policy-{recipe.digest()}"
