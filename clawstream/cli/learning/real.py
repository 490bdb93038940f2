"""`clawstream learn --real`: two versions answer a person's past requests; the person compares the answers blind."""

import asyncio
import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.progress import Progress
from rich.prompt import Prompt
from rich.table import Table
from rich.text import Text

from clawstream.cli.process import database, hide_torch
from clawstream.config import Settings
from clawstream.errors import OperatorError

if TYPE_CHECKING:
    from clawstream.replay.comparing import Choice, Pair, PreferenceCounts
    from clawstream.replay.past_requests import LearnedTurn

SHOWN_LESSONS = 12
SHOWN_CHARACTERS = 2000
UNRELATED = Path(__file__).parents[2] / "replay" / "unrelated.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RealComparison:
    """What both versions answered, and the turns that only the newer one learned from."""

    before: int
    after: int
    pairs: Sequence["Pair"]
    solved: tuple[int, int]  # of the unrelated tasks, before and after
    num_tasks: int
    lessons: Sequence["LearnedTurn"]


def compare(
    settings: Settings, *, before: int | None, after: int | None, count: int, seed: int, json_file: Path | None
) -> None:
    """Ask both versions, let the person choose, print the result; each choice is written to disk at once.

    Raises OperatorError where there is nothing to compare or nobody to ask.
    """
    if settings.engine.urls:
        raise OperatorError(
            f"--real asks each version in an engine of its own on this machine's CPU, and engine.urls names "
            f"{', '.join(settings.engine.urls)}, where the policy is served. Nothing was asked. "
            "Where this machine can hold the policy twice, compare with settings that have no engine.urls"
        )
    hide_torch()
    console = Console(stderr=True)
    folder = settings.data_dir / "comparisons" / time.strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True, mode=0o700)
    with database(settings) as url:
        found = asyncio.run(_find(settings, url, folder, console, before=before, after=after, count=count, seed=seed))
    choices = _choose(found, console, folder / "choices.jsonl")
    from clawstream.replay.comparing import tally

    counts = tally(choices.values())
    written = json.dumps(_as_json(found, counts, choices), indent=1)
    (folder / "comparison.json").write_text(written)
    if json_file is not None:
        json_file.write_text(written)
    Console().print(_tables(found, counts), *_lessons(found.lessons), sep="\n")
    console.print(f"\nAnswers and choices: {folder}", soft_wrap=True)


async def _find(
    settings: Settings, url: str, folder: Path, console: Console, *, before: int | None, after: int | None, count: int,
    seed: int,
) -> RealComparison:  # fmt: skip
    from clawstream.replay import past_requests
    from clawstream.replay.comparing import UnrelatedTask

    policy_id = settings.policy.id
    there = past_requests.versions(url, settings)
    if 0 not in there:
        where = "" if settings.weights.url is None else ". weights.url says that its trainer is elsewhere: ask there"
        raise OperatorError(
            f"the base of {policy_id} is not on this machine: nothing to compare with{where}. Nothing was asked"
        )
    old = past_requests.chosen(there, before, default=0)
    new = past_requests.chosen(there, after, default=max(there))
    if old.number >= new.number:
        raise OperatorError(
            f"versions {old.number} and {new.number} of {policy_id}: the second has to be newer than the first, and on "
            f"this machine's disk are {', '.join(map(str, sorted(there)))}. Nothing was asked"
        )
    requests = past_requests.past(url, policy_id, before=old.number, after=new.number, count=count, seed=seed)
    if not requests:
        raise OperatorError(
            f"no answered request of {policy_id} in the database is new to both versions {old.number} and "
            f"{new.number}; what they were trained on is not asked. Nothing was asked; talk to the policy more"
        )
    tasks = [UnrelatedTask(**task) for task in json.loads(UNRELATED.read_text())]
    console.print(f"asking versions {old.number} and {new.number} of {policy_id} for {len(requests)} past requests")
    async with past_requests.asked(settings, there[0].path, [old, new], folder) as (asked_before, asked_after):
        with Progress(console=console) as bar:
            task = bar.add_task("answers", total=len(requests))
            pairs = await past_requests.pairs(
                asked_before, asked_after, requests, temperature=settings.gateway.default_temperature, seed=seed,
                tell=lambda: bar.advance(task),
            )  # fmt: skip
        solved = [sum([await one.solves(task) for task in tasks]) for one in (asked_before, asked_after)]
    lessons = past_requests.learned(url, policy_id, before=old.number, after=new.number)
    return RealComparison(
        before=old.number, after=new.number, pairs=pairs, solved=(solved[0], solved[1]), num_tasks=len(tasks),
        lessons=lessons,
    )  # fmt: skip


def _choose(found: RealComparison, console: Console, file: Path) -> dict[str, "Choice"]:
    from clawstream.replay.comparing import Choice

    choices: dict[str, Choice] = {}
    with file.open("w") as out, contextlib.suppress(KeyboardInterrupt, EOFError):  # the choices until then count
        for number, pair in enumerate(found.pairs, 1):
            if pair.is_same:
                choices[pair.turn_id] = Choice.EQUAL
            else:
                letter = _asked(pair, number, len(found.pairs), console)
                if letter == "q":
                    break
                choices[pair.turn_id] = pair.choice(letter)
            line = {"before": found.before, "after": found.after, "choice": choices[pair.turn_id], "pair": asdict(pair)}
            out.write(json.dumps(line) + "\n")
            out.flush()
    return choices


def _asked(pair: "Pair", number: int, count: int, console: Console) -> str:
    console.print(Panel(Text(_short(pair.request)), title=f"{number} of {count}: you asked", title_align="left"))
    panels = [
        Panel(Text(_short(answer)), title=title, title_align="left", width=max(20, console.width // 2 - 2))
        for title, answer in zip(("a", "b"), pair.shown, strict=True)
    ]
    console.print(Columns(panels))
    if not sys.stdin.isatty():
        said = sys.stdin.readline().strip() or "q"
        if said not in ("a", "b", "=", "q"):
            raise OperatorError(f"found {said!r} on standard input, expected a, b, = or q on each line")
        return said
    return Prompt.ask("which is better (= for neither, q to stop)", choices=["a", "b", "=", "q"], console=console)


def _short(text: str) -> str:
    """Return a text without terminal codes; of a long text, only the beginning and the end."""
    shown = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
    half = SHOWN_CHARACTERS // 2
    return shown if len(shown) <= SHOWN_CHARACTERS else f"{shown[:half]}\n...\n{shown[-half:]}"


def _tables(found: RealComparison, counts: "PreferenceCounts") -> Table:
    from clawstream.simulation.marks import wilson

    table = Table(title=f"Version {found.after} beside version {found.before}", title_justify="left")
    for name in ("", f"version {found.before}", f"version {found.after}", "neither"):
        table.add_column(name, justify="right")
    table.add_row("you prefer", str(counts.before), str(counts.after), str(counts.equal))
    table.add_row(f"unrelated tasks solved, of {found.num_tasks}", *map(str, found.solved), "")
    if counts.decided:
        low, high = wilson(counts.after, counts.decided)
        table.caption = (
            f"{counts.after / counts.decided:.0%} of your choices are for version {found.after} "
            f"(95 % interval {low:.0%} - {high:.0%}; by chance alone, a choice this clear has p = {counts.chance:.2g})"
        )
    return table


def _lessons(lessons: Sequence["LearnedTurn"]) -> list[Table]:
    """Return a table of the lessons: corrections before praise, and the most frequent first."""
    said = Counter((lesson.next_state, lesson.hint) for lesson in lessons)
    first = {(lesson.next_state, lesson.hint): lesson for lesson in reversed(lessons)}
    ordered = sorted(said, key=lambda key: (key[1] is None, (first[key].reward or 0) > 0, -said[key]))
    table = Table(title="What it learned from", title_justify="left")
    for name in ("what was said", "reward", "hint", "times", "first in version"):
        table.add_column(name, overflow="fold")
    for key in ordered[:SHOWN_LESSONS]:
        lesson = first[key]
        reward = "" if lesson.reward is None else f"{lesson.reward:+g}"
        what = (Text(_short(lesson.next_state)[:200]), reward, Text(_short(lesson.hint or "")))
        table.add_row(*what, str(said[key]), str(lesson.policy_version))
    return [table] if lessons else []


def _as_json(found: RealComparison, counts: "PreferenceCounts", choices: dict[str, "Choice"]) -> dict[str, object]:
    return {
        "before": found.before,
        "after": found.after,
        "preferred": {"before": counts.before, "after": counts.after, "equal": counts.equal, "p": counts.chance},
        "unrelated": {"tasks": found.num_tasks, "before": found.solved[0], "after": found.solved[1]},
        "pairs": [asdict(pair) | {"choice": choices.get(pair.turn_id)} for pair in found.pairs],
        "learned_from": [asdict(lesson) for lesson in found.lessons],
    }
