"""A policy small enough for tests: Qwen3's shape, random weights, and samples over its little vocabulary."""

import json
import random
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from clawstream.events import SampleAssembled, Sampling, VersionSpan, float32

VOCABULARY = 96


def build(
    folder: Path, *, width: int = 32, layers: int = 2, seed: int = 0, dtype: torch.dtype = torch.float32,
    vocabulary: int = VOCABULARY,
) -> Path:  # fmt: skip
    """Write a model folder with a file that stands for its tokenizer; return it."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    Qwen3ForCausalLM(config).to(dtype).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps({"stands for": "a tokenizer"}))
    return folder


def sample(
    name: str,
    *,
    reward: int | None = 1,
    hinted: bool = False,
    prompt_tokens: int = 9,
    response_tokens: int = 7,
    temperature: float = 1.0,
    version: int = 0,
    policy_id: str = "policy",
    judge: str = "judge",
    revision: int = 0,
    num_feedback: int | None = None,
    group_id: str | None = None,
) -> SampleAssembled:
    """A sample whose tokens follow from its name."""
    rng = random.Random(name)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(VOCABULARY) for _ in range(count))

    prompt = tokens(prompt_tokens)
    return SampleAssembled(
        session_id=f"session-{name}",
        turn_id=name,
        judge=judge,
        prompt_version="1",
        revision=revision,
        reward=reward,
        hint="keep it plain" if hinted else None,
        prompt_ids=prompt,
        hinted_prompt_ids=prompt + tokens(5) if hinted else None,
        response_ids=tokens(response_tokens),
        response_logprobs=float32(-rng.uniform(3, 6) for _ in range(response_tokens)),
        trained=(1,) * response_tokens,
        temperature=temperature,
        sampling=Sampling(
            temperature=temperature, top_p=1.0, top_k=None, max_tokens=response_tokens, seed=None, stop=()
        ),
        policy_id=policy_id,
        versions=(VersionSpan(policy_version=version, num_tokens=response_tokens),),
        num_earlier_turns=0,
        total_reward=None if reward is None else float(reward),
        num_feedback=num_feedback,
        group_id=group_id,
        step_index=None if group_id is None else 0,
    )
