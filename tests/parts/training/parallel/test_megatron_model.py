"""A model that Megatron-Core cuts over two processes says what transformers says of the same folder."""

from pathlib import Path
from typing import Any

import pytest
import torch

from clawstream.errors import ConfigError
from clawstream.inference.model_folder import weight_files
from clawstream.training.base_folder import tensors_of
from clawstream.training.gating import PiecewiseCache, write
from clawstream.training.megatron.shape import Sizes
from clawstream.training.model import TokenScores
from clawstream.training.processes import Processes
from clawstream.training.step.losses import Suffix
from clawstream.training.torch_model import TorchModel
from tests.parts.training.parallel import families
from tests.parts.training.parallel.conftest import QUESTIONS
from tests.parts.training.step import head_memory

TENSOR = Sizes(processes=2, tensor=2)
PIPELINE = Sizes(processes=2, pipeline=2)
DATA = Sizes(processes=2)
# Slow, as CI alone installs the extra `megatron`; the processes' first imports take half a minute on a busy machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
CUTS = [
    pytest.param(TENSOR, id="tensor"),
    pytest.param(PIPELINE, id="pipeline"),
    pytest.param(DATA, id="data"),
]
LENGTHS = [(5, 9, 1.0), (12, 3, 0.7), (3, 20, 1.0), (1, 1, 1.0), (7, 14, 1.3)]


@pytest.fixture(scope="module")
def suffixes() -> list[Suffix]:
    """Answers of unlike lengths and temperatures."""
    draw = torch.Generator().manual_seed(1)

    def tokens(count: int) -> list[int]:
        drawn: list[int] = torch.randint(0, families.VOCABULARY, (count,), generator=draw).tolist()
        return drawn

    return [Suffix(tokens(prompt), tokens(response), temperature) for prompt, response, temperature in LENGTHS]


@pytest.mark.parametrize("sizes", CUTS)
@pytest.mark.parametrize("family", families.CONFIGS)
def test_log_probs_and_likeliest_tokens_are_transformers_own(
    two: Processes, models: dict[str, Path], suffixes: list[Suffix], family: str, sizes: Sizes
) -> None:
    whole = TorchModel.load(models[family])
    expected = whole.score(suffixes, weights=None, budget_tokens=64)
    expected_tops = whole.likeliest(suffixes, num_tokens=60, weights=None, budget_tokens=64)

    two.ask(f"{QUESTIONS}:load", models[family], sizes)

    for found in two.ask(f"{QUESTIONS}:score", suffixes):
        for mine, its in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, its, atol=1e-4, rtol=0)
    for tops in two.ask(f"{QUESTIONS}:likeliest", suffixes, 60):
        for suffix, top, its_top in zip(suffixes, tops, expected_tops, strict=True):
            torch.testing.assert_close(top.logp_TK, its_top.logp_TK, atol=1e-4, rtol=0)
            named = whole.token_scores([suffix], [top.ids_TK]).among_BTK[
                0
            ]  # of two that are as likely either may come first
            torch.testing.assert_close(top.logp_TK, named, atol=1e-4, rtol=0)
            assert all(len(set(row)) == len(row) for row in top.ids_TK.tolist())


@pytest.mark.parametrize("sizes", CUTS)
@pytest.mark.parametrize("family", families.CONFIGS)
def test_answers_are_written_token_by_token_as_transformers_writes_them(
    two: Processes, models: dict[str, Path], suffixes: list[Suffix], family: str, sizes: Sizes
) -> None:
    """Beyond a window's width, and all but greedily too."""
    questions = [*suffixes, suffixes[1]._replace(temperature=1e-2)]
    expected = write(TorchModel.load(models[family]), questions, limit_tokens=11, seed=7, budget_tokens=64)

    two.ask(f"{QUESTIONS}:load", models[family], sizes)

    assert two.ask(f"{QUESTIONS}:written", questions, 11, 64) == [expected, expected]


@pytest.mark.parametrize("sizes", CUTS)
@pytest.mark.parametrize("family", families.CONFIGS)
def test_an_exported_model_has_the_bytes_that_it_was_loaded_from(
    two: Processes, models: dict[str, Path], tmp_path: Path, family: str, sizes: Sizes
) -> None:
    two.ask(f"{QUESTIONS}:load", models[family], sizes)
    two.ask(f"{QUESTIONS}:save", tmp_path)

    before, after = (dict(tensors_of(weight_files(folder))) for folder in (models[family], tmp_path))
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name](), before[name]()) for name in before)
    assert (tmp_path / "tokenizer.json").exists()
    assert len(weight_files(tmp_path)) == 2  # each process writes what it put together


def test_what_is_published_is_as_exact_as_the_base(two: Processes, tmp_path: Path) -> None:
    (tmp_path / "published").mkdir()
    base = families.build(tmp_path / "base", "qwen3", dtype=torch.bfloat16)
    two.ask(f"{QUESTIONS}:load", base, TENSOR)
    two.ask(f"{QUESTIONS}:save", tmp_path / "published")

    before, after = (dict(tensors_of(weight_files(folder))) for folder in (base, tmp_path / "published"))
    assert all(torch.equal(after[name](), before[name]()) for name in before)
    assert {read().dtype for read in after.values()} == {torch.bfloat16}


@pytest.mark.parametrize("sizes", CUTS)
@pytest.mark.parametrize("family", families.CONFIGS)
def test_entropies_and_gradients_are_those_of_the_whole(
    two: Processes, models: dict[str, Path], suffixes: list[Suffix], family: str, sizes: Sizes
) -> None:
    """In one piece and in many."""
    whole = TorchModel.load(models[family])
    scores = whole.token_scores(suffixes)
    scores.logp_BT.nansum().backward()  # type: ignore[no-untyped-call]

    two.ask(f"{QUESTIONS}:load", models[family], sizes)
    for answers in (
        two.ask(f"{QUESTIONS}:look_and_gradients", suffixes),
        two.ask(f"{QUESTIONS}:look_and_gradients", suffixes, 5 * 4 * families.VOCABULARY),
    ):
        assert_looked(answers, scores, whole, sizes)


def test_memory_of_logits_is_bounded_however_many_tokens_are_scored_and_learned_from(
    two: Processes, tmp_path: Path
) -> None:
    limit_bytes = head_memory.HEAD_ROWS * 4 * -(-head_memory.VOCABULARY // 2)
    two.ask(f"{QUESTIONS}:load", families.build(tmp_path, "qwen3", vocabulary=head_memory.VOCABULARY), TENSOR)

    found = two.ask(f"{QUESTIONS}:head_bytes", head_memory.suffixes(8), limit_bytes)

    assert sum(num_tokens for num_tokens, _, _ in found) == head_memory.VOCABULARY
    for _, largest_bytes, most_bytes in found:
        assert 0 < largest_bytes <= limit_bytes
        # Logits, and thrice that computed from them; Gloo's two threads let go of what leads to a sum a little later.
        assert most_bytes <= (4 + 2) * limit_bytes


def assert_looked(answers: list[Any], scores: TokenScores, whole: TorchModel, sizes: Sizes) -> None:
    """Assert that processes found the entropies and gradients of the whole."""
    entropies = [entropy_BT for entropy_BT, _ in answers if entropy_BT is not None]
    assert entropies  # a pipeline's last stage has them
    for entropy_BT in entropies:
        torch.testing.assert_close(entropy_BT, scores.entropy_BT, atol=1e-4, rtol=0, equal_nan=True)
    gradients = answers[0][1] | answers[1][1]
    assert gradients.keys() == whole.trained.keys()
    for name, parameter in whole.trained.items():
        assert parameter.grad is not None
        expected = parameter.grad * sizes.data  # each copy of the model was given all of them
        torch.testing.assert_close(gradients[name], expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("sizes", CUTS)
@pytest.mark.parametrize("family", families.CONFIGS)
def test_an_adapter_begins_says_and_learns_as_pefts_does(
    two: Processes, models: dict[str, Path], suffixes: list[Suffix], tmp_path: Path, family: str, sizes: Sizes
) -> None:
    whole = TorchModel.load(models[family], lora_rank=3, seed=5)
    two.ask(f"{QUESTIONS}:load", models[family], sizes, 3, 5)
    assert_same_adapter(whole, two, tmp_path / "begun")

    with torch.no_grad():
        for parameter in whole.trained.values():
            parameter.normal_(std=0.3)
    whole.save(tmp_path / "other")
    two.ask(f"{QUESTIONS}:restore", tmp_path / "other")
    expected = whole.score(suffixes, weights=None, budget_tokens=64)
    whole.token_scores(suffixes).logp_BT.nansum().backward()  # type: ignore[no-untyped-call]

    for found in two.ask(f"{QUESTIONS}:score", suffixes):
        for mine, its in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, its, atol=1e-4, rtol=0)
    answers = two.ask(f"{QUESTIONS}:look_and_gradients", suffixes)
    gradients = answers[0][1] | answers[1][1]
    assert gradients.keys() == whole.trained.keys()
    for name, parameter in whole.trained.items():
        assert parameter.grad is not None
        torch.testing.assert_close(gradients[name], parameter.grad * sizes.data, atol=1e-3, rtol=1e-3)
    assert_same_adapter(whole, two, tmp_path / "after")


def test_rows_without_padding_are_read_without_a_mask_and_layers_share_those_that_there_are() -> None:
    reading = PiecewiseCache(torch.ones(2, 5))
    with reading.piece(5):
        assert reading.seen(5, None) is None
        assert reading.seen(5, 5) is None
        within = reading.seen(5, 3)
        assert within is not None
        assert within is reading.seen(5, 3)
        assert within[0, 0].tolist() == [[0 <= at - to < 3 for to in range(5)] for at in range(5)]
    with reading.piece(1):
        for window, expected in ((None, [True] * 6), (3, [False] * 3 + [True] * 3)):
            seen = reading.seen(1, window)
            assert seen is not None
            assert seen[0, 0].tolist() == [expected]


def test_an_adapter_of_another_rank_and_a_folder_without_one_are_refused(
    two: Processes, models: dict[str, Path], tmp_path: Path
) -> None:
    TorchModel.load(models["qwen3"], lora_rank=2).save(tmp_path)
    two.ask(f"{QUESTIONS}:load", models["qwen3"], TENSOR, 3)

    for said in two.ask(f"{QUESTIONS}:refusal", tmp_path):
        assert "o_proj.lora_A.default.weight has shape (2, 32), expected (3, 32)" in said  # not those of a part
        assert "the LoRA rank, that this policy was started with" in said
    for said in two.ask(f"{QUESTIONS}:refusal", models["qwen3"]):
        assert "holds no adapter, expected one. Nothing is trained. Name the LoRA rank" in said
    two.ask(f"{QUESTIONS}:load", models["qwen3"], TENSOR)
    for said in two.ask(f"{QUESTIONS}:refusal", tmp_path):
        assert "holds an adapter, expected none. Nothing is trained. Name the LoRA rank" in said


def assert_same_adapter(whole: TorchModel, two: Processes, folder: Path) -> None:
    """Assert that both publish the same files."""
    (folder / "whole").mkdir(parents=True)
    (folder / "cut").mkdir()
    whole.save(folder / "whole")
    two.ask(f"{QUESTIONS}:save", folder / "cut")
    names = {path.name for path in (folder / "whole").iterdir()}
    assert {path.name for path in (folder / "cut").iterdir()} == names
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (folder / "cut" / name).read_bytes() == (folder / "whole" / name).read_bytes()


def test_a_model_that_cannot_be_cut_so_is_refused(models: dict[str, Path]) -> None:
    from clawstream.training.megatron.shape import configuration, refuse_uneven, shape_of

    shape = shape_of(models["qwen3"], configuration(models["qwen3"]))
    with pytest.raises(ConfigError, match="num_attention_heads = 4, where the Megatron trainer needs a multiple of 3"):
        refuse_uneven(models["qwen3"], shape, Sizes(processes=3, tensor=3))
    with pytest.raises(ConfigError, match="num_hidden_layers = 2"):
        refuse_uneven(models["qwen3"], shape, Sizes(processes=4, pipeline=4))


def test_processes_that_are_cut_again_keep_no_groups_of_the_cut_before(two: Processes) -> None:
    cuts = [TENSOR, PIPELINE, DATA]

    for counts in two.ask(f"{QUESTIONS}:groups_after_joining", cuts * 2):
        assert counts[:3] == counts[3:]
