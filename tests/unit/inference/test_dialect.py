"""The wire as values: what is written is read back, and what is not of the dialect is refused by name."""

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.events import Shaping, TokenBias
from clawstream.inference.dialect import (
    Call,
    RequestRefused,
    TokenDelta,
    read_body,
    read_chunk,
    write_delta,
    write_request,
    write_spans,
)
from clawstream.inference.engine import (
    Chunk,
    Finish,
    FinishKind,
    GenerateRequest,
    SamplingParams,
    WeightsSpan,
)
from clawstream.inference.http_engine import joined

samplings = st.builds(
    SamplingParams,
    max_new_tokens=st.integers(0, 4096),
    temperature=st.one_of(st.just(0.0), st.floats(0.01, 2)),
    top_p=st.floats(0.01, 1),
    top_k=st.one_of(st.none(), st.integers(1, 100)),
    stop_token_ids=st.lists(st.integers(0, 1000), max_size=3).map(tuple),
    stop=st.lists(st.text(min_size=1, max_size=5, alphabet=st.characters(codec="utf-8")), max_size=3).map(tuple),
    sampling_seed=st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)),
    ignore_eos=st.booleans(),
)
requests = st.builds(
    GenerateRequest,
    input_ids=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=50),
    sampling=samplings,
    extra_key=st.one_of(st.none(), st.just("7")),
    rid=st.just("r1"),
    lora_name=st.one_of(st.none(), st.just("adapter")),
)
spans = st.lists(st.builds(WeightsSpan, st.sampled_from("abc"), st.integers(1, 9)), max_size=4)


@given(requests, st.booleans())
def test_request_that_is_written_is_read_back(request: GenerateRequest, stream: bool) -> None:
    body = read_body(orjson.loads(orjson.dumps(write_request(request, stream=stream))), new_rid="new")
    assert (body.stream, body.batch, body.calls[0].request) == (stream, False, request)
    assert body.calls[0].return_logprob


@given(st.lists(st.tuples(st.integers(0, 999), st.floats(-50, 0)), max_size=30), spans, st.booleans())
def test_chunk_that_is_written_is_read_back(
    pairs: list[tuple[int, float]], spans: list[WeightsSpan], last: bool
) -> None:
    delta = TokenDelta(
        token_ids=[token for token, _ in pairs],
        logprobs=[value for _, value in pairs],
        prompt_tokens=3,
        completion_tokens=len(pairs),
        cached_tokens=2,
        weight_version="v",
        finish={"type": "stop", "matched": 5} if last else None,
        weight_versions=spans if last else (),
    )
    call = Call(
        rid="r", request=GenerateRequest(input_ids=[1], sampling=SamplingParams(max_new_tokens=1)), return_logprob=True
    )
    chunk = read_chunk(orjson.loads(orjson.dumps(write_delta(call, delta))))
    assert (chunk.token_ids, chunk.logprobs_nats) == (tuple(delta.token_ids), tuple(delta.logprobs))
    assert chunk.finish == (Finish(kind=FinishKind.STOP, matched=5) if last else None)
    assert chunk.weight_versions == (tuple(spans or [WeightsSpan("v", 0)]) if last else ())


@given(spans)
def test_spans_lie_end_to_end_from_the_first_token(spans: list[WeightsSpan]) -> None:
    written = write_spans(spans, "now")
    assert [one["start"] for one in written] == [0, *(one["end"] for one in written[:-1])]
    assert written[-1]["end"] == sum(span.num_tokens for span in spans)


@given(st.lists(st.lists(st.integers(0, 99), max_size=5), min_size=1, max_size=6))
def test_deltas_that_were_not_sent_become_one_that_says_the_same(parts: list[list[int]]) -> None:
    deltas = [
        TokenDelta(
            token_ids=list(part),
            logprobs=[-1.0] * len(part),
            prompt_tokens=1,
            completion_tokens=sum(map(len, parts[: index + 1])),
            cached_tokens=0,
            weight_version=str(index),
        )
        for index, part in enumerate(parts)
    ]
    deltas[-1].finish = {"type": "length", "length": 1}
    whole = deltas[0]
    for newer in deltas[1:]:
        whole.absorb(newer)
    assert whole.token_ids == [token for part in parts for token in part]
    assert len(whole.logprobs) == whole.completion_tokens == len(whole.token_ids)
    assert (whole.weight_version, whole.finish) == (str(len(parts) - 1), {"type": "length", "length": 1})


def test_missing_logprobs_are_none_and_not_zero() -> None:
    chunk = read_chunk({"output_ids": [4, 5], "meta_info": {"id": "r", "finish_reason": None}})
    assert chunk.logprobs_nats == (None, None)
    assert (chunk.prompt_tokens, chunk.cached_tokens) == (None, None)


def test_cumulative_chunks_are_refused_with_the_flag_that_the_engine_lacks() -> None:
    pairs = [[-1.0, 4, None], [-1.0, 5, None]]
    element = {"output_ids": [5], "meta_info": {"finish_reason": None, "output_token_logprobs": pairs}}
    with pytest.raises(ValueError, match="--incremental-streaming-output"):
        read_chunk(element)


def test_batch_ids_start_with_the_id_that_it_was_sent_under() -> None:
    body = read_body({"input_ids": [[1], [2]], "rid": "b"}, new_rid="new")
    assert [call.rid for call in body.calls] == ["b_0", "b_1"]


@pytest.mark.parametrize("value", [None, [], {}, "x", 3, [[]], [[1], "x"], [True]])
def test_anything_but_token_ids_is_refused(value: object) -> None:
    with pytest.raises(RequestRefused, match="input_ids"):
        read_body({"input_ids": value}, new_rid="new")


def test_parameters_that_change_nothing_are_accepted() -> None:
    params = {"frequency_penalty": 0.0, "n": 1, "min_p": None, "skip_special_tokens": False, "top_k": -1}
    sampling = read_body({"input_ids": [1], "sampling_params": params}, new_rid="new").calls[0].request.sampling
    assert sampling == SamplingParams(max_new_tokens=128)


SHAPED = {
    "frequency_penalty": 0.5,
    "presence_penalty": -0.25,
    "repetition_penalty": 1.2,
    "min_p": 0.05,
    "min_new_tokens": 3,
    "logit_bias": {"7": -4.5},
    "regex": "a+",
}


def test_penalties_and_a_grammar_go_out_by_sglang_s_names_and_come_in_as_they_went() -> None:
    shaping = Shaping(
        frequency_penalty=0.5, presence_penalty=-0.25, repetition_penalty=1.2, min_p=0.05, min_new_tokens=3,
        logit_bias=(TokenBias(token_id=7, bias=-4.5),), regex="a+",
    )  # fmt: skip
    asked = GenerateRequest(input_ids=[1], sampling=SamplingParams(max_new_tokens=8, shaping=shaping))
    body = write_request(asked, stream=True)
    plain = {"max_new_tokens": 8, "temperature": 1.0, "top_p": 1.0, "top_k": -1}
    assert body["sampling_params"] == plain | SHAPED
    assert read_body(body, new_rid="new").calls[0].request.sampling == asked.sampling


@pytest.mark.parametrize(
    ("name", "shaping"),
    [("json_schema", Shaping(json_schema="x")), ("regex", Shaping(regex="x")), ("ebnf", Shaping(ebnf="x"))],
)
def test_what_is_neutral_is_left_out_beside_what_is_not(name: str, shaping: Shaping) -> None:
    asked = GenerateRequest(input_ids=[1], sampling=SamplingParams(max_new_tokens=8, shaping=shaping))
    params = write_request(asked, stream=False)["sampling_params"]
    assert isinstance(params, dict)
    assert params.keys() - {"max_new_tokens", "temperature", "top_p", "top_k"} == {name}


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"frequency_penalty": 3}, "frequency_penalty is 3"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens is 9"),
        ({"regex": "a", "ebnf": "b"}, "one grammar"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"structural_tag": "x"}, "not implemented"),
    ],
)
def test_shaping_outside_sglang_s_limits_is_refused(params: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestRefused, match=words):
        read_body({"input_ids": [1], "sampling_params": params}, new_rid="new")


def test_chunks_that_came_together_are_one_for_each_version_and_say_the_same() -> None:
    length = Finish(kind=FinishKind.LENGTH)
    chunks = [
        Chunk(token_ids=(1,), logprobs_nats=(-0.1,), prompt_tokens=5, weight_version="1"),
        Chunk(token_ids=(2, 3), logprobs_nats=(None, -0.3), prompt_tokens=5, weight_version="1"),
        Chunk(token_ids=(4,), logprobs_nats=(-0.4,), prompt_tokens=5, weight_version="2"),
        Chunk(token_ids=(), logprobs_nats=(), prompt_tokens=5, weight_version="2", finish=length),
    ]
    assert joined(chunks) == [
        Chunk(token_ids=(1, 2, 3), logprobs_nats=(-0.1, None, -0.3), prompt_tokens=5, weight_version="1"),
        Chunk(token_ids=(4,), logprobs_nats=(-0.4,), prompt_tokens=5, weight_version="2", finish=length),
    ]
    assert joined(chunks[:1])[0] is chunks[0]
