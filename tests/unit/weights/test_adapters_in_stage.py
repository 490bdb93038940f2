"""Adapters beside the weights: loaded, kept while requests run under them, unloaded."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from clawstream.errors import TryLater
from clawstream.events import PolicyActivated, PolicyPublished, PolicyRejected
from clawstream.inference.engine import EngineRefused
from clawstream.weights.taking import forget, take_over
from tests.unit.monitoring.said import activated, published
from tests.unit.weights.engines import WITHIN_S, PolicyTopic, Watched, Weights, keeping


def adapter(version: int, name: str | None = None) -> PolicyPublished:
    return replace(published(version, "/adapters"), adapter=name or f"policy-v{version}")


async def test_an_adapter_is_loaded_beside_the_weights_without_a_pause(weights: Weights) -> None:
    log, fake = PolicyTopic(weights(0), adapter(1)), Watched("http://e", "0", asyncio.Event())
    async with keeping(log, clients=[fake]):
        await log.until(lambda: len(log.active()) == 2)
    assert fake.told == ["resume", "retract", "update 0 flush", "resume", "load policy-v1"]
    newest = log.said(PolicyActivated)[-1]
    assert isinstance(newest, PolicyActivated)
    assert (newest.policy_version, newest.adapter, newest.pause_ms) == (1, "policy-v1", 0.0)


async def test_old_adapters_are_unloaded_once_no_request_can_use_them(weights: Weights) -> None:
    log, fake = PolicyTopic(weights(0)), Watched("http://e", "0", asyncio.Event())
    async with keeping(log, clients=[fake], drain_s=0.0):
        for version in range(1, 5):
            await log.append([adapter(version)])
            await log.until(lambda version=version: ("http://e", version) in log.active())  # type: ignore[misc]
        async with asyncio.timeout(WITHIN_S):
            while len(fake.adapters) > 2:
                await asyncio.sleep(0.001)
    assert fake.adapters == ["policy-v3", "policy-v4"]


async def test_no_adapter_is_unloaded_before_requests_have_had_time_to_end(weights: Weights) -> None:
    log, fake, now_ms = PolicyTopic(weights(0)), Watched("http://e", "0", asyncio.Event()), 0
    async with keeping(log, clients=[fake], drain_s=60.0, now_ms=lambda: now_ms), asyncio.timeout(WITHIN_S):
        await fake.asked.wait()
        now_ms = 100_000
        for version in range(1, 5):
            await log.append([adapter(version)])
            await log.until(lambda version=version: ("http://e", version) in log.active())  # type: ignore[misc]
        assert len(fake.adapters) == 4
        now_ms += 60_000
        while len(fake.adapters) > 2:
            await asyncio.sleep(0.001)


async def test_an_adapter_that_is_long_in_unloading_holds_no_version_up(weights: Weights) -> None:
    begun, over = asyncio.Event(), asyncio.Event()

    class Slow(Watched):
        async def unload_lora_adapter(self, name: str) -> None:
            begun.set()
            await over.wait()
            await super().unload_lora_adapter(name)

    log = PolicyTopic(weights(0), activated(0, "http://e"), *map(adapter, range(1, 4)))
    slow = Slow("http://e", "0", asyncio.Event())
    slow.adapters = ["policy-v1", "policy-v2"]
    async with keeping(log, clients=[slow], drain_s=0.0), asyncio.timeout(WITHIN_S):
        await begun.wait()
        await log.append([adapter(4)])
        await log.until(lambda: ("http://e", 4) in log.active())
        over.set()


async def test_weights_below_adapters_change_only_when_what_runs_under_them_has_ended(weights: Weights) -> None:
    log, fake = PolicyTopic(weights(0), adapter(1)), Watched("http://e", "0", asyncio.Event())
    fake.adapters = ["somebody's"]
    async with keeping(log, clients=[fake]):
        await log.until(lambda: ("http://e", 1) in log.active())
        fake.told.clear()
        await log.append([weights(2)])
        await log.until(lambda: ("http://e", 2) in log.active())
    assert fake.told == ["unload policy-v1", "pause", "update 2", "resume"]
    assert fake.adapters == ["somebody's"]


async def test_an_engine_that_came_back_gets_the_weights_and_then_the_adapter(weights: Weights) -> None:
    log, fake = PolicyTopic(weights(3), adapter(4)), Watched("http://e", "3", asyncio.Event())
    async with keeping(log, clients=[fake]):
        await log.until(lambda: ("http://e", 4) in log.active())
        fake.told.clear()
        fake.serves = "default"
        fake.adapters.clear()
        await log.until(lambda: log.active().count(("http://e", 4)) == 2)
    assert fake.told == ["retract", "update 3 flush", "resume", "load policy-v4"]


async def test_a_quantized_engine_takes_adapters_and_what_it_began_with_is_version_0(weights: Weights) -> None:
    log, fake = PolicyTopic(weights(0), adapter(1)), Watched("http://e", "default", asyncio.Event())
    fake.quantized = "fp8"
    async with keeping(log, clients=[fake]):
        await log.until(lambda: ("http://e", 1) in log.active())
        await log.append([weights(2)])
        await log.until(lambda: log.said(PolicyRejected) != [])
    assert [one for one in fake.told if not one.startswith("resume")] == ["name 0", "load policy-v1"]
    assert log.active() == [("http://e", 0), ("http://e", 1)]
    [refusal] = log.said(PolicyRejected)
    assert isinstance(refusal, PolicyRejected)
    assert "quantized (fp8)" in refusal.reason
    assert "training.lora_rank" in refusal.reason


async def test_an_engine_of_a_quantized_folder_is_told_by_the_folder(weights: Weights, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "quantization_config": {"quant_method": "awq"}}')
    fake = Watched("http://e", "default", asyncio.Event())
    fake.model_path = str(tmp_path)
    assert isinstance(await take_over(fake, weights(0), lambda: 0), PolicyActivated)
    refused = await take_over(fake, weights(1), lambda: 0)
    assert isinstance(refused, PolicyRejected)
    assert "quantized (awq)" in refused.reason
    assert fake.told == ["name 0"]


async def test_a_quantized_engine_that_can_not_name_its_weights_or_was_given_others_is_not_said_to_serve_the_base(
    weights: Weights,
) -> None:
    refuses = Watched("http://e", "base", asyncio.Event(), fails={"name": [EngineRefused(404, "no such route")]})
    for fake, why in ((refuses, "no such route"), (Watched("http://e", "7", asyncio.Event()), "quantized (awq)")):
        fake.quantized = "awq"
        outcome = await take_over(fake, weights(0), lambda: 0)
        assert isinstance(outcome, PolicyRejected)
        assert why in outcome.reason


async def test_an_adapter_whose_name_does_not_tell_its_version_is_refused(weights: Weights) -> None:
    log, fake = PolicyTopic(weights(0), adapter(1, "mine")), Watched("http://e", "0", asyncio.Event())
    async with keeping(log, clients=[fake]):
        await log.until(lambda: log.said(PolicyRejected) != [])
    [refusal] = log.said(PolicyRejected)
    assert isinstance(refusal, PolicyRejected)
    assert refusal.reason == "the adapter is named 'mine', expected 'policy-v1'"
    assert fake.adapters == []


async def test_an_adapter_that_is_loaded_already_is_not_loaded_again() -> None:
    fake = Watched("http://e", "0", asyncio.Event())
    fake.adapters = ["policy-v1"]
    assert isinstance(await take_over(fake, adapter(1), lambda: 0), PolicyActivated)
    assert fake.told == []


async def test_an_adapter_that_is_refused_or_not_listed_afterwards_was_not_taken_over() -> None:
    class Deaf(Watched):
        async def load_lora_adapter(self, name: str, path: str) -> None:
            pass

    refuses = Watched("http://e", "0", asyncio.Event(), fails={"load": [EngineRefused(400, "rank too high")]})
    for fake, why in ((Deaf("http://e", "0", asyncio.Event()), "does not list policy-v1"), (refuses, "rank too high")):
        outcome = await take_over(fake, adapter(1), lambda: 0)
        assert isinstance(outcome, PolicyRejected)
        assert why in outcome.reason


@pytest.mark.parametrize("how", [TryLater("reset by peer"), EngineRefused(400, "in use")], ids=["silent", "refused"])
async def test_an_adapter_that_can_not_be_unloaded_keeps_no_other(how: Exception) -> None:
    fake = Watched("http://e", "0", asyncio.Event(), fails={"unload": [how]})
    fake.adapters = ["policy-v1", "policy-v2"]
    await forget(fake, ["policy-v1", "policy-v2"])
    assert fake.adapters == ["policy-v1"]


def of_key(key: str, version: int) -> PolicyPublished:
    return replace(adapter(version, f"policy+{key}-v{version}"), policy_id=f"policy+{key}")


async def test_each_keys_newest_adapter_is_loaded_and_the_one_before_it_goes(weights: Weights) -> None:
    base = replace(weights(0), policy_id="policy+ben")
    log, fake = PolicyTopic(weights(0), base), Watched("http://e", "0", asyncio.Event())
    async with keeping(log, clients=[fake], by_key=True, drain_s=0.0), asyncio.timeout(WITHIN_S):
        for version in (1, 2, 3):
            await log.append([of_key("ben", version), of_key("anna", version)])
            await log.until(lambda version=version: log.active().count(("http://e", version)) == 2)  # type: ignore[misc]
        while len(fake.adapters) > 2:
            await asyncio.sleep(0.001)
    assert fake.adapters == ["policy+ben-v3", "policy+anna-v3"]
    outcomes = [e for e in log.events if isinstance(e, PolicyActivated)]
    assert [(e.policy_id, e.policy_version, e.adapter) for e in outcomes] == [
        ("policy", 0, None),
        *((f"policy+{key}", v, f"policy+{key}-v{v}") for v in (1, 2, 3) for key in ("ben", "anna")),
    ]
    assert log.said(PolicyRejected) == []


async def test_where_all_share_a_policy_no_adapter_of_a_key_is_loaded(weights: Weights) -> None:
    log, fake = PolicyTopic(weights(0), of_key("ben", 1), adapter(1)), Watched("http://e", "0", asyncio.Event())
    async with keeping(log, clients=[fake]):
        await log.until(lambda: ("http://e", 1) in log.active())
    assert fake.adapters == ["policy-v1"]


async def test_weights_below_keys_adapters_change_without_them_and_they_are_loaded_again(weights: Weights) -> None:
    log, fake = PolicyTopic(weights(0), of_key("ben", 1), of_key("anna", 1)), Watched("http://e", "0", asyncio.Event())
    async with keeping(log, clients=[fake], by_key=True):
        await log.until(lambda: len(log.active()) == 3)
        fake.told.clear()
        await log.append([weights(2)])
        await log.until(lambda: len(log.active()) == 6)
    names = ["policy+ben-v1", "policy+anna-v1"]
    assert fake.told == [
        *(f"unload {name}" for name in names), "pause", "update 2", "resume", *(f"load {name}" for name in names),
    ]  # fmt: skip


async def test_an_adapter_that_cannot_be_loaded_holds_no_other_keys_up(weights: Weights) -> None:
    class Picky(Watched):
        async def load_lora_adapter(self, name: str, path: str) -> None:
            if name.startswith("policy+ben"):
                raise TryLater("status 500")
            await super().load_lora_adapter(name, path)

    log = PolicyTopic(weights(0), *(of_key(key, 1) for key in ("ben", "anna", "cid")), adapter(1))
    picky = Picky("http://e", "0", asyncio.Event())
    async with keeping(log, clients=[picky], by_key=True):
        await log.until(lambda: len(log.active()) == 4)
    assert picky.adapters == ["policy-v1", "policy+anna-v1", "policy+cid-v1"]
