"""Log-probs against transformers' own logits, one row at a time; weights swapped, saved and loaded."""

import gc
import json
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, Qwen2Config, Qwen3Config

from clawstream.errors import ConfigError, UnusableCheckpoint
from clawstream.inference.model_folder import weight_files
from clawstream.training import model as training_model
from clawstream.training import torch_model
from clawstream.training.base_folder import FrozenLinear
from clawstream.training.step.losses import Suffix
from clawstream.training.torch_model import TorchModel
from tests.parts.training import tiny
from tests.parts.training.step import head_memory

RAGGED = [
    Suffix((5, 6, 7), (8, 9), 1.0),
    Suffix((1,), (2, 3, 4, 5, 6, 7), 0.6),
    Suffix(tuple(range(20)), (1,), 0.0),
]


def every(folder: Path, suffix: Suffix) -> torch.Tensor:
    """The definition [T, V]: all logits of one unpadded row, a softmax at the temperature, the response's places."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([[*suffix.prompt_ids, *suffix.response_ids]])
    with torch.no_grad():
        logp = (model(ids).logits[0].double() / (suffix.temperature or 1.0)).log_softmax(-1)
    logp_TV: torch.Tensor = logp[len(suffix.prompt_ids) - 1 : -1].float()
    return logp_TV


def alone(folder: Path, suffix: Suffix) -> torch.Tensor:
    """The log-probs of the response's own tokens by that."""
    return every(folder, suffix).gather(1, torch.tensor(suffix.response_ids).unsqueeze(1)).squeeze(1)


def test_a_ragged_batch_has_the_log_probs_of_each_row_alone(base: Path) -> None:
    logp_BT = TorchModel.load(base).logprobs(RAGGED)

    for row, suffix in enumerate(RAGGED):
        torch.testing.assert_close(logp_BT[row, : len(suffix.response_ids)], alone(base, suffix), atol=1e-5, rtol=1e-5)
        assert bool(logp_BT[row, len(suffix.response_ids) :].isnan().all())


@pytest.mark.parametrize("budget", [1, 10, 1000])
def test_scores_come_in_order_and_do_not_depend_on_the_budget(base: Path, budget: int) -> None:
    scores = TorchModel.load(base).score(RAGGED, weights=None, budget_tokens=budget)

    for found, suffix in zip(scores, RAGGED, strict=True):
        torch.testing.assert_close(found, alone(base, suffix), atol=1e-5, rtol=1e-5)


def test_logits_in_pieces_give_the_same_log_probs_and_gradients(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gradient() -> tuple[torch.Tensor, torch.Tensor]:
        model = TorchModel.load(base)
        logp_BT = model.logprobs(RAGGED)
        logp_BT.nansum().backward()  # type: ignore[no-untyped-call]
        grads = [p.grad.flatten() for p in model.trained.values() if p.grad is not None]
        return logp_BT.detach(), torch.cat(grads)

    whole = gradient()
    monkeypatch.setattr(training_model, "HEAD_BYTES", 2 * 4 * tiny.VOCABULARY)
    pieces = gradient()

    torch.testing.assert_close(pieces[0], whole[0], equal_nan=True)
    torch.testing.assert_close(pieces[1], whole[1])


def test_memory_of_logits_is_bounded_however_many_tokens_are_scored_and_learned_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TorchModel.load(tiny.build(tmp_path, vocabulary=head_memory.VOCABULARY))
    limit_bytes = head_memory.HEAD_ROWS * 4 * head_memory.VOCABULARY
    monkeypatch.setattr(training_model, "HEAD_BYTES", limit_bytes)

    largest_bytes, most_bytes = head_memory.held(model, head_memory.suffixes(8), head_memory.VOCABULARY)

    assert 0 < largest_bytes <= limit_bytes
    assert most_bytes <= 4 * limit_bytes  # logits, and thrice that computed from them


def test_a_look_has_the_entropy_of_each_place_and_the_log_probs_of_the_tokens_named(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TorchModel.load(base)
    among = [torch.arange(3).repeat(len(s.response_ids), 1) + 4 for s in RAGGED]
    for head_tokens in (4096, 2):
        monkeypatch.setattr(training_model, "HEAD_BYTES", head_tokens * 4 * tiny.VOCABULARY)
        scores = model.token_scores(RAGGED, among)
        assert scores.entropy_BT is not None
        for row, s in enumerate(RAGGED):
            num_tokens, logp_TV = len(s.response_ids), every(base, s)
            torch.testing.assert_close(scores.logp_BT[row, :num_tokens], alone(base, s), atol=1e-5, rtol=1e-5)
            entropy_T = -(logp_TV.exp() * logp_TV).sum(1)
            torch.testing.assert_close(scores.entropy_BT[row, :num_tokens], entropy_T, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(scores.among_BTK[row, :num_tokens], logp_TV[:, 4:7], atol=1e-5, rtol=1e-5)
            assert bool(scores.entropy_BT[row, num_tokens:].isnan().all())
            assert bool(scores.among_BTK[row, num_tokens:].isnan().all())
    assert scores.entropy_BT is not None
    assert not scores.entropy_BT.requires_grad
    assert scores.among_BTK.requires_grad


@pytest.mark.parametrize("at_once", [1, 3, 1000])
def test_scores_have_the_gradient_of_log_probs_however_many_are_computed_at_once(
    base: Path, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_model, "SCORED_BYTES", at_once * 4 * tiny.VOCABULARY)
    model, random = TorchModel.load(base), torch.Generator().manual_seed(0)
    logits_NV = (9 * torch.randn(7, tiny.VOCABULARY, generator=random)).requires_grad_()
    ids_NE = torch.randint(0, 5, (7, 3), generator=random)  # some of a place are alike
    slope_NE = torch.randn(7, 3, generator=random)
    found = model._scores(logits_NV, ids_NE, entropy=True)[0], logits_NV.log_softmax(1).gather(1, ids_NE)
    torch.testing.assert_close(*(torch.autograd.grad(logp_NE, logits_NV, slope_NE) for logp_NE in found))


def test_a_token_that_cannot_come_has_no_part_in_the_entropy(base: Path) -> None:
    logits_NV = torch.tensor([[0.3, -torch.inf, 2.0, 1.1]])
    _, entropy_N = TorchModel.load(base)._scores(logits_NV, torch.tensor([[0]]), entropy=True)
    torch.testing.assert_close(entropy_N, torch.special.entr(logits_NV.softmax(1)).sum(1))


@pytest.mark.parametrize("bias", [False, True])
def test_the_temperature_divides_all_that_a_head_says(base: Path, bias: bool) -> None:
    model = TorchModel.load(base)
    old = model._core.get_output_embeddings()
    head = torch.nn.Linear(old.in_features, old.out_features, bias=bias)
    model._core.set_output_embeddings(head)
    hidden_NH, scale_N = torch.randn(4, old.in_features), torch.tensor([0.5, 0.7, 1.0, 1.3])
    torch.testing.assert_close(model._logits(hidden_NH, scale_N), head(hidden_NH) / scale_N.unsqueeze(1))


def test_the_likeliest_tokens_come_with_their_log_probs_in_order(base: Path) -> None:
    found = TorchModel.load(base).likeliest(RAGGED, num_tokens=5, weights=None, budget_tokens=10)
    for top, s in zip(found, RAGGED, strict=True):
        expected = every(base, s).topk(5)
        assert top.ids_TK.tolist() == expected.indices.tolist()
        torch.testing.assert_close(top.logp_TK, expected.values, atol=1e-5, rtol=1e-5)


def test_a_model_is_published_as_exact_as_its_base(bfloat16_base: Path, base: Path, tmp_path: Path) -> None:
    for folder, dtype in ((base, torch.float32), (bfloat16_base, torch.bfloat16)):
        model = TorchModel.load(folder)
        before = model.copy()
        model.save(tmp_path / str(dtype))
        assert {value.dtype for value in load_file(tmp_path / str(dtype) / "model.safetensors").values()} == {dtype}
        again = AutoModelForCausalLM.from_pretrained(tmp_path / str(dtype), dtype="auto")
        assert {p.dtype for p in again.parameters()} == {dtype}
        assert all(torch.equal(before[name], value) for name, value in model.copy().items())
        assert model.rounds == (dtype is not torch.float32)
    published = {f.name: f.stat().st_size for f in (tmp_path / "torch.bfloat16").glob("*.safetensors")}
    assert sum(published.values()) < 1.1 * (bfloat16_base / "model.safetensors").stat().st_size


def test_padding_gets_no_gradient_and_gives_none(base: Path) -> None:
    model = TorchModel.load(base)
    model.logprobs(RAGGED).nansum().backward()  # type: ignore[no-untyped-call]

    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.trained.values())


def test_other_weights_are_held_for_a_while_and_the_current_ones_come_back(base: Path) -> None:
    model = TorchModel.load(base)
    before = model.copy()
    zeros = {name: torch.zeros_like(value) for name, value in before.items()}

    flat = model.score(RAGGED, weights=zeros, budget_tokens=100)[0]

    torch.testing.assert_close(flat, torch.full((2,), -float(torch.tensor(tiny.VOCABULARY).log())))
    assert all(torch.equal(model.trained[name], value) for name, value in before.items())


def test_a_saved_model_is_a_folder_that_engines_load(base: Path, tmp_path: Path) -> None:
    model = TorchModel.load(base)
    with torch.no_grad():
        model.trained["model.norm.weight"].mul_(2)
    model.save(tmp_path)

    torch.testing.assert_close(alone(tmp_path, RAGGED[0]), model.logprobs(RAGGED)[0, :2].detach(), atol=1e-5, rtol=1e-5)
    assert (tmp_path / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    assert [p.name for p in tmp_path.glob("*.safetensors")] == ["model.safetensors"]


def test_a_large_model_is_saved_in_pieces_that_engines_and_trainers_read(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_model, "SHARD", "20KB")
    model, other = TorchModel.load(base), TorchModel.load(base)
    with torch.no_grad():
        model.trained["model.norm.weight"].mul_(2)
    model.save(tmp_path)
    other.restore(tmp_path)

    assert len(weight_files(tmp_path)) > 2
    assert all(torch.equal(value, other.trained[name]) for name, value in model.trained.items())
    torch.testing.assert_close(alone(tmp_path, RAGGED[0]), model.logprobs(RAGGED)[0, :2].detach(), atol=1e-5, rtol=1e-5)


def test_a_fresh_adapter_changes_nothing_and_only_it_is_trained(base: Path) -> None:
    model = TorchModel.load(base, lora_rank=2, seed=3)

    torch.testing.assert_close(model.logprobs(RAGGED)[0, :2].detach(), alone(base, RAGGED[0]), atol=1e-5, rtol=1e-5)
    assert all("lora" in name for name in model.trained)


def test_an_adapter_comes_back_from_its_folder(base: Path, tmp_path: Path) -> None:
    model = TorchModel.load(base, lora_rank=2, seed=3)
    with torch.no_grad():
        for parameter in model.trained.values():
            parameter.add_(0.1)
    model.save(tmp_path)

    other = TorchModel.load(base, lora_rank=2, seed=4)
    other.restore(tmp_path)

    assert all(torch.equal(other.trained[name], value) for name, value in model.copy().items())
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 2
    assert [p.name for p in tmp_path.glob("*.safetensors")] == ["adapter_model.safetensors"]


def test_an_adapter_of_another_rank_is_refused(base: Path, tmp_path: Path) -> None:
    TorchModel.load(base, lora_rank=2).save(tmp_path)

    with pytest.raises(UnusableCheckpoint, match=r"lora_A.*expected \(4, 32\)"):
        TorchModel.load(base, lora_rank=4).restore(tmp_path)


def test_a_folder_without_a_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnusableCheckpoint, match=str(tmp_path)):
        TorchModel.load(tmp_path)


def test_a_model_file_cut_short_is_refused(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path, dirs_exist_ok=True)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])

    with pytest.raises(UnusableCheckpoint, match=str(tmp_path)):
        TorchModel.load(tmp_path)


def test_a_missing_weight_is_refused_instead_of_made_up(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(UnusableCheckpoint, match=r"model\.norm\.weight"):
        TorchModel.load(tmp_path)


def test_a_family_that_caps_its_logits_is_refused(tmp_path: Path) -> None:
    config = Gemma2Config(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        final_logit_softcapping=0.01,
        initializer_range=0.5,
        pad_token_id=0,
    )
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)

    with pytest.raises(ConfigError, match="caps or scales"):
        TorchModel.load(tmp_path)


def test_what_needs_no_gradient_is_computed_without_a_checkpoint(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = TorchModel.load(base, recompute_layers=True)
    expected = model.score(RAGGED, weights=None, budget_tokens=64)

    def checkpoint(*_args: object, **_options: object) -> None:
        raise AssertionError("there is no backward pass")

    monkeypatch.setattr("clawstream.training.base_folder.checkpoint", checkpoint)
    found = model.score(RAGGED, weights=None, budget_tokens=64)
    assert all(map(torch.equal, found, expected))
    with pytest.raises(AssertionError, match="no backward pass"):
        model.logprobs(RAGGED)


def test_a_model_whose_layers_are_computed_again_is_out_of_memory_once_it_is_let_go_of(base: Path) -> None:
    model = TorchModel.load(base, recompute_layers=True)
    model.logprobs(RAGGED).nansum().backward()  # type: ignore[no-untyped-call]
    layer = weakref.ref(model._core.get_decoder().layers[0])
    gc.collect()
    gc.disable()  # as between two of its rounds
    try:
        del model
        assert layer() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("family", [Qwen2Config, Qwen3Config])
def test_matrices_under_an_adapter_are_kept_as_they_are_multiplied_and_the_numbers_stay(
    tmp_path: Path, family: type[Qwen2Config | Qwen3Config]
) -> None:
    config = family(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    kept, wide = (TorchModel.load(tmp_path, lora_rank=2, dtype=torch.bfloat16) for _ in range(2))
    frozen = [module for module in wide._core.modules() if isinstance(module, FrozenLinear)]
    assert len(frozen) == 2 * 7
    for module in frozen:
        for parameter in module.parameters():
            assert parameter.dtype == torch.bfloat16
            parameter.data = parameter.float()
    in_halves = {n for n, p in kept._core.named_parameters() if p.dtype != torch.float32}
    assert all(".layers." in name and ".base_layer." in name for name in in_halves)
    assert all(p.dtype == torch.float32 for p in kept.trained.values())

    suffixes = [Suffix(tuple(range(9)), tuple(range(9, 20)), 0.8), Suffix((3, 1), (4, 1, 5), 1.0)]
    found = []
    for model in (kept, wide):
        torch.manual_seed(0)
        for parameter in model.trained.values():
            parameter.data.normal_(std=0.1)
        logp_BT = model.logprobs(suffixes)
        logp_BT.nansum().backward()  # type: ignore[no-untyped-call]
        found.append([logp_BT.detach(), *(p.grad for p in model.trained.values())])
    for one, other in zip(*found, strict=True):
        assert one is not None
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert any(bool(gradient.any()) for gradient in found[0][1:] if gradient is not None)
