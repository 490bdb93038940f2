"""A policy that several processes train has the gate of one: the same figures, the same decision in each, no trace."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from clawstream.config import TrainingSettings
from clawstream.errors import StepRefused
from clawstream.training.processes import Processes
from clawstream.training.publishing import AnswerLikelihood
from clawstream.training.step.trainer import Trainer
from clawstream.training.stepping import Team
from tests.keeping import keep
from tests.parts.training import tiny
from tests.parts.training.parallel import gating
from tests.parts.training.parallel.conftest import Teams, forked_processes

pytestmark = pytest.mark.timeout(300)  # the processes' first imports take half a minute on a busy machine

GATING = "tests.parts.training.parallel.gating"
MEMBER = "clawstream.training.stepping"
FSDP = {"processes": 2}
MEGATRON = {"trainer": "megatron", "processes": 2}
TENSOR = MEGATRON | {"tensor_parallel": 2}
PIPELINE = MEGATRON | {"pipeline_parallel": 2}
ADAPTER = {"lora_rank": 4}
HALF = {"dtype": "bfloat16"}
ENDS = tuple(range(0, 96, 8))
WRITES = 4  # a version whose step is always followed by answers


def batch(name: str) -> list[Any]:
    """More samples than are looked at, of unlike lengths; of some of them nothing says how they should have been."""
    return [
        tiny.sample(
            f"{name}{i}", reward=(1, -1, None)[i % 3], hinted=i % 3 == 2 or i % 2 == 0, prompt_tokens=3 + 2 * i,
            response_tokens=3 + i, temperature=(1.0, 0.8)[i % 2],
        )
        for i in range(11)
    ]  # fmt: skip


def settings_of(changes: dict[str, object]) -> TrainingSettings:
    return TrainingSettings(**{"learning_rate": 3e-4, "micro_batch_tokens": 96} | changes)


@pytest.fixture(scope="module")
def ending(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base, some of whose tokens end an answer."""
    folder = tmp_path_factory.mktemp("ending")
    shutil.copytree(base, folder, dirs_exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS}))
    return folder


def flat(looks: Sequence[AnswerLikelihood]) -> list[float]:
    return [number for look in looks for number in (*look.logps, look.entropy_nats) if number is not None]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(FSDP, id="fsdp"),
        pytest.param(FSDP | ADAPTER, id="fsdp-adapter"),
        pytest.param(FSDP | {"method": "topk"}, id="fsdp-topk"),
        pytest.param(TENSOR, id="tensor"),
        pytest.param(TENSOR | ADAPTER, id="tensor-adapter"),
        pytest.param(PIPELINE, id="pipeline"),
        pytest.param(PIPELINE | ADAPTER, id="pipeline-adapter"),
        pytest.param(MEGATRON, id="data"),
        pytest.param(FSDP | HALF, id="fsdp-half"),
        pytest.param(MEGATRON | HALF, id="data-half"),
    ],
)
def test_all_processes_decide_by_the_figures_of_a_trainer_that_is_whole(
    ending: Path, two: Processes, changes: dict[str, object]
) -> None:
    decided_alike(ending, two, changes)


@pytest.mark.slow
def test_processes_that_are_cut_every_way_at_once_decide_by_the_figures_of_a_trainer_that_is_whole(
    ending: Path,
) -> None:
    """Two copies of two stages of two parts each."""
    processes = forked_processes(8)
    try:
        decided_alike(ending, processes, TENSOR | PIPELINE | ADAPTER | {"processes": 8})
    finally:
        processes.close()


def decided_alike(ending: Path, processes: Processes, changes: dict[str, object]) -> None:
    """Raises AssertionError where a process of these decides by other figures than a trainer that is whole."""
    near = 0.15 if "dtype" in changes else 1e-4  # nats; half precision rounds by the length of what is summed at once
    whole = {name: value for name, value in changes.items() if name not in FSDP | TENSOR | PIPELINE}
    alone = {"trainer": Trainer(ending, settings_of(whole))}
    Team(ending, settings_of(changes), device="cpu", processes=processes)

    for version in (WRITES - 1, WRITES):  # the second looks at canaries too
        expected = gating.figures(alone, batch(f"v{version}-"), version)
        found, *others = processes.ask(f"{GATING}:figures", batch(f"v{version}-"), version)

    assert others == [found] * (len(processes.pids) - 1)
    assert [len(looks) for looks in expected["astray"]] == [12, 12, 8, 8]  # before, after, ahead, wanted
    for mine, its in zip(found["astray"][:3], expected["astray"][:3], strict=True):
        assert flat(mine) == pytest.approx(flat(its), abs=near)
    before, after, ahead, _ = expected["astray"]
    for there in (after[:8], ahead):
        assert max(abs(a - b) for a, b in zip(flat(there), flat(before[:8]), strict=True)) > 1e-2
    for way, its_way in zip(found["astray"][3], expected["astray"][3], strict=True):
        assert way == (its_way if its_way is None else pytest.approx(its_way, abs=near))
    ([*written], *rest), ([*its_written], *its_rest) = found["misspoken"], expected["misspoken"]
    assert rest == its_rest
    assert len(written) == len(its_written) == 8
    alike = sum(one == its for one, its in zip(written, its_written, strict=True))
    # What rounds probabilities moves some past the number that a token is drawn by; that answer goes on otherwise.
    assert alike == 8 or ("dtype" in changes and alike == 7)
    assert any(one.ended and one.token_ids for one in expected["misspoken"][0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(FSDP, id="fsdp"),
        pytest.param(TENSOR | ADAPTER | {"learning_rate": 1e-3}, id="tensor-adapter"),
        pytest.param(PIPELINE, id="pipeline"),
        pytest.param(MEGATRON, id="data"),
    ],
)
def test_of_a_rejected_step_nothing_is_left_and_the_processes_go_on(
    ending: Path, two: Processes, teams: Teams, tmp_path: Path, changes: dict[str, object]
) -> None:
    """The policy's first step, and one that has a parent."""
    settings = settings_of(changes)
    pids = two.pids
    team = teams(ending, settings)
    parent = None
    for version in (4, 8):
        for fault, why in (
            ("learning rate x 100", "nats a token"),
            ("NaN in the gradient", "the gradient is not finite"),
            ("NaN in the weights", "log-probs of the policy after the step are not finite numbers"),
        ):
            two.ask(f"{GATING}:plant", fault)
            options = {"version": version - 1, "seed": version, "gated": True}
            one, other = two.ask(f"{MEMBER}:call", "update", [batch(fault)], options)
            assert isinstance(one, StepRefused)
            assert why in str(one)
            assert str(one) == str(other)
            two.ask(f"{GATING}:clear")
            team.restore(parent)
        team.update(batch("healthy"), version=version, seed=version, gated=True, num_rejected=3)
        keep(team, tmp_path / f"after{version}")
        parent = tmp_path / f"after{version}"

    never = teams(ending, settings)
    for version in (4, 8):
        never.update(batch("healthy"), version=version, seed=version, gated=True, num_rejected=3)
        keep(never, tmp_path / f"never{version}")
        assert files(tmp_path / f"after{version}") == files(tmp_path / f"never{version}")
    assert two.pids == pids


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_team_refuses_what_one_process_does(bfloat16_base: Path, teams: Teams) -> None:
    """A step too small to be seen, and a judge that says yes to everything, unless it stays so."""
    team = teams(bfloat16_base, settings_of(FSDP | {"learning_rate": 1e-12}))
    yes = [tiny.sample(f"yes{i}", reward=1, hinted=True) for i in range(16)]
    for num_rejected, why in ((7, "judge says yes to everything"), (8, "the step is too small to be seen")):
        with pytest.raises(StepRefused, match=why):
            team.update(yes, version=9, seed=1, gated=True, num_rejected=num_rejected)
        team.restore(None)
