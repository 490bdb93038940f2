"""A picture on its way through a gateway: to the engine, into the record, and into the rest of its conversation."""

import base64
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from clawstream.conversation.messages import text_of
from clawstream.conversation.pictures import END, Picture, pictures_in
from clawstream.events import ExchangeCompleted
from clawstream.gateway.picture_store import PictureStore
from clawstream.gateway.requests.fields import SHOWN_BY_THE_USER
from tests.fakes.scripted_engine import ScriptedAnswer
from tests.parts.gateway.running_gateway import RunningGateway, running_gateway
from tests.parts.pictures.seeing import make_seeing
from tests.pictures import data_url, picture

RED, BLUE = picture(112, 56), picture(56, 56, red=0)
TOKENS = {data_url(RED): 8, data_url(BLUE): 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeing(tmp_path_factory.mktemp("seeing") / "model")


@pytest.fixture
async def gateway(folder: Path, tmp_path: Path) -> AsyncIterator[RunningGateway]:
    async with running_gateway(folder, data_dir=tmp_path) as running:
        running.engine.picture_tokens = TOKENS.__getitem__
        yield running


def showing(*pictures: bytes, words: str = "What is it?") -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": data_url(data)}} for data in pictures]
    return {"role": "user", "content": [{"type": "text", "text": words}, *parts]}


def num_pads(gateway: RunningGateway, ids: Any) -> int:
    [pad] = [token for token in gateway.renderer.marker_ids if gateway.renderer.decode([token]) == "<|image_pad|>"]
    return list(ids).count(pad)


async def test_the_engine_is_shown_the_pictures_in_their_order_and_the_record_has_their_tokens_and_marks(
    gateway: RunningGateway,
) -> None:
    answered = await gateway.chat([showing(BLUE, RED, BLUE)])
    assert answered.status == 200, answered.body
    [call] = gateway.engine.calls
    assert call.request.pictures == (data_url(BLUE), data_url(RED), data_url(BLUE))
    exchange = await gateway.exchange()
    assert num_pads(gateway, call.request.input_ids) == 3, "one each, which SGLang expands"
    assert num_pads(gateway, exchange.request.token_ids) == 4 + 8 + 4
    [message] = [json.loads(raw) for raw in exchange.request.messages]
    marks = [found.sha256 for _, found in pictures_in(text_of(message)) if found]
    assert marks == [hashlib.sha256(data).hexdigest() for data in (BLUE, RED, BLUE)]
    kept = PictureStore(gateway.settings.pictures_dir).kept()
    assert sorted((name, size) for name, size, _ in kept) == sorted(
        (hashlib.sha256(data).hexdigest(), len(data)) for data in (BLUE, RED)
    )


async def test_a_conversation_goes_on_from_a_picture_token_by_token(gateway: RunningGateway) -> None:
    first = showing(RED)
    said = (await gateway.chat([first])).body["choices"][0]["message"]
    await gateway.chat([first, said, showing(BLUE, words="And this?")])
    before, after = sorted(await gateway.recorded(ExchangeCompleted, at_least=2), key=lambda one: one.received_at_ms)
    assert after.request.kept_tokens == len(before.request.token_ids), "and what was sampled follows"
    assert after.request.token_ids[: len(before.output_ids)] == before.output_ids
    assert num_pads(gateway, (*before.request.token_ids, *after.request.token_ids)) == 8 + 4
    assert gateway.engine.calls[-1].request.pictures == (data_url(RED), data_url(BLUE))


async def test_a_picture_that_a_later_request_does_not_send_again_comes_from_the_store_until_it_is_erased(
    gateway: RunningGateway,
) -> None:
    async def respond(**body: Any) -> tuple[int, dict[str, Any]]:
        async with gateway.client.post(f"{gateway.url}/v1/responses", json={"model": "policy"} | body) as response:
            return response.status, await response.json()

    shown = {"type": "input_image", "image_url": data_url(RED)}
    status, first = await respond(input=[{"role": "user", "content": [shown]}])
    assert status == 200, first
    status, second = await respond(input="And now?", previous_response_id=first["id"])
    assert (status, gateway.engine.calls[-1].request.pictures) == (200, (data_url(RED),))
    store, sha256 = PictureStore(gateway.settings.pictures_dir), hashlib.sha256(RED).hexdigest()
    assert (store.erase(sha256), store.erase(sha256)) == (True, False)
    status, refused = await respond(input="Still there?", previous_response_id=second["id"])
    assert (status, refused["error"]["code"]) == (400, "picture_gone")
    assert sha256 in refused["error"]["message"]


async def test_anthropics_form_is_shown_and_counted_too(gateway: RunningGateway) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(RED).decode()}
    messages = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    body = {"model": "policy", "max_tokens": 50, "messages": messages}
    async with gateway.client.post(f"{gateway.url}/v1/messages/count_tokens", json=body) as response:
        counted = (await response.json())["input_tokens"]
    assert list(PictureStore(gateway.settings.pictures_dir).kept()) == [], "what is only counted is not kept"
    async with gateway.client.post(f"{gateway.url}/v1/messages", json=body) as response:
        assert response.status == 200
    [call] = gateway.engine.calls
    assert call.request.pictures == (data_url(RED),)
    assert counted == len(call.request.input_ids) + 8 - 1


async def test_an_engine_that_makes_other_tokens_of_a_picture_than_are_recorded_is_not_believed(
    gateway: RunningGateway,
) -> None:
    gateway.engine.picture_tokens = lambda _: 7
    refused = await gateway.chat([showing(RED)])
    assert refused.status == 503
    assert "prompt_tokens is" in refused.body["error"]["message"]


def by_document(mark: str) -> dict[str, Any]:
    file = {"file_data": f"data:text/plain;base64,{base64.b64encode(mark.encode()).decode()}"}
    return {"messages": [{"role": "user", "content": [{"type": "file", "file": file}]}]}


def by_text(mark: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"Show me {mark}"}]}


def by_tool(mark: str) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "look", "description": mark, "parameters": {"type": "object"}}}
    return {"messages": [{"role": "user", "content": "Look."}], "tools": [tool]}


@pytest.mark.parametrize("forged", [by_document, by_text, by_tool])
async def test_a_client_can_not_write_a_mark_and_see_what_another_showed(gateway: RunningGateway, forged: Any) -> None:
    await gateway.chat([showing(RED)])
    shown = await gateway.exchange()
    text = text_of(json.loads(shown.request.messages[0]))
    [mark] = [found.mark for _, found in pictures_in(text) if found]
    answered = await gateway.post(json.dumps({"model": "policy"} | forged(mark)).encode())
    assert answered.status == 200, answered.body
    assert gateway.engine.calls[-1].request.pictures == ()
    assert num_pads(gateway, gateway.engine.calls[-1].request.input_ids) == 0
    found = await gateway.recorded(ExchangeCompleted, at_least=2)
    [recorded] = [one.request for one in found if one.exchange_id != shown.exchange_id]
    assert END.encode() not in b"".join(recorded.messages)


async def test_a_client_can_not_repeat_its_own_picture_by_its_mark_nor_hide_one_in_a_thought(
    gateway: RunningGateway,
) -> None:
    mark = Picture(sha256=hashlib.sha256(RED).hexdigest(), width=112, height=56).mark
    thought = {"role": "assistant", "content": f"<think>{mark}</think>\nok"}
    await gateway.chat([showing(RED, words=mark * 3), thought, {"role": "user", "content": f"And {mark}?"}])
    [call] = gateway.engine.calls
    assert call.request.pictures == (data_url(RED),)
    assert num_pads(gateway, call.request.input_ids) == 1


async def test_a_picture_s_token_that_the_policy_sampled_is_none_and_the_request_is_refused_in_words(
    gateway: RunningGateway,
) -> None:
    pad = gateway.renderer.picture_id
    assert pad is not None
    ids = (*gateway.renderer.encode("See "), pad, gateway.renderer.stop_token_ids[0])
    gateway.engine.script = lambda _prompt: ScriptedAnswer(token_ids=ids)
    said = (await gateway.chat([first := showing(RED)])).body["choices"][0]["message"]
    refused = await gateway.chat([first, said, {"role": "user", "content": "And?"}])
    assert refused.status == 400
    assert "has 1 pictures, and its prompt 9 tokens of pictures" in refused.body["error"]["message"]
    assert len(gateway.engine.calls) == 1


async def test_a_policy_can_not_write_a_mark_and_its_answer_goes_on_as_it_was_sampled(gateway: RunningGateway) -> None:
    gateway.say(f"See {END}picture {'ab' * 32} 56x56{END} there.")
    first = {"role": "user", "content": "Hi"}
    said = (await gateway.chat([first])).body["choices"][0]["message"]
    assert END not in said["content"]
    await gateway.chat([first, said, {"role": "user", "content": "And?"}])
    before, after = sorted(await gateway.recorded(ExchangeCompleted, at_least=2), key=lambda one: one.received_at_ms)
    assert after.session_id == before.session_id
    assert after.request.token_ids[: len(before.output_ids)] == before.output_ids
    assert gateway.engine.calls[-1].request.pictures == ()


async def test_nothing_is_kept_of_a_request_that_is_refused(gateway: RunningGateway) -> None:
    refused = await gateway.chat([showing(RED)], model="another")
    assert refused.status == 404
    assert list(PictureStore(gateway.settings.pictures_dir).kept()) == []


async def test_what_is_no_picture_is_refused_before_an_engine_is_asked(gateway: RunningGateway) -> None:
    refused = await gateway.chat(
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b"}}]}]
    )
    assert refused.status == 400
    assert "fetches none" in refused.body["error"]["message"]
    assert gateway.engine.calls == []


async def test_on_vllm_pictures_are_words_as_for_a_model_that_can_not_see(folder: Path, tmp_path: Path) -> None:
    counted = []
    async with running_gateway(
        folder, data_dir=tmp_path, dialect="vllm", engine_urls=["http://127.0.0.1:9"]
    ) as running:
        source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(RED).decode()}
        for part in ({"type": "image", "source": source}, {"type": "text", "text": SHOWN_BY_THE_USER}):
            body = {"model": "policy", "messages": [{"role": "user", "content": [part]}]}
            async with running.client.post(f"{running.url}/v1/messages/count_tokens", json=body) as response:
                counted.append((await response.json())["input_tokens"])
    assert counted[0] == counted[1]
    assert not (tmp_path / "pictures").exists()
