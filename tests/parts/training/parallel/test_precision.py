"""Processes multiply in half precision, and compute layers again, as one process does."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

from clawstream.training.megatron.shape import Sizes
from clawstream.training.processes import Processes
from clawstream.training.step.losses import Suffix
from clawstream.training.step.trainer import Trainer
from clawstream.training.stepping import Team
from clawstream.training.torch_model import TorchModel
from tests.parts.training.parallel import families
from tests.parts.training.parallel.conftest import QUESTIONS, Teams
from tests.parts.training.parallel.test_trainers import ADAPTER, CUTS, MIXED, same, settings_of, step, values, weights

pytestmark = pytest.mark.timeout(300)  # the processes' first imports take half a minute on a busy machine

HALF = {"dtype": "bfloat16"}
VOCABULARY = 1009
ROWS_OF_HEADS = {VOCABULARY, 505, 504}  # whole, and cut over two; nothing else in a step has such a side
AGAIN = {"gradient_checkpointing": True}
PARAMETRISATIONS = pytest.mark.parametrize(
    "trained", [pytest.param({}, id="all weights"), pytest.param(ADAPTER, id="adapter")]
)


@pytest.fixture(scope="module")
def of_many_words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose head can be told from its other matrices by its shape."""
    folder = tmp_path_factory.mktemp("of-many-words")
    Qwen3ForCausalLM(Qwen3Config(**families.COMMON | {"vocab_size": VOCABULARY})).save_pretrained(folder)
    return folder


def moved(start: Path, end: Path) -> torch.Tensor:
    """Return what a step added to all weights, in one row."""
    before, after = weights(start), weights(end)
    return torch.cat([(after[name] - before[name]).flatten() for name in sorted(after)])


@pytest.mark.slow
@PARAMETRISATIONS
@pytest.mark.parametrize("cut", CUTS)
def test_half_precision_gives_the_step_that_one_process_takes_by_it(
    base: Path, teams: Teams, tmp_path: Path, cut: dict[str, object], trained: dict[str, object]
) -> None:
    exact, alone = Trainer(base, settings_of(trained)), Trainer(base, settings_of(trained | HALF))
    team = teams(base, settings_of(trained | HALF | AGAIN | cut))
    step(exact, tmp_path / "start", MIXED, 1)  # before it half of an adapter has no gradient
    for one in (alone, team):
        one.restore(tmp_path / "start")

    names: dict[str, Trainer | Team] = {"exact": exact, "alone": alone, "team": team}
    updates = {name: step(one, tmp_path / name, MIXED, 2) for name, one in names.items()}

    figures = {name: torch.tensor([v for v in values(one) if v is not None]) for name, one in updates.items()}
    torch.testing.assert_close(figures["team"], figures["alone"], rtol=0.05, atol=5e-3)
    assert not torch.allclose(figures["team"], figures["exact"], rtol=1e-5, atol=1e-5)
    moves = {name: moved(tmp_path / "start", tmp_path / name) for name in names}
    assert functional.cosine_similarity(moves["team"], moves["alone"], dim=0) > 0.99


@pytest.mark.slow
@PARAMETRISATIONS
@pytest.mark.parametrize("cut", CUTS)
def test_layers_that_are_computed_again_give_the_same_step(
    base: Path, two: Processes, teams: Teams, tmp_path: Path, cut: dict[str, object], trained: dict[str, object]
) -> None:
    kept, again = (settings_of(trained | cut | more) for more in ({}, AGAIN))
    counts, updates = [], []
    for name, settings in (("kept", kept), ("again", again)):
        team = teams(base, settings)
        counts.append(two.ask(f"{QUESTIONS}:layers_of_a_step", MIXED))
        team.restore(None)
        updates.append(step(team, tmp_path / name, MIXED, 1))
    same(*updates)
    assert counts[1] == [2 * count for count in counts[0]]
    assert min(counts[0]) > 0


@pytest.mark.slow
@PARAMETRISATIONS
@pytest.mark.parametrize("cut", CUTS)
def test_in_half_precision_all_matrices_but_the_head_are_multiplied_by_it(
    of_many_words: Path, two: Processes, teams: Teams, cut: dict[str, object], trained: dict[str, object]
) -> None:
    for changes in ({}, HALF):
        teams(of_many_words, settings_of(trained | cut | changes))
        for products in two.ask(f"{QUESTIONS}:products_of_a_step", MIXED):
            of_layers = {dtype for dtype, sides in products if not ROWS_OF_HEADS & set(sides) and sides[1] > 1}
            of_heads = {dtype for dtype, sides in products if ROWS_OF_HEADS & set(sides)}
            assert of_layers == {"torch.bfloat16" if changes else "torch.float32"}
            assert of_heads <= {"torch.float32"}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_half_precision_rounds_where_one_process_does(two: Processes, models: dict[str, Path], family: str) -> None:
    """Positions are turned in float32: rounded, the angles of late tokens are the largest error of all."""
    draw = torch.Generator().manual_seed(3)
    rows = torch.randint(0, families.VOCABULARY, (4, 240), generator=draw).tolist()
    suffixes = [Suffix(row[:40], row[40:], 1.0) for row in rows]
    exact, half = (
        torch.cat(TorchModel.load(models[family], dtype=dtype).score(suffixes, weights=None, budget_tokens=256))
        for dtype in (torch.float32, torch.bfloat16)
    )

    two.ask(f"{QUESTIONS}:load", models[family], Sizes(processes=2), None, 0, torch.bfloat16)
    found = torch.cat(two.ask(f"{QUESTIONS}:score", suffixes)[0])

    assert (half - exact).abs().mean() > 1e-3
    assert (found - half).abs().mean() < 1e-3
