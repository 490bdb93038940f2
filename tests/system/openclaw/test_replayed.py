"""What a real OpenClaw asked, asked again of a real gateway: each reaction belongs to the answer that it is about."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from clawstream.conversation.history import rebuild
from clawstream.events import Event, ExchangeCompleted, ExchangeFailed, TurnOrphaned, TurnPaired
from clawstream.gateway.http.connection import Bounds
from clawstream.gateway.requests.profiles import openclaw_session
from clawstream.stream.kafka import admin
from clawstream.stream.kafka.kafka_log import KafkaLog
from clawstream.stream.topics import TURNS
from clawstream.turns.stage import turns_stage
from tests.fakes.scripted_engine import ScriptedAnswer
from tests.parts.engine.tiny_model import make_tokenizer
from tests.parts.gateway.running_gateway import WITHIN_S, RunningGateway, everything, running_gateway
from tests.sessions import Json
from tests.system.openclaw.policy import Line, Script
from tests.unit.openclaw import recording
from tests.unit.stream import toys

pytestmark = pytest.mark.slow

CONTEXT_TOKENS = 8192
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("exec", "tool_call")]


@pytest.fixture
async def log(kafka_bootstrap: str, topic_prefix: str) -> AsyncIterator[KafkaLog]:
    await admin.apply(kafka_bootstrap, topic_prefix, partitions=2)
    async with KafkaLog.connect(kafka_bootstrap, prefix=topic_prefix) as connected:
        yield connected


async def play(gateway: RunningGateway, asked: recording.Asked) -> None:
    """Ask, and be answered what OpenClaw was answered; where it hung up, hang up after the same words."""
    tokens = Script(gateway.renderer, ()).ids(line(asked.answer).sampled())
    stall = len(tokens) - 1 if asked.gone else None
    gateway.engine.script = lambda _prompt: ScriptedAnswer(token_ids=tokens, stall_after_tokens=stall)
    headers = {"traceparent": f"00-{asked.trace_id}-52324b77b6c1adec-01"}
    if not asked.gone:
        assert (await gateway.chat(asked.messages, headers=headers, stream=True, tools=TOOLS)).done
        return
    body = json.dumps({"model": "policy", "messages": asked.messages, "stream": True, "tools": TOOLS}).encode()
    num_before = len(await gateway.recorded(ExchangeFailed, at_least=0))
    async with asyncio.timeout(WITHIN_S), gateway.asking(body, headers=headers) as answer:
        got = ""
        while got != asked.answer["content"]:
            event = json.loads((await answer.content.readuntil(b"\n\n")).removeprefix(b"data: "))
            got += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
        answer.close()
    await gateway.recorded(ExchangeFailed, at_least=num_before + 1)


def line(answer: Json) -> Line:
    called = [call["function"] for call in answer.get("tool_calls") or ()]
    return Line(
        heard="",
        content=answer["content"] or "",
        reasoning=answer.get("reasoning_content") or "",
        calls=tuple((one["name"], one["arguments"]) for one in called),
    )


def paired(turns: list[Event], exchanges: list[Event]) -> dict[str, list[tuple[str, str]]]:
    """What was said to which answer, by session."""
    known = {event.exchange_id: event for event in exchanges if isinstance(event, ExchangeCompleted | ExchangeFailed)}
    requests = {exchange_id: event.request for exchange_id, event in known.items()}
    found: dict[str, list[tuple[str, str]]] = {}
    for turn in turns:
        if isinstance(turn, TurnPaired):
            asked = [json.loads(message) for message in rebuild(turn.next_exchange_id, requests).messages]
            answer = json.loads(known[turn.turn_id].message or b"")
            found.setdefault(turn.session_id, []).append(recording.reaction(turn, answer, asked))
    return found


async def test_over_http_and_kafka_each_reaction_to_an_answer_of_openclaws_is_paired_with_that_answer(
    tmp_path: Path, log: KafkaLog
) -> None:
    make_tokenizer(tmp_path)
    stage = turns_stage()
    expected: dict[str, list[tuple[str, str]]] = {}
    async with (
        running_gateway(
            tmp_path, log=log, context_length_tokens=CONTEXT_TOKENS, bounds=Bounds(ack_timeout_s=WITHIN_S)
        ) as gateway,
        toys.running(stage, log),
    ):
        for name, reactions in recording.REACTIONS.items():
            session = recording.session(name)
            session_id = openclaw_session(tuple(session[0].messages))
            assert session_id is not None
            expected[session_id] = reactions
            for asked in session:
                await play(gateway, asked)
        await toys.settled(log, stage.name)
        turns = [record.event for record in await toys.read(log, TURNS)]
        exchanges = await everything(log)
    found = paired(turns, exchanges)
    assert found == expected
    assert sum(map(len, found.values())) == recording.NUM_REACTIONS
    assert sum(isinstance(turn, TurnOrphaned) for turn in turns) == sum(recording.UNSHOWN.values())
