"""Exchanges as they are recorded: the engine's own numbers, whatever the chunks were."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.errors import TryLater
from clawstream.events import ExchangeCompleted, FinishReason, RequestDelta, Sampling, TurnType
from clawstream.gateway.answering.capture import Accepted, Capture
from clawstream.gateway.requests.fields import BadRequest, to_json
from clawstream.gateway.requests.wire import parse_body, read_request
from clawstream.inference.engine import (
    Chunk,
    Finish,
    FinishKind,
    WeightsSpan,
    finish_reason,
    policy_version,
)

ACCEPTED = Accepted(
    exchange_id="e",
    session_id="s",
    turn_type=TurnType.MAIN,
    client="headers",
    key_name=None,
    model="policy",
    request_sha256="0",
    group=None,
    retry_count=None,
    num_spliced=0,
    sampling=Sampling(temperature=1.0, top_p=1.0, top_k=None, max_tokens=9, seed=None, stop=()),
    policy_id="policy",
    trace_id=None,
    received_at_ms=1,
)
REQUEST = RequestDelta(
    parent_exchange_id=None, kept_messages=0, kept_tokens=0, messages=(), token_ids=(), options=b"{}"
)
STOP = Finish(kind=FinishKind.STOP, matched=7)
Tokens = st.lists(st.tuples(st.integers(0, 1000), st.none() | st.floats(-20, 0, width=32)), min_size=1, max_size=20)


def record(
    tokens: list[tuple[int, float | None]],
    sizes: list[int],
    spans: list[WeightsSpan],
    adapter_version: int | None = None,
) -> ExchangeCompleted:
    """Capture `tokens` in chunks of `sizes`, over and over; each chunk comes a millisecond later."""
    capture, at, turn = Capture(), 0, 0
    while at < len(tokens):
        part = tokens[at : at + sizes[turn % len(sizes)]]
        at, turn = at + len(part), turn + 1
        last = at >= len(tokens)
        capture.add(
            Chunk(
                token_ids=tuple(token for token, _ in part),
                logprobs_nats=tuple(value for _, value in part),
                cached_tokens=3,
                finish=STOP if last else None,
                weight_versions=tuple(spans) if last else (),
            ),
            5,
        )
    behaviour = capture.behaviour(adapter_version)
    return capture.completed(ACCEPTED, REQUEST, {"content": "x"}, FinishReason.STOP, behaviour, 9)


@given(tokens=Tokens, sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_any_chunking_gives_the_same_event(tokens: list[tuple[int, float | None]], sizes: list[int]) -> None:
    spans = [WeightsSpan("3", len(tokens))]
    event = record(tokens, sizes, spans)
    assert event == record(tokens, [len(tokens)], spans)
    assert event.output_ids == tuple(token for token, _ in tokens)
    assert event.output_logprobs == tuple(value for _, value in tokens)
    assert (event.first_token_at_ms, event.finished_at_ms, event.cached_tokens) == (5, 9, 3)


def test_each_token_has_the_version_that_the_engine_names() -> None:
    event = record([(1, -0.5), (2, -0.5), (3, None)], [1], [WeightsSpan("0", 2), WeightsSpan("1", 1)])
    assert [(span.policy_version, span.num_tokens) for span in event.versions] == [(0, 2), (1, 1)]


def test_an_adapter_names_all_tokens_until_the_weights_below_it_change() -> None:
    tokens: list[tuple[int, float | None]] = [(1, -0.5), (2, -0.25), (3, -0.125)]
    under_it = record(tokens, [1], [WeightsSpan("0", 3)], adapter_version=1)
    assert [(span.policy_version, span.num_tokens) for span in under_it.versions] == [(1, 3)]
    assert under_it.output_logprobs == (-0.5, -0.25, -0.125)
    changed = record(tokens, [1], [WeightsSpan("0", 1), WeightsSpan("2", 2)], adapter_version=1)
    assert [(span.policy_version, span.num_tokens) for span in changed.versions] == [(1, 1), (2, 2)]
    assert changed.output_logprobs == (-0.5, None, None)  # no published version sampled them: never trained on


@pytest.mark.parametrize("spans", [[], [WeightsSpan("0", 1)], [WeightsSpan("0", 3)]])
def test_tokens_without_a_version_are_no_record(spans: list[WeightsSpan]) -> None:
    with pytest.raises(TryLater, match="of 2 sampled tokens"):
        record([(1, -0.5), (2, -0.5)], [2], spans)


def test_an_answer_whose_weights_go_back_is_no_record() -> None:
    with pytest.raises(TryLater, match="from version 7 back to 5"):
        record([(1, -0.5), (2, -0.5)], [2], [WeightsSpan("7", 1), WeightsSpan("5", 1)])


@pytest.mark.parametrize(("name", "version"), [("0", 0), ("17", 17), ("default", 0), (None, 0)])
def test_the_weights_of_the_start_are_version_0(name: str | None, version: int) -> None:
    assert policy_version(name) == version


def test_weights_with_another_name_are_no_version() -> None:
    with pytest.raises(TryLater, match="'mine'"):
        policy_version("mine")


def test_an_answer_that_calls_tools_ends_with_them_unless_it_was_cut() -> None:
    assert finish_reason(STOP, ["call"]) is FinishReason.TOOL_CALLS
    assert finish_reason(STOP, []) is FinishReason.STOP
    assert finish_reason(Finish(kind=FinishKind.LENGTH), ["call"]) is FinishReason.LENGTH


ANY = st.characters(exclude_categories=())  # lone surrogates and NUL among them
Json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(ANY, max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(ANY, max_size=5), inner, max_size=3),
    max_leaves=10,
)
Text = st.text(ANY, max_size=10)
Message = st.builds(
    lambda text, extra: extra | {"role": "user", "content": text},
    Text,
    st.dictionaries(Text.map("x{}".format), Json, max_size=2),
)


@given(
    messages=st.lists(Message, min_size=1, max_size=3),
    more=st.dictionaries(st.sampled_from(["user", "x", "store"]), Json),
)
def test_a_request_survives_to_the_log_word_for_word(messages: list[dict[str, Any]], more: dict[str, Any]) -> None:
    body = more | {"messages": messages, "model": "policy"}
    request = read_request(parse_body(json.dumps(body).encode()))
    rebuilt = json.loads(request.options_json) | {"messages": [json.loads(raw) for raw in request.messages_json]}
    assert rebuilt == body


def refusal(raw: bytes) -> BadRequest | None:
    """Why the body is refused."""
    try:
        read_request(parse_body(raw))
    except BadRequest as refused:
        return refused
    return None


def said(refused: BadRequest) -> str:
    """What the client is told."""
    return str(json.loads(refused.as_json())["error"]["message"])


@given(value=Json)
def test_whatever_a_body_is_it_is_read_or_refused(value: Any) -> None:
    for body in (value, {"messages": value}, {"messages": [value]}, {"messages": [{"role": "user", "content": value}]}):
        refused = refusal(to_json(body))
        assert refused is None or said(refused)


@given(
    key=st.sampled_from(
        [
            "temperature",
            "top_p",
            "top_k",
            "seed",
            "stop",
            "stream",
            "stream_options",
            "n",
            "tools",
            "tool_choice",
            "max_tokens",
            "max_completion_tokens",
            "metadata",
            "response_format",
            "user",
            "session_id",
            "turn_type",
            "session_done",
            "model",
            "logprobs",
            "logit_bias",
            "frequency_penalty",
            "repetition_penalty",
            "min_p",
            "min_tokens",
            "json_schema",
            "regex",
            "ebnf",
        ]
    ),
    value=Json,
)
def test_whatever_a_field_holds_it_is_read_or_refused(key: str, value: Any) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], key: value}
    refused = refusal(to_json(body))
    assert refused is None or (refused.status == 400 and said(refused))
