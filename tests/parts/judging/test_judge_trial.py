"""A judge that does not work is told in words before any turn is put to it, and while turns wait for it."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from pydantic import SecretStr

from clawstream.cli.status import judge_line, unread_line
from clawstream.cli.up import _test_vote
from clawstream.config import JudgeSettings, Settings
from clawstream.errors import TryLater
from clawstream.events import Question, VoteCast
from clawstream.inference.judge_client import JudgeClient, judge_name, problem_with
from clawstream.judging.prompts import PROMPT_VERSION, Prompt
from clawstream.judging.stage import judging_stage
from clawstream.judging.votes import Ballot, VoteKey
from clawstream.local.running import NOTED_EVERY_MS, JudgeNotes, judge_of
from clawstream.local.servers.server_process import reserved
from clawstream.monitoring.alarm import ReadVotes, newest
from tests.parts.judging.endpoint import completion, endpoint
from tests.parts.judging.test_reward_model import served

BALLOT = Ballot(
    session_id="s",
    key=VoteKey("m@x", PROMPT_VERSION, "t", Question.SCORE, 0),
    number=0,
    prompt=Prompt(system="s", user="u"),
    seed=7,
)


def judge(url: str | None, **changes: Any) -> JudgeSettings:
    return JudgeSettings(url=url, model="qwen3-8b", **changes)


def saying(status: int, text: str) -> Callable[[dict[str, Any]], Any]:
    async def answer(_: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=status, text=text)

    return answer


async def votes(_: dict[str, Any]) -> web.StreamResponse:
    return completion("\\boxed{1}")


@pytest.mark.parametrize(
    ("status", "text", "words"),
    [
        (401, '{"error": "no key"}', 'status 401 ({"error": "no key"}). Set judge.api_key'),
        (404, "no such model", "status 404 (no such model). Has it a model qwen3-8b (judge.model)"),
        (307, "over there", "status 307 (over there)"),
        (503, "loading", "status 503 (loading). Its own log says why"),
        (200, "<html>hello</html>", "no chat completion (<html>hello</html>). Is judge.url the address that ends"),
        (200, '{"choices": []}', "no chat completion"),
        (200, "", "no chat completion. Is"),
    ],
)
async def test_what_a_judge_answers_in_place_of_a_vote_is_told_with_what_to_do(
    status: int, text: str, words: str
) -> None:
    async with endpoint(saying(status, text)) as made:
        found = await problem_with(judge(made.url), made.url)
    assert words in (found or "")
    assert f"{made.url}/chat/completions" in (found or "")


async def test_a_judge_that_is_away_or_silent_is_told() -> None:
    with reserved() as port:
        found = await problem_with(judge(None), f"http://127.0.0.1:{port}/v1")
    assert (found or "").startswith(f"nothing answers at http://127.0.0.1:{port}/v1/chat/completions")

    over = asyncio.Event()

    async def silent(_: dict[str, Any]) -> web.StreamResponse:
        await over.wait()
        return web.Response()

    async with endpoint(silent) as made:
        assert "gave no answer within 0.2 s" in (await problem_with(judge(None), made.url, within_s=0.2) or "")
        over.set()


async def test_a_judge_that_votes_is_asked_as_votes_are_asked_for() -> None:
    async with endpoint(votes) as made:
        assert await problem_with(judge(None, api_key=SecretStr("key")), made.url) is None
    [body] = made.bodies
    assert (made.keys, body["model"]) == (["Bearer key"], "qwen3-8b")


async def test_up_asks_for_a_vote_and_status_knows_what_came_of_it(tmp_path: Path) -> None:
    async with endpoint(saying(404, "no such model")) as made:
        settings = Settings(data_dir=tmp_path, judge=judge(made.url), environment=False)
        assert "status 404" in (await _test_vote(settings) or "")
    noted = judge_of(tmp_path)
    assert noted is not None
    said = judge_line(settings.judge, noted, noted.since_ms + 300_000)
    assert said.startswith(f"[red]judge: {judge_name('qwen3-8b', made.url)} has given no answer for 5 min[/]")
    assert "status 404 (no such model)" in said
    assert await _test_vote(Settings(data_dir=tmp_path, environment=False)) is None


def votes_read(
    replies: int, cut: int = 0, cut_tokens: int | None = None, without: int = 0, broken: int = 0
) -> ReadVotes:
    return ReadVotes(replies=replies, cut=cut, cut_tokens=cut_tokens, without=without, broken=broken)


def test_status_says_what_keeps_votes_from_being_read_and_what_helps() -> None:
    asked = judge("http://judge/v1", max_tokens=1024)
    said = unread_line(asked, votes_read(12, cut=6, cut_tokens=1024, without=1, broken=1))
    assert said is not None
    assert "8 of its last 12 replies are no votes" in said
    assert "6 were cut at judge.max_tokens = 1024: raise it, or set judge.thinking = false" in said
    assert "1 end without \\boxed{}" in said
    assert "1 were too long or never ended" in said
    told = unread_line(judge("http://judge/v1", thinking=False), votes_read(12, cut=6, cut_tokens=8192))
    assert told is not None
    assert told.endswith("6 were cut at judge.max_tokens = 8192: raise it")
    raised = unread_line(judge("http://judge/v1"), votes_read(12, cut=6, cut_tokens=1024))
    assert raised is not None
    assert raised.endswith("6 were cut at judge.max_tokens = 1024: it is 8192 by now")
    for few in (None, votes_read(5, cut=5, cut_tokens=1024), votes_read(30, cut=2, cut_tokens=1024)):
        assert unread_line(asked, few) is None


async def test_up_asks_a_reward_model_for_a_number(tmp_path: Path) -> None:
    async with served([1.0]) as model:
        chosen = JudgeSettings(url=model.url, model="rm", reward_above=0.0)
        assert await _test_vote(Settings(data_dir=tmp_path, judge=chosen, environment=False)) is None
    assert [path for path, _ in model.asked] == ["/tokenize", "/classify"]
    assert "no reply" in (await _test_vote(Settings(data_dir=tmp_path, judge=chosen, environment=False)) or "")


async def test_while_a_turn_waits_for_its_judge_the_last_error_and_its_beginning_are_known(tmp_path: Path) -> None:
    now_ms = 1_000
    replies = [saying(401, "who are you"), saying(401, "who are you"), votes]

    async def one_after_the_other(body: dict[str, Any]) -> Any:
        return await replies.pop(0)(body)

    async with endpoint(one_after_the_other) as made, JudgeClient.open(judge(made.url)) as client:
        notes = JudgeNotes(tmp_path, client.name, now_ms=lambda: now_ms)
        stage = judging_stage(judge(made.url), client, heard=notes.heard)
        assert stage.perform is not None
        for _ in range(2):
            with pytest.raises(TryLater):
                await stage.perform(BALLOT)
            now_ms += NOTED_EVERY_MS
        failing = judge_of(tmp_path)
        (vote,) = await stage.perform(BALLOT)
    assert failing is not None
    assert (failing.since_ms, failing.heard_ms) == (1_000, 1_000 + NOTED_EVERY_MS)
    assert "status 401, who are you" in (failing.error or "")
    assert isinstance(vote, VoteCast)
    well = judge_of(tmp_path)
    assert well is not None
    assert (well.error, well.since_ms) == (None, 1_000 + 2 * NOTED_EVERY_MS)
    assert newest(failing, well, None, judge=client.name) == well
    assert newest(failing, judge="another") is None


@pytest.mark.parametrize("found", ["", "[]", '{"of_another_version": 1}', '"half'])
def test_a_note_that_can_not_be_read_is_none(tmp_path: Path, found: str) -> None:
    JudgeNotes(tmp_path, "judge@test").heard("gone")
    [file] = tmp_path.iterdir()
    file.write_text(found)
    assert judge_of(tmp_path) is None
    JudgeNotes(tmp_path, "judge@test").heard(None)
    assert judge_of(tmp_path) is not None
