"""A reward model over real HTTP, as SGLang serves one: its number is a vote, and whatever else it says is none."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from clawstream.config import JudgeSettings
from clawstream.errors import TryLater
from clawstream.events import Question, TurnPaired, VoteCast, VoteStatus
from clawstream.inference.reward_model import RewardModel, problem_with
from clawstream.judging.prompts import PROMPT_VERSION, Prompt
from clawstream.judging.stage import judge_at, judging_stage
from clawstream.judging.votes import Ballot, VoteKey
from clawstream.stream.stage import Record
from tests.sessions import Session, assistant, user

RATED = ({"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"})


@dataclass
class Served:
    """What the endpoint gives, and what it was asked."""

    numbers: object
    status: int = 200
    tokens: object = (1, 2, 3)
    url: str = ""
    asked: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.Response:
        self.asked.append((request.path, await request.json()))
        if self.status != 200:
            return web.Response(status=self.status, text="not now")
        given = {"tokens": self.tokens} if request.path == "/tokenize" else {"embedding": self.numbers, "meta_info": {}}
        return web.json_response(given)


@asynccontextmanager
async def served(numbers: object, **how: Any) -> AsyncIterator[Served]:
    made = Served(numbers, **how)
    app = web.Application()
    app.add_routes([web.post("/tokenize", made.handle), web.post("/classify", made.handle)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        made.url = f"http://{host}:{port}/v1"
        yield made
    finally:
        await runner.cleanup()


def settings(at: Served, above: float = 0.0) -> JudgeSettings:
    return JudgeSettings(url=at.url, model="rm", reward_above=above)


async def cast(chosen: JudgeSettings, question: Question = Question.SCORE) -> VoteCast:
    async with judge_at(chosen) as judge:
        assert isinstance(judge, RewardModel)
        stage = judging_stage(chosen, judge)
        assert stage.perform is not None
        key = VoteKey(judge.name, PROMPT_VERSION, "t", question, 0)
        ballot = Ballot(session_id="s", key=key, number=0, prompt=Prompt(rated=RATED), seed=1)
        (vote,) = await stage.perform(ballot)
    assert isinstance(vote, VoteCast)
    return vote


@pytest.mark.parametrize(("number", "above", "score"), [(1.25, 0, 1), (-0.5, 0, -1), (1.25, 2, -1), (2, 2, -1)])
async def test_a_number_above_the_mark_is_a_good_answer(number: float, above: float, score: int) -> None:
    async with served([number]) as model:
        vote = await cast(settings(model, above))
    assert (vote.status, vote.score, vote.hint, vote.error) == (VoteStatus.READABLE, score, None, None)
    assert vote.text == f"{number:g}"
    assert (vote.prompt_tokens, vote.completion_tokens) == (3, 0)
    assert model.asked == [
        ("/tokenize", {"model": "rm", "messages": list(RATED), "add_generation_prompt": False}),
        ("/classify", {"input_ids": [1, 2, 3]}),
    ]


@pytest.mark.parametrize("numbers", [None, [], [0.1, 0.2], ["1"], [True], 3.0])
async def test_what_is_not_one_number_is_a_failed_vote_that_says_so(numbers: object) -> None:
    async with served(numbers) as model:
        vote = await cast(settings(model))
    assert (vote.status, vote.score) == (VoteStatus.FAILED, None)
    assert vote.error is not None
    assert "expected one number: is it a reward model, started with --is-embedding?" in vote.error


async def test_no_tokens_are_a_failed_vote() -> None:
    async with served([1.0], tokens=[]) as model:
        vote = await cast(settings(model))
    assert vote.status is VoteStatus.FAILED
    assert "/tokenize gives no tokens" in (vote.error or "")


async def test_a_model_that_can_not_answer_now_is_asked_again() -> None:
    async with served([1.0], status=503) as model:
        with pytest.raises(TryLater, match="status 503"):
            await cast(settings(model))
    with pytest.raises(TryLater, match="no reply"):
        await cast(settings(model))


async def test_a_trial_says_whether_it_gives_a_number() -> None:
    async with served([1.0]) as model:
        assert await problem_with(settings(model)) is None
    assert "no reply" in (await problem_with(settings(model)) or "")
    async with served([1.0, 2.0]) as model:
        assert "expected one number" in (await problem_with(settings(model)) or "")


async def test_whether_there_is_a_hint_is_not_asked_and_its_vote_says_no() -> None:
    async with served([1.0]) as model:
        vote = await cast(settings(model), Question.HINT)
    assert (vote.status, vote.score, vote.hint, vote.text, vote.error) == (VoteStatus.READABLE, -1, None, None, None)
    assert model.asked == []


async def test_what_a_reward_model_is_asked_is_settled_by_the_judge_that_is_set() -> None:
    chosen = JudgeSettings(url="http://judge/v1", reward_above=0.0)
    session = Session()
    first = session.ask([{"role": "system", "content": "SECRET"}, user("2+2?")], "5")
    second = session.ask([{"role": "system", "content": "SECRET"}, user("2+2?"), assistant("5"), user("no")], "4")
    turn = TurnPaired(session_id="s", turn_id=first.exchange_id, next_exchange_id=second.exchange_id, next_state=(3,))
    async with judge_at(chosen) as judge:
        step, state = judging_stage(chosen, judge).step, None
        asked: list[Ballot] = []
        for offset, event in enumerate((first, second, turn)):
            record = Record(topic="t", partition=0, offset=offset, timestamp_ms=0, key="s", event=event)
            state, _, calls = step(state, record)
            asked += calls
    assert [ballot.key.question for ballot in asked] == [Question.SCORE, Question.HINT]
    assert asked[0].prompt.rated == ({"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "5"})


def test_a_reward_model_does_not_take_the_time_of_written_votes() -> None:
    rates = JudgeSettings(reward_above=0.0)
    assert (rates.call_timeout_s, rates.deadline_s) == (60, 600)


def test_a_reward_model_votes_once_and_alone_makes_a_verdict() -> None:
    rates = JudgeSettings(reward_above=0.0, votes=5)
    assert (rates.num_votes, rates.needed, rates.needed_for_a_hint) == (1, 1, 1)
