"""What the gateway promises when its log or disk is slow or away, or a client is gone."""

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from clawstream.errors import TryLater
from clawstream.events import (
    ExchangeCompleted,
    ExchangeFailed,
    FailureReason,
    FeedbackGiven,
    PolicyActivated,
    SessionDone,
    VersionSpan,
)
from clawstream.gateway.http.connection import Bounds
from clawstream.inference.dialect import read_chunk
from clawstream.stream.log import Sealed
from clawstream.stream.stage import Record
from clawstream.stream.topics import EXCHANGES, FEEDBACK
from tests.fakes.memory_log import MemoryLog
from tests.parts.gateway.running_gateway import (
    QUESTION,
    WITHIN_S,
    RunningGateway,
    everything,
    full_disk,
    running_gateway,
    until,
)

BODY = json.dumps({"model": "policy", "messages": QUESTION, "stream": True}).encode()


class GatedLog(MemoryLog):
    """A log that acknowledges nothing while its gate is shut, and refuses all while it is `away`."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked = asyncio.Event()
        self.away = False

    async def append_sealed(self, records: Sequence[Sealed], *, timeout_s: float | None = None) -> None:
        """Wait for the gate, then append."""
        self.asked.set()
        try:
            async with asyncio.timeout(timeout_s):
                await self.gate.wait()
        except TimeoutError as error:
            raise TryLater("no acknowledgement") from error
        if self.away:
            raise TryLater("the broker is not there")
        await super().append_sealed(records)

    def healthy(self) -> bool:
        """Whether it is not away."""
        return not self.away


@pytest.fixture
async def gateway(tokenizer_folder: Path) -> AsyncIterator[RunningGateway]:
    async with running_gateway(tokenizer_folder) as found:
        yield found


async def test_no_client_sees_a_finish_before_the_log_has_acknowledged(tokenizer_folder: Path) -> None:
    log = GatedLog()
    log.gate.clear()
    async with (
        running_gateway(tokenizer_folder, log=log, bounds=Bounds(ack_timeout_s=30.0)) as gateway,
        gateway.asking(BODY) as answer,
    ):
        seen = b""
        async with asyncio.timeout(WITHIN_S):
            await log.asked.wait()
            while b'"content":"."' not in seen:
                seen += await answer.content.readany()
        assert b'finish_reason":null' in seen
        assert b'finish_reason":"stop"' not in seen
        assert await everything(gateway.log) == []
        log.gate.set()
        rest = await answer.content.read()
        assert b'finish_reason":"stop"' in rest
        assert len(await everything(gateway.log)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_is_kept_nowhere_has_no_finish(tokenizer_folder: Path, stream: bool) -> None:
    log = GatedLog()
    log.gate.clear()
    async with running_gateway(
        tokenizer_folder, log=log, fsync=full_disk, bounds=Bounds(ack_timeout_s=0.05)
    ) as gateway:
        response = await gateway.chat(stream=stream)
        log.gate.set()
    if stream:
        assert response.events[-1]["error"]["code"] == "service_unavailable"
        assert response.finish_reasons == []
        assert not response.done
    else:
        assert response.status == 503
        assert response.headers["retry-after"] == "2"


async def test_no_client_sees_a_finish_before_the_spool_is_on_the_disk(tokenizer_folder: Path) -> None:
    log = GatedLog()
    syncing, synced = threading.Event(), threading.Event()

    def fsync(fd: int) -> None:
        syncing.set()
        assert synced.wait(WITHIN_S)
        os.fsync(fd)

    async with running_gateway(tokenizer_folder, log=log, fsync=fsync) as gateway, gateway.asking(BODY) as answer:
        log.away = True
        seen = bytearray()

        async def read() -> None:
            async for chunk in answer.content.iter_any():
                seen.extend(chunk)

        reading = asyncio.create_task(read())
        async with asyncio.timeout(WITHIN_S):
            while not syncing.is_set():
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)  # a finish that was sent by now would be read
        assert b'finish_reason":"stop"' not in seen
        synced.set()
        await reading
        assert b'finish_reason":"stop"' in seen
        log.away = False
        assert len(await gateway.recorded(ExchangeCompleted)) == 1


async def spooled_records(gateway: RunningGateway) -> int:
    """How many records wait in the gateway's spool."""
    found: int = json.loads((await gateway.get("/readyz"))[1])["spool"]["records"]
    return found


async def test_while_kafka_is_away_everything_goes_on_and_is_told(tokenizer_folder: Path) -> None:
    log = GatedLog()
    async with running_gateway(tokenizer_folder, log=log) as gateway:
        log.away = True
        response = await gateway.chat()
        status, told = await gateway.get("/readyz")
        _, metrics = await gateway.get("/metrics")
        log.away = False
        (exchange,) = await gateway.recorded(ExchangeCompleted)

        async def drained() -> bool:
            return await spooled_records(gateway) == 0

        await until(drained)
    ready = json.loads(told)
    assert (response.status, response.body["id"]) == (200, f"chatcmpl-{exchange.exchange_id}")
    assert (status, ready["ready"], ready["missing"]) == (
        200, True, [{"part": "kafka", "problem": "the broker does not answer"}],
    )  # fmt: skip
    assert ready["spool"]["records"] == 1
    assert ready["spool"]["bytes"] > 100
    assert "clawstream_spool_records 1.0" in metrics
    assert "clawstream_spooled_records_total 1.0" in metrics


class ForgetfulLog(MemoryLog):
    """A log that writes and, while it is `mute`, does not acknowledge."""

    mute = False

    async def append_sealed(self, records: Sequence[Sealed], *, timeout_s: float | None = None) -> None:
        """Append, and say nothing of it once."""
        await super().append_sealed(records, timeout_s=timeout_s)
        if self.mute:
            self.mute = False
            raise TryLater("no acknowledgement")


async def test_what_was_written_without_an_acknowledgement_is_written_again_as_it_was(tokenizer_folder: Path) -> None:
    log = ForgetfulLog()
    async with running_gateway(tokenizer_folder, log=log) as gateway:
        log.mute = True
        response = await gateway.chat()
        both = await gateway.recorded(ExchangeCompleted, at_least=2)
    first, second = (
        (raw.key, raw.value, raw.headers)
        for place in log.broker.places([EXCHANGES])
        for raw in log.broker.records(place)
    )
    assert first == second
    assert {f"chatcmpl-{one.exchange_id}" for one in both} == {response.body["id"]}


async def test_a_session_with_something_in_the_spool_goes_through_it_and_others_do_not(tokenizer_folder: Path) -> None:
    log = GatedLog()
    async with running_gateway(tokenizer_folder, log=log, bounds=Bounds(ack_timeout_s=30.0)) as gateway:
        log.away = True
        first = await gateway.chat(session_id="a")
        log.gate.clear()  # what is drained now waits here
        log.away = False
        second = await gateway.chat(session_id="a")
        waiting = asyncio.create_task(gateway.chat(session_id="b"))
        waited = await spooled_records(gateway)
        log.gate.set()
        assert (await waiting).status == 200
        exchanges = await gateway.recorded(ExchangeCompleted, at_least=3)
    assert (first.status, second.status, waited) == (200, 200, 2)
    ours = [f"chatcmpl-{one.exchange_id}" for one in exchanges if one.session_id == "a"]
    assert ours == [first.body["id"], second.body["id"]]


async def test_feedback_and_the_end_of_a_session_go_the_same_way(tokenizer_folder: Path) -> None:
    log = GatedLog()
    async with running_gateway(tokenizer_folder, log=log) as gateway:
        log.away = True
        answer = await gateway.chat(session_id="a")
        thumb = {"response_id": answer.body["id"], "thumb": "up"}
        async with gateway.client.post(f"{gateway.url}/v1/feedback", json=thumb) as given:
            assert given.status == 201
        ended = await gateway.chat([], session_id="a", session_done=True)
        assert await spooled_records(gateway) == 3
        log.away = False
        (done,) = await gateway.recorded(SessionDone)
        batches = log.follow((FEEDBACK,), until_end=True)
        (feedback,) = [record.event async for records in batches for record in records if isinstance(record, Record)]
    assert isinstance(feedback, FeedbackGiven)
    assert (ended.status, f"chatcmpl-{feedback.turn_id}") == (200, answer.body["id"])
    assert f"chatcmpl-{done.after_exchange_id}" == answer.body["id"]


@pytest.mark.slow
async def test_a_full_spool_is_said_before_anything_is_generated(tokenizer_folder: Path) -> None:
    log = GatedLog()
    async with running_gateway(tokenizer_folder, log=log, spool_bytes=2**16) as gateway:
        log.away = True
        gateway.say("x" * 1000)
        answered = [await gateway.chat(session_id=f"s{number}") for number in range(40)]
        generated = len(gateway.engine.calls)
        status, told = await gateway.get("/readyz")
        log.away = False
        recorded = await gateway.recorded(ExchangeCompleted, at_least=generated)
        again = await gateway.chat()
    refused = [response for response in answered if response.status != 200]
    assert 3 < generated < 40
    assert {response.status for response in refused} == {503}
    assert "its spool is full" in refused[0].body["error"]["message"]
    assert refused[0].headers["retry-after"] == "2"
    assert (status, json.loads(told)["ready"]) == (503, False)
    assert {f"chatcmpl-{one.exchange_id}" for one in recorded} == {
        response.body["id"] for response in answered if response.status == 200
    }
    assert again.status == 200


async def test_what_a_gateway_left_in_its_spool_is_known_and_delivered_by_the_next(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    log = GatedLog()
    async with running_gateway(tokenizer_folder, log=log, data_dir=tmp_path) as gateway:
        log.away = True
        first = await gateway.chat()
        assert await everything(log) == []
    history = [*QUESTION, first.body["choices"][0]["message"], {"role": "user", "content": "And 3+3?"}]
    async with running_gateway(tokenizer_folder, log=log, data_dir=tmp_path) as gateway:
        second = await gateway.chat(history)
        log.away = False
        exchanges = await gateway.recorded(ExchangeCompleted, at_least=2)
    assert second.headers["x-session-id"] == first.headers["x-session-id"]
    assert [f"chatcmpl-{one.exchange_id}" for one in exchanges] == [first.body["id"], second.body["id"]]


async def test_a_client_that_goes_away_cancels_its_generation(gateway: RunningGateway) -> None:
    gateway.engine.hold()
    leaving, staying = (asyncio.create_task(gateway.post(BODY)) for _ in range(2))

    async def both_run() -> bool:
        return len(gateway.engine.running) == 2

    await until(both_run)
    leaving.cancel()
    (failed,) = await gateway.recorded(ExchangeFailed)
    assert len(gateway.engine.running) == 1
    gateway.engine.release()
    assert (await staying).finish_reasons == ["stop"]
    assert failed.reason is FailureReason.CLIENT_GONE
    assert gateway.engine.cancelled == [failed.exchange_id]


async def test_what_a_gone_client_was_sent_is_recorded_with_its_failure(gateway: RunningGateway) -> None:
    gateway.say("x" * 500)
    gateway.engine.token_delay_s = 0.01
    async with gateway.asking(BODY) as answer:
        await answer.content.readuntil(b'"content":"x"')
    (failed,) = await gateway.recorded(ExchangeFailed)
    assert 0 < len(failed.output_ids) < 500
    assert failed.message is not None
    assert failed.num_sent_tokens is not None
    got = json.loads(failed.message)["content"]
    assert gateway.renderer.decode(failed.output_ids[: failed.num_sent_tokens]) == got
    assert "x" <= got <= "x" * 500
    assert failed.output_logprobs is not None
    assert len(failed.output_logprobs) == len(failed.output_ids)
    assert failed.versions == (VersionSpan(policy_version=0, num_tokens=len(failed.output_ids)),)
    assert failed.sampling is not None
    assert await gateway.recorded(ExchangeCompleted, at_least=0) == []


async def test_what_a_gone_client_was_sent_has_no_version_where_no_chunk_named_the_weights(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    nameless = read_chunk
    monkeypatch.setattr(
        "clawstream.inference.sglang.read_chunk", lambda element: nameless(element)._replace(weight_version=None)
    )
    gateway.say("x" * 500)
    gateway.engine.token_delay_s = 0.01
    async with gateway.asking(BODY) as answer:
        await answer.content.readuntil(b'"content":"x"')
    (failed,) = await gateway.recorded(ExchangeFailed)
    assert failed.message is not None
    assert failed.versions is None


async def test_a_gone_client_that_waited_for_the_whole_was_sent_nothing(gateway: RunningGateway) -> None:
    gateway.say("x" * 500)
    gateway.engine.token_delay_s = 0.01
    asking = asyncio.create_task(gateway.chat())

    async def has_tokens() -> bool:
        return "clawstream_ttft_seconds_count 1.0" in (await gateway.get("/metrics"))[1]

    await until(has_tokens)
    asking.cancel()
    (failed,) = await gateway.recorded(ExchangeFailed)
    assert len(failed.output_ids) > 0
    assert (failed.message, failed.versions, failed.sampling) == (None, None, None)


async def test_a_weight_change_cuts_no_stream_and_each_token_has_its_version(
    gateway: RunningGateway, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    gateway.say("x" * 40)
    gateway.engine.token_delay_s = 0.005
    async with gateway.asking(BODY) as answer:
        seen = await answer.content.readuntil(b'"content":"x"')
        await gateway.engine.pause("in_place")
        await gateway.engine.update_weights(str(tmp_path), "3", abort_all=False)
        await gateway.engine.resume()
        seen += await answer.content.read()
    exchange = await gateway.exchange()
    assert seen.count(b'"content":"x"') == 40
    assert [span.policy_version for span in exchange.versions] == [0, 3]
    assert sum(span.num_tokens for span in exchange.versions) == len(exchange.output_ids)


async def test_an_activated_version_has_a_cache_of_its_own(gateway: RunningGateway) -> None:
    activated = PolicyActivated(
        policy_id="policy", policy_version=7, engine=gateway.engine_url, adapter=None, pause_ms=1.0, num_bytes=1,
        activated_at_ms=1,
    )  # fmt: skip
    await gateway.log.append((activated,))

    async def heard() -> bool:
        return (await gateway.chat()).headers["x-policy-version"] == "7"

    await until(heard)
    assert gateway.engine.calls[-1].request.extra_key == "policy:7"


async def test_running_answers_are_finished_when_the_gateway_stops(tokenizer_folder: Path) -> None:
    async with running_gateway(tokenizer_folder) as gateway:
        gateway.engine.hold()
        asking = asyncio.create_task(gateway.chat())
        await until(gateway.generating)
        asyncio.get_running_loop().call_later(0.2, gateway.engine.release)
    response = await asking
    assert response.body["choices"][0]["message"]["content"] == "It is 4."
