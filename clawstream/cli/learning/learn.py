"""`clawstream learn`: does the policy learn what people want, and because of what they said?"""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

from clawstream.cli.learning.progress import shown, waiting
from clawstream.cli.process import Context, hide_torch, log_to_stderr
from clawstream.config import Settings
from clawstream.config.training import CORRECTION_EPOCHS
from clawstream.errors import ConfigError
from clawstream.local.servers.jars import refuse_what_is_missing
from clawstream.locks import locked
from clawstream.simulation.learn.grid import (
    LearnHintChoice,
    LearnMethod,
    LearnTeacher,
    changed_settings,
    refuse_blocks,
    refuse_drawn_votes,
    refuse_flip,
    refuse_hint_choices,
    refuse_not_own,
    refuse_roles,
    refuse_unfit,
)

if TYPE_CHECKING:
    from clawstream.simulation.learn.cell import Grid
    from clawstream.simulation.learn.grid import Cell
    from clawstream.simulation.learn.outcome import Reference, ReportRow

T = TypeVar("T")

FULL_RATE = 3e-4
EPOCHS = 3
_ROLE = "A language model that {}, at an address with the OpenAI API; by default code does. Key: OPENAI_API_KEY."
_AT = "[MODEL@]URL"
_OF_REAL = ("before", "after", "requests")
_OF_BOTH = ("seeds", "json_file", "real")


# all: three kinds of people at the same time; blocks: the same, one kind after the other; unrelated: students, who then
# speak of something else; corrections: students, one session at a time; tools: agents with a calculator; everyday:
# three people with everyday requests, in one stream or in blocks.
LearnScenario = Literal["all", "student", "blocks", "unrelated", "corrections", "tools", "everyday", "everyday_blocks"]
# standard_2, standard_3: built as standard is, from another seed; hard: a policy that seldom answers as people want;
# tools: one that calls a calculator, and seldom finishes; smollm2: SmolLM2-135M-Instruct; own: engine.model_path of the
# settings, with their engines, judge and trainer.
LearnBase = Literal["standard", "standard_2", "standard_3", "hard", "demo", "tools", "smollm2", "own"]


def learn(
    context: typer.Context,
    scenario: Annotated[
        LearnScenario,
        typer.Option(
            help="Who talks to the policy: student, or all, three kinds of people in one stream; blocks: the three one "
            "after the other; unrelated: a student who then speaks of something else; corrections: a student, each of "
            "whose corrections is trained on at once; tools: agents; everyday: three people with everyday requests, in "
            "one stream, or one after the other (everyday_blocks)."
        ),
    ] = "all",
    base: Annotated[
        LearnBase | None,
        typer.Option(
            help="Which policy they talk to; by default standard (standard_2 and standard_3 are built as it is, from "
            "other seeds), with agents tools, with everyday requests smollm2: SmolLM2-135M-Instruct, 93 MB to fetch. "
            "own: that of the settings file (engine.model_path), with its engine.urls, its judge.url and its trainer."
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="As for `demo`, with commas; by default binary,opd,combined. Of agents: stepwise (verdicts on steps, "
            "and outcomes) and outcome (the same with outcomes alone)."
        ),
    ] = None,
    seeds: Annotated[str, typer.Option(help="With commas; each method is run with each seed.")] = "0,1,2,3,4",
    updates: Annotated[
        int | None,
        typer.Option(
            help="Weight updates of each run, by default 16; with blocks, of all blocks together, by default 30; with "
            "unrelated, without the last four; with corrections 3; with everyday_blocks 18; with tools, rounds of 96 "
            "steps.",
            min=1,
        ),
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            help="At the beginning; by default 3e-4; for adapters 1e-3, with tools 1.5e-3, with corrections 2e-3.",
            min=0,
        ),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Passes over each batch, by default 3; with corrections at most 4.", min=1)
    ] = None,
    answers_per_hint: Annotated[
        int, typer.Option(help="Answers that a hint scores, the turn's own included.", min=1, max=64)
    ] = 1,
    w_topk: Annotated[
        float | None,
        typer.Option(
            help="Weight of the teacher's whole distribution in `combined`; 0: none; by default 1, or 0 where hints "
            "are chosen by overlap.",
            min=0,
        ),
    ] = None,
    lora_rank: Annotated[int, typer.Option(help="Of the adapter that is trained; 0: all weights are.", min=0)] = 16,
    hurry: Annotated[
        bool,
        typer.Option("--hurry", help="People go on while weights are trained, so samples are older than the policy."),
    ] = False,
    teachers: Annotated[
        str, typer.Option(help="Teachers of hints: usual, contrast, reference, with commas; each is run.")
    ] = "usual",
    hint_choices: Annotated[
        str,
        typer.Option(help="Which of the judge's hints is taken: longest, fall, overlap, with commas; each is run."),
    ] = "longest",
    flip_after: Annotated[
        int | None,
        typer.Option(help="After so many of the updates each person wants what another wanted.", min=1),
    ] = None,
    score_at: Annotated[
        str | None,
        typer.Option(
            help="After which updates; by default 0, half of them (with blocks, half of each block) and the last; with "
            "32 or more, every 8th. The version at which people change is scored, too."
        ),
    ] = None,
    controls: Annotated[
        str,
        typer.Option(
            help="Control runs, in which people are not heard (coin: hints are): shuffled, coin, frozen, with commas."
        ),
    ] = "",
    problems: Annotated[
        Path | None,
        typer.Option(help='Real ones, [{"question", "ground_truth_answer"}], in place of sums.', metavar="FILE"),
    ] = None,
    people: Annotated[str | None, typer.Option(help=_ROLE.format("reacts as people do"), metavar=_AT)] = None,
    judge: Annotated[str | None, typer.Option(help=_ROLE.format("judges"), metavar=_AT)] = None,
    scorer: Annotated[str | None, typer.Option(help=_ROLE.format("grades answers, 0 to 1"), metavar=_AT)] = None,
    split: Annotated[
        Literal["report", "development"],
        typer.Option(help="Of everyday requests: which of them are scored. Tune on development alone."),
    ] = "report",
    num_scored: Annotated[
        int, typer.Option(help="Of everyday requests: how many are scored, of each person.", min=1)
    ] = 30,
    votes_together: Annotated[
        float,
        typer.Option(
            help="Share of turns on which the judge's votes err together, all or none; 0: each alone.", min=0, max=1
        ),
    ] = 0.0,
    wordy_hints: Annotated[
        float,
        typer.Option(help="Share of the judge's hints that say more than what is wanted.", min=0, max=1),
    ] = 0.0,
    adapters: Annotated[
        Literal["shared", "keyed", "by_key"],
        typer.Option(help="keyed: people share an adapter, by API keys; by_key: they have one each (corrections)."),
    ] = "shared",
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="A setting of the section training that no other option says, as kl=0.1, for all runs. May be given "
            "several times.",
            metavar="NAME=VALUE",
        ),
    ] = None,
    at_once: Annotated[int, typer.Option(help="Runs at the same time.", min=1)] = 1,
    folder: Annotated[Path | None, typer.Option(help="Where runs are kept; by default in the data folder.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write a row per run here.", metavar="FILE")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the curves here; by default into the folder.")] = None,
    real: Annotated[
        bool, typer.Option("--real", help="Compare two versions on your own past requests, blind.")
    ] = False,
    before: Annotated[int | None, typer.Option(help="With --real: the older version; by default the base.")] = None,
    after: Annotated[int | None, typer.Option(help="With --real: the newer one; by default the newest.")] = None,
    requests: Annotated[int, typer.Option(help="With --real: how many.", min=1)] = 20,
) -> None:
    """Run each method with each seed on the whole pipeline, and say how much of what people want it learned.

    A run takes two to four minutes on two cores; with opd, or with everyday requests, half an hour or more. Runs that
    are complete in the same folder are kept, so a grid that was interrupted goes on where it stopped. Where a run
    failed, the others are reported, and the exit code is 2.
    """
    settings = Context.of(context).settings()
    log_to_stderr("learn", level=30)
    _refuse_idle(context, real=real)
    to_be_made = None if folder is None else folder.absolute()
    for option, file in (("--json", json_file), ("--plot", plot)):
        into = None if file is None else file.absolute().parent
        if into is not None and into != to_be_made and not into.is_dir():
            raise ConfigError(f"{option} {file}: there is no folder {into}. Nothing was run. Make it")
    if real:
        from clawstream.cli.learning.real import compare

        first, *others = _listed(seeds, int, "--seeds")
        if others and _is_said(context, "seeds"):
            raise ConfigError(f"--seeds {seeds}: --real draws with one seed. Nothing was asked. Name one")
        compare(settings, before=before, after=after, count=requests, seed=first, json_file=json_file)
        return
    needed = settings if base == "own" else Settings(environment=False)
    refuse_what_is_missing(needed.model_copy(update={"data_dir": settings.data_dir, "cache_dir": settings.cache_dir}))
    hide_torch()
    from clawstream.cli.learning.progress import show, tables
    from clawstream.simulation.everyday import Split
    from clawstream.simulation.learn.cell import Grid
    from clawstream.simulation.learn.grid import UNTAUGHT, Cell, grid, usual_score_at
    from clawstream.simulation.learn.plot import plot_curves, plot_people
    from clawstream.simulation.learn.report import curves, lasting, with_lines
    from clawstream.simulation.opinions import Control
    from clawstream.simulation.roles import BY_CODE, Roles
    from clawstream.simulation.runs.people import people_of
    from clawstream.simulation.runs.scenarios import CASTS, UnusableProblems

    cast = CASTS[scenario]
    rate = learning_rate if learning_rate is not None else cast.adapter_rate if lora_rank else FULL_RATE
    updates = (updates or cast.updates) + cast.unrelated_updates
    refuse_blocks(scenario, updates, hurry=hurry, answers=answers_per_hint)
    at = _listed(score_at, int, "--score-at") if score_at else usual_score_at(scenario, updates)
    if not all(0 <= update <= updates for update in at):
        raise ConfigError(f"--score-at {score_at}: there are {updates} updates; name numbers from 0 to {updates}")
    methods = methods or ",".join(cast.methods[:3])
    wanted = _listed(methods, LearnMethod, "--methods"), _listed(seeds, int, "--seeds")
    without = _listed(controls, Control, "--controls") if controls else []
    changed = changed_settings(changes or (), wanted[0])
    taught_by = _listed(teachers, LearnTeacher, "--teachers")
    chosen_by = _listed(hint_choices, LearnHintChoice, "--hint-choices")
    if {*wanted[0]} <= {*UNTAUGHT}:
        for name in ("teachers", "answers_per_hint", "hint_choices"):
            if _is_said(context, name):
                raise ConfigError(
                    f"--{name.replace('_', '-')} {context.params[name]}: hints teach nothing with --methods {methods}. "
                    "Nothing was run. Leave it out, or name another method"
                )
    if _is_said(context, "w_topk") and LearnMethod.COMBINED not in wanted[0]:
        raise ConfigError(
            f"--w-topk {w_topk:g}: it adds to combined, and --methods are {methods}. Nothing was run. "
            "Leave it out, or name combined"
        )
    refuse_hint_choices(chosen_by, wanted[0], scenario)
    refuse_flip(flip_after, scenario, updates=updates, hurry=hurry, controls=controls, answers=answers_per_hint)
    if adapters == "by_key" and not (cast.one_by_one and lora_rank):
        raise ConfigError(
            "--adapters by_key: expected --scenario corrections, in which one person talks, and a --lora-rank above 0. "
            "Nothing was run. Name these"
        )
    policy_base = base or cast.bases[0]
    shares = {"--votes-together": votes_together, "--wordy-hints": wordy_hints}
    changes_votes = [option for option, share in shares.items() if share > 0]
    of_requests = [option for option in ("--split", "--num-scored") if _is_said(context, option[2:].replace("-", "_"))]
    refuse_unfit(
        scenario, policy_base, methods, wanted[0], problems=problems, hurry=hurry, changes_votes=changes_votes,
        of_requests=of_requests,
    )  # fmt: skip
    for control in dict.fromkeys(without):
        if not {method.value for method in wanted[0]} & set(cast.controls[control]):
            raise ConfigError(
                f"--controls {control.value}: it changes nothing of --methods {methods}, expected one of "
                f"{', '.join(cast.controls[control])}. Nothing was run. Leave it out, or name such a method"
            )
        if left := [method.value for method in wanted[0] if method.value not in cast.controls[control]]:
            Console(stderr=True).print(
                f"--controls {control.value} changes nothing of {', '.join(left)}: left out there"
            )
    own_judge = settings.judge.url if policy_base == "own" else None
    if policy_base == "own":
        refuse_not_own(settings, at_once=at_once)
    refuse_roles(scenario, people=people, judge=judge or own_judge, scorer=scorer, flip_after=flip_after)
    if asked := f"--judge {judge}" if judge else f"judge.url is {own_judge}" if own_judge else None:
        refuse_drawn_votes(asked, without, changes_votes=changes_votes)
    roles = Roles(people=people, judge=judge, scorer=scorer).named()
    kept_in = folder or settings.data_dir / "learn"
    kept_in.mkdir(parents=True, exist_ok=True)
    of_what = split if cast.everyday else None if problems is None else problems.stem
    asked_in = kept_in / "problems" / (scenario if of_what is None else f"{scenario}-{of_what}")
    with locked(kept_in / ".lock", within_s=1.0):
        try:
            asked_of = people_of(scenario, asked_in, problems=problems, split=Split(split), num_scored=num_scored)
        except UnusableProblems as error:
            raise ConfigError(str(error)) from error
        who = replace(asked_of, roles=roles)
        own = settings if policy_base == "own" else None
        policy, base_sha = _built(settings, policy_base)
        like = Cell(
            scenario=scenario, base=policy_base, base_sha=base_sha, problems_sha=who.sha,
            method=wanted[0][0], seed=wanted[1][0], control=None, updates=updates, learning_rate=rate,
            epochs=epochs or (CORRECTION_EPOCHS if cast.one_by_one else EPOCHS),
            answers_per_hint=answers_per_hint, w_topk=1.0 if w_topk is None else w_topk,
            lora_rank=lora_rank or None, hurry=hurry,
            score_at=tuple(at), flip_after=flip_after,
            votes_together=votes_together, wordy_hints=wordy_hints, adapters=adapters,
            split=split if cast.everyday else None, roles=None if roles == BY_CODE else roles, changed=changed,
        )  # fmt: skip
        cells = grid(
            like, methods=wanted[0], seeds=wanted[1], controls=without, teachers=taught_by, hint_choices=chosen_by,
            w_topk_is_said=w_topk is not None,
        )  # fmt: skip
        runs = Grid(kept_in, who, policy, settings.cache_dir, base_sha=base_sha, own=own)
        reference, rows = asyncio.run(_run(runs, cells, at_once=at_once))
        written = json.dumps([with_lines(row) for row in rows], indent=1)
        for file in (kept_in / "report.json", *(() if json_file is None else (json_file,))):
            file.write_text(written)
        picture = plot or kept_in / "curves.png"
        title = f"{scenario}, {policy_base} base"
        if cast.talkers:
            plot_people(lasting(rows), reference, title, picture)
        else:
            plot_curves(curves(rows), reference, title, picture, unit=cast.unit)
    show(tables(rows, reference))
    _say_where(rows, picture, kept_in / "cells")
    if any(row.error is not None for row in rows):
        raise typer.Exit(2)


async def _run(grid: "Grid", cells: "Sequence[Cell]", *, at_once: int) -> "tuple[Reference, list[ReportRow]]":
    from clawstream.simulation.runs.scenarios import CASTS

    console = Console(stderr=True)
    with waiting(console) as say:
        reference = await grid.reference(flips=cells[0].flip_after is not None, say=say)
    for what, of in (("scores", reference), ("scores, by the wishes after the flip,", reference.flipped)):
        if of is not None:
            console.print(f"the base {what} {of.baseline.score:.2f}, with the hint {of.ceiling.score:.2f}")
    with shown(console, cells[0].updates, CASTS[cells[0].scenario].unit) as tell:
        rows = await grid.run(cells, reference, at_once=at_once, tell=lambda cell, step: tell(cell.title, step))
    return reference, rows


def _built(settings: "Settings", base: str) -> tuple[Path, str]:
    """Return the policy's folder, made or fetched if it is missing, and a name that no other policy has."""
    from clawstream.local.packaged_model import MODELS, packaged_model
    from clawstream.simulation.policy.recipe import base_policy
    from clawstream.simulation.runs.scenarios import digest

    if base == "own":
        return settings.engine.base_policy, digest(settings)
    fetched = MODELS.get(base)
    policy = base_policy(settings.cache_dir, base) if fetched is None else packaged_model(settings.cache_dir, fetched)
    return policy, policy.name


def _refuse_idle(context: typer.Context, *, real: bool) -> None:
    idle = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name is not None
        and parameter.name not in _OF_BOTH
        and (parameter.name in _OF_REAL) is not real
        and _is_said(context, parameter.name)
    ]
    if idle:
        kind = "with --real: it asks the policy that there is" if real else "without --real"
        raise ConfigError(f"{', '.join(idle)}: no effect {kind}. Nothing was run. Leave them out")


def _is_said(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _listed(text: str, kind: Callable[[str], T], option: str) -> list[T]:
    """Return the values of an option, which are separated by commas."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise ConfigError(f"{option} names nothing: give at least one, with commas between. Nothing was run")
    try:
        return [kind(word) for word in words]
    except ValueError as error:
        raise ConfigError(f"{option} {text}: {error}. Nothing was run") from error


def _say_where(rows: "Sequence[ReportRow]", picture: Path, cells: Path) -> None:
    console = Console(stderr=True)
    for row in rows:
        if row.error is not None:
            console.print(
                f"[bold red]failed:[/] {row.cell.title}: {escape(row.error)}", soft_wrap=True, highlight=False
            )
    scores = [score for row in rows if row.outcome is not None for score in row.outcome.scores.values()]
    if num_ungraded := sum(score.num_ungraded for score in scores):
        asked = num_ungraded + sum(score.num_problems for score in scores)
        console.print(f"{num_ungraded} of {asked} answers got no grade from the language model, and count nowhere")
    if len({row.outcome.code for row in rows if row.outcome is not None}) > 1:
        console.print("The rows were not all made by the same code (`code` in --json): name a new --folder to compare")
    console.print(f"Curves: {picture}\nEach run's log, database and scored weights stay in {cells}", soft_wrap=True)
