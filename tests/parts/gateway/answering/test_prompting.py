"""Prompts that take long to be made: they end in a refusal, and nobody waits for them."""

import asyncio
from typing import Any

import pytest

from clawstream.conversation.continuing import Request
from clawstream.errors import TryLater, UnrenderableRequest
from clawstream.gateway.answering.prompts import PromptMaker
from clawstream.gateway.sessions import KnownSession
from clawstream.rendering.renderer import PromptRenderer
from tests.parts.engine.tiny_model import make_tokenizer
from tests.renderers import load_renderer
from tests.sessions import user

# The model's own, and as bad as any: its work grows with the square of the conversation.
SLOW = "{% for a in messages %}{% for b in messages %}{% endfor %}{{ a.content }}{% endfor %}"
BIG = "x" * 20_000


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> PromptRenderer:
    folder = tmp_path_factory.mktemp("slow")
    tokenizer = make_tokenizer(folder)
    tokenizer.chat_template = SLOW
    tokenizer.save_pretrained(folder)
    return load_renderer(folder, "default")


def request(num_messages: int, text: str = "hello") -> Request:
    messages = tuple(user(text) for _ in range(num_messages))
    return Request(messages=messages, raw=[str(message).encode() for message in messages], options={})


async def made(maker: PromptMaker, asked: Request) -> Any:
    return (await maker.make(asked, KnownSession(), context_length_tokens=None)).token_ids


async def test_a_prompt_that_takes_too_long_is_refused(slow: PromptRenderer) -> None:
    maker = PromptMaker(slow, within_s=0.2)
    with pytest.raises(UnrenderableRequest, match=r"not made within 0.2 s"):
        await made(maker, request(4_000))
    maker.close()


async def test_while_all_threads_are_busy_others_are_told_to_try_again_and_small_prompts_are_made(
    slow: PromptRenderer,
) -> None:
    maker = PromptMaker(slow, within_s=0.1)
    long = await asyncio.gather(*(made(maker, request(4_000)) for _ in range(4)), return_exceptions=True)
    assert [type(one) for one in long] == [UnrenderableRequest] * 4
    with pytest.raises(TryLater, match="threads for large prompts are busy"):
        await made(maker, request(1, BIG))
    assert len(await made(maker, request(1))) == len("hello")
    maker.close()
