"""The README's picture: a question, a correction, the versions that `clawstream up` serves, the question again.

`clawstream up` runs as a person starts it, with the simulated judge. One person asks and reacts to the first answer.
Simulated students ask and react beside them, until so many versions are served. What the terminal shows goes to an SVG
file that names no font of the network.
"""

import contextlib
import json
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, Queue
from typing import Annotated

import httpx
import platformdirs
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from clawstream.local.servers.server_process import die_with_parent
from clawstream.simulation.judge import MODEL
from clawstream.simulation.reactions import PersonTask, impression, react
from clawstream.simulation.runs.people import people_of
from clawstream.simulation.runs.run import TEMPERATURE

WIDTH = 102
READY_WITHIN_S = 300.0
ASKED_AGAIN_S = 60.0  # no step takes longer on an idle machine
ENDED_WITHIN_S = 60.0
SHOWN_EVERY = 4  # versions: of the others the picture shows none
BATCH_SAMPLES = 16  # training.batch_samples: a session of a student is one
SERVED = re.compile(r"^version \d+ is served")
SETTINGS = """environment = false
data_dir = {data_dir}
cache_dir = {cache_dir}
[engine]
port = 0
[gateway]
port = 0
default_temperature = {temperature}
[judge]
url = {judge_url}
model = {judge_model}
votes = 3
[monitor]
port = 0
"""


def screen(
    svg: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("docs/first.svg"),
    versions: Annotated[int, typer.Option(help="Served before the question is asked again.", min=1)] = 16,
    seed: Annotated[int, typer.Option(help="Of the question, and of students.", min=0)] = 0,
) -> None:
    """Record what a terminal shows while a policy learns, as an SVG file."""
    console = Console(record=True, width=WIDTH, force_terminal=True, color_system="truecolor")
    with tempfile.TemporaryDirectory(prefix="clawstream-screen-") as folder:
        _show(console, Path(folder), versions, seed)
    title = "clawstream up, with simulated people and a tiny policy"
    svg.write_text(_without_fonts(console.export_svg(title=title, clear=False)))


def _show(console: Console, folder: Path, versions: int, seed: int) -> None:
    people, rng = people_of("student", folder / "people"), random.Random(seed)
    row = rng.choice([json.loads(line) for line in people.scored.read_text().splitlines()])
    task = PersonTask(persona=row["persona"], question=row["question"], answer=row["answer"])
    with _started("-m", "clawstream.simulation.judge") as judge:
        settings = folder / "clawstream.toml"
        settings.write_text(
            SETTINGS.format(
                data_dir=json.dumps(str(folder / "data")),
                cache_dir=json.dumps(platformdirs.user_cache_dir("clawstream")),
                judge_url=json.dumps(json.loads(judge.line(re.compile("{")))["url"]),
                judge_model=json.dumps(MODEL),
                temperature=TEMPERATURE,
            )
        )
        with _started("-m", "clawstream", "-c", str(settings), "up", "--model", "tiny") as up:
            url = up.line(re.compile("clawstream is up: ")).split("up: ")[1].split("/v1")[0]
            _say(console, "you", row["prompt"])
            asked = [_message("user", row["prompt"])]
            answer = _answer(console, url, asked, session="picture")
            reaction = react(task, impression(task, answer), rng, hint_share=1.0)
            _say(console, "you", reaction)
            _answered(url, [*asked, _message("assistant", answer), _message("user", reaction)], "picture", done=True)
            console.print()
            argv = ("-m", "clawstream.simulation.student", "--base-url", f"{url}/v1", "--problems", str(people.asked))
            with _started(*argv, "--seed", str(seed), "--wait") as students:
                version = 0  # the number of a step that was rejected is no version
                while version < versions:
                    version, line = _served(up, students)
                    if version == 1 or version >= versions or version % SHOWN_EVERY == 0:
                        console.print(Text(line, style="green"), soft_wrap=True)
                    print(f"version {version}: {_answered(url, asked)[0]!r}", file=sys.stderr)
            console.print()
            _say(console, "you", row["prompt"])
            _answer(console, url, asked)


def _served(up: "Running", students: "Running") -> tuple[int, str]:
    """Return the next version, and what `up` says of it; students ask on where what they said was too little."""
    num_sessions = BATCH_SAMPLES
    while True:
        students.tell(f"go {num_sessions}")
        with contextlib.suppress(Empty):
            line = up.line(SERVED, within_s=ASKED_AGAIN_S)
            return int(line.split()[1]), line
        num_sessions = BATCH_SAMPLES // 4


def _answer(console: Console, url: str, messages: list[dict[str, str]], session: str | None = None) -> str:
    answer, version = _answered(url, messages, session)
    _say(console, f"policy, version {version}", answer)
    return answer


def _answered(
    url: str, messages: list[dict[str, str]], session: str | None = None, *, done: bool = False
) -> tuple[str, str]:
    """Return the likeliest answer and the version that gave it; without a session nobody learns from it."""
    headers = {"X-Session-Id": session or uuid.uuid4().hex, "X-Turn-Type": "side" if session is None else "main"}
    reply = httpx.post(
        f"{url}/v1/chat/completions",
        json={"model": "policy", "messages": messages, "max_tokens": 160, "temperature": 0},
        headers=headers | ({"X-Session-Done": "1"} if done else {}),
        timeout=120,
    )
    reply.raise_for_status()
    return str(reply.json()["choices"][0]["message"]["content"]), reply.headers["x-policy-version"]


def _say(console: Console, who: str, words: str) -> None:
    said = Table.grid(padding=(0, 2))
    said.add_column(width=18, no_wrap=True)
    said.add_column()
    said.add_row(Text(who, style="bold cyan" if who == "you" else "bold magenta"), Text(words))
    console.print(said)


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


class Running:
    """A process of ours: what it says, stdout and stderr as one, and its stdin."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self._lines: Queue[str] = Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def line(self, wanted: re.Pattern[str], *, within_s: float = READY_WITHIN_S) -> str:
        """Return the next line that has what is wanted; what else is said goes to stderr. Raises Empty."""
        until_s = time.monotonic() + within_s
        while wanted.search(line := self._lines.get(timeout=max(0.0, until_s - time.monotonic()))) is None:
            print(line, file=sys.stderr)
        return line

    def tell(self, command: str) -> None:
        """Write a line to its stdin."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.rstrip())


@contextlib.contextmanager
def _started(*argv: str) -> Iterator[Running]:
    """Start this Python with such arguments; the process is gone when the block ends."""
    process = subprocess.Popen(
        [sys.executable, *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        preexec_fn=die_with_parent,
    )  # fmt: skip
    try:
        yield Running(process)
    finally:
        process.terminate()
        process.wait(ENDED_WITHIN_S)


def _without_fonts(svg: str) -> str:
    """Return the picture with fonts that a reader's machine has; rich names those of a server."""
    own = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    return own.replace("Fira Code, monospace", "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace")
