"""What an engine is known to serve: by the log, by asking it and by its answers; and where requests are put."""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from clawstream.errors import TryLater
from clawstream.events import PolicyActivated
from clawstream.gateway import engines as gateway_engines
from clawstream.gateway.engines import Engines, ServedEngine, StaleCache
from clawstream.inference.engine import Chunk, Finish, FinishKind, ServerInfo, WeightsSpan
from clawstream.inference.sglang import SglangEngine


class _Told(SglangEngine):
    """An engine that serves `version`; `meanwhile` happens while it answers."""

    def __init__(
        self, version: str, meanwhile: Callable[[], None] = lambda: None, adapters: Sequence[str] = ()
    ) -> None:
        self.serves, self.meanwhile, self.names = version, meanwhile, adapters
        self.error: Exception | None = None

    async def server_info(self) -> ServerInfo:
        self.meanwhile()
        if self.error is not None:
            raise self.error
        return ServerInfo(model_path="m", context_length_tokens=64, weight_version=self.serves)

    async def lora_adapters(self) -> tuple[str, ...]:
        return tuple(self.names)


def served(
    url: str = "http://e", *, version: str = "0", weights: int | None = 0, adapters: Sequence[str] = ()
) -> ServedEngine:
    client = _Told(version, adapters=adapters)
    return ServedEngine(url=url, client=client, weights=weights, problem=None, context_length_tokens=64)


def activated(
    version: int, url: str = "http://e", adapter: str | None = None, policy_id: str = "policy"
) -> PolicyActivated:
    return PolicyActivated(
        policy_id=policy_id, policy_version=version, engine=url, adapter=adapter, pause_ms=1.0, num_bytes=1,
        activated_at_ms=1,
    )  # fmt: skip


def first(version: str, cached_tokens: int | None = 0) -> Chunk:
    return Chunk(token_ids=(1,), logprobs_nats=(-1.0,), cached_tokens=cached_tokens, weight_version=version)


async def test_a_version_whose_event_was_missed_is_heard_from_the_engine() -> None:
    engine = served(version="3", weights=2)
    await engine.ask()
    assert engine.version == 3


async def test_an_event_that_comes_while_the_engine_is_asked_outweighs_its_older_answer() -> None:
    engine = served(weights=3)
    engine.client = _Told("3", lambda: engine.serves(4))
    await engine.ask()
    assert engine.version == 4


async def test_an_engine_that_came_back_with_old_weights_is_known_by_them() -> None:
    engine = served(version="1", weights=5)
    engine.problem = "away"
    await engine.ask()
    assert engine.version == 1


async def test_an_event_older_than_what_is_known_changes_nothing() -> None:
    engine = served(weights=5)
    Engines("policy", [engine]).learn(activated(4))
    assert engine.version == 5


async def test_events_of_another_policy_or_engine_change_nothing() -> None:
    one, other = served("http://a"), served("http://b")
    engines = Engines("policy", [one, other])
    engines.learn(activated(3, "http://b/"))
    assert (one.version, other.version) == (0, 3)
    Engines("another", [one]).learn(activated(9, "http://a"))
    assert one.version == 0


async def test_a_key_names_the_weights_and_the_last_resort_is_a_key_that_no_other_request_has() -> None:
    engine = served(weights=3)
    assert engine.place().extra_key == engine.place().extra_key == "policy:3"
    assert len({engine.place(alone=True).extra_key for _ in range(3)} | {"policy:3"}) == 4


async def test_an_answer_by_newer_weights_that_used_the_cache_is_asked_again_under_a_key_of_theirs() -> None:
    engine = served()
    place = engine.place()
    with pytest.raises(StaleCache):
        place.check(first("1", cached_tokens=64))
    assert (place.extra_key, engine.place().extra_key) == ("policy:0", "policy:1")


@pytest.mark.parametrize("cached", [0, 64])
async def test_an_answer_by_the_weights_that_its_key_names_is_good(cached: int) -> None:
    engine = served()
    engine.place().check(first("0", cached))
    assert engine.version == 0


async def test_an_answer_by_newer_weights_that_used_no_cache_is_good_and_tells_the_version() -> None:
    engine = served()
    engine.place().check(first("1", cached_tokens=0))
    assert engine.version == 1


async def test_an_answer_that_does_not_say_how_much_was_cached_is_not_trusted() -> None:
    with pytest.raises(StaleCache):
        served().place().check(first("1", cached_tokens=None))


async def test_under_a_key_that_no_other_request_has_every_answer_is_good() -> None:
    served().place(alone=True).check(first("1", cached_tokens=None))


async def test_an_answer_by_what_was_new_then_does_not_undo_what_is_known_now() -> None:
    engine = served()
    place = engine.place()
    engine.serves(2)
    place.check(first("1", cached_tokens=0))
    assert engine.version == 2


async def test_an_answer_by_older_weights_than_its_key_names_tells_that_the_engine_came_back_with_them() -> None:
    engine, other = served("http://a", weights=5), served("http://b", weights=5)
    engines = Engines("policy", [engine, other])
    engine.place().check(first("0"))
    assert engine.version == 0
    assert {place.engine.url for n in range(20) if (place := engines.place(str(n)))} == {"http://b"}


async def test_of_an_answer_in_one_chunk_the_span_of_the_first_token_counts() -> None:
    spans = (WeightsSpan("1", 0), WeightsSpan("0", 1), WeightsSpan("1", 1))
    chunk = Chunk(
        token_ids=(1, 2), logprobs_nats=(-1.0, -1.0), cached_tokens=9, weight_version="1",
        finish=Finish(kind=FinishKind.STOP), weight_versions=spans,
    )  # fmt: skip
    served().place().check(chunk)


async def test_the_newest_loaded_adapter_is_asked_for_and_names_the_version() -> None:
    engine = served(adapters=("policy-v3", "policy-v12", "another-v99", "policy-v013"))
    await engine.ask()
    place = engine.place()
    assert (engine.version, place.adapter, place.adapter_version, place.weights) == (12, "policy-v12", 12, 0)
    assert place.extra_key == "policy:0"


async def test_full_weights_newer_than_every_adapter_are_asked_for_themselves() -> None:
    engine = served(version="13", adapters=("policy-v12",))
    await engine.ask()
    assert (engine.place().adapter, engine.place().version) == (None, 13)


async def test_an_adapter_is_asked_for_as_soon_as_the_log_says_that_it_is_loaded() -> None:
    engine = served()
    Engines("policy", [engine]).learn(activated(4, adapter="policy-v4"))
    assert engine.place().adapter == "policy-v4"


async def test_a_session_stays_while_its_engine_is_there_and_goes_back_to_none_that_is_not() -> None:
    engines = Engines("policy", [served(f"http://{name}") for name in "abc"])
    homes = [_asked(engines, "s") for _ in range(5)]
    assert len(set(homes)) == 1
    homes[0].problem = "killed"
    moved = _asked(engines, "s")
    assert moved is not homes[0]
    homes[0].problem = None
    assert _asked(engines, "s") is moved


async def test_an_engine_that_failed_a_request_is_not_asked_by_it_again() -> None:
    engines = Engines("policy", [served(f"http://{name}") for name in "ab"])
    home = _asked(engines, "s")
    other = engines.place("s", avoid=[home])
    assert other is not None
    assert other.engine is not home
    assert engines.place("s", avoid=[home, other.engine]) is None


@pytest.mark.parametrize(("asked_again", "remembered"), [(True, True), (False, False)])
async def test_of_very_many_sessions_those_asked_last_stay_where_they_are(
    monkeypatch: pytest.MonkeyPatch, asked_again: bool, remembered: bool
) -> None:
    monkeypatch.setattr(gateway_engines, "_HOMES", 2)
    engines = Engines("policy", [served(f"http://{name}") for name in "ab"])
    first = _asked(engines, "s")
    first.problem = "killed"
    moved = _asked(engines, "s")
    first.problem = None
    for session_id in ("t", *("s" * asked_again), "u"):
        _asked(engines, session_id)
    assert _asked(engines, "s") is (moved if remembered else first)


async def test_what_is_in_flight_is_counted_until_it_ends_however_it_does() -> None:
    engines = Engines("policy", [served()])
    place = engines.place("s")
    assert place is not None

    def cut() -> None:
        with engines.asked("s", place, asyncio.Timeout(None)):
            assert place.engine.in_flight == 1
            raise TryLater("cut")

    with pytest.raises(TryLater):
        cut()
    assert (place.engine.in_flight, place.engine.timeouts) == (0, set())


async def test_new_sessions_go_where_the_least_is_in_flight() -> None:
    busy, idle = served("http://a"), served("http://b")
    engines = Engines("policy", [busy, idle])
    busy.in_flight = 3
    assert {place.engine for n in range(20) if (place := engines.place(f"s{n}"))} == {idle}


async def test_a_version_in_turn_keeps_every_engine_offered_and_one_that_stays_behind_is_not() -> None:
    now = 0.0
    one, other = served("http://a"), served("http://b")
    engines = Engines("policy", [one, other], clock=lambda: now)
    assert _offered(engines) == {"http://a", "http://b"}
    engines.learn(activated(1, "http://a"))
    assert _offered(engines) == {"http://a", "http://b"}
    now = 29.0
    assert _offered(engines) == {"http://a", "http://b"}
    now = 31.0
    assert _offered(engines) == {"http://a"}
    engines.learn(activated(1, "http://b"))
    assert _offered(engines) == {"http://a", "http://b"}


async def test_an_engine_that_comes_up_with_old_weights_is_not_offered_until_it_has_the_others() -> None:
    one, late = served("http://a", weights=5), served("http://b", version="0", weights=None)
    late.problem = "not asked yet"
    engines = Engines("policy", [one, late])
    assert _offered(engines) == {"http://a"}
    await late.ask()
    assert _offered(engines) == {"http://a"}
    engines.learn(activated(5, "http://b"))
    assert _offered(engines) == {"http://a", "http://b"}


async def test_an_engine_that_comes_back_with_old_weights_is_out_at_once() -> None:
    one, back = served("http://a"), served("http://b")
    engines = Engines("policy", [one, back])
    one.serves(5)
    back.serves(5)
    assert _offered(engines) == {"http://a", "http://b"}
    back.serves(0)
    assert _offered(engines) == {"http://a"}


async def test_no_adapter_is_asked_for_that_the_engine_has_no_more() -> None:
    engine = served(adapters=("policy-v12",))
    await engine.ask()
    assert isinstance(engine.client, _Told)
    engine.client.names = ()
    await engine.ask()
    assert (engine.place().adapter, engine.place().version) == (None, 0)


async def test_where_all_have_old_weights_the_newest_of_them_serve() -> None:
    one, other = served("http://a", weights=5), served("http://b", weights=5)
    engines = Engines("policy", [one, other])
    one.serves(0)
    other.serves(2)
    assert _offered(engines) == {"http://b"}


async def test_requests_that_wait_on_a_hanging_engine_are_let_go_once_another_is_there() -> None:
    hanging, other = served("http://a"), served("http://b")
    hanging.answers_within_s = other.answers_within_s = 0.05
    engines = Engines("policy", [hanging, other])

    class Hangs(_Told):
        async def server_info(self) -> ServerInfo:
            await asyncio.Event().wait()
            raise AssertionError

    hanging.client = Hangs("0")

    async def wait() -> None:
        async with asyncio.timeout(3600) as timeout:
            with engines.asked("s", hanging.place(), timeout):
                await asyncio.Event().wait()

    watching = asyncio.create_task(engines.watch())
    try:
        async with asyncio.timeout(10):
            with pytest.raises(TimeoutError):
                await wait()
        assert hanging.problem == "engine http://a: no answer within 0.05 s"
    finally:
        watching.cancel()


async def test_a_stream_on_a_lost_engine_keeps_its_time_however_often_the_engine_fails_to_answer() -> None:
    engine = served()
    engine.answers_within_s = 60.0
    engines = Engines("policy", [engine])
    async with asyncio.timeout(None) as timeout:
        with engines.asked("s", engine.place(), timeout):
            engine.give_up()
            until = timeout.when()
            assert until is not None
            engine.give_up()
            assert timeout.when() == until
            timeout.reschedule(None)  # a token came
            await asyncio.sleep(0)
            engine.give_up()
            assert timeout.when() is not None
    assert engine.bounded == set()


async def test_requests_that_wait_on_the_only_engine_keep_waiting_when_it_does_not_answer() -> None:
    engine = served()
    assert isinstance(engine.client, _Told)
    engine.client.error = TryLater("refused")
    engines = Engines("policy", [engine])
    watching = asyncio.create_task(engines.watch())
    try:
        async with asyncio.timeout(60) as timeout:
            with engines.asked("s", engine.place(), timeout):
                until = timeout.when()
                while engine.problem is None or engine.doubted.is_set():
                    await asyncio.sleep(0)
                for _ in range(3):
                    await asyncio.sleep(0)
                assert timeout.when() == until
    finally:
        watching.cancel()


def _asked(engines: Engines, session_id: str) -> ServedEngine:
    place = engines.place(session_id)
    assert place is not None
    with engines.asked(session_id, place, asyncio.Timeout(None)):
        return place.engine


def _offered(engines: Engines) -> set[str]:
    return {place.engine.url for n in range(50) if (place := engines.place(str(n)))}


async def test_an_engine_that_was_never_there_is_said_to_be_away_once_a_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = _Told("0")
    engine = ServedEngine(url="http://e", client=client)
    for reason in ("refused", "refused", "loading"):
        client.error = TryLater(reason)
        await engine.ask()
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"engine=http://e state=away reason={reason}" for reason in ("refused", "loading")]
