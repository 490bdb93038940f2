"""Penalties, grammars and calls that have to be made on the CPU engine, by SGLang's rules."""

import json
import math
import re
from collections.abc import AsyncIterator, Sequence
from itertools import product
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch

from clawstream.events import ExchangeCompleted, Shaping, TokenBias
from clawstream.inference.dialect import Call, TokenDelta
from clawstream.inference.engine import GenerateRequest, SamplingParams
from clawstream.local.engine.rows import Job
from clawstream.local.engine.sampling import draw, shaped
from tests.parts.engine.conftest import COMPUTING, Subject
from tests.parts.gateway.running_gateway import RunningGateway, running_gateway, until

LOGITS = [2.0, -1.0, 0.5, 0.0]
PROMPT = (3, 3)
END = 2


class Deaf:
    """A sink for a job that is not run."""

    def push(self, delta: TokenDelta) -> None:
        """Nothing is kept."""


def job(shaping: Shaping | None, said: Sequence[int]) -> Job:
    request = GenerateRequest(input_ids=PROMPT, sampling=SamplingParams(max_new_tokens=9, shaping=shaping))
    return Job(
        call=Call(rid="r", request=request),
        sink=Deaf(),
        seed=1,
        stop_ids=frozenset({END, 99}),
        tokens=[*PROMPT, *said],
        num_prompt=len(PROMPT),
        prompt=np.array(PROMPT, dtype=np.int32),
    )


def logits_of(shaping: Shaping | None, said: Sequence[int] = ()) -> list[float]:
    found: list[float] = shaped(torch.tensor([LOGITS]), [job(shaping, said)])[0].tolist()
    return found


@pytest.mark.parametrize(
    ("shaping", "said", "expected"),
    [
        (Shaping(frequency_penalty=0.5), [0, 0, 1], [1.0, -1.5, 0.5, 0.0]),
        (Shaping(presence_penalty=0.5), [0, 0, 1], [1.5, -1.5, 0.5, 0.0]),
        (Shaping(repetition_penalty=2.0), [0, 0, 1], [1.0, -2.0, 0.5, 0.0]),
        (Shaping(frequency_penalty=1.5, repetition_penalty=2.0), [0, 0, 1], [-2.0, -5.0, 0.5, 0.0]),
        (Shaping(frequency_penalty=1.0, repetition_penalty=2.0), [], LOGITS),
        (Shaping(min_new_tokens=2), [0], [2.0, -1.0, -math.inf, 0.0]),
        (Shaping(min_new_tokens=2), [0, 0], LOGITS),
        (
            Shaping(logit_bias=(TokenBias(token_id=3, bias=5.0),), repetition_penalty=2.0), [0, 3],
            [1.0, -1.0, 0.5, 5.0],
        ),
    ],
)  # fmt: skip
def test_a_token_weighs_as_its_answer_so_far_says_and_its_prompt_does_not(
    shaping: Shaping, said: list[int], expected: list[float]
) -> None:
    assert logits_of(shaping, said) == expected


def test_a_penalty_near_0_makes_a_logit_that_can_still_be_drawn_by() -> None:
    assert all(map(math.isfinite, logits_of(Shaping(repetition_penalty=5e-324), [0, 3])))


def test_the_rows_of_others_stay_as_the_model_gave_them() -> None:
    logits = torch.tensor([LOGITS, LOGITS])
    found = shaped(logits, [job(None, [0]), job(Shaping(frequency_penalty=1.0), [0])])
    assert found.tolist() == [LOGITS, [1.0, *LOGITS[1:]]]
    assert logits.tolist() == [LOGITS, LOGITS]
    assert shaped(logits, [job(None, [0]), job(None, [])]) is logits


def test_less_likely_tokens_than_min_p_allows_are_not_drawn() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05])).expand(4000, -1)
    asked = SamplingParams(max_new_tokens=1, shaping=Shaping(min_p=0.4))
    drawn = draw(logits, [asked] * 4000, range(4000), [0] * 4000, 0)
    assert [drawn.token_ids.count(token) / 4000 for token in range(4)] == pytest.approx([0.625, 0.375, 0, 0], abs=0.03)


@pytest.fixture
async def gateway(subject: Subject) -> AsyncIterator[RunningGateway]:
    async with running_gateway(subject.model, engine_urls=(subject.url,), dialect=subject.dialect) as found:
        await until(found.ready)
        yield found


async def answered(gateway: RunningGateway, num_answers: int) -> list[ExchangeCompleted]:
    """What is on the log, in the order in which it was asked."""
    found = await gateway.recorded(ExchangeCompleted, at_least=num_answers)
    return sorted(found, key=lambda exchange: exchange.received_at_ms)


@pytest.mark.slow
@pytest.mark.parametrize("subject", COMPUTING, indirect=True)
async def test_an_agent_gets_its_answer_under_penalties_and_they_count(gateway: RunningGateway) -> None:
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 64, "logit_bias": {"40": 100}}
    for penalty in (0, 2):
        assert (await gateway.chat(**asked, frequency_penalty=penalty)).status == 200
    exchanges = await answered(gateway, 2)
    plain, frequent = (exchange.output_ids for exchange in exchanges)
    assert plain == (40,) * 64
    assert frequent[:10] == (40,) * 10
    assert set(frequent) > {40}
    assert not any(exchange.sampling.of_the_policy for exchange in exchanges)


@pytest.mark.parametrize("subject", COMPUTING, indirect=True)
async def test_an_answer_that_must_have_so_many_tokens_does_not_end_before(gateway: RunningGateway) -> None:
    ends = {str(token): 20 for token in gateway.renderer.stop_token_ids}
    for least in (0, 5):
        assert (await gateway.chat(temperature=0, max_tokens=12, min_tokens=least, logit_bias=ends)).status == 200
    exchanges = await answered(gateway, 2)
    assert [len(exchange.output_ids) for exchange in exchanges] == [1, 6]


@pytest.mark.parametrize("subject", COMPUTING, indirect=True)
async def test_a_bias_for_a_token_that_the_model_has_not_is_refused_in_words(gateway: RunningGateway) -> None:
    response = await gateway.chat(logit_bias={"999999999": 1})
    assert (response.status, "logit_bias" in response.body["error"]["message"]) == (400, True)
    assert (await gateway.chat(max_tokens=2)).status == 200


GRAMMARS: list[tuple[dict[str, Any], str]] = [
    ({"regex": "(yes|no)"}, "yes|no"),
    ({"ebnf": 'root ::= "yes" | "no"'}, "yes|no"),
    ({"json_schema": {"type": "boolean"}}, "true|false"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": [1, 2]}}}}, "1|2"),
]


@pytest.mark.parametrize("subject", COMPUTING, indirect=True)
async def test_an_answer_follows_the_grammar_that_its_client_sent_and_is_not_the_policy_s_own(
    gateway: RunningGateway,
) -> None:
    for grammar, follows in GRAMMARS:
        for stream in (True, False):
            response = await gateway.chat(temperature=1, max_tokens=20, stream=stream, **grammar)
            assert response.status == 200
            said = response.text if stream else response.body["choices"][0]["message"]["content"]
            assert re.fullmatch(follows, said), grammar
    exchanges = await answered(gateway, 2 * len(GRAMMARS))
    assert not any(exchange.sampling.of_the_policy for exchange in exchanges)
    assert {exchange.output_ids[-1] for exchange in exchanges} <= set(gateway.renderer.stop_token_ids)


@pytest.mark.parametrize("subject", COMPUTING, indirect=True)
@pytest.mark.parametrize("grammar", [{"regex": "("}, {"ebnf": "root ::= nothing"}], ids=str)
async def test_a_grammar_that_is_none_is_refused_by_the_engine_and_by_the_gateway_in_its_words(
    gateway: RunningGateway, grammar: dict[str, Any]
) -> None:
    response = await gateway.chat(max_tokens=5, **grammar)
    assert (response.status, response.body["error"]["message"][:27]) == (400, "The engine refused the requ")
    assert (await gateway.chat(max_tokens=2)).status == 200


UNIT = {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"]}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": UNIT}},
    {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}},
]
SEARCH = {"type": "function", "function": {"name": "search"}}


@pytest.mark.parametrize("subject", COMPUTING, indirect=True)
async def test_a_tool_that_a_client_has_called_is_called(gateway: RunningGateway) -> None:
    for choice, stream in product(("required", SEARCH), (True, False)):
        asked: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
        response = await gateway.chat(temperature=1, max_tokens=200, stream=stream, **asked)
        assert response.status == 200, response.body
        [last] = [event["choices"][0] for event in response.events[-1:]] or response.body["choices"]
        deltas = [event["choices"][0]["delta"] for event in response.events] or [last["message"]]
        [call] = [call["function"] for delta in deltas for call in delta.get("tool_calls") or ()]
        assert last["finish_reason"] == "tool_calls"
        assert not any(delta.get("content") for delta in deltas)
        if choice == SEARCH or call["name"] == "search":
            assert (call["name"], json.loads(call["arguments"])) == ("search", {})
        else:
            assert json.loads(call["arguments"])["unit"] in ("C", "F")
    exchanges = await answered(gateway, 4)
    assert not any(exchange.sampling.of_the_policy for exchange in exchanges)


TOTAL = {
    "type": "object",
    "properties": {"total": {"type": "boolean"}},
    "required": ["total"],
    "additionalProperties": False,
}


@pytest.mark.slow
@pytest.mark.parametrize("subject", COMPUTING, indirect=True)
@pytest.mark.parametrize(
    ("begins", "choice", "calls"),
    [
        ("<tool_call>", None, True),
        ("<tool_call>", "auto", True),
        ("{", "auto", False),
        ("<tool_call>", "none", False),
        ("{", "required", True),
        ("{", SEARCH, True),
    ],
    ids=str,
)
async def test_beside_a_schema_a_tool_may_be_called_and_what_is_answered_follows_the_schema(
    gateway: RunningGateway, begins: str, choice: Any, calls: bool
) -> None:
    likely = {str(gateway.renderer.encode(begins)[0]): 100}
    asked: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "logit_bias": likely, "parallel_tool_calls": False}
    shape = {"type": "json_schema", "json_schema": {"name": "total", "schema": TOTAL}}
    for stream in (True, False):
        response = await gateway.chat(temperature=1, max_tokens=200, stream=stream, response_format=shape, **asked)
        assert response.status == 200, response.body
        deltas = [event["choices"][0]["delta"] for event in response.events] or [
            choice["message"] for choice in response.body["choices"]
        ]
        called = [call["function"] for delta in deltas for call in delta.get("tool_calls") or ()]
        content = "".join(delta.get("content") or "" for delta in deltas)
        assert (len(called), bool(content)) == ((1, False) if calls else (0, True))
        assert calls or json.loads(content)["total"] in (True, False)
    exchanges = await answered(gateway, 2)
    assert not any(exchange.sampling.of_the_policy for exchange in exchanges)


@pytest.mark.parametrize("subject", ["cpu"], indirect=True)
async def test_an_engine_that_is_to_ignore_the_end_follows_no_grammar(subject: Subject) -> None:
    body = {"input_ids": [3], "sampling_params": {"regex": "a", "ignore_eos": True, "max_new_tokens": 3}}
    async with aiohttp.ClientSession() as session, session.post(f"{subject.url}/generate", json=body) as answer:
        assert (answer.status, "leave ignore_eos" in await answer.text()) == (400, True)
