"""`clawstream learn --real` from end to end: the database is real, the engines' answers are scripted."""

import io
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from rich.console import Console
from transformers import AutoTokenizer
from typer.testing import CliRunner, Result

from clawstream.cli import app
from clawstream.cli.learning.real import UNRELATED, RealComparison, _choose
from clawstream.config import Settings
from clawstream.errors import OperatorError
from clawstream.inference.dialect import Call
from clawstream.inference.sglang import SglangEngine
from clawstream.projections import database
from clawstream.rendering.renderer import PromptRenderer
from clawstream.replay import past_requests
from clawstream.replay.comparing import Choice, Pair
from tests.fakes.scripted_engine import ScriptedAnswer, ScriptedBackend, serving
from tests.parts.engine.tiny_model import make_config
from tests.parts.projections.reading import write_all
from tests.parts.replay.past import conversation, made, published
from tests.unit.projections.logs import records
from tests.unit.replay.unrelated import RIGHT

NEW = ("ann", "bob", "cid", "dan", "eve", "fay")  # what nobody was trained on; of the last both say the same
FROM_1_TO_2 = ("--before", "1", "--after", "2", "--seeds", "2")
QUESTIONS = [task["question"] for task in json.loads(UNRELATED.read_text())]
SOLVED = {1: 24, 2: 20}  # of the unrelated tasks, by version

pytestmark = pytest.mark.timeout(120)


@dataclass(slots=True)
class Rig:
    """An installation with versions 0 to 3, its settings file, and what each version was asked."""

    config: Path
    data: Path
    calls: dict[int, list[Call]] = field(default_factory=dict)
    decode: Callable[[Sequence[int]], str] = str

    def run(self, *options: str, said: str) -> Result:
        """What comes of the command whose standard input is `said`."""
        return CliRunner().invoke(app, ["-c", str(self.config), "learn", "--real", *options], input=said)

    def asked(self, version: int, *, temperature: float) -> list[tuple[str, int | None]]:
        """The prompts that a version was asked at a temperature, and their seeds."""
        requests = [call.request for call in self.calls[version]]
        return sorted(
            (self.decode(one.input_ids), one.sampling.sampling_seed)
            for one in requests
            if one.sampling.temperature == temperature
        )

    def kept(self, name: str) -> str:
        """A file of the one comparison."""
        [file] = (self.data / "comparisons").glob(f"*/{name}")
        return file.read_text()


@pytest.fixture
def rig(tmp_path: Path, fresh_database_url: str, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """Version 1 learned from the turn `one`, version 2 from the turn `two`, and version 3 from all others."""
    base = tmp_path / "base"
    make_config(base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    database.upgrade(fresh_database_url)
    engine = database.connect(fresh_database_url)
    turns = [conversation(name, prompt_ids=encoded(tokenizer, f"I am {name}")) for name in ("one", "two", *NEW)]
    versions = [published(0, None, base), *made(1, 0, "one", path=base), *made(2, 1, "two", path=base)]
    write_all(engine, records([*chain(*turns), *versions, *made(3, 2, *NEW, path=base)]))
    engine.dispose()
    config = tmp_path / "clawstream.toml"
    config.write_text(
        f'environment = false\ndata_dir = "{tmp_path}/data"\ncache_dir = "{tmp_path}/cache"\n'
        f'[postgres]\nurl = "{fresh_database_url}"\n[policy]\nrenderer = "qwen3"\nenable_thinking = false\n'
        "[gateway]\ndefault_temperature = 0.5\n"
    )
    built = Rig(config, tmp_path / "data", decode=tokenizer.decode)
    monkeypatch.setattr(past_requests, "asked", scripted(built, tokenizer))
    return built


def encoded(tokenizer: Any, text: str) -> tuple[int, ...]:
    """The tokens of a text."""
    return tuple(tokenizer.encode(text))


def scripted(rig: Rig, tokenizer: Any) -> Callable[..., Any]:
    """In place of `again.asked`: engines that say who they are, and solve so many of the unrelated tasks."""

    def said(version: int, prompt: str) -> str:
        for number, question in enumerate(QUESTIONS):
            if question in prompt:
                return RIGHT[number] if number < SOLVED[version] else "I don't know."
        return "alike" if prompt.endswith(NEW[-1]) else f"{prompt[-3:]} hears {version}"

    def answer(version: int, prompt_ids: Sequence[int]) -> ScriptedAnswer:
        return ScriptedAnswer(token_ids=encoded(tokenizer, said(version, tokenizer.decode(prompt_ids))))

    @asynccontextmanager
    async def asked(
        settings: Settings, base: Path, wanted: Sequence[past_requests.LocalVersion], _: Path
    ) -> AsyncIterator[list[past_requests.VersionEngine]]:
        renderer = PromptRenderer.of(settings.policy, base)
        async with AsyncExitStack() as stack:
            http = await stack.enter_async_context(aiohttp.ClientSession())
            answering = []
            for version in wanted:
                backend = ScriptedBackend(script=partial(answer, version.number))
                rig.calls[version.number] = backend.calls
                engine = SglangEngine(http, await stack.enter_async_context(serving(backend)))
                answering.append(
                    past_requests.VersionEngine(
                        version=version, engine=engine, adapter=None, renderer=renderer, gateway=settings.gateway
                    )
                )
            yield answering

    return asked


def first_shown(words: str, name: str) -> int:
    """The version whose answer to `name` stands on the left."""
    at = {version: words.index(f"{name} hears {version}") for version in (1, 2)}
    return min(at, key=lambda version: at[version])


def test_requests_that_are_new_to_both_versions_are_asked_of_both_alike(rig: Rig) -> None:
    result = rig.run(*FROM_1_TO_2, said="q\n")

    assert result.exit_code == 0, result.exception
    assert [prompt for prompt, _ in rig.asked(1, temperature=0.5)] == [f"I am {name}" for name in NEW]
    assert rig.asked(1, temperature=0.5) == rig.asked(2, temperature=0.5), "with the same seeds"


def test_nobody_can_tell_whose_answer_is_whose_and_a_choice_is_for_who_gave_it(rig: Rig) -> None:
    result = rig.run(*FROM_1_TO_2, said="a\n" * len(NEW))

    assert result.exit_code == 0, result.exception
    [announced, shown] = result.stderr.split("\n", 1)
    assert announced.startswith("asking versions 1 and 2")
    assert "version" not in shown
    left = {name: first_shown(shown, name) for name in NEW[:-1]}
    assert {*left.values()} == {1, 2}, "either may stand on the left"
    told = json.loads(rig.kept("comparison.json"))
    choices = {pair["turn_id"]: pair["choice"] for pair in told["pairs"]}
    assert choices == {name: {1: "before", 2: "after"}[version] for name, version in left.items()} | {NEW[-1]: "equal"}
    lines = [json.loads(line) for line in rig.kept("choices.jsonl").splitlines()]
    assert {line["pair"]["turn_id"]: line["choice"] for line in lines} == choices
    assert {(line["before"], line["after"]) for line in lines} == {(1, 2)}
    counts = [list(choices.values()).count(choice) for choice in ("before", "after", "equal")]
    assert [told["preferred"][choice] for choice in ("before", "after", "equal")] == counts
    assert ["you", "prefer", *map(str, counts)] in rows(result)


def test_unrelated_tasks_are_asked_of_both_and_what_each_solves_is_said(rig: Rig, tmp_path: Path) -> None:
    result = rig.run(*FROM_1_TO_2, "--json", str(tmp_path / "told.json"), said="q\n")

    told = json.loads((tmp_path / "told.json").read_text())
    assert told["unrelated"] == {"tasks": 24, "before": 24, "after": 20}
    assert ["unrelated", "tasks", "solved,", "of", "24", "24", "20"] in rows(result)
    for version in (1, 2):
        assert len(rig.asked(version, temperature=0.0)) == 24


def test_what_the_older_version_had_learned_is_no_lesson_of_the_newer_one(rig: Rig) -> None:
    result = rig.run(*FROM_1_TO_2, said="q\n")

    told = json.loads(rig.kept("comparison.json"))
    assert [(one["policy_version"], one["next_state"]) for one in told["learned_from"]] == [(2, "user: no two")]
    assert "user: no two" in result.stdout
    assert "user: no one" not in result.stdout


def test_where_the_newest_version_was_trained_on_all_there_is_nothing_is_asked(rig: Rig) -> None:
    result = rig.run(said="a\n")

    assert isinstance(result.exception, OperatorError)
    assert "no answered request of policy in the database is new to both versions 0 and 3" in str(result.exception)
    assert not rig.calls


def rows(result: Result) -> list[list[str]]:
    """The words of each line of the tables."""
    return [line.replace("│", " ").split() for line in result.stdout.splitlines()]


PAIRS = [
    Pair(turn_id=f"t{n}", request="?", before=f"old {n}", after=f"new {n}", after_first=n % 2 == 0) for n in range(3)
]


@dataclass(slots=True)
class Person:
    """Standard input, which sees how many choices are on disk whenever it is asked."""

    said: str
    file: Path
    seen: list[int] = field(default_factory=list)

    def isatty(self) -> bool:
        return False

    def readline(self) -> str:
        said = self.said.splitlines(keepends=True)
        self.seen.append(len(self.file.read_text().splitlines()))
        return said[len(self.seen) - 1] if len(self.seen) <= len(said) else ""


@pytest.mark.parametrize(
    ("said", "chosen"),
    [
        ("a\nb\n=\n", [Choice.AFTER, Choice.AFTER, Choice.EQUAL]),
        ("b\na\nb\n", [Choice.BEFORE, Choice.BEFORE, Choice.BEFORE]),
        ("a\nq\nb\n", [Choice.AFTER]),
        ("=\n", [Choice.EQUAL]),
    ],
)
def test_each_choice_is_on_disk_before_the_next_is_asked_for_and_those_until_a_stop_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, chosen: list[Choice]
) -> None:
    file = tmp_path / "choices.jsonl"
    person = Person(said, file)
    monkeypatch.setattr(sys, "stdin", person)
    found = RealComparison(before=3, after=5, pairs=PAIRS, solved=(0, 0), num_tasks=0, lessons=[])

    choices = _choose(found, Console(file=io.StringIO()), file)

    assert choices == {f"t{n}": choice for n, choice in enumerate(chosen)}
    assert person.seen == [*range(len(person.seen))]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["before"], line["after"], line["pair"]["turn_id"], line["choice"]) for line in lines] == [
        (3, 5, f"t{n}", choice) for n, choice in enumerate(chosen)
    ]


def test_what_is_no_choice_is_refused_and_choices_until_then_stay_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\nthe left one\n"))
    found = RealComparison(before=0, after=1, pairs=PAIRS, solved=(0, 0), num_tasks=0, lessons=[])

    with pytest.raises(OperatorError, match="found 'the left one' on standard input, expected a, b, = or q"):
        _choose(found, Console(file=io.StringIO()), tmp_path / "choices.jsonl")

    assert [json.loads(line)["choice"] for line in (tmp_path / "choices.jsonl").read_text().splitlines()] == ["after"]
