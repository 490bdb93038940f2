"""Answers in one row against answers in rows of their own, by models of each family that packs."""

import gc
import random
import weakref
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from clawstream.errors import ConfigError
from clawstream.training import torch_model
from clawstream.training.step.losses import Suffix
from clawstream.training.step.packing import pack
from clawstream.training.torch_model import TorchModel
from tests.examples import examples

VOCABULARY = 61
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=True)),
    "qwen3_with_a_window_in_some_layers": lambda: Qwen3ForCausalLM(
        Qwen3Config(**SHAPE, use_sliding_window=True, sliding_window=23, max_window_layers=1)
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=YARN)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=17)),
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    place = tmp_path_factory.mktemp(request.param)
    MODELS[request.param]().save_pretrained(place)
    return place


def test_every_family_that_packs_is_held_against_rows_of_their_own() -> None:
    assert {model().config.model_type for model in MODELS.values()} == torch_model.FAMILIES


@st.composite
def answers(draw: st.DrawFn) -> list[Suffix]:
    """Answers whose prompts fork from one another's, or continue one another with the answer in them."""
    rng = random.Random(draw(st.integers(0, 2**32)))

    def some(*lengths: int) -> tuple[int, ...]:
        return tuple(rng.randrange(VOCABULARY) for _ in range(rng.choice(lengths)))

    found: list[Suffix] = []
    for _ in range(draw(st.integers(1, 8))):
        last = rng.choice(found) if found else Suffix((), (), 1.0)
        begins = rng.choice(((), (*last.prompt_ids, *last.response_ids), tuple(last.prompt_ids)[:40]))
        found.append(Suffix(begins + some(1, 4, 50), some(1, 2, 30), rng.choice((0.0, 0.7, 1.0))))
    return found


def scored(model: TorchModel, suffixes: list[Suffix], weights: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the log-probs of each answer, and the gradient of their sum, each answer's with a weight of its own."""
    for parameter in model.trained.values():
        parameter.grad = None
    logp_BT = model.logprobs(suffixes)
    (logp_BT.nansum(1) * weights).sum().backward()  # type: ignore[no-untyped-call]
    gradient = torch.cat([p.grad.flatten() for p in model.trained.values() if p.grad is not None])
    return [logp_T[: len(s.response_ids)].detach() for logp_T, s in zip(logp_BT, suffixes, strict=True)], gradient


def padded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> TorchModel:
    with monkeypatch.context() as patch:
        patch.setattr(torch_model, "FAMILIES", frozenset())
        return TorchModel.load(folder)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Hold two gradients against each other by their largest part: single numbers may be sums that cancel out."""
    assert float((found - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


@pytest.mark.slow
@examples(0.12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(suffixes=answers())
def test_one_row_has_the_log_probs_and_the_gradient_of_rows_of_their_own(
    folder: Path, suffixes: list[Suffix], monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, alone = TorchModel.load(folder), padded(folder, monkeypatch)
    assert (packed.packs, alone.packs) == (True, False)
    weights_B = torch.linspace(-1, 2, len(suffixes))
    with monkeypatch.context() as patch:
        patch.setattr(torch_model, "SMALL_TOKENS", 60)
        patch.setattr(torch_model, "LARGE_TOKENS", 32)
        found, gradient = scored(packed, suffixes, weights_B)
    expected, expected_gradient = scored(alone, suffixes, weights_B)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    close(gradient, expected_gradient)


def test_a_changed_neighbour_leaves_log_probs_and_gradients_as_they_are(folder: Path) -> None:
    rng = random.Random(1)
    prompt = [rng.randrange(VOCABULARY) for _ in range(120)]
    kept = [Suffix(prompt, prompt[:20], 1.0), Suffix(prompt[:60] + prompt[:9], prompt[40:50], 1.0)]
    neighbours = [Suffix(prompt[:80] + [3] * 30, [4] * 9, 1.0), Suffix(prompt[:80] + [5] * 90, [6] * 40, 1.0)]
    model, weights_B = TorchModel.load(folder), torch.tensor([1.0, 2.0, 0.0])
    results = [scored(model, [*kept, neighbour], weights_B) for neighbour in neighbours]
    for one, other in zip(results[0][0][:2], results[1][0][:2], strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    close(*(gradient for _, gradient in results))


def test_the_order_of_answers_is_that_of_the_results(folder: Path) -> None:
    model = TorchModel.load(folder)
    suffixes = [Suffix(range(n, n + 30), range(n + 2, n + 3 + n % 5), 1.0) for n in range(9)]
    forward = model.score(suffixes, weights=None, budget_tokens=64)
    backward = model.score(suffixes[::-1], weights=None, budget_tokens=10_000)[::-1]
    for one, other in zip(forward, backward, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_layers_computed_again_give_the_same_gradient(folder: Path) -> None:
    suffixes = [Suffix(range(40), range(5, 30), 1.0), Suffix((*range(30), 9, 9), range(12), 0.5)]
    kept, again = TorchModel.load(folder), TorchModel.load(folder, recompute_layers=True)
    calls: list[TorchModel] = []
    for model in (kept, again):
        for layer in model._core.get_decoder().layers:
            layer.mlp.register_forward_pre_hook(lambda *_, model=model: calls.append(model))
    close(scored(again, suffixes, torch.ones(2))[1], scored(kept, suffixes, torch.ones(2))[1])
    assert (calls.count(kept), calls.count(again)) == (2, 4)


def forked(num_turns: int) -> list[Suffix]:
    """A session by a template that renders earlier answers otherwise than they were sampled."""
    rng, prompt = random.Random(0), tuple[int, ...]()
    found: list[Suffix] = []
    for _ in range(num_turns):
        prompt += tuple(rng.randrange(VOCABULARY) for _ in range(20))
        found.append(Suffix(prompt, tuple(rng.randrange(VOCABULARY) for _ in range(20)), 1.0))
    return found


def kept_bytes(model: TorchModel, suffixes: list[Suffix]) -> float:
    """Return what a forward pass leaves for the backward pass, a token of the row, whoever holds it."""
    before = {t.untyped_storage().data_ptr() for t in gc.get_objects() if type(t) is torch.Tensor}
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logp_BT = model.logprobs(suffixes)
    held = [t for t in gc.get_objects() if type(t) is torch.Tensor]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*saved, *held)}
    assert logp_BT.requires_grad
    return sum(num for at, num in storages.items() if at not in before) / len(pack([s.read_ids for s in suffixes]).ids)


@pytest.mark.slow
def test_a_forked_session_of_more_turns_keeps_no_more_for_each_token(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_model, "SMALL_TOKENS", 16)
    model = TorchModel.load(folder)
    kept_bytes(model, forked(2))
    assert kept_bytes(model, forked(40)) < 1.2 * kept_bytes(model, forked(10))


def test_half_precision_multiplies_as_such_and_keeps_weights_and_log_probs_exact(folder: Path) -> None:
    suffixes = [Suffix(range(40), range(5, 30), 1.0), Suffix((*range(30), 9, 9), range(12), 0.5)]
    exact, half = TorchModel.load(folder), TorchModel.load(folder, dtype=torch.bfloat16)
    assert half.packs
    with torch.no_grad():
        found, expected = half.logprobs(suffixes), exact.logprobs(suffixes)
    assert found.dtype == torch.float32
    assert {p.dtype for p in half.trained.values()} == {torch.float32}
    answered = expected.isfinite()
    assert 1e-5 < float((found - expected)[answered].abs().max()) < 0.15


class Halves(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Knows which half copies of a model's weights there are."""

    def __init__(self, model: TorchModel) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights = {p.data_ptr() for p in model.trained.values()}
        self.made: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute it as it would be."""
        found = func(*args, **kwargs or {})
        if func._schema.name == "aten::_to_copy" and args[0].data_ptr() in self._weights:
            self.made.append(weakref.ref(found))
        return found

    def numbers(self) -> int:
        return sum(half.numel() for ref in self.made if (half := ref()) is not None)


def test_layers_computed_again_leave_no_half_copy_of_their_matrices_in_a_pass(folder: Path) -> None:
    model = TorchModel.load(folder, dtype=torch.bfloat16, recompute_layers=True)
    halves, left = Halves(model), list[int]()
    model._core.get_decoder().norm.register_forward_pre_hook(lambda *_: left.append(halves.numbers()))
    with halves:
        model.logprobs([Suffix(range(40), range(5, 30), 1.0)])
    assert len(halves.made) > 10
    assert left == [0]


def test_answers_are_written_by_the_precision_of_everything_else(folder: Path) -> None:
    ids, exact = list(range(60)), TorchModel.load(folder)
    half = TorchModel.load(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        said, rounded = (model.logprobs([Suffix(ids[:1], ids[1:], 1.0)])[0] for model in (exact, half))
        found = []
        with half.reading(torch.ones(1, 1)) as read:
            for token, following in pairwise(ids):
                found.append(read(torch.tensor([[token]]))[0].log_softmax(-1)[following])
    read_T = torch.stack(found)
    rounding = (rounded - said).abs().mean()
    assert (read_T - said).abs().mean() > 0.5 * rounding
    assert (read_T - rounded).abs().mean() < 0.7 * rounding


def test_the_head_is_multiplied_exactly_whatever_else_is(folder: Path) -> None:
    half = TorchModel.load(folder, dtype=torch.bfloat16)
    hidden_NH = torch.randn(5, SHAPE["hidden_size"], generator=torch.Generator().manual_seed(0)).bfloat16()  # type: ignore[call-overload]
    with torch.no_grad():
        found = half._logits(hidden_NH, torch.ones(5))
        expected = hidden_NH.double() @ half._core.get_output_embeddings().weight.double().T
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-5)


def test_what_is_saved_names_no_attention_of_ours(folder: Path, tmp_path: Path) -> None:
    TorchModel.load(folder).save(tmp_path)
    assert torch_model.NAME not in (tmp_path / "config.json").read_text()
    AutoModelForCausalLM.from_pretrained(tmp_path)(input_ids=torch.tensor([[1, 2, 3]]))


def test_a_family_that_is_not_known_to_allow_it_gets_rows_of_its_own(tmp_path: Path) -> None:
    config = Gemma2Config(**SHAPE, final_logit_softcapping=None, pad_token_id=0)
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    model = TorchModel.load(tmp_path)
    assert not model.packs
    assert model.groups([Suffix((1,) * 30, (2,), 1.0), Suffix((1,) * 30, (3,), 1.0)], budget_tokens=40) == [[0], [1]]


def test_positions_that_follow_the_longest_of_a_pass_get_rows_of_their_own(tmp_path: Path) -> None:
    for rope_type in ("dynamic", "longrope"):
        rope: dict[str, Any] = {"rope_type": rope_type, "factor": 4.0, "rope_theta": 1e4}
        if rope_type == "longrope":
            rope |= {"original_max_position_embeddings": 64, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
        LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=rope)).save_pretrained(tmp_path / rope_type)
        assert not TorchModel.load(tmp_path / rope_type).packs


def test_a_model_whose_layers_can_t_be_computed_again_is_refused_the_switch(tmp_path: Path) -> None:
    shape = OpenAIGPTConfig(vocab_size=VOCABULARY, n_positions=64, n_embd=16, n_layer=1, n_head=2)
    OpenAIGPTLMHeadModel(shape).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="gradient_checkpointing: OpenAIGPTLMHeadModel has no layers"):
        TorchModel.load(tmp_path, recompute_layers=True)


WRONG: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], bool]] = {
    "a block without a mask": lambda _query, _key, mask: mask is None,
    "a block that sees others": lambda query, key, _mask: key.shape[2] > query.shape[2],
}


@pytest.mark.parametrize("factor", [3.0, torch.nan])
@pytest.mark.parametrize("where", WRONG)
def test_a_model_that_says_something_else_in_a_kind_of_block_is_not_packed(
    folder: Path, where: str, factor: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **more: Any) -> Any:
        output, weights = sdpa_attention_forward(module, query, key, value, mask, **more)
        return output * (factor if WRONG[where](query, key, mask) else 1.0), weights

    monkeypatch.setattr(torch_model, "sdpa_attention_forward", wrong)
    assert not TorchModel.load(folder).packs
    assert "packing=off" in caplog.text


def test_a_model_that_says_something_else_in_one_row_is_not_packed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def leaking(*args: Any, **more: Any) -> Any:
        return sdpa_attention_forward(
            *args[:4], None, **more
        )  # what a family would see that lets nobody say what is seen

    suffixes = [Suffix(range(40), range(5, 30), 1.0), Suffix((*range(30), 9, 9), range(12), 0.5)]
    expected = TorchModel.load(folder).logprobs(suffixes)
    monkeypatch.setattr(torch_model, "sdpa_attention_forward", leaking)
    model = TorchModel.load(folder)
    assert not model.packs
    assert "packing=off" in caplog.text
    torch.testing.assert_close(model.logprobs(suffixes), expected, atol=1e-4, rtol=1e-4, equal_nan=True)
