"""Conversations through the gateway go on token by token: what was sampled stands in every later prompt."""

import json
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from clawstream.conversation.history import WholeRequest
from clawstream.events import Event, ExchangeCompleted, Question, RefusalReason, SampleAssembled, SampleRefused
from clawstream.rendering.renderer import PromptRenderer
from tests import recorded
from tests.fakes.memory_log import MemoryLog
from tests.flow import Flow, Oracle
from tests.parts.gateway.running_gateway import RunningGateway, everything, running_gateway
from tests.sessions import Json, assistant, history, user
from tests.unit.samples.test_parts import HINT, TAIL

ANN = {"X-Session-Id": "ann"}
TOOLS: list[Json] = [{"type": "function", "function": {"name": "exec", "parameters": {}}}]
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
PAGE_TOKENS = 64  # of an engine's prefix cache


async def prompts(gateway: RunningGateway) -> tuple[list[ExchangeCompleted], dict[str, WholeRequest]]:
    """The exchanges on the log, and each whole."""
    exchanges = [event for event in await everything(gateway.log) if isinstance(event, ExchangeCompleted)]
    return exchanges, history(exchanges)


async def turns(gateway: RunningGateway, num: int, messages: Sequence[Json] = (), **body: Any) -> list[Json]:
    """A client that adds to its history and drops reasoning; return the history."""
    asked = [*messages]
    for number in range(num):
        asked = [*asked, user(f"question {number}")]
        gateway.say(f"<think>\nthought {number}\n</think>\n\nanswer {number}")
        answer = await gateway.chat(asked, headers=ANN, **body)
        asked = [*asked, assistant(answer.body["choices"][0]["message"]["content"])]
    return asked


async def counted(gateway: RunningGateway, name: str) -> dict[str, float]:
    """A metric's values by how prompts were made."""
    _, text = await gateway.get("/metrics")
    lines = (line for line in text.splitlines() if line.startswith(f'{name}{{made="'))
    return {line.split('"')[1]: float(line.rsplit(" ", 1)[1]) for line in lines}


@pytest.mark.slow
@pytest.mark.parametrize("body", [{}, NO_THINKING, {"tools": TOOLS}, {"stream": False, "max_tokens": 12}])
async def test_six_turns_are_one_sequence(tokenizer_folder: Path, body: Json) -> None:
    async with running_gateway(tokenizer_folder) as gateway:
        await turns(gateway, 6, **body)
        exchanges, whole = await prompts(gateway)
        made = await counted(gateway, "clawstream_prompts_total")
        timed = await counted(gateway, "clawstream_rendering_seconds_count")
    assert [exchange.num_spliced for exchange in exchanges] == [0, 1, 2, 3, 4, 5]
    for before, after in pairwise(exchanges):
        so_far = whole[before.exchange_id].token_ids + before.output_ids
        assert whole[after.exchange_id].token_ids[: len(so_far)] == so_far
    assert made == timed == {"rendered": 1.0, "continued": 5.0}


async def test_a_restarted_gateway_goes_on_token_by_token(tokenizer_folder: Path) -> None:
    log = MemoryLog()
    async with running_gateway(tokenizer_folder, log=log) as gateway:
        asked = await turns(gateway, 2)
    async with running_gateway(tokenizer_folder, log=log) as gateway:
        await turns(gateway, 1, asked)
        (_, second, third), whole = await prompts(gateway)
    so_far = whole[second.exchange_id].token_ids + second.output_ids
    assert whole[third.exchange_id].token_ids[: len(so_far)] == so_far
    assert third.num_spliced == 2


@pytest.mark.slow
@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("farewell", [False, True])
async def test_a_session_that_is_done_is_forgotten(tokenizer_folder: Path, restarted: bool, farewell: bool) -> None:
    log = MemoryLog()
    async with running_gateway(tokenizer_folder, log=log) as gateway:
        asked = await turns(gateway, 1)
        if farewell:
            await gateway.post(json.dumps({"model": "policy", "session_done": True}).encode(), headers=ANN)
        else:
            asked = await turns(gateway, 1, asked, session_done=True)
        if not restarted:
            await turns(gateway, 1, asked)
    if restarted:
        async with running_gateway(tokenizer_folder, log=log) as gateway:
            await turns(gateway, 1, asked)
    exchanges = [event for event in await everything(log) if isinstance(event, ExchangeCompleted)]
    assert exchanges[-1].num_spliced == 0


async def test_what_a_client_changed_is_rendered_and_counted(tokenizer_folder: Path) -> None:
    async with running_gateway(tokenizer_folder) as gateway:
        asked = await turns(gateway, 1)
        asked = await turns(gateway, 2, [asked[0], assistant("edited")])
        made = await counted(gateway, "clawstream_prompts_total")
        exchanges, whole = await prompts(gateway)
        plain = gateway.renderer.prompt_ids(asked[:3], {})
    assert made == {"rendered": 1.0, "fallback": 1.0, "spliced": 1.0}
    assert whole[exchanges[1].exchange_id].token_ids == plain
    assert whole[exchanges[2].exchange_id].token_ids[: len(plain)] == plain


def openclaw_says(answer: Json) -> str:
    """What a model samples for a recorded answer: its own spacing, and thoughts that the client does not echo."""
    calls = [call["function"] for call in answer.get("tool_calls", ())]
    blocks = [
        f'<tool_call>\n{{"name": "{one["name"]}", "arguments": {one["arguments"]}}}\n</tool_call>' for one in calls
    ]
    return "\n".join(["<think>\nI should look.\n</think>\n\n" + str(answer["content"]), *blocks])


async def openclaw(gateway: RunningGateway) -> None:
    """Three sessions as a real client held them, and a reply to the last answer of each."""
    for asked, answer in (
        (recorded.FIRST_TURN, recorded.GREETING),
        (recorded.TOOL_REQUEST, recorded.LOOKING),
        (recorded.OTHER_SESSION, assistant("hello")),
        (recorded.TOOL_RESULTS, recorded.FINISHED),
        (recorded.USER_CORRECTS, assistant("2 and 2 is 4")),
        (recorded.USER_CORRECTS_AFTER_TOOLS, assistant("sorry")),
    ):
        gateway.say(openclaw_says(answer))
        assert (await gateway.chat(asked, tools=TOOLS)).status == 200


def common(left: Sequence[int], right: Sequence[int]) -> int:
    return next((n for n, (one, other) in enumerate(zip(left, right, strict=False)) if one != other), len(left))


async def test_with_openclaw_no_more_is_prefilled_than_the_answer_what_is_new_its_block_and_a_page(
    tokenizer_folder: Path,
) -> None:
    async with running_gateway(tokenizer_folder) as gateway:
        await openclaw(gateway)
        exchanges, whole = await prompts(gateway)
        renderer = gateway.renderer
    continued = 0
    for session_id in ("s1", "s9"):
        session = [exchange for exchange in exchanges if exchange.session_id == session_id]
        for number, (before, after) in enumerate(pairwise(session)):
            old, new = whole[before.exchange_id], whole[after.exchange_id]
            assert after.num_spliced == number + 1
            cached = common(old.token_ids + before.output_ids, new.token_ids) // PAGE_TOKENS * PAGE_TOKENS
            said = [
                json.loads(message) for message in new.messages[len(old.messages) :]
            ]  # the block stood there before
            allowed = len(before.output_ids) + len(renderer.prompt_ids(said, {})) + PAGE_TOKENS
            assert len(new.token_ids) - cached <= allowed
            continued += 1
    assert continued == 3


def hinted(events: Sequence[Event], renderer: PromptRenderer) -> list[SampleAssembled]:
    """A sample with a hint of every turn that was paired, on log and workers that are cut at any point."""
    said = f"\\boxed{{1}} [HINT_START]{HINT}[HINT_END]"
    judge = Oracle({Question.SCORE: ["\\boxed{1}"], Question.HINT: [said]})
    log = Flow(judge, renderer=renderer).run(events, random.Random(1), restarts=0.1)
    assert RefusalReason.HINT_UNRENDERABLE not in [refused.reason for refused in log.of(SampleRefused)]
    return log.of(SampleAssembled)


@pytest.mark.slow
@pytest.mark.parametrize("client", ["plain", "restarted", "openclaw", "edits"])
async def test_a_hinted_prompt_is_the_prompt_that_was_asked_and_the_hint(tokenizer_folder: Path, client: str) -> None:
    log = MemoryLog()
    async with running_gateway(tokenizer_folder, log=log) as gateway:
        renderer = gateway.renderer
        if client == "openclaw":
            await openclaw(gateway)
        else:
            asked = await turns(gateway, 3)
            if client == "edits":
                asked = await turns(gateway, 3, [*asked[:-1], assistant("edited")])
            elif client == "plain":
                await turns(gateway, 2, asked)
    if client == "restarted":
        async with running_gateway(tokenizer_folder, log=log) as gateway:
            await turns(gateway, 2, asked)
    samples = hinted(await everything(log), renderer)
    assert len(samples) == {"openclaw": 3}.get(client, 4)
    for sample in samples:
        assert sample.hinted_prompt_ids is not None
        text = renderer.decode(sample.hinted_prompt_ids)
        assert text.count(TAIL) == 1
        assert text.replace(TAIL, "") == renderer.decode(sample.prompt_ids)
