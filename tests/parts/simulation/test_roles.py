"""Language models play people and grade answers, over HTTP: when a session ends, and what becomes of odd replies."""

import asyncio
import itertools
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from clawstream.errors import ConfigError, PartUnavailable
from clawstream.simulation.roles import RolePlayer, Roles
from clawstream.simulation.runs.figures import VersionScore
from clawstream.simulation.runs.programs import ScorerProcess, StudentProcess
from clawstream.simulation.runs.programs import program as running
from clawstream.simulation.runs.scenarios import CASTS, SCENARIOS, write
from tests.parts.simulation.chat_server import answer, serving
from tests.parts.simulation.test_people import lines_until_exit, program


def played(replies: Iterator[str]) -> Callable[[list[dict[str, str]]], str]:
    """Answer as a language model with the next reply where it is told its part, else as the policy."""
    return lambda messages: next(replies) if messages[0]["role"] == "system" else answer(messages)


@pytest.fixture
def sums(tmp_path: Path) -> tuple[Path, Path]:
    return write(SCENARIOS["student"], tmp_path)


@pytest.mark.parametrize(
    ("replies", "num_answers"),
    [(["DONE"], 2), (["plain words please", "thanks, DONE"], 3), (["no"] * 7, 8), (["", "", "DONE"], 2)],
)
async def test_a_session_with_a_played_person_lasts_until_they_are_content_and_eight_answers_at_most(
    sums: tuple[Path, Path], replies: list[str], num_answers: int
) -> None:
    async with serving(played(iter(replies))) as chat:
        named = f"model@{chat.url}"
        argv = ("--base-url", chat.url, "--problems", str(sums[0]), "--sessions", "1", "--played-by", named)
        async with program("student", *argv) as student:
            reports = await lines_until_exit(student)

    asked = [(headers, body) for headers, body in chat.asked if body["messages"][0]["role"] != "system"]
    assert [report["first_answer"] for report in reports] == [True] + [False] * (num_answers - 1)
    assert ["x-session-done" in headers for headers, _ in asked] == [False] * (num_answers - 1) + [True]
    assert len({headers["x-session-id"] for headers, _ in asked}) == 1
    for (_, before), (_, after) in pairwise(asked):
        assert after["messages"][: len(before["messages"])] == before["messages"]
    said = [message["content"] for message in asked[-1][1]["messages"][2::2]]
    assert said == [
        reply.replace("thanks, DONE", "thanks").replace("DONE", "Thanks, that's it.") for reply in replies if reply
    ]


async def test_a_person_who_says_nothing_three_times_ends_the_talk_with_words_and_status_1(
    sums: tuple[Path, Path],
) -> None:
    async with serving(played(iter([""] * 3))) as chat:
        argv = ("--base-url", chat.url, "--problems", str(sums[0]), "--sessions", "1")
        async with program("student", *argv, "--played-by", f"model@{chat.url}") as student:
            _, err = await student.communicate()

    assert student.returncode == 1
    assert b"said nothing 3 times in a row" in err
    assert b"Traceback" not in err


@pytest.mark.parametrize(
    ("replies", "score", "num", "ungraded"),
    [(["\\boxed{0.5}", "\\boxed{1}"], 0.75, 2, 0), (["\\boxed{0.4}", "hm", "hm", "hm"], 0.4, 1, 1)],
)
async def test_a_score_is_the_mean_of_the_grades_and_an_answer_without_one_counts_nowhere(
    sums: tuple[Path, Path], tmp_path: Path, replies: list[str], score: float,
    num: int, ungraded: int,
) -> None:  # fmt: skip
    found = await scored(sums[1], tmp_path, iter(replies), count=2)

    assert isinstance(found, VersionScore)
    assert found.score == pytest.approx(score)
    assert (found.num_problems, found.num_ungraded) == (num, ungraded)
    assert (found.num_right, found.num_styled) == (None, None)
    assert found.low <= found.score <= found.high
    assert found.by_persona == {"student": found.score}


async def test_where_no_grade_can_be_read_there_is_no_score(sums: tuple[Path, Path], tmp_path: Path) -> None:
    found = await scored(sums[1], tmp_path, iter(["good"] * 3), count=1)
    assert isinstance(found, PartUnavailable)
    assert "gave no grade that can be read to any of 1 answers" in (tmp_path / "logs" / "scorer.log").read_text()


def first_of(problems: Path, count: int) -> Path:
    few = problems.with_name("few.jsonl")
    few.write_text("".join(problems.read_text().splitlines(keepends=True)[:count]))
    return few


async def scored(problems: Path, folder: Path, replies: Iterator[str], *, count: int) -> VersionScore | BaseException:
    """Return the score of so many problems, graded by who gives these replies, or why there is none."""
    few = first_of(problems, count)
    (folder / "logs").mkdir()
    async with serving(played(replies)) as chat:
        scorer = ScorerProcess(
            chat.url.removesuffix("/v1"), few, folder / "logs", cast=CASTS["student"], seed=0, temperature=1.0,
            graded_by=f"model@{chat.url}",
        )  # fmt: skip
        [found] = await asyncio.gather(scorer.score(3), return_exceptions=True)
    return found


async def test_a_model_that_is_away_is_asked_again_and_the_first_model_of_an_address_is_taken() -> None:
    num_asked = 0

    async def complete(_request: web.Request) -> web.Response:
        nonlocal num_asked
        num_asked += 1
        if 1 < num_asked < 4:  # the first asks whether there is a model
            return web.json_response({"error": {"message": "loading"}}, status=503, headers={"Retry-After": "0.01"})
        message = {"role": "assistant", "content": "\\boxed{0.5}"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response(
            {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        )

    async def models(_request: web.Request) -> web.Response:
        listed = [{"id": name, "object": "model", "created": 1, "owned_by": "x"} for name in ("first", "second")]
        return web.json_response({"object": "list", "data": listed})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    app.router.add_get("/v1/models", models)
    async with TestServer(app) as server:
        url = str(server.make_url("/v1"))
        roles = await asyncio.to_thread(Roles(scorer=url).named)
        assert roles.scorer == f"first@{url}"
        async with RolePlayer.open(roles.scorer) as player:
            assert await player.grade(("Grade.", "3"), seed=1) == 0.5
    assert num_asked == 4
    assert roles.judge is None


async def test_an_address_that_lists_no_model_is_named() -> None:
    async with serving() as chat:
        [found] = await asyncio.gather(asyncio.to_thread(Roles(scorer=chat.url).named), return_exceptions=True)
    assert isinstance(found, ConfigError)
    assert f"--scorer {chat.url}: no model answers there" in str(found)


async def test_a_model_that_is_named_is_asked_before_anything_is_run() -> None:
    async with serving() as chat:
        chat.failing = True
        [found] = await asyncio.gather(asyncio.to_thread(Roles(judge=f"m@{chat.url}").named), return_exceptions=True)
    assert isinstance(found, ConfigError)
    assert f"--judge m@{chat.url}: no model answers there" in str(found)


async def test_students_whose_player_fails_while_a_run_holds_them_are_named_with_their_log(
    sums: tuple[Path, Path], tmp_path: Path
) -> None:
    async with serving(played(itertools.repeat(""))) as chat:
        argv = ("--base-url", chat.url, "--problems", str(sums[0]), "--wait", "--played-by", f"model@{chat.url}")
        async with running("clawstream.simulation.student", *argv, log=tmp_path / "student.log") as process:
            students = StudentProcess(process)
            listening = asyncio.create_task(students.listen())
            [found] = await asyncio.gather(students.hold(4), return_exceptions=True)
            [again] = await asyncio.gather(students.hold(4), return_exceptions=True)
            await listening
    assert isinstance(found, PartUnavailable)
    assert isinstance(again, PartUnavailable)
    assert "see student.log" in str(found)
    assert "said nothing 3 times in a row" in (tmp_path / "student.log").read_text()
