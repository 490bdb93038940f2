"""How far a hint moves a model's answers to everyday requests: which wishes can be taught by hints at all.

A hint stands in the prompt where the teacher of a sample reads it. The answers without a hint are asked for once, and
scored for each wish. The answers are in the report, so a run that was cut off goes on, and a run on a whole report only
scores anew.
"""

import json
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from clawstream.config import PolicySettings
from clawstream.inference.dialect import Call, TokenDelta
from clawstream.inference.engine import GenerateRequest, SamplingParams
from clawstream.local.engine.core import Core
from clawstream.local.engine.model import RowModel
from clawstream.local.engine.rows import Job
from clawstream.rendering.renderer import PromptRenderer
from clawstream.samples.hinted import MARKER, with_hint
from clawstream.simulation.everyday import AnswerWish, Split, requests_of, wishes
from clawstream.simulation.everyday.scorer import holds, is_answer

TEMPERATURE = 0.6  # at 1 a model of 135 million parameters babbles
WRITTEN_EVERY = 8  # answers
Key = tuple[str | None, str]  # a wish's id, None without a hint; and the request


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One request to the model."""

    wish: str | None  # None: without a hint
    request: str
    hint: str | None

    @property
    def key(self) -> Key:
        return self.wish, self.request


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked(Question):
    """One request to the model, and its answer."""

    answer: str
    num_tokens: int
    finished: bool  # it ended by a stop token, and was not cut


def survey(
    model: Annotated[Path, typer.Option(help="The model's folder.")],
    json_file: Annotated[Path, typer.Option("--json", help="The report, which is also gone on with.")],
    wanted: Annotated[str, typer.Option("--wishes", help="Ids with commas, or all.")] = "all",
    num_requests: Annotated[int, typer.Option("--requests", help="Of the development split, for each wish.")] = 8,
    max_tokens: Annotated[int, typer.Option(help="Of an answer.")] = 160,
    at_once: Annotated[int, typer.Option(help="Answers computed together.")] = 16,
    seed: Annotated[int, typer.Option(help="Of the answers.")] = 0,
) -> None:
    """Ask with and without each wish's hints, and report how many answers are as wished."""
    torch.set_num_threads(1)
    settings = {"model": model.name, "temperature": TEMPERATURE, "max_tokens": max_tokens, "seed": seed}
    asked = {one.key: one for one in _known(json_file, settings)}
    chosen = [wish for wish in wishes() if wanted == "all" or wish.id in wanted.split(",")]
    requests = requests_of(Split.DEVELOPMENT)[:num_requests]
    missing = [question for question in _questions(chosen, requests) if question.key not in asked]
    if missing:
        speaker = _Speaker(model, max_tokens=max_tokens, at_once=at_once)
        for number, one in enumerate(speaker.answers(missing, seed), 1):
            asked[one.key] = one
            if number % WRITTEN_EVERY == 0:
                _write(json_file, settings, asked.values())
                typer.echo(f"{number} of {len(missing)} have answered", err=True)
    _write(json_file, settings, asked.values())
    _show(rows(list(asked.values())))


def _questions(chosen: Sequence[AnswerWish], requests: Sequence[str]) -> Iterator[Question]:
    """Yield each request without a hint and then for each wish, whose hints take turns: all wishes go on together."""
    for number, request in enumerate(requests):
        yield Question(wish=None, request=request, hint=None)
        for wish in chosen:
            yield Question(wish=wish.id, request=request, hint=wish.hints[number % len(wish.hints)])


class _Heard:
    """What the engine said to one question."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []

    def push(self, delta: TokenDelta) -> None:
        self.token_ids += delta.token_ids


class _Speaker:
    """The embedded engine with a model, and the template of its prompts."""

    def __init__(self, folder: Path, *, max_tokens: int, at_once: int) -> None:
        self._renderer = PromptRenderer.of(PolicySettings(), folder)
        self._core = Core(RowModel(str(folder)), num_rows=at_once, version="0", decode=None)
        self._max_tokens = max_tokens

    def answers(self, questions: Sequence[Question], seed: int) -> Iterator[Asked]:
        """Yield the answers as they end; an answer follows from its question and the seed, whatever else is asked."""
        asked = {id(job): (question, heard) for question in questions for job, heard in [self._submit(question, seed)]}
        while self._core.busy:
            for job, delta in self._core.step():
                question, heard = asked[id(job)]
                heard.push(delta)
                if job.finished:
                    yield self._read(question, heard.token_ids)

    def _submit(self, question: Question, seed: int) -> tuple[Job, _Heard]:
        prompt, heard = self._prompt(question), _Heard()
        sampling = SamplingParams(max_new_tokens=self._max_tokens, temperature=TEMPERATURE)
        name = f"{seed} {question.wish} {question.request}"
        job = Job(
            call=Call(rid=name, request=GenerateRequest(input_ids=prompt, sampling=sampling), return_logprob=False),
            sink=heard,
            seed=zlib.crc32(name.encode()),
            stop_ids=frozenset(self._renderer.stop_token_ids),
            tokens=list(prompt),
            num_prompt=len(prompt),
            prompt=np.array(prompt, dtype=np.int32),
        )
        self._core.submit(job)
        return job, heard

    def _prompt(self, question: Question) -> list[int]:
        message = {"role": "user", "content": question.request}
        said = (message,) if question.hint is None else with_hint((message,), question.hint)
        return list(self._renderer.prompt_ids(said, {}))

    def _read(self, question: Question, token_ids: Sequence[int]) -> Asked:
        finished = token_ids[-1] in self._renderer.stop_token_ids
        text = self._renderer.decode(token_ids[:-1] if finished else token_ids).strip()
        return Asked(**asdict(question), answer=text, num_tokens=len(token_ids), finished=finished)


def rows(asked: Sequence[Asked]) -> list[dict[str, Any]]:
    """Return each wish's figures, the one that a hint moves most first; without a hint the same requests count."""
    plain = {one.request: one for one in asked if one.wish is None}
    found = []
    for wish in dict.fromkeys(one.wish for one in asked if one.wish is not None and one.request in plain):
        hinted = [one for one in asked if one.wish == wish and one.request in plain]
        without, with_it = _shares(wish, [plain[one.request] for one in hinted]), _shares(wish, hinted)
        moved = {"holds_moved": with_it["holds"] - without["holds"], "won_moved": with_it["won"] - without["won"]}
        found.append({"wish": wish, "requests": len(hinted), "without": without, "with_hint": with_it} | moved)
    return sorted(found, key=lambda row: -row["holds_moved"])


def _shares(wish: str, asked: Sequence[Asked]) -> dict[str, float]:
    as_wished = [holds(wish, one.answer) for one in asked]
    answers = [
        is_answer(one.answer, one.request, wish=wish, finished=one.finished, hint=f"{MARKER}\n{one.hint}")
        for one in asked
    ]
    return {
        "holds": fmean(as_wished),
        "answers": fmean(answers),
        "won": fmean(a and b for a, b in zip(as_wished, answers, strict=True)),
        "finished": fmean(one.finished for one in asked),
        "tokens": fmean(one.num_tokens for one in asked),
    }


def _known(json_file: Path, settings: Mapping[str, Any]) -> list[Asked]:
    """Return the answers of the report that is gone on with. Raises BadParameter where they were asked otherwise."""
    if not json_file.exists():
        return []
    report = json.loads(json_file.read_text())
    if differs := {name: report[name] for name, value in settings.items() if report[name] != value}:
        raise typer.BadParameter(f"{json_file} has answers that were asked with {differs}. Name another file")
    return [Asked(**one) for one in report["asked"]]


def _write(json_file: Path, settings: Mapping[str, Any], asked: Collection[Asked]) -> None:
    figures = {**settings, "rows": rows(list(asked)), "asked": [asdict(one) for one in asked]}
    part = json_file.with_suffix(".part")
    part.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")
    part.replace(json_file)


def _show(found: Sequence[Mapping[str, Any]]) -> None:
    names = ("holds", "answers", "won", "tokens")
    table = Table(
        "wish", "requests", "moved", "won moved", *(f"{name}{end}" for name in names for end in ("", ", hint"))
    )
    for row in found:
        pairs = [(row["without"][name], row["with_hint"][name]) for name in names]
        shown = [f"{value:.0f}" if value > 1 else f"{value:.2f}" for pair in pairs for value in pair]
        table.add_row(
            row["wish"], str(row["requests"]), *(f"{row[name]:+.2f}" for name in ("holds_moved", "won_moved")), *shown
        )
    Console(width=140).print(table)
