"""Simulates people who chat with the policy through an OpenAI client: a question, a look at the answer, a reaction.

A session is closed by its last request (X-Session-Done), and a failed request ends its session. With --played-by a
language model reacts in place of code, until it is content or has had eight answers. Run as
`python -m clawstream.simulation.student --base-url URL/v1 --problems students.jsonl`. JSON goes to stdout, one object a
line. Lines on stdin steer it: `pause`, `go`, `go N` (N sessions and no more) and `stop`. Two more change the sessions
that start later: `talk NAME` lets NAME talk alone (a persona, or `unrelated`: other subjects than sums), and `flip` has
each person want what their line of the file calls `flipped`. `pause` and `go N` are answered by {"event": "paused"}
once no session is open.
"""

import asyncio
import itertools
import json
import os
import random
import signal
import stat
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Generic, Protocol, TypeVar, cast

import orjson
import typer

from clawstream.errors import first_of
from clawstream.simulation import reactions
from clawstream.simulation.everyday import person as requests
from clawstream.simulation.roles import Remark, RolePlayer, RoleUnplayed, person_prompt

if TYPE_CHECKING:  # imported where it is used: that takes more than a second
    from openai import AsyncOpenAI
    from openai.types.chat import ChatCompletionMessageParam

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)
P = TypeVar("P", bound="Asked")
P_contra = TypeVar("P_contra", contravariant=True)

MOST_ANSWERS = 8  # in a session with a person whom a language model plays
LAST_TOKENS = 1  # of a session's last answer to everyday requests: it is dear, nobody reads it, and it teaches nothing
_AFTER_FAILURE_S = 0.5  # a server that is away is asked again at this pace


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestReport:
    """One request, as its line on stdout says."""

    event: str = "request"
    session: str
    first_answer: bool
    failed: bool
    error: str | None
    ttft_ms: float | None  # None: no text came
    gaps: tuple[tuple[float, float], ...]  # between two chunks with text: (Unix time of the later one, ms)
    started_at_s: float
    total_ms: float
    num_chunks: int


class Arrivals:
    """When the chunks of one stream came."""

    def __init__(self) -> None:
        self._started_at_s, self._started = time.time(), time.perf_counter()
        self._seen: list[float] = []

    def note(self) -> None:
        self._seen.append(time.perf_counter())

    def report(self, *, session: str, first_answer: bool, error: str | None) -> RequestReport:
        since = self._started_at_s - self._started
        gaps = tuple((late + since, (late - early) * 1000) for early, late in itertools.pairwise(self._seen))
        return RequestReport(
            session=session,
            first_answer=first_answer,
            failed=error is not None,
            error=error,
            ttft_ms=(self._seen[0] - self._started) * 1000 if self._seen else None,
            gaps=gaps,
            started_at_s=self._started_at_s,
            total_ms=(time.perf_counter() - self._started) * 1000,
            num_chunks=len(self._seen),
        )


def keys_in(file: Path | None) -> Mapping[str, str]:
    """Return the API keys in the file, by person; none where there is no file."""
    return {} if file is None else json.loads(file.read_text())


def shown_key(api_keys: Mapping[str, str], person: str) -> dict[str, str]:
    """Return the header that shows the person's own key; empty: they have none."""
    return {"Authorization": f"Bearer {api_keys[person]}"} if person in api_keys else {}


class CutStream(Exception):
    """A stream that ended without a finish reason."""


class Asked(Protocol):
    """What somebody asks."""

    @property
    def persona(self) -> str:
        """Who asks."""

    @property
    def wish(self) -> str:
        """How they want answers to be, by its name."""

    @property
    def speaker(self) -> str:
        """Who talks, by the names that the command `talk` takes."""


class Person(Protocol[P_contra]):
    """How people open a session, and what they say of an answer."""

    def opening(self, task: P_contra, rng: random.Random) -> list[dict[str, str]]:
        """Return the messages with which a session begins."""

    def reaction(self, task: P_contra, answer: str, rng: random.Random) -> str:
        """Return what the person says of the answer."""


class Student(Generic[P]):
    """Holds sessions, one after the other, with one client, as the person that each task names.

    The answer to a person's last remark is the last; nobody says anything of it. Where code reacts, that is the second.
    """

    def __init__(
        self, client: "AsyncOpenAI", model: str, person: Person[P], *, max_tokens: int | None,
        max_last_tokens: int | None, api_keys: Mapping[str, str] = MappingProxyType({}),
        player: RolePlayer | None = None,
    ) -> None:  # fmt: skip
        """`api_keys` has the keys, by name, of people who have one of their own; None: the policy's own limit."""
        self._client, self._model, self._person, self._player = client, model, person, player
        self._max_tokens, self._max_last_tokens, self._api_keys = max_tokens, max_last_tokens, api_keys

    async def chat(self, session: str, task: P, rng: random.Random) -> bool:
        """Hold one session about `task`; False where a request of it failed."""
        messages = self._person.opening(task, rng)
        headers = {"X-Session-Id": session, "X-Turn-Type": "main", **shown_key(self._api_keys, task.persona)}
        for _ in range(MOST_ANSWERS - 1):
            answer = await self._answered(session, messages, headers)
            if answer is None:
                return False
            messages.append({"role": "assistant", "content": answer})
            remark = await self._remark(task, messages, rng)
            messages.append({"role": "user", "content": remark.text})
            if remark.is_last:
                break
        return await self._answered(session, messages, headers | {"X-Session-Done": "1"}) is not None

    async def _remark(self, task: P, messages: Sequence[Mapping[str, str]], rng: random.Random) -> Remark:
        if self._player is not None:
            system = messages[0]["content"] if messages[0]["role"] == "system" else None
            return await self._player.react(person_prompt(task.persona, task.wish, system, messages), rng)
        return Remark(text=self._person.reaction(task, messages[-1]["content"], rng), is_last=True)

    async def _answered(self, session: str, messages: list[dict[str, str]], headers: dict[str, str]) -> str | None:
        """Print the request's report and return the answer's text; None where the request failed."""
        from openai import OpenAIError

        arrivals, answer, error = Arrivals(), None, None
        is_first = all(message["role"] != "assistant" for message in messages)
        max_tokens = self._max_last_tokens if "X-Session-Done" in headers else self._max_tokens
        try:
            answer = await self._stream(messages, headers, arrivals, max_tokens)
        except (OpenAIError, CutStream) as problem:
            error = f"{type(problem).__name__}: {problem}"
        say(asdict(arrivals.report(session=session, first_answer=is_first, error=error)))
        return answer

    async def _stream(
        self, messages: list[dict[str, str]], headers: dict[str, str], arrivals: Arrivals, max_tokens: int | None
    ) -> str:
        from openai import omit

        stream = await self._client.chat.completions.create(
            model=self._model,
            messages=cast("list[ChatCompletionMessageParam]", messages),
            stream=True,
            max_tokens=omit if max_tokens is None else max_tokens,
            extra_headers=headers,
        )
        text, finished = "", False
        async with stream:
            async for chunk in stream:
                for choice in chunk.choices:
                    finished = finished or choice.finish_reason is not None
                    if choice.delta.content:
                        arrivals.note()
                        text += choice.delta.content
        if not finished:
            raise CutStream(f"the stream ended after {len(text)} characters without a finish_reason")
        return text


class Talker(Protocol[T_contra]):
    """Who holds sessions."""

    async def chat(self, session: str, task: T_contra, rng: random.Random) -> bool:
        """Hold one session about `task`; False where a request of it failed."""
        ...


class StudentPool(Generic[T]):
    """Holds sessions, `concurrency` at once, and pauses, goes on and stops as commands say."""

    def __init__(
        self, student: Talker[T], sums: Iterable[T], *, seed: int, num_sessions: int | None, waits: bool = False,
        flipped: Callable[[T], T] | None = None, speaker: Callable[[T], str] | None = None,
    ) -> None:  # fmt: skip
        self._student, self._seed, self._flipped, self._speaker = student, seed, flipped, speaker
        self._speakers = {speaker(task) for task in sums} if speaker else set[str]()
        self._talks: str | None = None  # None: everybody
        self._plan: Iterator[tuple[int, T]] = enumerate(
            itertools.cycle(sums) if isinstance(sums, Sequence) else sums  # a sequence is repeated for ever
        )
        if num_sessions is not None:
            self._plan = itertools.islice(self._plan, num_sessions)
        self._name = f"student-{seed}-{uuid.uuid4().hex[:8]}"
        self._may_start, self._nobody_talks, self._stop = asyncio.Event(), asyncio.Event(), asyncio.Event()
        if not waits:
            self._may_start.set()
        self._nobody_talks.set()
        self._num_open = 0
        self._has_flipped = False
        self._left: int | None = None  # sessions that may still start; None: any number

    def stop(self) -> None:
        """Let open sessions end and start no more."""
        self._stop.set()
        self._may_start.set()

    async def run(self, concurrency: int) -> None:
        """Return when all sessions are held, or `stop` was called and the open ones have ended."""
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(self._seat())

    async def obey(self, command: str) -> None:
        """Do what one line of stdin says."""
        word, _, number = command.partition(" ")
        if command == "pause":
            self._may_start.clear()
            await self._all_said()
        elif command == "go":
            self._left = None
            self._may_start.set()
        elif word == "go" and number.isdecimal() and int(number):
            self._left = int(number)
            self._may_start.set()
            self._nobody_talks.clear()
            await self._all_said()
        elif command == "flip" and self._flipped is not None:
            self._has_flipped = True
        elif word == "talk" and number in self._speakers:
            self._talks = number
        elif command == "stop":
            self.stop()
        elif command:
            print(
                f"unknown command {command!r}: send pause, go, go N, talk NAME, flip or stop; nothing changed",
                file=sys.stderr,
            )

    async def _all_said(self) -> None:
        await self._nobody_talks.wait()
        say({"event": "paused"})

    async def _seat(self) -> None:
        while True:
            while not self._may_start.is_set():  # a loop, since the event may be cleared again before this runs on
                await self._may_start.wait()
            planned = None if self._stop.is_set() else self._next()
            if planned is None:
                return
            number, task = planned
            if self._left is not None:
                self._left -= 1
                if self._left == 0:
                    self._may_start.clear()
            if self._has_flipped and self._flipped is not None:
                task = self._flipped(task)
            if not await self._hold(number, task):
                await asyncio.sleep(_AFTER_FAILURE_S)

    def _next(self) -> tuple[int, T] | None:
        """Return the next session of a person who may talk; sessions of other people before it are skipped."""
        for number, task in self._plan:
            if self._talks is None or self._speaker is None or self._speaker(task) == self._talks:
                return number, task
        return None

    async def _hold(self, number: int, task: T) -> bool:
        self._num_open += 1
        self._nobody_talks.clear()
        rng = random.Random(f"{self._seed} {number}")
        is_whole = await self._student.chat(f"{self._name}-{number:05d}", task, rng)  # an error ends the process
        self._num_open -= 1
        if self._num_open == 0 and (not self._may_start.is_set() or self._left is None):
            self._nobody_talks.set()
        return is_whole


def say(line: dict[str, object]) -> None:
    print(orjson.dumps(line).decode(), flush=True)


async def listen(classroom: StudentPool[T], *, until_closed: bool) -> None:
    """Pass stdin's lines on; with `until_closed` its end means `stop`. A file or /dev/null steers nothing."""
    kind = os.fstat(sys.stdin.fileno()).st_mode
    if not (stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind) or sys.stdin.isatty()):
        return
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        await classroom.obey(line.decode("utf-8", "replace").strip())
    if until_closed:
        classroom.stop()


async def run(classroom: StudentPool[T], concurrency: int, *, until_closed: bool) -> None:
    """Hold the sessions, listening to stdin and to SIGTERM and SIGINT meanwhile."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, classroom.stop)
    async with asyncio.TaskGroup() as group:
        listening = group.create_task(listen(classroom, until_closed=until_closed))
        await classroom.run(concurrency)
        listening.cancel()


def main(
    base_url: Annotated[str, typer.Option(help="of the gateway, ending in /v1")],
    problems: Annotated[Path, typer.Option(help="what they ask, and who does, one JSON object a line", exists=True)],
    everyday: Annotated[bool, typer.Option("--everyday", help="everyday requests, and no sums")] = False,
    api_key: Annotated[str, typer.Option(help="the gateway's key, if it has one")] = "none",
    api_keys: Annotated[Path | None, typer.Option(help="keys of people's own, a JSON object by person")] = None,
    model: Annotated[str, typer.Option(help="the served model's name")] = "policy",
    sessions: Annotated[int, typer.Option(help="0: until stdin says stop or ends", min=0)] = 0,
    concurrency: Annotated[int, typer.Option(help="sessions at once", min=1)] = 4,
    seed: Annotated[int, typer.Option(help="of sums and wordings")] = 0,
    played_by: Annotated[str | None, typer.Option(help="MODEL@URL: a language model that reacts as people do")] = None,
    hint_share: Annotated[float, typer.Option(help="share of complaints that say what is wanted", min=0, max=1)] = 1.0,
    max_tokens: Annotated[int, typer.Option(help="of an answer; to everyday requests the policy's own", min=1)] = 160,
    wait: Annotated[bool, typer.Option("--wait", help="start no session before stdin says go")] = False,
    timeout_s: Annotated[float, typer.Option(help="of one request", min=0.1)] = 120.0,
) -> None:
    """Chat with the policy as people would; stop cleanly on SIGTERM."""
    asked: list[Any]
    person: Person[Any]
    try:
        if everyday:
            asked, person = requests.tasks(problems.read_text()), requests.EverydayPerson(hint_share=hint_share)
        else:
            asked, person = reactions.tasks(problems.read_text()), reactions.SumPerson(hint_share=hint_share)
    except ValueError as error:
        print(f"{problems}: {error}. Nothing was asked.", file=sys.stderr)
        raise typer.Exit(2) from error
    random.Random(seed).shuffle(asked)

    async def talk() -> None:
        from openai import AsyncOpenAI

        async with (
            AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=timeout_s) as client,
            nullcontext() if played_by is None else RolePlayer.open(played_by) as player,
        ):
            student: Student[Any] = Student(
                client, model, person, max_tokens=None if everyday else max_tokens, player=player,
                max_last_tokens=LAST_TOKENS if everyday else max_tokens, api_keys=keys_in(api_keys),
            )  # fmt: skip
            classroom = StudentPool(
                student, asked, seed=seed, num_sessions=sessions or None, waits=wait,
                flipped=None if everyday else reactions.flip, speaker=lambda task: str(task.speaker),
            )  # fmt: skip
            await run(classroom, concurrency, until_closed=sessions == 0)

    failed: BaseException | None = None
    try:
        asyncio.run(talk())
    except* RoleUnplayed as caught:
        failed = first_of(caught)
    if failed is not None:
        print(f"{played_by}: {failed}. Nobody talks any more.", file=sys.stderr)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
