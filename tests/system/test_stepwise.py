"""A whole installation that learns from attempts at a task: two of a group make one step, by their outcomes alone.

The policy has random weights; a text that it says soon ends its answers, and there is no judge.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import count

import aiohttp
import pytest

from clawstream.config import load
from clawstream.events import BatchPlanned, GroupSettled, StepTaken
from clawstream.local.installation import Installation, installation
from clawstream.stream.kafka.connect import connected
from clawstream.stream.stage import Record
from clawstream.stream.topics import GROUPS, POLICY
from tests.parts.engine.tiny_model import make_model
from tests.system.test_installation import _database, _rows

pytestmark = pytest.mark.timeout(300)
STOPS = ["a", "e", "o", " "]


@pytest.fixture(scope="module")
async def running(
    tmp_path_factory: pytest.TempPathFactory, kafka_bootstrap: str, postgres_url: str
) -> AsyncIterator[Installation]:
    folder = tmp_path_factory.mktemp("stepwise")
    model = make_model(folder / "model")
    config = folder / "clawstream.toml"
    config.write_text(
        f"""
        data_dir = "{folder}"
        [kafka]
        bootstrap = "{kafka_bootstrap}"
        prefix = "{folder.name}."
        [postgres]
        url = "{_database(postgres_url, folder.name)}"
        [engine]
        port = 0
        [gateway]
        port = 0
        [policy]
        renderer = "qwen3"
        enable_thinking = false
        [training]
        method = "stepwise"
        batch_samples = 4
        learning_rate = 1e-3
        [monitor]
        port = 0
        """
    )
    async with installation(load(config), model_path=model, say=lambda _: None) as found:
        yield found


async def _attempt(http: aiohttp.ClientSession, gateway: str, session: str, group: str, outcome: float) -> None:
    """Two steps; the outcome is said of the second, and then that the session is over."""
    headers = {"X-Session-Id": session, "X-Group-Id": group, "X-Group-Size": "2"}
    messages = [{"role": "user", "content": "begin"}]
    for step in range(2):
        body = {"model": "policy", "messages": messages, "max_tokens": 64, "temperature": 1.0, "stop": STOPS}
        async with http.post(f"{gateway}/v1/chat/completions", json=body, headers=headers) as answered:
            answer = json.loads(await answered.read())
        said = answer["choices"][0]["message"]
        messages += [said, {"role": "user", "content": f"result {step}"}]
    told = {"response_id": answer["id"], "source": "environment", "score": outcome}
    async with http.post(f"{gateway}/v1/feedback", json=told) as heard:
        assert heard.ok
    async with http.post(f"{gateway}/v1/chat/completions", json={"session_done": True}, headers=headers) as done:
        assert done.ok


async def _try_again_and_again(gateway: str) -> None:
    """An answer may be cut or empty all the same, which makes no sample."""
    async with aiohttp.ClientSession() as http:
        for task in count():
            attempts = [
                _attempt(http, gateway, f"{name}-{task}", f"task-{task}", outcome)
                for name, outcome in (("ann", 1.0), ("ben", -1.0))
            ]
            await asyncio.gather(*attempts)


async def _whole_group_that_made_a_step(running: Installation) -> tuple[BatchPlanned, GroupSettled]:
    groups: list[GroupSettled] = []
    plans: list[BatchPlanned] = []
    taken: set[int] = set()
    topics = [POLICY, GROUPS]
    async with asyncio.timeout(150), connected(running.settings.kafka, client_id="test") as log:
        async for records in log.follow(topics, "earliest"):
            for event in (record.event for record in records if isinstance(record, Record)):
                match event:
                    case GroupSettled() if event.complete and len(event.advantages) == 4:
                        groups.append(event)
                    case BatchPlanned():
                        plans.append(event)
                    case StepTaken():
                        taken.add(event.policy_version)
            for group in groups:
                for plan in plans:
                    named = {step.sample_id for step in group.advantages} & set(plan.sample_ids)
                    if named and plan.policy_version in taken:
                        return plan, group
    raise AssertionError("the log ends")


@pytest.mark.slow
async def test_two_attempts_at_a_task_train_one_step_by_which_of_them_did_better(running: Installation) -> None:
    trying = asyncio.create_task(_try_again_and_again(running.addresses.gateway))
    plan, group = await _whole_group_that_made_a_step(running)
    trying.cancel()

    planned = dict(zip(plan.sample_ids, plan.advantages or (), strict=True))
    assert {step.sample_id: planned.get(step.sample_id) for step in group.advantages} == {
        step.sample_id: step.advantage for step in group.advantages
    }
    assert sorted((step.step_index, step.reward, step.advantage) for step in group.advantages) == [
        (index, outcome, outcome) for index in (0, 1) for outcome in (-1.0, 1.0)
    ]
    rows = await _rows(
        running, f"SELECT turn_id, advantage FROM group_steps WHERE group_id = '{group.group_id}' AND reason IS NULL"
    )
    assert {row["turn_id"]: row["advantage"] for row in rows} == {
        step.turn_id: step.advantage for step in group.advantages
    }
