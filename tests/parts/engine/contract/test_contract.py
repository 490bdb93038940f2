"""What every engine keeps, whatever dialect it speaks and whoever computes the tokens."""

import asyncio
import math
import re
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from clawstream.errors import TryLater
from clawstream.inference.engine import Chunk, EngineRefused, FinishKind, WeightsSpan
from clawstream.inference.http_engine import HttpEngine
from tests.parts.engine.conftest import Subject
from tests.parts.engine.contract.asking import Answered, answer, asking, whole

PROMPT = tuple(range(40, 60))
JSON = {"Content-Type": "application/json"}
WITHIN_S = 90  # two busy cores


@pytest.mark.slow
async def test_answer_streams_token_by_token_with_a_logprob_for_each(subject: Subject) -> None:
    told = await answer(subject.engine, asking(PROMPT, 200))
    assert len(told.token_ids) == len(told.logprobs_nats) == 200
    assert told.num_chunks > 1  # tokens that arrive together are one chunk; an answer that comes whole is one
    assert told.finish.kind is FinishKind.LENGTH
    assert told.prompt_tokens == len(PROMPT)
    assert all(-math.inf < value <= 0 for value in told.logprobs_nats)


@pytest.mark.slow
async def test_equal_requests_get_equal_answers(subject: Subject) -> None:
    first, second = [await answer(subject.engine, asking(PROMPT, 16)) for _ in range(2)]
    assert first.token_ids == second.token_ids


async def test_scores_equal_the_logprobs_that_the_answer_came_with(subject: Subject) -> None:
    told = await answer(subject.engine, asking(PROMPT, 16, temperature=1.0, seed=5))
    scores = await subject.engine.score(PROMPT + told.token_ids, len(PROMPT))
    assert scores == pytest.approx(told.logprobs_nats, abs=2e-4)


@pytest.mark.parametrize("start", [1, 7, len(PROMPT) - 1])
async def test_score_gives_one_value_per_token_from_start(subject: Subject, start: int) -> None:
    whole_prompt = await subject.engine.score(PROMPT, 1)
    scores = await subject.engine.score(PROMPT, start)
    assert scores == pytest.approx(whole_prompt[start - 1 :], abs=2e-4)
    assert len(scores) == len(PROMPT) - start


async def test_last_row_of_the_vocabulary_has_a_score_too(subject: Subject) -> None:
    last = orjson.loads((subject.model / "config.json").read_bytes())["vocab_size"] - 1
    scores = await subject.engine.score((*PROMPT, last, *PROMPT), len(PROMPT))
    assert len(scores) == 1 + len(PROMPT)
    assert all(-math.inf < value < 0 for value in scores)


async def test_score_from_the_end_is_empty(subject: Subject) -> None:
    assert await subject.engine.score(PROMPT, len(PROMPT)) == ()


async def test_score_of_the_first_token_is_our_own_mistake(subject: Subject) -> None:
    with pytest.raises(ValueError, match="the first token has no log-prob"):
        await subject.engine.score(PROMPT, 0)


async def test_stop_token_ends_the_answer_and_is_its_last_token(subject: Subject) -> None:
    free = await answer(subject.engine, asking(PROMPT, 16))
    stop_token = free.token_ids[5]
    request = asking(PROMPT, 16, stop_token_ids=(stop_token,))
    told = await answer(subject.engine, request)
    assert told.token_ids == free.token_ids[: free.token_ids.index(stop_token) + 1]
    assert (told.finish.kind, told.finish.matched) == (FinishKind.STOP, stop_token)


async def test_stop_string_ends_the_answer_with_the_token_that_completes_it(subject: Subject) -> None:
    free = await answer(subject.engine, asking(PROMPT, 200))
    text = subject.decode(free.token_ids)
    start = next(i for i in range(3, len(text) - 1) if text[i : i + 2].isascii() and text[i : i + 2].isprintable())
    stop = text[start : start + 2]
    told = await answer(subject.engine, asking(PROMPT, 200, stop=("never said", stop)))
    assert (told.finish.kind, told.finish.matched) == (FinishKind.STOP, stop)
    assert told.token_ids == free.token_ids[: len(told.token_ids)]
    assert stop in subject.decode(told.token_ids)
    assert stop not in subject.decode(told.token_ids[:-1])


async def test_seed_decides_the_answer_whatever_else_runs(subject: Subject) -> None:
    subject.needs("seeds")
    request = asking(PROMPT, 24, temperature=1.0, seed=11)
    alone = await answer(subject.engine, request)
    others = [asking((30 + i, 31, 32), 40 + i, temperature=1.0) for i in range(7)]
    crowd = await asyncio.gather(*(answer(subject.engine, one) for one in [*others, request]))
    assert crowd[-1].token_ids == alone.token_ids
    assert crowd[-1].logprobs_nats == pytest.approx(alone.logprobs_nats, abs=2e-4)


async def test_closing_the_stream_ends_the_request_at_the_engine_even_while_it_is_paused(subject: Subject) -> None:
    subject.needs("names of requests")
    num_tokens = 1900
    async with aclosing(subject.engine.generate(asking(PROMPT, num_tokens, rid="closed-early"))) as chunks:
        await anext(chunks)
        await subject.engine.pause()
    await subject.engine.resume()
    num_steps = 0
    async with asyncio.timeout(WITHIN_S):
        # The engine refuses an id that still runs. All requests advance together, so had the first one not been ended
        # early, its id would be free only after as many steps as it wanted tokens.
        while not await _accepted(subject.engine, "closed-early"):
            num_steps += len((await answer(subject.engine, asking(PROMPT, 20))).token_ids)
    assert num_steps < num_tokens - 200


async def _accepted(engine: HttpEngine, rid: str) -> bool:
    try:
        await answer(engine, asking(PROMPT, 1, rid=rid))
    except EngineRefused:
        return False
    return True


async def test_abort_finishes_a_running_request_as_aborted(subject: Subject) -> None:
    chunks: list[Chunk] = []
    async with asyncio.timeout(WITHIN_S):
        async for chunk in subject.engine.generate(asking(PROMPT, 1500, rid="unwanted")):
            if not chunks:
                await subject.abort("unwanted")
            chunks.append(chunk)
    told = whole(chunks)
    assert told.finish.kind is FinishKind.ABORT
    assert len(told.token_ids) < 1500


@pytest.mark.parametrize(
    ("num_prompt", "num_new", "said"), [(5000, 8, "longer than the model's context"), (2000, 100, "Requested token")]
)
async def test_request_beyond_the_context_is_refused_as_400(
    subject: Subject, num_prompt: int, num_new: int, said: str
) -> None:
    subject.needs("room for the answer")
    with pytest.raises(EngineRefused, match=said) as refusal:
        await answer(subject.engine, asking([40] * num_prompt, num_new))
    assert refusal.value.status == 400


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": ["a"]}, "input_ids"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
        ({"sampling_params": {"top_p": 2}}, "top_p"),
        ({"sampling_params": {"nonsense": 1}}, "nonsense"),
        ({"return_logprob": True, "logprob_start_len": 99}, "logprob_start_len"),
        ({"lora_path": "nobody"}, "nobody"),
    ],
)
async def test_bad_request_is_a_400_that_names_the_field(
    subject: Subject, change: dict[str, object], named: str
) -> None:
    subject.needs("SGLang's routes")
    status, content = await _post(subject, "/generate", {"input_ids": list(PROMPT)} | change)
    assert status == 400
    assert named in orjson.dumps(content).decode()


async def test_token_id_beyond_the_vocabulary_is_a_400(subject: Subject) -> None:
    subject.needs("bounded ids")
    with pytest.raises(EngineRefused) as refusal:
        await answer(subject.engine, asking([10**6]))
    assert refusal.value.status == 400


@pytest.mark.parametrize("subject", ["cpu", "scripted"], indirect=True)
async def test_parameter_that_an_engine_of_ours_does_not_implement_is_refused_by_name(subject: Subject) -> None:
    body = {"input_ids": list(PROMPT), "sampling_params": {"custom_params": {"a": 1}}}
    status, content = await _post(subject, "/generate", body)
    assert status == 400
    assert "custom_params" in content["error"]["message"]


async def test_body_that_is_not_json_is_a_400(subject: Subject) -> None:
    subject.needs("SGLang's routes")
    async with subject.session.post(subject.url + "/generate", data=b"{", headers=JSON) as response:
        assert response.status == 400


async def test_no_engine_at_the_address_is_for_later(subject: Subject) -> None:
    nobody = type(subject.engine)(subject.session, "http://127.0.0.1:9")
    with pytest.raises(TryLater, match="no answer"):
        await answer(nobody, asking(PROMPT))


async def test_health_and_info_tell_what_is_served(subject: Subject) -> None:
    async with subject.session.get(subject.url + "/health") as response:
        assert response.status == 200
    info = await subject.engine.server_info()
    assert (info.model_path, info.weight_version, info.context_length_tokens) == (str(subject.model), "1", 2048)
    if subject.dialect == "sglang":
        async with subject.session.get(subject.url + "/health_generate") as response:
            assert response.status == 200


async def test_weights_get_another_name_and_stay_as_they_are(subject: Subject) -> None:
    subject.needs("SGLang's routes")
    before = await answer(subject.engine, asking(PROMPT, 6))
    assert await subject.engine.quantization() is None
    await subject.engine.name_weights("0")
    after = await answer(subject.engine, asking(PROMPT, 6))
    assert after.token_ids == before.token_ids
    assert after.logprobs_nats == pytest.approx(before.logprobs_nats, abs=1e-4)
    assert (before.versions, after.versions) == ((WeightsSpan("1", 6),), (WeightsSpan("0", 6),))
    assert await subject.engine.weight_version() == "0"


async def test_batch_is_answered_in_its_order(subject: Subject) -> None:
    subject.needs("SGLang's routes")
    prompts = [[50, 51, 52], list(PROMPT), [60] * 30]
    body = {
        "input_ids": prompts,
        "sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
    }
    status, elements = await _post(subject, "/generate", body)
    singles = [await answer(subject.engine, asking(prompt, 4)) for prompt in prompts]
    assert status == 200
    assert [tuple(one["output_ids"]) for one in elements] == [single.token_ids for single in singles]
    assert [one["meta_info"]["prompt_tokens"] for one in elements] == [3, len(PROMPT), 30]
    for prompt, one in zip(prompts, elements, strict=True):
        scores = one["meta_info"]["input_token_logprobs"]
        assert [entry[1] for entry in scores] == prompt
        assert scores[0][0] is None
        assert None not in [entry[0] for entry in scores[1:]]
        assert len(one["meta_info"]["output_top_logprobs"]) == 4


async def test_streamed_batch_names_the_prompt_of_each_chunk(subject: Subject) -> None:
    subject.needs("SGLang's routes")
    params = {"max_new_tokens": 3, "ignore_eos": True}
    body = {"input_ids": [[50, 51], [52, 53]], "sampling_params": params, "stream": True}
    async with subject.session.post(subject.url + "/generate", json=body) as response:
        events = (await response.read()).split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    elements = [orjson.loads(event.removeprefix(b"data: ")) for event in events[:-2]]
    for index in (0, 1):
        assert sum(len(one["output_ids"]) for one in elements if one["index"] == index) == 3


@pytest.mark.slow
async def test_nothing_is_sampled_between_pause_and_resume(subject: Subject) -> None:
    received = 0
    begun = asyncio.Event()

    async def follow() -> None:
        nonlocal received
        async for chunk in subject.engine.generate(asking(PROMPT, 600)):
            received += len(chunk.token_ids)
            begun.set()

    async with asyncio.timeout(WITHIN_S), asyncio.TaskGroup() as group:
        running = group.create_task(follow())
        await begun.wait()
        await subject.engine.pause()
        await asyncio.wait({running}, timeout=0.2)
        at_pause = received
        late = {group.create_task(answer(subject.engine, asking((70, 71), 2))) for _ in range(5)}
        await asyncio.wait(late, timeout=0.3)
        assert received == at_pause < 600
        assert not any(task.done() for task in late)
        await subject.engine.resume()
    assert received == 600
    assert [len(task.result().token_ids) for task in late] == [2] * 5


async def test_swap_in_place_cuts_none_of_eight_streams_and_names_the_weights_of_each_token(subject: Subject) -> None:
    num_tokens = 200
    started = [asyncio.Event() for _ in range(8)]

    async def follow(index: int) -> tuple[float, Answered]:
        chunks: list[Chunk] = []
        last, gap = time.perf_counter(), 0.0
        async for chunk in subject.engine.generate(asking((35 + index, *PROMPT), num_tokens)):
            now = time.perf_counter()
            gap, last = max(gap, now - last) if chunks else 0.0, now
            chunks.append(chunk)
            started[index].set()
        return gap, whole(chunks)

    async with asyncio.timeout(WITHIN_S), asyncio.TaskGroup() as group:
        streams = [group.create_task(follow(index)) for index in range(8)]
        await asyncio.gather(*(event.wait() for event in started))
        begun = time.perf_counter()
        await subject.engine.pause()
        await subject.engine.update_weights(str(subject.other_model), "2")
        await subject.engine.resume()
        paused_s = time.perf_counter() - begun
    for stream in streams:
        gap, told = stream.result()
        assert len(told.token_ids) == num_tokens
        assert [span.version for span in told.versions] == ["1", "2"]
        assert sum(span.num_tokens for span in told.versions) == num_tokens
        assert gap < paused_s + 1.0
    print(f"swap_pause_ms={paused_s * 1e3:.1f} longest_gap_ms={max(s.result()[0] for s in streams) * 1e3:.1f}")
    assert (await answer(subject.engine, asking(PROMPT, 3))).versions == (WeightsSpan("2", 3),)
    assert (await subject.engine.server_info()).weight_version == "2"


async def test_weights_that_are_none_are_refused_and_the_old_ones_serve_on(subject: Subject, tmp_path: Path) -> None:
    before = await answer(subject.engine, asking(PROMPT, 6))
    with pytest.raises(EngineRefused, match=re.escape(str(tmp_path))) as refusal:
        await subject.engine.update_weights(str(tmp_path), "9")
    after = await answer(subject.engine, asking(PROMPT, 6))
    assert refusal.value.status == 400
    assert (after.token_ids, after.versions) == (before.token_ids, (WeightsSpan("1", 6),))


async def test_adapter_that_nobody_loaded_is_refused(subject: Subject) -> None:
    subject.needs("adapters")
    with pytest.raises(EngineRefused, match="nobody"):
        await answer(subject.engine, asking(PROMPT, 1, lora_name="nobody"))
    with pytest.raises(EngineRefused, match="nobody"):
        await subject.engine.unload_lora_adapter("nobody")


async def test_unknown_pause_mode_and_missing_field_are_refused(subject: Subject) -> None:
    subject.needs("SGLang's routes")
    assert (await _post(subject, "/pause_generation", {"mode": "gently"}))[0] == 400
    assert (await _post(subject, "/update_weights_from_disk", {}))[0] == 400


async def _post(subject: Subject, path: str, body: object) -> tuple[int, Any]:
    async with subject.session.post(
        subject.url + path, json=body, timeout=aiohttp.ClientTimeout(total=WITHIN_S)
    ) as response:
        return response.status, orjson.loads(await response.read())
