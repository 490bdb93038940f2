"""The demonstration with an FP8 and an INT4 engine: a policy that trains in more bits learns from what they sampled."""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

import platformdirs
import pytest

from clawstream.config import Settings
from clawstream.local.servers.server_process import ServerProcess, reserved
from clawstream.simulation.policy.recipe import base_policy
from clawstream.simulation.runs import run
from clawstream.simulation.runs.people import people_of
from clawstream.simulation.runs.run import SCENARIO, Plan, simulate
from tests.parts.sglang.process import wait_until_ready

pytestmark = [pytest.mark.rebuild, pytest.mark.timeout(900)]
UPDATES = 12


@contextmanager
def rounded_engine(model: Path, log: Path, bits: str) -> Iterator[str]:
    """Run the engine during the block; return its address."""
    with reserved() as port:
        command = [sys.executable, "-m", "tests.fakes.rounded_engine", str(model), str(port), bits]
        server = ServerProcess(command, folder=log.parent, log=log, grace_s=20.0)
        try:
            wait_until_ready(server, port, "the engine")
            yield f"http://127.0.0.1:{port}"
        finally:
            server.stop()


@pytest.mark.parametrize("bits", ["fp8", "int4"])
def test_an_adapter_learns_from_an_engine_of_fewer_bits_whose_log_probs_are_the_behaviours(
    tmp_path: Path, bits: str
) -> None:
    cache, folder = Path(platformdirs.user_cache_dir("clawstream")), tmp_path / bits
    base = base_policy(cache)
    with rounded_engine(base, tmp_path / "engine.log", bits) as url:
        own = Settings(
            environment=False, engine={"urls": [url], "model_path": base},
            policy={"renderer": "qwen3", "enable_thinking": False}, training={"lora_rank": 16},
        )  # fmt: skip
        plan = Plan(
            people=people_of(SCENARIO, folder / "people"), method="combined", updates=UPDATES, seed=1, folder=folder,
            cache_dir=cache, base=base, temperature=run.TEMPERATURE, training={"learning_rate": 1e-3},
            score_every=UPDATES, own=own,
        )  # fmt: skip
        found = asyncio.run(simulate(plan, tell=lambda progress: print(progress, file=sys.stderr)))
    first, *_, last = [score.score for score in found.scores]
    apart_nats = [step.behaviour_kl_nats for step in found.steps if step.behaviour_kl_nats is not None]
    print(
        f"score {first:.3f} -> {last:.3f}, {found.num_rejected} steps rejected, engine and trainer "
        f"{fmean(map(abs, apart_nats)):.4f} nats apart"
    )
    assert last > first + 0.3
    assert fmean(map(abs, apart_nats)) > 1e-3, "the engine's own log-probs are the behaviour's"
