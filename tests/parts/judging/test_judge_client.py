"""The judge client over real HTTP: what arrived is a reply, what did not is asked again."""

import asyncio
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from aiohttp import web
from pydantic import SecretStr

from clawstream.config import JudgeSettings
from clawstream.errors import ConfigError, TryLater
from clawstream.events import CUT, Question, VoteCast, VoteStatus
from clawstream.inference.judge_client import JudgeClient, JudgeRefused, JudgeReply
from clawstream.judging.prompts import PROMPT_VERSION, Prompt
from clawstream.judging.stage import judging_stage
from clawstream.judging.votes import Ballot, VoteKey
from tests.parts.judging.endpoint import Endpoint, completion, endpoint


def settings(judge: Endpoint | None, **changes: Any) -> JudgeSettings:
    return JudgeSettings(url=judge and judge.url, model="m", **changes)


async def saying(content: str | None) -> web.StreamResponse:
    return completion(content)


async def ask(judge: Endpoint, **changes: Any) -> JudgeReply:
    async with JudgeClient.open(settings(judge, **changes)) as client:
        return await client.ask("system", "user", seed=7)


def ballot(judge: str) -> Ballot:
    prompt = Prompt(system="system", user="user")
    key = VoteKey(judge, PROMPT_VERSION, "t", Question.SCORE, 0)
    return Ballot(session_id="s", key=key, number=1, prompt=prompt, seed=7)


async def cast(judge: Endpoint, **changes: Any) -> VoteCast:
    async with JudgeClient.open(settings(judge, **changes)) as client:
        stage = judging_stage(settings(judge, **changes), client)
        assert stage.perform is not None
        (vote,) = await stage.perform(ballot(client.name))
    assert isinstance(vote, VoteCast)
    return vote


async def test_a_reply_is_its_text_and_the_endpoints_own_counts() -> None:
    async with endpoint(lambda _: saying("\\boxed{1}")) as judge:
        reply = await ask(judge, api_key=SecretStr("key"))
    assert reply == JudgeReply(text="\\boxed{1}", prompt_tokens=11, completion_tokens=7)
    assert judge.keys == ["Bearer key"]
    assert judge.bodies == [
        {
            "model": "m",
            "messages": [{"role": "system", "content": "system"}, {"role": "user", "content": "user"}],
            "temperature": 0.6,
            "max_tokens": 8192,
            "seed": 7,
        }
    ]


@pytest.mark.parametrize("thinking", [True, False])
async def test_a_judge_whose_thinking_is_settled_is_told_so_by_its_chat_template(thinking: bool) -> None:
    async with endpoint(lambda _: saying("\\boxed{1}")) as judge:
        await ask(judge, thinking=thinking)
    assert judge.bodies[0]["chat_template_kwargs"] == {"enable_thinking": thinking}


THOUGHT_TOKENS = 3000


async def thinker(body: dict[str, Any]) -> web.StreamResponse:
    """A judge that thinks for `THOUGHT_TOKENS` tokens, with \\boxed{-1} among them, before it says 1."""
    words = ["\\boxed{-1}", *(["hm"] * (THOUGHT_TOKENS - 1))]
    if body["max_tokens"] < THOUGHT_TOKENS:
        return completion(f"<think>{' '.join(words[: body['max_tokens']])}", "length")
    return completion(f"<think>{' '.join(words)}</think>It moved on: \\boxed{{1}}")


async def test_a_judge_may_think_for_long_and_its_verdict_is_what_it_says_afterwards() -> None:
    async with endpoint(thinker) as judge:
        vote = await cast(judge)
    assert (vote.status, vote.score, vote.error) == (VoteStatus.READABLE, 1, None)


async def test_a_vote_that_was_cut_while_the_judge_thought_names_the_limit_and_is_none() -> None:
    async with endpoint(thinker) as judge:
        vote = await cast(judge, max_tokens=1024)
    assert (vote.status, vote.score) == (VoteStatus.UNREADABLE, None)
    assert vote.error == f"{CUT} 1024"
    assert vote.text is not None
    assert vote.text.startswith("<think>")


@pytest.mark.parametrize(
    ("content", "score"),
    [
        (None, None),
        ("no verdict here", None),
        ("I would say \\boxed{-1}, but they went on, so I", None),  # thoughts that a template began
        ("<think>hm</think>\\boxed{1} and then it goes on", 1),
    ],
)
async def test_a_cut_reply_counts_only_if_its_thinking_had_ended(content: str | None, score: int | None) -> None:
    async def cutting(_: dict[str, Any]) -> web.StreamResponse:
        return completion(content, "length")

    async with endpoint(cutting) as judge:
        vote = await cast(judge, max_tokens=16)
    assert vote.status is (VoteStatus.UNREADABLE if score is None else VoteStatus.READABLE)
    assert (vote.score, vote.error) == (score, f"{CUT} 16" if score is None else None)


async def test_a_judge_that_does_not_know_the_switch_is_named_with_what_helps() -> None:
    async def strict(_: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=400, text="Unrecognized request argument supplied: chat_template_kwargs")

    async with endpoint(strict) as judge:
        vote = await cast(judge, thinking=True)
    assert vote.error is not None
    assert vote.error.endswith("Leave judge.thinking out: it does not take that switch")


async def test_a_judge_whose_context_is_too_short_for_a_vote_is_named_with_what_helps() -> None:
    async def short(_: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=400, text="The requested tokens exceed the model's maximum context length of 8192.")

    async with endpoint(short) as judge:
        vote = await cast(judge)
    assert vote.status is VoteStatus.FAILED
    assert vote.error is not None
    assert vote.error.endswith("Give the judge a longer context, or lower judge.max_tokens if it writes its votes")


def test_a_longer_vote_may_take_longer() -> None:
    short, usual = JudgeSettings(max_tokens=256), JudgeSettings()
    assert (short.call_timeout_s, short.deadline_s) == (60, 600)
    assert (usual.call_timeout_s, usual.deadline_s) == (480, 960)


async def test_votes_share_connections() -> None:
    async with endpoint(lambda _: saying("ok")) as judge, JudgeClient.open(settings(judge)) as client:
        for _ in range(5):
            await client.ask("system", "user", seed=1)
    assert len(judge.peers) == 1


@pytest.mark.parametrize("status", [401, 403, 408, 429, 500, 502, 503])
async def test_a_judge_that_can_not_answer_now_is_asked_again(status: int) -> None:
    async def busy(_: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=status, text="not now", headers={"Retry-After": "3"})

    async with endpoint(busy) as judge:
        with pytest.raises(TryLater, match=f"status {status}, not now") as caught:
            await ask(judge)
    assert caught.value.retry_after_s == 3.0


async def test_a_retry_after_may_be_a_date() -> None:
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)

    async def busy(_: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=429, headers={"Retry-After": later})

    async with endpoint(busy) as judge:
        with pytest.raises(TryLater) as caught:
            await ask(judge)
    assert caught.value.retry_after_s is not None
    assert 20 < caught.value.retry_after_s <= 30


async def test_a_judge_that_is_not_there_is_asked_again() -> None:
    async with endpoint(lambda _: saying("ok")) as judge:
        pass
    with pytest.raises(TryLater, match="no reply"):
        await ask(judge)


async def test_a_judge_that_takes_too_long_is_asked_again() -> None:
    never = asyncio.Event()

    async def silent(_: dict[str, Any]) -> web.StreamResponse:
        await never.wait()
        return completion("too late")

    async with endpoint(silent) as judge:
        async with JudgeClient.open(JudgeSettings(url=judge.url), call_timeout_s=0.2) as client:
            with pytest.raises(TryLater, match="no reply"):
                await client.ask("system", "user", seed=1)
        never.set()


async def test_a_request_that_the_judge_will_never_take_is_refused_and_a_failed_vote_at_once() -> None:
    async def refuse(_: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "context too long"}}, status=400)

    async with endpoint(refuse) as judge:
        with pytest.raises(JudgeRefused, match="context too long"):
            await ask(judge)
        vote = await cast(judge)
    assert (vote.status, vote.score, vote.text) == (VoteStatus.FAILED, None, None)
    assert vote.error is not None
    assert "context too long" in vote.error


@pytest.mark.parametrize("content", [None, "", "I can not say", "\\boxed{7}"])
async def test_a_reply_without_a_verdict_is_an_unreadable_vote(content: str | None) -> None:
    async with endpoint(lambda _: saying(content)) as judge:
        vote = await cast(judge)
    assert (vote.status, vote.score, vote.text) == (VoteStatus.UNREADABLE, None, content or "")


@pytest.mark.parametrize("body", ["<html>", "{}", '{"choices": []}', "[1]", '{"choices": [{"message": "x"}]}'])
async def test_a_reply_that_is_no_completion_is_an_unreadable_vote(body: str) -> None:
    async def odd(_: dict[str, Any]) -> web.StreamResponse:
        return web.Response(text=body)

    async with endpoint(odd) as judge:
        vote = await cast(judge)
    assert (vote.status, vote.text, vote.prompt_tokens) == (VoteStatus.UNREADABLE, body, None)


async def test_a_readable_vote_records_who_was_asked_and_what_was_said() -> None:
    async with endpoint(lambda _: saying("fine \\boxed{1}")) as judge:
        vote = await cast(judge)
    assert (vote.status, vote.score, vote.text) == (VoteStatus.READABLE, 1, "fine \\boxed{1}")
    assert vote.judge == f"m@{judge.url.removeprefix('http://').removesuffix('/v1')}"
    assert (vote.turn_id, vote.ballot, vote.prompt_tokens, vote.completion_tokens) == ("t", 1, 11, 7)


async def test_a_vote_that_never_came_is_failed_under_an_id_of_its_own() -> None:
    async with endpoint(lambda _: saying("\\boxed{1}")) as judge:
        came = await cast(judge)
        async with JudgeClient.open(settings(judge)) as client:
            stage = judging_stage(settings(judge), client)
            assert stage.give_up is not None
            (missed,) = stage.give_up(ballot(client.name), "no reply for 600 s")
    assert isinstance(missed, VoteCast)
    assert (missed.status, missed.score, missed.error) == (VoteStatus.FAILED, None, "no reply for 600 s")
    assert missed.event_id != came.event_id


async def test_no_url_is_an_operators_error() -> None:
    with pytest.raises(ConfigError, match=r"judge\.url is not set"):
        async with JudgeClient.open(settings(None)):
            pass
