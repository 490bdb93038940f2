"""Errors and models in the shapes, and with the words, by which clients know them."""

import re
from pathlib import Path

import anthropic
import openai
import pytest

from clawstream.gateway.http.pages import wrong_path
from tests.parts.gateway.running_gateway import QUESTION, RunningGateway, running_gateway, until

AS_ANTHROPIC = {"anthropic-version": "2023-06-01"}
CLAUDE_CODE_S = re.compile(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", re.IGNORECASE)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/chat/completions", "it is /v1/chat/completions: set the base URL to this gateway's address and /v1"),
        ("/v1/v1/messages", "it is /v1/messages: /v1 stands in the base URL and in the path"),
        ("/v1/v1/chat/completions", "it is /v1/chat/completions: /v1 stands in the base URL and in the path"),
        ("/responses", "it is /v1/responses"),
        ("/messages", "it is /v1/messages"),
        ("/openai/v1/responses", "it is /v1/responses"),
        ("/models", "it is /v1/models"),
        ("/v1/chat/completions/", "leave out the slash at the end"),
        ("/v1/completions", "completions of bare text are not offered; use /v1/chat/completions"),
        ("/v1/responses/resp_1", "asked for by POST /v1/responses and not fetched, listed or deleted"),
        ("/v1/responses/compact", "a client compacts by itself here"),
        ("/v1/embeddings", "has no embeddings"),
        ("/v1/images/generations", "makes no pictures"),
        ("/v1/audio/transcriptions", "and no sound"),
        ("/v1/moderations", "moderates nothing"),
        ("/", "base URL ending in /v1"),
    ],
)
def test_a_path_that_is_none_names_the_one_that_is_meant(path: str, words: str) -> None:
    assert words in wrong_path("POST", path)


async def test_a_wrong_path_or_method_is_told_in_the_client_s_shape(gateway: RunningGateway) -> None:
    async with gateway.client.post(f"{gateway.url}/chat/completions", json={}) as answer:
        error = (await answer.json())["error"]
        assert (answer.status, error["code"]) == (404, "unknown_url")
        assert "it is /v1/chat/completions" in error["message"]
    async with gateway.client.post(f"{gateway.url}/v1/v1/messages", json={}, headers=AS_ANTHROPIC) as answer:
        body = await answer.json()
        assert (answer.status, body["type"], body["error"]["type"]) == (404, "error", "not_found_error")
    for path in ("/v1/chat/completions", "/v1/responses"):
        async with gateway.client.get(f"{gateway.url}{path}") as answer:
            assert (answer.status, answer.headers["allow"]) == (405, "POST")


@pytest.mark.slow
async def test_openai_s_clients_see_the_model_the_wrong_key_and_a_prompt_too_long(tokenizer_folder: Path) -> None:
    async with running_gateway(tokenizer_folder, api_key="k") as gateway:
        await small(gateway)
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="k", max_retries=0) as client:
            assert [model.id async for model in client.models.list()] == ["policy"]
            assert (await client.models.retrieve("policy")).object == "model"
            with pytest.raises(openai.NotFoundError):
                await client.models.retrieve("gpt")
            for asking in (
                client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "x" * 40}]),
                client.responses.create(model="policy", input="x" * 40),
            ):
                with pytest.raises(openai.BadRequestError, match="This model's maximum context length is 32") as found:
                    await asking
                assert found.value.code == "context_length_exceeded"
        async with gateway.client.post(f"{gateway.url}/v1/chat/completions", json={"messages": QUESTION}) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (401, "invalid_api_key")


@pytest.mark.slow
async def test_anthropic_s_clients_see_the_model_the_wrong_key_and_a_prompt_too_long(tokenizer_folder: Path) -> None:
    async with running_gateway(tokenizer_folder, api_key="k") as gateway:
        await small(gateway)
        async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key="k", max_retries=0) as client:
            (model,) = [model async for model in client.models.list()]
            assert (model.id, model.type, model.display_name) == ("policy", "model", "policy")
            assert (await client.models.retrieve("policy")).created_at == model.created_at
            with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
                await client.models.retrieve("claude")
            for content in ("x" * 40, "x" * 4000):
                with pytest.raises(anthropic.BadRequestError, match="prompt is too long") as found:
                    await client.messages.create(
                        model="policy", max_tokens=5, messages=[{"role": "user", "content": content}]
                    )
                assert bool(CLAUDE_CODE_S.search(str(found.value))) is (len(content) == 40)
        async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key="none", max_retries=0) as client:
            with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
                await client.models.list()


async def small(gateway: RunningGateway) -> None:
    """From now on the context is 32 tokens."""
    gateway.engine.context_length_tokens = 32
    key = {"Authorization": "Bearer k"}

    async def told() -> bool:
        return '"max_model_len":32' in (await gateway.get("/v1/models", headers=key))[1]

    await until(told)
