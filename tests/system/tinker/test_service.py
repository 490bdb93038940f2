"""A real service that trains and samples: SkyRL's server on the CPU, asked by the Tinker SDK in processes of ours."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from clawstream.local.servers import accounts
from clawstream.local.servers.server_process import reserved
from clawstream.simulation.policy.recipe import base_policy
from clawstream.simulation.runs.people import people_of
from clawstream.simulation.runs.run import SCENARIO, Plan, simulate
from tests.parts.engine.tiny_model import make_model
from tests.system.tinker import skyrl

pytestmark = pytest.mark.timeout(1500)  # what jax compiles for the first time takes minutes
SCRIPT = Path(__file__).with_name("on_service.py")


@pytest.mark.sdks
def test_a_step_a_snapshot_and_a_resumed_state_are_as_the_contract_says(tmp_path: Path) -> None:
    """What the stand-in for the SDK does in the quick tests, a real one does too."""
    base = make_model(tmp_path / "base", seed=0)
    with skyrl.service(base, tmp_path / "service") as url:
        done = subprocess.run(
            [sys.executable, str(SCRIPT), str(base), url], env=skyrl.environment(), capture_output=True, text=True,
            timeout=1200, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["up"] > 0.01, "a reward of 1 makes its answer likelier"
    assert found["down"] < -0.01
    assert found["resumed_nats"] < 1e-5, "a state brings weights back exactly"
    assert found["next_step_nats"] < 1e-3, "and moments: the next step leads to the same place"
    assert found["sampled_nats"] < 1e-3, "a snapshot's log-probs are those that the trainer scores"
    assert found["base_nats"] < 1e-3, "before its first step the adapter is the base"
    assert found["grad_norm"] > 0


@pytest.mark.rebuild
async def test_a_policy_learns_from_people_by_a_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole installation with no weights of its own: versions are served by name, and the score rises."""
    base = base_policy(accounts.cache_folder())
    with reserved() as port, skyrl.service(base, tmp_path / "service", port=port) as url:
        for name, value in skyrl.environment().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("TINKER_BASE_URL", url)
        monkeypatch.setenv("TINKER_API_KEY", "tml-none")
        people = people_of(SCENARIO, tmp_path / "people")
        plan = Plan(
            people=people, method="binary", updates=4, seed=1, folder=tmp_path / "run",
            cache_dir=accounts.cache_folder(), base=base, temperature=1.0,
            training={"trainer": "tinker", "learning_rate": 1e-3}, score_every=4,
        )  # fmt: skip
        record = await simulate(plan, tell=lambda _: None)
    first, *_, last = record.scores
    assert record.versions[-1] == 4
    assert [step.num_samples >= 16 for step in record.steps] == [True] * len(record.steps)
    assert last.score > first.score + 0.1, "more than chance: 200 problems"
    for version, folder in sorted(record.published.items())[1:]:  # the first is the base
        named = json.loads((folder / "adapter_config.json").read_text())
        assert named["sampler_path"].startswith("tinker://"), version
    assert not any(chat.failed for chat in record.chats)
