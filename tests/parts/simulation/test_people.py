"""Student, judge and scorer as the demonstration runs them: processes of their own, over HTTP."""

import ast
import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

import clawstream.simulation
from clawstream.simulation import reactions
from clawstream.simulation.runs.scenarios import SCENARIOS, write
from tests.parts.simulation.chat_server import serving


@asynccontextmanager
async def program(name: str, *arguments: str, stdin: int = PIPE) -> AsyncIterator[Process]:
    """A running `python -m clawstream.simulation.NAME`, killed at the end if it still runs."""
    argv = (sys.executable, "-m", f"clawstream.simulation.{name}", *arguments)
    process = await asyncio.create_subprocess_exec(*argv, stdin=stdin, stdout=PIPE, stderr=PIPE)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def line(process: Process) -> dict[str, Any]:
    assert process.stdout is not None
    async with asyncio.timeout(30):
        said = await process.stdout.readline()
    result = json.loads(said)
    assert isinstance(result, dict)
    return result


async def lines_until_exit(process: Process) -> list[dict[str, Any]]:
    async with asyncio.timeout(30):
        out, err = await process.communicate()
    assert not err, err.decode()
    return [json.loads(said) for said in out.splitlines()]


def tell(process: Process, command: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{command}\n".encode())


@pytest.fixture
def sums(tmp_path: Path) -> tuple[str, str]:
    students, scored = write(SCENARIOS["student"], tmp_path)
    return str(students), str(scored)


@pytest.fixture
def mixed(tmp_path: Path) -> tuple[str, str]:
    students, scored = write(SCENARIOS["all"], tmp_path)
    return str(students), str(scored)


async def test_a_session_is_a_question_and_a_reaction_with_the_whole_history_and_is_closed(
    sums: tuple[str, str],
) -> None:
    async with (
        serving() as chat,
        program("student", "--base-url", chat.url, "--problems", sums[0], "--sessions", "1") as student,
    ):
        reports = await lines_until_exit(student)

    (first_headers, first), (second_headers, second) = chat.asked
    assert [r["first_answer"] for r in reports] == [True, False]
    assert first_headers["x-session-id"] == second_headers["x-session-id"] == reports[0]["session"]
    assert "x-session-done" not in first_headers
    assert second_headers["x-session-done"] == "1"
    assert first_headers["x-turn-type"] == second_headers["x-turn-type"] == "main"
    assert first["stream"] is second["stream"] is True
    assert second["messages"][:1] == first["messages"]
    assert second["messages"][1]["content"].startswith("## Answer\n**")
    assert any(word in second["messages"][2]["content"] for word in ("bold", "plain", "fancy"))
    assert all(not r["failed"] and r["ttft_ms"] > 0 and r["num_chunks"] >= 2 for r in reports)
    assert all(0 <= ms <= r["total_ms"] for r in reports for _, ms in r["gaps"])


@pytest.mark.slow
async def test_the_same_seed_asks_the_same_things_in_the_same_words(sums: tuple[str, str]) -> None:
    async def said() -> list[str]:
        async with (
            serving() as chat,
            program(
                "student", "--base-url", chat.url, "--problems", sums[0],
                "--sessions", "5", "--concurrency", "1", "--seed", "7",
            ) as student,
        ):  # fmt: skip
            await lines_until_exit(student)
        return [m["content"] for _, body in chat.asked for m in body["messages"]]

    first = await said()

    assert len(first) == 20  # five sessions of a question, and of a question, its answer and a reaction
    assert await said() == first


async def test_pause_is_acknowledged_once_no_session_is_open_and_go_goes_on(sums: tuple[str, str]) -> None:
    async with serving() as chat, program("student", "--base-url", chat.url, "--problems", sums[0]) as student:
        await line(student)
        tell(student, "pause")
        said = [await line(student)]
        while said[-1]["event"] != "paused":
            said.append(await line(student))
        paused_at = len(chat.asked)
        num_done = sum("x-session-done" in headers for headers, _ in chat.asked)
        tell(student, "go")
        await line(student)
        resumed_at = len(chat.asked)
        tell(student, "stop")
        rest = await lines_until_exit(student)

    assert paused_at == 2 * num_done
    assert resumed_at > paused_at
    assert sum(r["event"] == "request" for r in rest) % 2 == 1  # with the one read after `go`: whole sessions
    assert student.returncode == 0


async def test_who_talks_alone_is_told_over_stdin(mixed: tuple[str, str]) -> None:
    async with (
        serving() as chat,
        program("student", "--base-url", chat.url, "--problems", mixed[0], "--wait") as student,
    ):
        tell(student, "talk teacher")
        tell(student, "go 6")
        while (await line(student))["event"] != "paused":
            pass
        tell(student, "stop")
        await lines_until_exit(student)

    first = {body["messages"][0]["content"] for _, body in chat.asked}
    patterns = [question.partition("{question}")[0] for question in reactions.MANNERS["teacher"].questions]
    assert len(first) == 6
    assert all(any(text.startswith(words) for words in patterns) for text in first)


async def test_a_signal_lets_open_sessions_end(sums: tuple[str, str]) -> None:
    async with serving() as chat, program("student", "--base-url", chat.url, "--problems", sums[0]) as student:
        await line(student)
        student.send_signal(signal.SIGTERM)
        await lines_until_exit(student)

    sessions = [headers["x-session-id"] for headers, _ in chat.asked]
    assert student.returncode == 0
    assert all(sessions.count(session) == 2 for session in sessions)


async def test_students_stop_when_whoever_steers_them_is_gone(sums: tuple[str, str]) -> None:
    async with serving() as chat, program("student", "--base-url", chat.url, "--problems", sums[0]) as student:
        await line(student)
        assert student.stdin is not None
        student.stdin.close()
        await lines_until_exit(student)

    assert student.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["failing", "cutting"])
async def test_a_failed_request_is_reported_and_ends_its_session(sums: tuple[str, str], trouble: str) -> None:
    async with serving() as chat:
        setattr(chat, trouble, True)
        async with program(
            "student", "--base-url", chat.url, "--problems", sums[0], "--sessions", "2", "--concurrency", "2",
            stdin=asyncio.subprocess.DEVNULL,
        ) as student:  # fmt: skip
            reports = await lines_until_exit(student)

    assert [(r["failed"], r["first_answer"]) for r in reports] == [(True, True)] * 2
    assert len({r["session"] for r in reports}) == 2
    assert all(r["error"] for r in reports)


@pytest.mark.slow
async def test_the_score_is_of_side_turns_with_a_seed_for_each_sum(sums: tuple[str, str]) -> None:
    async with serving() as chat, program("scorer", "--base-url", chat.url, "--problems", sums[1]) as scorer:
        (score,) = await lines_until_exit(scorer)

    assert len({body["seed"] for _, body in chat.asked}) == len(chat.asked) == 200
    assert {headers["x-turn-type"] for headers, _ in chat.asked} == {"side"}
    assert (score["score"], score["right"], score["styled"], score["n"]) == (0.0, 200, 0, 200)
    assert score["policy_versions"] == ["3"]


@pytest.mark.slow
async def test_the_ceiling_is_the_score_with_the_hint_in_the_prompt(sums: tuple[str, str]) -> None:
    arguments = ("--problems", sums[1], "--hinted", "--temperature", "0.8")
    async with serving() as chat, program("scorer", "--base-url", chat.url, *arguments) as scorer:
        (score,) = await lines_until_exit(scorer)

    assert score["score"] == 1.0
    assert score["ci95_low"] > 0.98
    hint = (
        "\n\n[user's hint / instruction]\nWrite in plain, casual words without headings or bold, and keep every step."
    )
    assert all(b["messages"][0]["content"].endswith(hint) for _, b in chat.asked)
    assert {body["temperature"] for _, body in chat.asked} == {0.8}


@pytest.mark.slow
async def test_each_person_is_scored_by_their_own_wish_and_hinted_with_it(mixed: tuple[str, str]) -> None:
    async with (
        serving() as chat,
        program("scorer", "--base-url", chat.url, "--problems", mixed[1], "--hinted") as scorer,
    ):
        (score,) = await lines_until_exit(scorer)

    hints = {body["messages"][0]["content"].partition("instruction]\n")[2] for _, body in chat.asked}
    assert hints == {persona.hint for persona in SCENARIOS["all"].personas}
    assert score["n"] == 500
    assert score["by_persona"] == {"student": 1.0, "ta": 0.0, "teacher": 0.0}  # the server answers all in plain words


@pytest.mark.slow
@pytest.mark.parametrize(("share", "specific"), [("0", 0), ("1", 20)])
async def test_the_stated_share_of_complaints_says_what_is_wanted(
    mixed: tuple[str, str], share: str, specific: int
) -> None:
    arguments = ("--problems", mixed[0], "--sessions", "20", "--hint-share", share)
    async with serving() as chat, program("student", "--base-url", chat.url, *arguments) as student:
        await lines_until_exit(student)

    said = [body["messages"][2]["content"] for _, body in chat.asked if len(body["messages"]) == 3]
    assert len(said) == 20
    assert sum(words not in reactions.VAGUE for words in said) == specific


async def test_a_judge_of_unknown_people_does_not_start() -> None:
    async with program("judge", "--scenario", "nobody") as judge:
        out, err = await judge.communicate()

    assert (judge.returncode, out) == (2, b"")
    assert b"expected one of student, all" in err


async def test_there_is_no_score_when_an_answer_is_missing(sums: tuple[str, str]) -> None:
    async with serving() as chat:
        chat.failing = True
        async with program("scorer", "--base-url", chat.url, "--problems", sums[1]) as scorer:
            out, err = await scorer.communicate()

    assert (scorer.returncode, out) == (1, b"")
    assert b"There is no score" in err
    assert b"503" in err


async def test_the_judge_answers_an_openai_client_and_repeats_itself_for_a_seed() -> None:
    complaint = '<next_state role="user">\nno bold please\n</next_state>'
    async with program("judge", "--wrong-share", "0.5") as judge:
        url = (await line(judge))["url"]
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:

            async def vote(seed: int | None = None) -> str:
                messages: Any = [{"role": "system", "content": "score"}, {"role": "user", "content": complaint}]
                reply = await client.chat.completions.create(model="simulated-judge", messages=messages, seed=seed)
                return reply.choices[0].message.content or ""

            seeded = [await vote(seed=n) for n in range(20)]
            again = [await vote(seed=n) for n in range(20)]
            unseeded = [await vote() for _ in range(20)]
            models = [model.id async for model in client.models.list()]
            with pytest.raises(openai.BadRequestError, match="messages is missing or empty"):
                await client.chat.completions.create(model="simulated-judge", messages=[])
        judge.terminate()
        async with asyncio.timeout(10):
            await judge.wait()

    assert seeded == again
    assert len(set(seeded)) == len(set(unseeded)) == 2
    assert models == ["simulated-judge"]


@pytest.mark.parametrize("programs", [("student", "scorer"), ("student", "judge"), ("scorer", "judge")])
def test_student_judge_and_scorer_share_no_code(programs: tuple[str, str]) -> None:
    first, second = (_ours(name, set()) for name in programs)

    # The words and requests that lie there as files, and how a language model is asked that takes the place of either.
    assert first & second <= {"everyday", "roles"}
    assert _ours("roles", set()) == {"everyday", "roles"}


def _ours(name: str, seen: set[str]) -> set[str]:
    """The modules of the simulation that a module of it imports, itself among them; named by their path below it."""
    path = Path(clawstream.simulation.__file__).parent.joinpath(*name.split("."))
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    seen.add(name)
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("clawstream.simulation"):
            continue
        below = (node.module or "").removeprefix("clawstream.simulation").lstrip(".")
        folder = Path(clawstream.simulation.__file__).parent.joinpath(*below.split(".")) if below else None
        found = {alias.name for alias in node.names} if folder is None else {below}
        if folder is not None and folder.is_dir():
            inside = {file.stem for file in folder.glob("*.py")}
            found = {f"{below}.{alias.name}" if alias.name in inside else below for alias in node.names}
        for imported in found - seen:
            _ours(imported, seen)
    return seen
