"""Engines take over what is published while they answer, whatever happens to them, to us and to the log."""

import asyncio

import aiohttp
import pytest

from clawstream.errors import TryLater
from clawstream.events import PolicyActivated, PolicyRejected
from clawstream.inference.engine import EngineRefused, GenerateRequest, SamplingParams
from clawstream.inference.sglang import SglangEngine
from clawstream.stream import topics
from clawstream.stream.stage import Record
from clawstream.weights.stage import keep_current
from clawstream.weights.taking import swap
from tests.fakes.memory_log import MemoryLog
from tests.fakes.scripted_engine import counting, serving
from tests.unit.monitoring.said import activated, published
from tests.unit.weights.engines import WITHIN_S, Engine, Hangs, PolicyTopic, Watched, Weights, engine, keeping


async def test_an_engine_takes_over_each_version_by_pausing_in_place_and_going_on(weights: Weights) -> None:
    log, backend = PolicyTopic(weights(0)), engine()
    async with keeping(log, backend) as [client]:
        await log.until(lambda: len(log.active()) == 1)
        await log.append([weights(1)])
        await log.until(lambda: len(log.active()) == 2)
    assert log.active() == [(client.url, 0), (client.url, 1)]
    assert backend.told[-3:] == ["pause in_place", "update 1", "resume"]
    assert backend.version == "1"
    first = log.said(PolicyActivated)[0]
    assert isinstance(first, PolicyActivated)
    assert (first.activated_at_ms, first.num_bytes) == (7, 1)
    assert first.pause_ms > 0


async def test_it_runs_on_the_log_that_the_stages_run_on(weights: Weights) -> None:
    log, backend = MemoryLog(), engine()
    await log.append([weights(0), weights(1)])
    stop = asyncio.Event()
    async with serving(backend) as url, aiohttp.ClientSession() as http, asyncio.TaskGroup() as tasks:
        tasks.create_task(keep_current([SglangEngine(http, url)], log, policy_id="policy", stop=stop))
        async with asyncio.timeout(WITHIN_S):
            async for records in log.follow([topics.POLICY]):
                found = [r.event for r in records if isinstance(r, Record) and isinstance(r.event, PolicyActivated)]
                if found:
                    break
        stop.set()
    assert [(event.engine, event.policy_version) for event in found] == [(url, 1)]


async def test_only_the_newest_of_the_versions_on_the_log_is_taken_over(weights: Weights) -> None:
    log, backend = PolicyTopic(*map(weights, range(5))), engine()
    async with keeping(log, backend):
        await log.until(lambda: log.active() != [])
    assert [told for told in backend.told if told.startswith("update")] == ["update 4"]


async def test_after_a_restart_no_engine_goes_back_to_a_version_on_the_way_to_the_newest(weights: Weights) -> None:
    log, backend = PolicyTopic(), engine(version="4")
    async with keeping(log, backend) as [client]:
        pass
    log = PolicyTopic(*(event for v in range(5) for event in (weights(v), activated(v, client.url))))
    asked = asyncio.Event()
    fake = Watched(client.url, "4", asked)
    async with keeping(log, clients=[fake]):
        async with asyncio.timeout(WITHIN_S):
            await asked.wait()
    assert fake.told == ["resume"]


async def test_a_version_that_an_engine_refused_is_not_offered_again(weights: Weights) -> None:
    log, backend = PolicyTopic(published(1, "/nowhere")), engine()
    async with keeping(log, backend) as [client]:
        await log.until(lambda: log.said(PolicyRejected) != [])
        await log.append([weights(2)])
        await log.until(lambda: log.active() != [])
    [refusal] = log.said(PolicyRejected)
    assert isinstance(refusal, PolicyRejected)
    assert (refusal.policy_version, refusal.engine) == (1, client.url)
    assert "config.json" in refusal.reason
    assert [told for told in backend.told if told.startswith("update")] == ["update 1", "update 2"]
    assert backend.flowing


async def test_an_engine_that_comes_back_with_old_weights_is_brought_up_to_date(weights: Weights) -> None:
    log, backend = PolicyTopic(weights(1)), engine()
    async with keeping(log, backend):
        await log.until(lambda: len(log.active()) == 1)
        backend.version = "default"  # what a restarted engine says
        await log.until(lambda: len(log.active()) == 2)
    assert backend.version == "1"


async def test_the_cache_is_emptied_of_an_engine_that_came_back_with_old_weights_and_of_no_other(
    weights: Weights,
) -> None:
    log, backend = PolicyTopic(weights(1)), engine()
    async with keeping(log, backend) as [client]:
        await log.until(lambda: log.active() == [(client.url, 1)])
        await log.append([weights(2)])
        await log.until(lambda: (client.url, 2) in log.active())
        assert [told for told in backend.told if told.startswith("pause")][-1] == "pause in_place"
        backend.version = "1"
        await log.until(lambda: log.active().count((client.url, 2)) == 2)
    assert [told for told in backend.told if told.startswith("pause")][-1] == "pause retract"


async def test_the_cache_is_emptied_after_a_takeover_that_the_log_may_not_know_of(weights: Weights) -> None:
    log, fake = PolicyTopic(weights(1), activated(1, "http://e")), Watched("http://e", "1", asyncio.Event())
    async with keeping(log, clients=[fake]):
        async with asyncio.timeout(WITHIN_S):
            await fake.asked.wait()
        fake.fails["update"] = [TryLater("reset by peer")]
        await log.append([weights(2)])
        await log.until(lambda: ("http://e", 2) in log.active())
    assert fake.told == ["resume", "pause", "update 2", "resume", "resume", "retract", "update 2 flush", "resume"]


async def test_only_one_engine_at_a_time_takes_a_version_over(weights: Weights) -> None:
    log, at_once, most = PolicyTopic(weights(1)), 0, 0

    class Slow(Watched):
        async def update_weights(self, path: str, version: str, *, flush_cache: bool = False) -> None:
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            await asyncio.sleep(0.02)
            at_once -= 1
            await super().update_weights(path, version, flush_cache=flush_cache)

    fakes = [Slow(f"http://{name}", "0", asyncio.Event()) for name in "abc"]
    async with keeping(log, clients=fakes):
        await log.until(lambda: len(log.active()) == 3)
    assert most == 1


async def test_an_engine_that_hangs_in_its_turn_loses_it_and_takes_over_when_it_is_back(weights: Weights) -> None:
    log, back = PolicyTopic(weights(1)), asyncio.Event()
    hangs = Hangs("http://a", back)
    others = [Watched(f"http://{name}", "0", asyncio.Event()) for name in "bc"]
    async with keeping(log, clients=[hangs, *others], turn_s=0.05):
        await log.until(lambda: set(log.active()) == {("http://b", 1), ("http://c", 1)})
        back.set()
        await log.until(lambda: ("http://a", 1) in log.active())


async def test_an_engine_that_loads_for_long_and_answers_meanwhile_keeps_its_turn(weights: Weights) -> None:
    log, at_once, most, turn_s = PolicyTopic(weights(1)), 0, 0, 0.5

    class Loads(Watched):
        async def weight_version(self) -> str | None:
            self.asked.set()
            refused, self.refuses = self.refuses, not self.refuses
            if refused and at_once:
                raise TryLater("busy")  # one question that fails is no silence
            return self.serves

        refuses = False

        async def update_weights(self, path: str, version: str, *, flush_cache: bool = False) -> None:
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            self.asked.clear()
            over_s = asyncio.get_running_loop().time() + 2 * turn_s
            while asyncio.get_running_loop().time() < over_s:
                await self.asked.wait()
                self.asked.clear()
            at_once -= 1
            await super().update_weights(path, version, flush_cache=flush_cache)

    loads = [Loads(f"http://{name}", "0", asyncio.Event()) for name in "ab"]
    async with keeping(log, clients=loads, turn_s=turn_s):
        await log.until(lambda: len(log.active()) == 2)
    assert most == 1


async def test_an_engine_that_comes_back_late_does_not_give_away_another_s_turn(weights: Weights) -> None:
    log, back, at_once, most = PolicyTopic(weights(1)), asyncio.Event(), 0, 0

    class Slow(Watched):
        async def update_weights(self, path: str, version: str, *, flush_cache: bool = False) -> None:
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            back.set()
            await asyncio.sleep(0.05)
            at_once -= 1
            await super().update_weights(path, version, flush_cache=flush_cache)

    hangs = Hangs("http://a", back)
    others = [Slow(f"http://{name}", "0", asyncio.Event()) for name in "bc"]
    async with keeping(log, clients=[hangs, *others], turn_s=1.0):
        await log.until(lambda: len(log.active()) == 3)
    assert most == 1


async def test_what_was_done_while_an_engine_waited_for_its_turn_is_not_done_again(weights: Weights) -> None:
    log, begun, back = PolicyTopic(weights(1)), asyncio.Event(), asyncio.Event()

    class Hangs(Watched):
        async def update_weights(self, path: str, version: str, *, flush_cache: bool = False) -> None:
            begun.set()
            await back.wait()
            await super().update_weights(path, version, flush_cache=flush_cache)

    hangs, waits = Hangs("http://a", "0", asyncio.Event()), Watched("http://b", "0", asyncio.Event())
    async with keeping(log, clients=[hangs, waits]), asyncio.timeout(WITHIN_S):
        await begun.wait()
        await waits.asked.wait()
        waits.serves = "1"
        await log.append([activated(1, "http://b")])
        waits.asked.clear()
        back.set()
        await waits.asked.wait()
        await log.until(lambda: ("http://a", 1) in log.active())
    assert waits.told == ["resume"]


async def test_an_engine_that_is_away_holds_no_other_up_and_is_served_when_it_is_back(weights: Weights) -> None:
    log, here = PolicyTopic(weights(1)), engine()
    away = Watched("http://away", "default", asyncio.Event())
    away.away = True
    async with keeping(log, here, clients=[away]) as [_, client]:
        await log.until(lambda: log.active() == [(client.url, 1)])
        await log.append([weights(2)])
        await log.until(lambda: log.active() == [(client.url, 1), (client.url, 2)])
        away.away = False
        await log.until(lambda: ("http://away", 2) in log.active())
    assert away.told == ["resume", "retract", "update 2 flush", "resume"]


async def test_two_engines_take_a_version_over_once_each(weights: Weights) -> None:
    log, one, other = PolicyTopic(weights(0)), engine(), engine()
    async with keeping(log, one, other) as clients:
        for version in range(1, 6):
            await log.append([weights(version)])
            await log.until(lambda version=version: len(log.active()) >= 2 * version)  # type: ignore[misc]
        await log.until(lambda: {(client.url, 5) for client in clients} <= set(log.active()))
    for backend in (one, other):
        updates = [told for told in backend.told if told.startswith("update")]
        assert len(updates) == len(set(updates))
        assert updates[-1] == "update 5"


@pytest.mark.parametrize("fails", ["pause", "update"])
@pytest.mark.parametrize("how", [TryLater("reset by peer"), EngineRefused(400, "no")], ids=["silent", "refused"])
async def test_an_engine_is_told_to_go_on_whatever_fails(fails: str, how: Exception) -> None:
    fake = Watched("http://e", "default", asyncio.Event(), fails={fails: [how]})
    try:
        outcome = await swap(fake, published(1), lambda: 0)
    except TryLater:
        outcome = None
    assert fake.told[-1] == "resume"
    assert (outcome is None) == isinstance(how, TryLater)


async def test_an_engine_that_did_not_hear_that_it_may_go_on_is_told_again_and_again(weights: Weights) -> None:
    log = PolicyTopic(weights(1))
    deaf = [TryLater("reset by peer")] * 3
    fake = Watched("http://e", "default", asyncio.Event(), fails={"resume": [None, *deaf]})
    async with keeping(log, clients=[fake]):
        await log.until(lambda: log.active() != [])
    assert fake.told.count("resume") >= 5
    assert fake.told[-1] == "resume"
    assert fake.serves == "1"


async def test_an_engine_that_a_killed_process_left_paused_goes_on_at_our_start(weights: Weights) -> None:
    log, backend = PolicyTopic(weights(1)), engine(version="1")
    async with keeping(log, backend) as [client]:
        await log.until(lambda: log.active() != [])
    log = PolicyTopic(weights(1), activated(1, client.url))
    fake = Watched(client.url, "1", asyncio.Event())
    async with keeping(log, clients=[fake]), asyncio.timeout(WITHIN_S):
        await fake.asked.wait()
    assert fake.told == ["resume"]


async def test_a_takeover_that_the_log_did_not_take_is_written_later(weights: Weights) -> None:
    log, backend = PolicyTopic(weights(1)), engine()
    log.refusals = 2
    async with keeping(log, backend) as [client]:
        await log.until(lambda: log.active() == [(client.url, 1)])
    assert backend.version == "1"


async def test_an_engine_that_still_serves_the_old_weights_after_a_takeover_has_refused_them() -> None:
    fake = Watched("http://e", "0", asyncio.Event())
    fake.deaf_to_updates = True
    outcome = await swap(fake, published(1), lambda: 0)
    assert isinstance(outcome, PolicyRejected)
    assert outcome.reason == "it serves 0 after it took over 1"


async def test_an_answer_goes_on_through_a_takeover_and_names_both_versions(weights: Weights) -> None:
    log = PolicyTopic(weights(0))
    backend = Engine(script=counting(400), token_delay_s=0.001)
    backend.told = []
    async with keeping(log, backend) as [client]:
        await log.until(lambda: log.active() != [])
        assert isinstance(client, SglangEngine)
        request = GenerateRequest(input_ids=(1, 2), sampling=SamplingParams(max_new_tokens=400))
        spans: list[int] = []
        async for chunk in client.generate(request):
            if not spans:
                await log.append([weights(1)])
            spans = [*spans, *chunk.token_ids]
            last = chunk
    assert len(spans) == 400
    assert [span.version for span in last.weight_versions] == ["0", "1"]
