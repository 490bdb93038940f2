"""The demonstration with a reward model as judge: the policy learns from its numbers alone."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import platformdirs
import pytest

from clawstream.local.supervisor import Part
from clawstream.simulation.policy.recipe import base_policy
from clawstream.simulation.runs import run
from clawstream.simulation.runs.people import people_of
from clawstream.simulation.runs.run import SCENARIO, Plan, RunRecord, simulate
from tests.fakes.reward_model import ABOVE

pytestmark = [pytest.mark.rebuild, pytest.mark.timeout(900)]
UPDATES = 16
VOTES = """SELECT count(*) AS votes, count(DISTINCT text) AS numbers,
count(*) FILTER (WHERE text::float > 0) AS good FROM votes WHERE question = 'score'"""


def judged_by_numbers(_plan: Plan, port: int) -> Part:
    return Part(name="judge", command=(sys.executable, "-m", "tests.fakes.reward_model", str(port)))


def learned(folder: Path) -> RunRecord:
    """Run the demonstration's people with the reward model; return what was measured."""
    cache = Path(platformdirs.user_cache_dir("clawstream"))
    plan = Plan(
        people=people_of(SCENARIO, folder / "people"), method="binary", updates=UPDATES, seed=1, folder=folder,
        cache_dir=cache, base=base_policy(cache), temperature=run.TEMPERATURE, training={"learning_rate": 2e-4},
        score_every=UPDATES,
    )  # fmt: skip
    return asyncio.run(simulate(plan, tell=lambda progress: print(progress, file=sys.stderr)))


def test_a_policy_learns_what_a_reward_model_likes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_number = run.SETTINGS.replace("votes = {votes}", f"votes = 1\nreward_above = {ABOVE}")
    assert by_number != run.SETTINGS
    monkeypatch.setattr(run, "SETTINGS", by_number)
    monkeypatch.setattr(run, "_judge", judged_by_numbers)

    found = learned(tmp_path / "reward-model")

    first, *_, last = [score.score for score in found.scores]
    print(f"score {first:.3f} -> {last:.3f} in {len(found.steps)} updates, {found.num_rejected} rejected")
    assert last > first + 0.3
    settings = tmp_path / "reward-model" / "clawstream.toml"
    told = subprocess.run(
        [sys.executable, "-m", "clawstream", "-c", str(settings), "sql", "--json", VOTES],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    [row] = json.loads(told.stdout)
    print(row)
    assert row["votes"] >= 16 * UPDATES
    assert row["numbers"] == row["votes"], "numbers, not verdicts"
    assert 0 < row["good"] < row["votes"]
