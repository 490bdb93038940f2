"""vLLM's dialect as values: bodies that are written, and answers as vLLM 0.32.0 wrote them."""

from typing import Any

import pytest

from clawstream.events import Shaping, TokenBias
from clawstream.inference.engine import Chunk, Finish, FinishKind, GenerateRequest, SamplingParams, WeightsSpan
from clawstream.inference.vllm_dialect import (
    Reading,
    has_mode,
    probe,
    read_score,
    tells_logprobs,
    write_generate,
    write_score,
)

PROMPT = (40, 41, 42)
REQUEST = GenerateRequest(input_ids=PROMPT, sampling=SamplingParams(max_new_tokens=8))


def event(token_ids: list[int], finish: str | None = None, **more: Any) -> dict[str, Any]:
    """One event as vLLM writes it; each token has the log-prob -token / 8."""
    content = [
        {
            "token_id": token, "logprob": -token / 8, "rank": 2,
            "top_logprobs": [
                {"token_id": token, "logprob": -token / 8, "rank": 2}, {"token_id": 9, "logprob": -0.01, "rank": 1},
                {"token_id": 8, "logprob": -99.0, "rank": 3},
            ],
        }
        for token in token_ids
    ]  # fmt: skip
    choice = {
        "index": 0, "finish_reason": finish, "stop_reason": None, "token_ids": token_ids, "routed_experts": None,
        "sampling_mask": None, "weight_versions": None, "logprobs": {"content": content}, **more,
    }  # fmt: skip
    return {"request_id": "generate-tokens-r", "usage": None, "output_mode": "tokens", "choices": [choice]}


def usage(cached: int | None = 0) -> dict[str, Any]:
    """The last event."""
    details = None if cached is None else {"cached_tokens": cached}
    counts = {"prompt_tokens": 3, "total_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": details}
    return {"request_id": "generate-tokens-r", "usage": counts, "output_mode": "tokens", "choices": []}


def read(*events: dict[str, Any], request: GenerateRequest = REQUEST) -> list[Chunk]:
    reading = Reading(request)
    return [chunk for element in events if (chunk := reading.take(element)) is not None]


def test_a_request_is_written_whole() -> None:
    sampling = SamplingParams(
        max_new_tokens=7, temperature=0.5, top_p=0.9, top_k=5, stop_token_ids=(2,), stop=("x",), sampling_seed=3,
        ignore_eos=True,
        shaping=Shaping(
            frequency_penalty=0.5, presence_penalty=-0.5, repetition_penalty=1.5, min_p=0.1, min_new_tokens=2,
            logit_bias=(TokenBias(token_id=4, bias=-2.0),), regex="a+",
        ),
    )  # fmt: skip
    request = GenerateRequest(
        input_ids=PROMPT, sampling=sampling, extra_key="policy:3:t", rid="r", lora_name="policy-v4", top_logprobs_num=3
    )
    assert write_generate(request) == {
        "token_ids": [40, 41, 42],
        "sampling_params": {
            "max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "logprobs": 3, "stop_token_ids": [2],
            "stop": ["x"], "skip_special_tokens": False, "seed": 3, "ignore_eos": True,
            "frequency_penalty": 0.5, "presence_penalty": -0.5,
            "repetition_penalty": 1.5, "min_p": 0.1, "min_tokens": 2, "logit_bias": {"4": -2.0},
            "structured_outputs": {"regex": "a+"},
        },
        "stream": True,
        "stream_options": {"include_usage": True},
        "request_id": "r",
        "cache_salt": "policy:3:t",
        "model": "policy-v4",
    }  # fmt: skip


def test_what_is_not_asked_for_is_not_written() -> None:
    written = write_generate(REQUEST)
    params = {"max_tokens": 8, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "logprobs": 0}
    assert written == {
        "token_ids": [40, 41, 42], "sampling_params": params, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("shaping", "grammar"),
    [
        (Shaping(json_schema='{"type": "boolean"}'), {"json": '{"type": "boolean"}'}),
        (Shaping(regex="a"), {"regex": "a"}),
        (Shaping(ebnf='root ::= "a"'), {"grammar": 'root ::= "a"'}),
    ],
)
def test_a_grammar_has_vllm_s_name(shaping: Shaping, grammar: dict[str, str]) -> None:
    written = write_generate(
        GenerateRequest(input_ids=PROMPT, sampling=SamplingParams(max_new_tokens=8, shaping=shaping))
    )
    assert written["sampling_params"]["structured_outputs"] == grammar  # type: ignore[index]


def test_an_answer_is_read_token_by_token_and_ends_with_its_weights_and_counts() -> None:
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
    first, last = read(event([16]), event([24], "length", weight_versions=spans), usage(cached=2))
    assert first == Chunk((16,), (-2.0,))
    assert last == Chunk(
        (24,),
        (-3.0,),
        prompt_tokens=3,
        cached_tokens=2,
        finish=Finish(kind=FinishKind.LENGTH),
        weight_versions=(WeightsSpan("3", 1), WeightsSpan("4", 1)),
    )


def test_without_its_flag_vllm_does_not_tell_what_was_cached() -> None:
    assert read(event([16], "length"), usage(cached=None))[-1].cached_tokens is None


@pytest.mark.parametrize(("said", "matched"), [(None, 24), (7, 7), ("stop", "stop")])
def test_what_ended_the_answer_is_what_vllm_names_or_else_its_last_token(
    said: int | str | None, matched: int | str
) -> None:
    [chunk] = read(event([24], "stop", stop_reason=said), usage())
    assert chunk.finish == Finish(kind=FinishKind.STOP, matched=matched)


def test_an_aborted_answer_ends_as_one() -> None:
    [chunk] = read(event([], "abort", logprobs=None), usage())
    assert (chunk.token_ids, chunk.finish) == ((), Finish(kind=FinishKind.ABORT))


def test_the_likeliest_tokens_are_as_many_as_were_asked_for_in_their_order() -> None:
    asked = GenerateRequest(input_ids=PROMPT, sampling=SamplingParams(max_new_tokens=8), top_logprobs_num=2)
    [chunk] = read(event([16]), request=asked)
    assert chunk.top_logprobs == (((-0.01, 9), (-2.0, 16)),)
    assert read(event([16]))[0].top_logprobs == ()


GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0)


@pytest.mark.parametrize(
    ("sampling", "told"),
    [
        (SamplingParams(max_new_tokens=8), True),
        (SamplingParams(max_new_tokens=8, temperature=0.3, shaping=Shaping(presence_penalty=1.0)), True),
        (GREEDY, True),
        (SamplingParams(max_new_tokens=8, temperature=0.0, top_p=0.5, top_k=3), True),
        (SamplingParams(max_new_tokens=8, top_p=0.99), False),
        (SamplingParams(max_new_tokens=8, top_k=50), False),
        (SamplingParams(max_new_tokens=8, shaping=Shaping(min_p=0.05)), False),
        (SamplingParams(max_new_tokens=8, temperature=0.005), False),
    ],
)
def test_logprobs_after_a_cut_of_the_distribution_are_none(sampling: SamplingParams, told: bool) -> None:
    request = GenerateRequest(input_ids=PROMPT, sampling=sampling, top_logprobs_num=1)
    [chunk] = read(event([16]), request=request)
    assert tells_logprobs(sampling) is told
    assert chunk.logprobs_nats == ((-2.0,) if told else (None,))
    assert bool(chunk.top_logprobs) is told


@pytest.mark.parametrize(
    "events",
    [
        [{}],
        [{"choices": [{"token_ids": [1]}]}],
        [event([16], logprobs=None)],
        [event([16], logprobs={"content": event([17])["choices"][0]["logprobs"]["content"]})],
        [event([16], "content_filter")],
        [event([16], "length", weight_versions=[{"version": "3", "start": 1, "end": 2}])],
        [event([16], "length"), event([17])],
        [usage()],
    ],
)
def test_what_is_not_of_this_dialect_is_no_chunk(events: list[dict[str, Any]]) -> None:
    with pytest.raises((LookupError, TypeError, ValueError)):
        read(*events)


def test_a_score_is_asked_for_and_read_from_the_prompt() -> None:
    written = write_score(PROMPT, extra_key="policy:3", lora_name="policy-v4")
    params = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
    assert written == {
        "token_ids": [40, 41, 42], "sampling_params": params, "stream": False, "cache_salt": "policy:3",
        "model": "policy-v4",
    }  # fmt: skip
    told = {"prompt_logprobs": [None, {"41": {"logprob": -4.5}}, {"7": {"logprob": -0.1}, "42": {"logprob": -8.5}}]}
    assert read_score(told, PROMPT, 1) == [(41, -4.5), (42, -8.5)]
    assert read_score(told, PROMPT, 3) == []
    assert read_score(told, (40, 41, 43), 2) == [(43, None)]
    with pytest.raises(ValueError, match="3 tokens for 4"):
        read_score(told, (*PROMPT, 43), 1)


def answered(first: float, second: float) -> dict[str, Any]:
    likeliest = [{"token_id": 5, "logprob": first, "rank": 1}, {"token_id": 6, "logprob": second, "rank": 2}]
    return {
        "choices": [
            {"logprobs": {"content": [{"token_id": 5, "logprob": first, "rank": 1, "top_logprobs": likeliest}]}}
        ]
    }


@pytest.mark.parametrize(
    ("first", "second", "right"),
    [(0.0, -9999.0, True), (-0.1, -2.0, False), (0.0, -40.0, False), (12.5, -9999.0, False)],
    ids=["processed_logprobs", "raw_logprobs", "raw_logprobs of a certain token", "processed_logits"],
)
def test_the_answer_to_the_probe_tells_the_mode(first: float, second: float, right: bool) -> None:
    params: Any = probe()["sampling_params"]
    assert (params["top_k"], params["logprobs"]) == (1, 2)
    assert has_mode(answered(first, second)) is right
