"""A judge that says too much, for too long, or elsewhere: a vote that can't be read, or asked again; never more."""

import asyncio
import gzip
import json
import tracemalloc
import zlib

import pytest

from clawstream.config import JudgeSettings
from clawstream.errors import TryLater
from clawstream.events import VoteCast, VoteStatus
from clawstream.inference.judge_client import JudgeClient, JudgeRefused
from clawstream.judging.stage import judging_stage
from clawstream.stream.avro import codec
from tests.parts.judging.endpoint import completion_body
from tests.parts.judging.test_judge_client import ballot
from tests.rogue import Rogue, drip, head, piece, pour, rogue

LIMIT = 64 * 2**10 + 64 * JudgeSettings().max_tokens


async def cast(url: str, *, call_timeout_s: float = 20.0) -> VoteCast:
    settings = JudgeSettings(url=f"{url}/v1", model="m")
    async with JudgeClient.open(settings, call_timeout_s=call_timeout_s) as client:
        stage = judging_stage(settings, client)
        assert stage.perform is not None
        (vote,) = await stage.perform(ballot(client.name))
    assert isinstance(vote, VoteCast)
    return vote


async def test_a_reply_of_100_mb_is_an_unreadable_vote_and_is_not_held() -> None:
    verdict = completion_body("\\boxed{1}" * 200)

    async def say(found: Rogue, writer: asyncio.StreamWriter) -> None:
        writer.write(head())
        await pour(found, writer, verdict.ljust(2**20), 100)
        writer.write(b"0\r\n\r\n")

    async with rogue(say) as judge:
        tracemalloc.start()
        try:
            vote = await cast(judge.url)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert (vote.status, vote.score) == (VoteStatus.UNREADABLE, None)
    assert vote.error is not None
    assert f"it has more than {LIMIT} bytes" in vote.error
    assert vote.text is not None
    assert 0 < len(vote.text) <= 2000
    assert judge.sent_bytes < 20 * 2**20
    assert peak_bytes < 16 * 2**20


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_bomb_of_10_mb_is_not_inflated(encoding: str) -> None:
    pack = gzip.compress if encoding == "gzip" else zlib.compress
    bomb = pack(completion_body("\\boxed{1}" + " " * 10 * 2**20))

    async def say(_: Rogue, writer: asyncio.StreamWriter) -> None:
        writer.write(head(200, f"Content-Encoding: {encoding}") + piece(bomb) + b"0\r\n\r\n")
        await writer.drain()

    async with rogue(say) as judge:
        vote = await cast(judge.url)
    assert (vote.status, vote.score) == (VoteStatus.UNREADABLE, None)
    assert vote.error is not None
    assert f"more than {LIMIT} bytes" in vote.error
    assert b"Accept-Encoding: identity" in judge.heads[0]


async def test_a_reply_that_was_compressed_unasked_is_read() -> None:
    async def say(_: Rogue, writer: asyncio.StreamWriter) -> None:
        packed = gzip.compress(completion_body("\\boxed{1}"))
        writer.write(head(200, "Content-Encoding: gzip") + piece(packed) + b"0\r\n\r\n")
        await writer.drain()

    async with rogue(say) as judge:
        vote = await cast(judge.url)
    assert (vote.status, vote.score, vote.error) == (VoteStatus.READABLE, 1, None)


@pytest.mark.parametrize("encoding", ["br", "gzip"])
async def test_a_reply_under_an_encoding_that_it_does_not_have_is_an_unreadable_vote(encoding: str) -> None:
    async def say(_: Rogue, writer: asyncio.StreamWriter) -> None:
        plain = completion_body("\\boxed{1}")
        writer.write(head(200, f"Content-Encoding: {encoding}") + piece(plain) + b"0\r\n\r\n")
        await writer.drain()

    async with rogue(say) as judge:
        vote = await cast(judge.url)
    assert (vote.status, vote.score) == (VoteStatus.UNREADABLE, None)


async def test_a_reply_that_never_ends_is_an_unreadable_vote_once_its_time_is_over() -> None:
    async def say(_: Rogue, writer: asyncio.StreamWriter) -> None:
        writer.write(head())
        await drip(writer, b"x", 0.02)

    async with rogue(say) as judge:
        vote = await cast(judge.url, call_timeout_s=0.5)
    assert (vote.status, vote.score) == (VoteStatus.UNREADABLE, None)
    assert vote.error is not None
    assert "it did not end in time" in vote.error


async def test_a_judge_that_only_keeps_the_line_warm_is_asked_again() -> None:
    async def say(_: Rogue, writer: asyncio.StreamWriter) -> None:
        writer.write(head())
        await drip(writer, b"\n", 0.02)

    async with rogue(say) as judge:
        with pytest.raises(TryLater, match="no reply"):
            await cast(judge.url, call_timeout_s=0.3)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_judge_does_not_send_the_conversation_elsewhere(status: int) -> None:
    async def elsewhere(_: Rogue, writer: asyncio.StreamWriter) -> None:
        writer.write(head() + piece(completion_body("\\boxed{1}")) + b"0\r\n\r\n")

    async with rogue(elsewhere) as other:

        async def say(_: Rogue, writer: asyncio.StreamWriter) -> None:
            writer.write(head(status, f"Location: {other.url}/v1/chat/completions") + b"0\r\n\r\n")

        async with rogue(say) as judge:
            with pytest.raises(TryLater, match=f"status {status}, it redirects to {other.url}.*not followed"):
                await cast(judge.url)
    assert other.heads == []


async def test_what_a_judge_says_of_a_refusal_is_cut() -> None:
    async def say(found: Rogue, writer: asyncio.StreamWriter) -> None:
        writer.write(head(400))
        await pour(found, writer, b"no " * 2**18, 200)

    async with rogue(say) as judge:
        vote = await cast(judge.url)
        assert (vote.status, judge.sent_bytes < 20 * 2**20) == (VoteStatus.FAILED, True)
        assert vote.error is not None
        assert len(vote.error) < 500
        async with JudgeClient.open(JudgeSettings(url=f"{judge.url}/v1")) as client:
            with pytest.raises(JudgeRefused, match="status 400, no no"):
                await client.ask("system", "user", seed=1)


@pytest.mark.parametrize("after", ["999999999999", "9" * 400, "Fri, 31 Dec 9999 23:59:59 GMT"])
async def test_a_judge_can_ask_for_an_hour_at_most(after: str) -> None:
    async def say(_: Rogue, writer: asyncio.StreamWriter) -> None:
        writer.write(head(429, f"Retry-After: {after}") + b"0\r\n\r\n")

    async with rogue(say) as judge:
        with pytest.raises(TryLater) as caught:
            await cast(judge.url)
    assert caught.value.retry_after_s == 3600.0


@pytest.mark.parametrize("count", [10**12, -5, True, "11", 1e30])
async def test_a_count_of_tokens_that_is_none_is_not_reported(count: object) -> None:
    body = json.loads(completion_body("\\boxed{1}"))
    body["usage"] = {"prompt_tokens": count, "completion_tokens": 7}

    async def say(_: Rogue, writer: asyncio.StreamWriter) -> None:
        writer.write(head() + piece(json.dumps(body).encode()) + b"0\r\n\r\n")

    async with rogue(say) as judge:
        vote = await cast(judge.url)
    assert (vote.score, vote.prompt_tokens, vote.completion_tokens) == (1, None, 7)
    assert codec().decode(codec().encode(vote)) == vote
