"""What a sample has to be: whatever passes breaks no step, and what doesn't is said in words."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from transformers import GPT2Config, Qwen3Config

from clawstream.config import TrainingSettings
from clawstream.errors import UnusableCheckpoint
from clawstream.events import SampleAssembled, VersionSpan
from clawstream.training.base_folder import limits_of
from clawstream.training.batches.trainable import ModelLimits, flaw
from clawstream.training.step.trainer import Trainer
from tests.examples import examples
from tests.parts.training import tiny

GOOD = tiny.sample("good", hinted=True)
LIMITS = ModelLimits(vocabulary_tokens=tiny.VOCABULARY, context_tokens=32)
N = len(GOOD.response_ids)

FLAWS: list[tuple[dict[str, Any], str]] = [
    ({"prompt_ids": ()}, "a prompt without a token"),
    ({"hinted_prompt_ids": ()}, "a prompt without a token"),
    ({"response_ids": (), "response_logprobs": (), "trained": ()}, "response_ids is empty"),
    ({"response_logprobs": GOOD.response_logprobs * 2}, "response_logprobs has 14 values: expected 7"),
    ({"response_logprobs": GOOD.response_logprobs[1:]}, "response_logprobs has 6 values: expected 7"),
    ({"trained": GOOD.trained * 2}, "trained has 14 values: expected 7"),
    ({"trained": GOOD.trained[1:]}, "trained has 6 values: expected 7"),
    ({"trained": (1,) * (N - 1) + (-5,)}, "trained has a -5"),
    ({"num_thinking": N + 1}, "num_thinking is 8: expected 0 to 7"),
    ({"response_ids": (96,) * N}, "response_ids has the id 96: expected ids from 0 to 95"),
    ({"response_ids": (-1,) * N}, "response_ids has the id -1"),
    ({"prompt_ids": (10**6,)}, "prompt_ids has the id 1000000"),
    ({"hinted_prompt_ids": (1, 96)}, "hinted_prompt_ids has the id 96"),
    ({"prompt_ids": (1,) * 26}, "33 tokens: expected at most 32"),
    ({"hinted_prompt_ids": (1,) * 26}, "33 tokens: expected at most 32"),
    ({"reward": 10**9}, "the judge's part of the reward is 1000000000"),
    ({"total_reward": 1.5}, "the reward is 1.5: expected -1 to 1"),
    ({"total_reward": math.nan}, "the reward is nan"),
    ({"temperature": -1.0}, "the temperature is -1"),
    ({"temperature": math.nan}, "the temperature is nan"),
    ({"temperature": math.inf}, "the temperature is inf"),
    ({"versions": (VersionSpan(policy_version=-1, num_tokens=N),)}, "a version below 0"),
]


@pytest.mark.parametrize(("changes", "words"), FLAWS)
def test_a_flaw_is_said_in_words(changes: dict[str, Any], words: str) -> None:
    assert words in (flaw(replace(GOOD, **changes), LIMITS) or "")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"prompt_ids": (95,) * 25},
        {"total_reward": None},
        {"total_reward": 0.25},
        {"temperature": 0.0},
        {"trained": (0,) * N},
    ],
)
def test_a_sample_at_the_limits_has_none(changes: dict[str, Any]) -> None:
    assert flaw(replace(GOOD, **changes), LIMITS) is None


def test_what_the_model_does_not_say_limits_nothing() -> None:
    assert flaw(replace(GOOD, prompt_ids=(10**6,) * 10**4), ModelLimits()) is None


IDS = st.lists(st.integers(0, tiny.VOCABULARY - 1), min_size=1, max_size=6).map(tuple)
ODD_IDS = IDS | st.sampled_from([(), (-1,), (tiny.VOCABULARY,)])


@st.composite
def odd_samples(draw: st.DrawFn) -> SampleAssembled:
    response = draw(ODD_IDS)
    about = st.sampled_from([len(response)] * 5 + [len(response) + 1])
    logprob = st.none() | st.floats(-50, 0, width=32) | st.sampled_from([math.inf, -math.inf, 3e38, -3e38])
    return replace(
        tiny.sample("odd"),
        prompt_ids=draw(ODD_IDS),
        hinted_prompt_ids=draw(st.none() | ODD_IDS),
        response_ids=response,
        response_logprobs=tuple(draw(logprob) for _ in range(draw(about))),
        trained=tuple(draw(st.integers(0, 1)) for _ in range(draw(about))),
        reward=draw(st.sampled_from([None, -1, 1, 1, 10**18])),
        total_reward=draw(st.sampled_from([None, -1.0, 1.0, 0.0, -0.25, 1e18, math.nan])),
        temperature=draw(st.sampled_from([0.0, 1e-300, 1e-6, 0.7, 2.0, 1e300, 1.0, -1.0, math.nan])),
    )


@examples(0.6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(odd_samples())
def test_a_sample_without_a_flaw_breaks_no_step(base: Path, odd: SampleAssembled) -> None:
    limits = limits_of(base)
    if flaw(odd, limits) is not None:
        return
    trainer = Trainer(base, TrainingSettings(kl=0.1))
    update = trainer.update([odd, GOOD], version=1, seed=0)
    assert update.grad_norm is not None
    assert math.isfinite(update.grad_norm)


def test_a_step_without_samples_leaves_the_weights_and_says_so(base: Path) -> None:
    update = Trainer(base, TrainingSettings()).update([], version=1, seed=0)

    assert (update.num_samples, update.loss.num_tokens, update.grad_norm) == (0, 0, None)


def test_the_limits_are_those_of_the_models_configuration(base: Path, tmp_path: Path) -> None:
    assert limits_of(base) == ModelLimits(vocabulary_tokens=96, context_tokens=1024)

    GPT2Config(vocab_size=50, n_positions=64).save_pretrained(tmp_path)
    assert limits_of(tmp_path) == ModelLimits(vocabulary_tokens=50, context_tokens=64)

    Qwen3Config(
        vocab_size=50, max_position_embeddings=64, rope_scaling={"rope_type": "linear", "factor": 4.0}
    ).save_pretrained(tmp_path)
    assert limits_of(tmp_path).context_tokens == 256


def test_a_folder_without_a_configuration_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(UnusableCheckpoint, match="no causal model"):
        limits_of(tmp_path)


def test_settings_that_a_plan_holds_whole_are_taken_again() -> None:
    chosen = TrainingSettings(method="topk", epochs=7)
    assert TrainingSettings.model_validate_json(chosen.model_dump_json()) == chosen


@pytest.mark.parametrize(
    ("said", "weight"),
    [({}, 1.0), ({"w_topk": 0.5}, 0.5), ({"method": "binary"}, None), ({"teacher": "http://teacher"}, 0.0)],
    ids=str,
)
def test_a_plan_says_how_much_the_teacher_s_distribution_counts(said: dict[str, Any], weight: float | None) -> None:
    planned = TrainingSettings(**said).resolved
    assert planned.w_topk == weight
    assert TrainingSettings.model_validate_json(planned.model_dump_json()).divergence_weight == (weight or 0.0)
