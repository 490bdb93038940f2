"""How much may be asked, by one key and by all: what is beyond is refused, and what is let in is let out again."""

import asyncio
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.gateway.access.key_file import add_key
from clawstream.gateway.access.keys import Allowance, Caller, Limits, Rate, TooMuch, duration
from clawstream.gateway.http.connection import Bounds
from tests.fakes.scripted_engine import Fault
from tests.parts.gateway.running_gateway import QUESTION, RunningGateway, running_gateway, until

ANNA, BEN, NOBODY = Caller(name="anna"), Caller(name="ben"), Caller(name=None)
MANY = 1000


def limits(*, at_once: int | None = None, per_minute: int | None = None, in_flight: int = MANY) -> Limits:
    return Limits(Allowance(max_concurrent=at_once, requests_per_minute=per_minute), in_flight)


def begun(found: Limits, caller: Caller) -> Rate | None:
    """Let a request in with its body."""
    rate = found.enter(caller, 0.0)
    found.begin()
    return rate


def test_without_limits_everybody_gets_in_up_to_the_gateways_own() -> None:
    found = limits(in_flight=3)
    assert [begun(found, ANNA) for _ in range(3)] == [None, None, None]
    with pytest.raises(TooMuch, match="max_in_flight") as error:
        found.enter(BEN, 0.0)
    assert (error.value.status, error.value.limit, error.value.retry_after_s) == (503, "gateway", 1)
    found.leave(ANNA, begun=True)
    begun(found, BEN)


def test_bodies_on_their_way_take_no_room_and_are_bounded_all_the_same() -> None:
    found = limits(in_flight=2)
    for _ in range(7):
        found.enter(ANNA, 0.0)
    begun(found, BEN)
    with pytest.raises(TooMuch, match="bodies on their way"):
        found.enter(BEN, 0.0)
    found.begin()
    with pytest.raises(TooMuch) as error:
        found.begin()
    assert (error.value.status, found.in_flight) == (503, 2)


def test_of_several_keys_none_has_more_than_its_share_unless_the_settings_say_so() -> None:
    found = limits(in_flight=8)
    for _ in range(2):
        found.enter(ANNA, 0.0, num_keys=2)
    with pytest.raises(TooMuch) as error:
        found.enter(ANNA, 0.0, num_keys=2)
    assert (error.value.status, error.value.limit) == (429, "key_concurrency")
    found.enter(BEN, 0.0, num_keys=2)
    found.enter(ANNA, 0.0, num_keys=1)
    more = Caller(name="more", allowance=Allowance(max_concurrent=5))
    for _ in range(5):
        found.enter(more, 0.0, num_keys=2)


def test_one_key_at_its_limit_holds_no_other_up() -> None:
    found = limits(at_once=1)
    found.enter(ANNA, 0.0)
    found.enter(BEN, 0.0)
    with pytest.raises(TooMuch, match="in flight") as error:
        found.enter(ANNA, 0.0)
    assert (error.value.status, error.value.limit, error.value.code) == (429, "key_concurrency", "rate_limit_exceeded")


def test_a_keys_own_allowance_goes_before_the_settings() -> None:
    found = limits(at_once=1, per_minute=1)
    more = Caller(name="anna", allowance=Allowance(max_concurrent=3, requests_per_minute=2))
    found.enter(more, 0.0)
    found.enter(more, 0.0)
    with pytest.raises(TooMuch) as error:
        found.enter(more, 0.0)
    assert error.value.limit == "key_rate"


def test_a_key_that_has_used_its_minute_is_told_when_to_come_back_and_then_gets_in() -> None:
    found = limits(per_minute=4)
    rates = [found.enter(ANNA, 10.0) for _ in range(4)]
    assert rates[0] == Rate(per_minute=4, remaining=3, full_in_s=15.0)
    with pytest.raises(TooMuch) as error:
        found.enter(ANNA, 11.5)
    assert (error.value.status, error.value.retry_after_s) == (429, 14)
    assert error.value.rate == Rate(per_minute=4, remaining=0, full_in_s=58.5)
    found.enter(ANNA, 11.5 + 14)


def test_a_clock_that_goes_back_takes_nothing_and_gives_nothing_twice() -> None:
    found = limits(per_minute=2)
    found.enter(ANNA, 60.0)
    found.enter(ANNA, 0.0)
    with pytest.raises(TooMuch):
        found.enter(ANNA, 60.0)
    found.enter(ANNA, 90.0)


def test_what_is_refused_costs_nothing() -> None:
    found = limits(at_once=1, per_minute=2)
    found.enter(ANNA, 0.0)
    for _ in range(9):
        with pytest.raises(TooMuch):
            found.enter(ANNA, 0.0)
    found.leave(ANNA, begun=False)
    found.enter(ANNA, 0.0)


@given(st.lists(st.tuples(st.floats(0, 30), st.sampled_from([ANNA, BEN])), max_size=60), st.integers(1, 9))
def test_no_key_ever_makes_more_requests_than_its_rate_allows_in_any_span(
    asked: list[tuple[float, Caller]], per_minute: int
) -> None:
    found, now_s = limits(per_minute=per_minute), 0.0
    let_in: dict[str | None, list[float]] = {"anna": [], "ben": []}
    for after_s, caller in asked:
        now_s += after_s
        try:
            found.enter(caller, now_s)
        except TooMuch:
            continue
        let_in[caller.name].append(now_s)
    for times in let_in.values():
        for first, start in enumerate(times):
            for last in range(first, len(times)):
                assert last - first + 1 <= per_minute * (1 + (times[last] - start) / 60) + 1e-6


@given(st.lists(st.tuples(st.booleans(), st.sampled_from([ANNA, BEN, NOBODY]), st.floats(0, 100)), max_size=80))
def test_after_everybody_has_left_nothing_is_in_flight(steps: list[tuple[bool, Caller, float]]) -> None:
    found, inside = limits(at_once=3, per_minute=5, in_flight=6), Counter[Caller]()
    for comes, caller, at_s in steps:
        if comes:
            try:
                found.enter(caller, at_s)
                found.begin()
            except TooMuch:
                continue
            inside[caller] += 1
        elif inside[caller]:
            found.leave(caller, begun=True)
            inside[caller] -= 1
        assert found.in_flight == inside.total() <= 6
        assert max(inside.values(), default=0) <= 3
    for caller in inside.elements():
        found.leave(caller, begun=True)
    assert found.in_flight == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.012, "12ms"), (0.9995, "1s"), (1.5, "1.5s"), (59.5, "59.5s"), (60, "1m0s"), (361.2, "6m1s")],
)
def test_times_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


async def test_the_rate_stands_in_the_headers_and_a_refusal_says_when(tokenizer_folder: Path) -> None:
    async with running_gateway(tokenizer_folder, requests_per_minute_per_key=2) as gateway:
        answers = [await gateway.chat(stream=stream) for stream in (True, False)]
        refused = await gateway.chat()
        _, metrics = await gateway.get("/metrics")
        assert len(gateway.engine.calls) == 2
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in (*answers, refused)] == ["1", "0", "0"]
    assert {answer.headers["x-ratelimit-limit-requests"] for answer in (*answers, refused)} == {"2"}
    assert answers[0].headers["x-ratelimit-reset-requests"] == "30s"
    assert (refused.status, refused.body["error"]["type"]) == (429, "requests")
    assert 28 <= int(refused.headers["retry-after"]) <= 30
    assert 'clawstream_requests_limited_total{limit="key_rate"} 1.0' in metrics


async def test_a_key_with_two_streams_open_waits_and_another_does_not(tokenizer_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    one, other = add_key(path, "one", Allowance()), add_key(path, "other", Allowance(max_concurrent=1))
    async with running_gateway(tokenizer_folder, keys_file=path, max_concurrent_per_key=2) as gateway:

        def asked(key: str) -> asyncio.Task[int]:
            async def ask() -> int:
                return (await gateway.chat(headers={"Authorization": f"Bearer {key}"}, stream=True)).status

            return asyncio.create_task(ask())

        gateway.engine.hold()
        open_streams = [asked(one), asked(one), asked(other)]

        async def all_open() -> bool:
            return len(gateway.engine.running) == 3

        await until(all_open)
        assert [await asked(one), await asked(other)] == [429, 429]
        gateway.engine.release()
        assert await asyncio.gather(*open_streams) == [200, 200, 200]
        assert [await asked(one), await asked(other)] == [200, 200]


async def test_beyond_the_gateways_own_limit_a_request_is_refused_before_its_body_is_read(
    tokenizer_folder: Path,
) -> None:
    async with running_gateway(tokenizer_folder, max_in_flight=1) as gateway:
        gateway.engine.hold()
        first = asyncio.create_task(gateway.chat())
        await until(gateway.generating)
        refused = await gateway.post(b"not even json")
        gateway.engine.release()
        assert (await first).status == 200
        assert (refused.status, refused.body["error"]["code"]) == (503, "overloaded")
        assert refused.headers["retry-after"] == "1"
        assert (await gateway.chat()).status == 200


@dataclass(frozen=True)
class Ending:
    """One way in which a request can end."""

    body: bytes = json.dumps({"model": "policy", "messages": QUESTION}).encode()
    fault: Fault | None = None
    leaves: bool = False


ENDINGS = {
    "answered": Ending(),
    "streamed": Ending(body=json.dumps({"model": "policy", "messages": QUESTION, "stream": True}).encode()),
    "no JSON": Ending(body=b"{"),
    "a wrong field": Ending(body=json.dumps({"model": "policy", "messages": []}).encode()),
    "another model": Ending(body=json.dumps({"model": "x", "messages": QUESTION}).encode()),
    "too large": Ending(body=b"x" * 30_000),
    "refused by the engine": Ending(fault=Fault(status=400)),
    "the engine fails": Ending(fault=Fault(status=500)),
    "the engine is cut": Ending(fault=Fault(cut_after_tokens=2)),
    "the client leaves": Ending(leaves=True),
    "the session ends": Ending(body=json.dumps({"session_id": "s", "session_done": True}).encode()),
}


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS.keys())
async def test_however_a_request_ends_its_place_is_free_again(tokenizer_folder: Path, ending: Ending) -> None:
    async with running_gateway(tokenizer_folder, max_in_flight=1, bounds=Bounds(max_body_bytes=20_000)) as gateway:
        if ending.fault is not None:
            gateway.engine.faults.append(ending.fault)
        if ending.leaves:
            await leave(gateway, ending.body)
        else:
            await gateway.post(ending.body)

        async def free() -> bool:
            return (await gateway.chat()).status == 200

        await until(free)


async def leave(gateway: RunningGateway, body: bytes, key: str = "none") -> None:
    """Ask, and close the connection while the engine samples."""
    gateway.engine.hold()
    async with aiohttp.ClientSession() as leaving:
        asking = asyncio.create_task(
            leaving.post(f"{gateway.url}/v1/chat/completions", data=body, headers={"x-api-key": key})
        )
        await until(gateway.generating)
        asking.cancel()
        await asyncio.wait([asking])
    gateway.engine.release()
