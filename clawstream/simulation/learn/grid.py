"""Which runs a comparison consists of, the name of each, and which runs are refused.

Two cells with the same plan have the same name, and every change of a plan changes the name. A field that
was added later defaults to what was done before, and its default is left out of the name, so that kept runs are found
again.
"""

import hashlib
import json
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from clawstream.config import Settings, TrainingSettings
from clawstream.config.training import IDLE, RECIPE, usual_teacher
from clawstream.errors import ConfigError
from clawstream.simulation.opinions import Control
from clawstream.simulation.roles import Roles
from clawstream.simulation.runs.scenarios import CASTS, Block, blocks_of

USUAL_TEACHER = "usual"
USUAL_CHOICE = "longest"
AGAIN_WITHIN = 24  # updates after a flip, within which the new wishes are to be learned
TRAINING = ("learning_rate", "epochs", "answers_per_hint", "w_topk", "lora_rank", "teacher")  # as settings name them
LONG_UPDATES = 32
Changed = tuple[str, str | float | bool]  # a setting's name and its value
# Settings of [training] that options of their own say; and those that a run needs to be as they are.
OF_OPTIONS = (*TRAINING, "method", "hint_choice")
OF_RUNS = ("batch_samples", "max_wait_s", "cadence", "late", "max_updates", "keep_checkpoints", "save_dir", "seed")
AS_PUBLISHED = ("recipe", "openclaw-rl")  # a changed setting: the original's losses
UNTAUGHT = ("binary", "stepwise", "outcome")  # methods that no hint teaches: one run for all teachers


class LearnTeacher(StrEnum):
    """Which weights the teacher has, which scores an answer after the prompt with the hint."""

    USUAL = "usual"  # the default of the method
    CONTRAST = "contrast"  # the base with the hint, compared with the base without it
    REFERENCE = "reference"  # the base


class LearnMethod(StrEnum):
    COMBINED = "combined"
    BINARY = "binary"
    OPD = "opd"
    TOPK = "topk"
    STEPWISE = "stepwise"  # verdicts on steps, and outcomes
    OUTCOME = "outcome"  # outcomes alone


class LearnHintChoice(StrEnum):
    """Which of the hints that judges offer is trained on."""

    LONGEST = "longest"
    FALL = "fall"  # the one that lowers the answer's log-prob most
    OVERLAP = "overlap"  # the one whose teacher is nearest to the policy, learned on the policy's likeliest tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run of a grid."""

    scenario: str
    base: str
    base_sha: str  # of the recipe that the base policy was built by
    problems_sha: str  # of all that is asked, and of the language model that scores
    method: str
    seed: int
    control: Control | None
    updates: int
    learning_rate: float
    epochs: int  # passes over each batch
    answers_per_hint: int = 1  # the turn's own among them
    w_topk: float = 0.0  # weight of the teacher's whole distribution, beside the gaps of `combined`
    lora_rank: int | None  # None: all weights are trained
    hurry: bool  # people do not wait for the policy to learn from what they said
    score_at: tuple[int, ...]  # updates, ascending
    teacher: str = USUAL_TEACHER  # a name of training.teacher, or "usual"; without effect where no hint teaches
    flip_after: int | None = None  # updates: then each person wants what another wanted
    votes_together: float = 0.0  # the share of turns on which the judge's votes are all wrong, or none
    adapters: str = "shared"  # "keyed": shared by people with API keys of their own; "by_key": each key has its own
    hint_choice: str = USUAL_CHOICE  # a name of training.hint_choice
    wordy_hints: float = 0.0  # the share of the judge's hints that say more than what is wanted
    split: str | None = None  # of everyday requests, the one that is scored; None: people ask sums
    roles: Roles | None = None  # language models that play somebody; None: code plays all
    changed: tuple[Changed, ...] = ()  # further settings of [training]

    @property
    def name(self) -> str:
        """The name of the cell's folder."""
        usual = {field.name: field.default for field in fields(self)}
        plan = {name: value for name, value in asdict(self).items() if value != usual[name]}
        digest = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:8]
        control = () if self.control is None else (self.control.value,)
        teacher = () if self.teacher == USUAL_TEACHER else (self.teacher,)
        choice = () if self.hint_choice == USUAL_CHOICE else (self.hint_choice,)
        adapters = () if self.adapters == "shared" else (self.adapters,)
        return "-".join(
            (self.scenario, self.base, self.method, *teacher, *choice, *adapters, *control, f"seed{self.seed}", digest)
        )

    @property
    def arm(self) -> str:
        """The unit compared over seeds: the method, and what is not usual of teacher, hints, adapters and settings."""
        teacher = "" if self.teacher == USUAL_TEACHER else f", {self.teacher} teacher"
        choice = "" if self.hint_choice == USUAL_CHOICE else f", hints by {self.hint_choice}"
        adapters = {"shared": "", "keyed": ", API keys", "by_key": ", an adapter a person"}[self.adapters]
        changed = "".join(f", {name} {value}" for name, value in self.changed)
        return f"{self.method}{teacher}{choice}{adapters}{changed}"

    @property
    def by_key(self) -> bool:
        """Whether each person has an adapter of their own."""
        return self.adapters == "by_key"

    @property
    def title(self) -> str:
        """The cell's name for people."""
        control = "" if self.control is None else f" {self.control.value}"
        return f"{self.arm}{control} seed {self.seed}"

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Who talks up to which update; none where all talk in one stream."""
        return blocks_of(self.scenario, self.updates)

    def is_flipped(self, update: int) -> bool:
        """Whether this update learns from what people want after the flip."""
        return self.flip_after is not None and update > self.flip_after

    @property
    def scorings(self) -> tuple[tuple[int, bool], ...]:
        """The updates to score, and whether by the wishes after the flip; the update of the flip is scored by both."""
        twice = () if self.flip_after is None else ((self.flip_after, True),)
        return tuple(sorted([*((update, self.is_flipped(update)) for update in self.score_at[1:]), *twice]))

    @property
    def training(self) -> dict[str, Any]:
        names = [name for name in TRAINING if name != "teacher" or self.taught_by == self.teacher]
        cadence = {"cadence": "correction"} if CASTS[self.scenario].one_by_one else {}
        choice = {} if self.hint_choice == USUAL_CHOICE else {"hint_choice": self.hint_choice}
        return {name: value for name in names if (value := getattr(self, name)) is not None} | {
            **cadence, **choice, **dict(self.changed)
        }  # fmt: skip

    @property
    def taught_by(self) -> str | None:
        """The teacher of hints by training.teacher's names; None: no hint teaches."""
        if self.method in UNTAUGHT:
            return None
        if self.teacher != USUAL_TEACHER:
            return self.teacher
        if AS_PUBLISHED in self.changed:
            return str(RECIPE["teacher"])
        return usual_teacher(self.method, diverges=self.w_topk > 0)


def grid(
    like: Cell, *, methods: Sequence[str], seeds: Sequence[int], controls: Sequence[Control], teachers: Sequence[str],
    hint_choices: Sequence[str] = (USUAL_CHOICE,), w_topk_is_said: bool = False,
) -> tuple[Cell, ...]:  # fmt: skip
    """Return a cell like `like` for each combination, seed by seed: a grid that is cut short has all methods with the
    same seeds. Each cell is scored at the last update too, around its flip, and at the end of each block.

    Where hints are chosen by overlap, and by the original's recipe, `w_topk` is 0 unless the user named it
    (`w_topk_is_said`).
    """
    after, updates = like.flip_after, like.updates
    flip = () if after is None else (after, min(after + AGAIN_WITHIN, updates))
    ends = [block.end for block in like.blocks]
    late = [ends[-2] + number for number in CASTS[like.scenario].scored_after]
    return tuple(
        replace(
            like,
            method=method,
            seed=seed,
            control=control,
            teacher=teacher,
            # Where hints do not count, no prompt is answered again.
            answers_per_hint=1 if method in UNTAUGHT else like.answers_per_hint,
            w_topk=like.w_topk
            if method == "combined" and (w_topk_is_said or not (choice == "overlap" or AS_PUBLISHED in like.changed))
            else 0.0,
            hint_choice=choice,
            score_at=tuple(sorted({0, *like.score_at, *flip, *ends, *late, updates})),
        )
        for seed in dict.fromkeys(seeds)
        for control in (None, *dict.fromkeys(controls))
        for method in dict.fromkeys(methods)
        for teacher in ((USUAL_TEACHER,) if method in UNTAUGHT else dict.fromkeys(teachers))
        for choice in ((USUAL_CHOICE,) if method in UNTAUGHT else dict.fromkeys(hint_choices))
        if control is None or method in CASTS[like.scenario].controls[control]
    )


def changed_settings(said: Sequence[str], methods: Sequence[str]) -> tuple[Changed, ...]:
    """Return the settings of [training] that `--set` names, each as NAME=VALUE, in one order; raises ConfigError."""
    found: dict[str, Any] = {}
    for one in said:
        name, _, value = (part.strip() for part in one.partition("="))
        if why := _not_to_change(name, value, found):
            raise ConfigError(f"--set {one}: {why}. Nothing was run")
        try:
            found[name] = tomllib.loads(f"it = {value}")["it"]
        except tomllib.TOMLDecodeError:
            found[name] = value
    for method in methods if found else ():
        found = _as_read("stepwise" if method == "outcome" else method, found)
    return tuple(sorted(found.items()))


def _not_to_change(name: str, value: str, found: Collection[str]) -> str | None:
    """Return why `--set` can't change the setting; None: it can."""
    if not value:
        return "expected NAME=VALUE"
    if name not in TrainingSettings.model_fields:
        return f"[training] has no setting {name}; `clawstream config` prints all"
    if name in OF_OPTIONS:
        return f"an option of learn says it: {', '.join(OF_OPTIONS)} have one each"
    if name in OF_RUNS:
        return f"runs need {', '.join(OF_RUNS)} as they are"
    return "it is said twice" if name in found else None


def _as_read(method: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings as they are read; raises ConfigError where one is invalid or idle."""
    idle, why = IDLE.get(method, ((), ""))
    if without := sorted(found.keys() & {*idle}):
        raise ConfigError(
            f"--set {', '.join(without)}: no effect with --methods {method}, which {why}. Nothing was run"
        )
    try:
        settings = TrainingSettings(**{"method": method, **found})
    except ValidationError as error:
        first = error.errors()[0]
        said = "".join(f"{name}: " for name in first["loc"]) + first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"--set {said} (with --methods {method}). Nothing was run") from error
    return {name: getattr(settings, name) for name in found}


def usual_score_at(scenario: str, updates: int) -> list[int]:
    """Return which updates are scored if nobody names others, beside those that `grid` adds."""
    if blocks := blocks_of(scenario, updates):
        ends = [0, *(block.end for block in blocks)]
        return [(begin + end) // 2 for begin, end in pairwise(ends)]
    return [0, updates // 2] if updates < LONG_UPDATES else list(range(0, updates, 8))


def refuse_blocks(scenario: str, updates: int, *, hurry: bool, answers: int) -> None:
    """Raise ConfigError where people come one after the other and could not change at the end of a given update."""
    cast = CASTS[scenario]
    if not cast.talkers:
        return
    if not cast.unrelated_updates and updates % len(cast.talkers):
        raise ConfigError(
            f"--updates {updates}: --scenario {scenario} has {len(cast.talkers)} blocks, all equally long. Nothing was "
            f"run. Name a multiple of {len(cast.talkers)}"
        )
    options = (("--hurry", hurry), (f"--answers-per-hint {answers}", answers > 1))
    if said := [option for option, is_said in options if is_said]:
        raise ConfigError(
            f"{', '.join(said)}: with --scenario {scenario} the next people come after a given update, and this option "
            "lets the policy pass that update before they come. Nothing was run. Leave it out"
        )


def refuse_flip(after: int | None, scenario: str, *, updates: int, hurry: bool, controls: str, answers: int) -> None:
    """Raise ConfigError where nobody could change their mind after that update, or the change could not be measured."""
    if after is None:
        return
    if scenario != "all":
        raise ConfigError(
            f"--flip-after {after}: with --scenario {scenario} there is nobody to exchange wishes with. Nothing "
            "was run. Take --scenario all"
        )
    if hurry:
        raise ConfigError(
            f"--flip-after {after}: people who ask on all the time do not all change their minds between "
            "two updates. Nothing was run. Leave out --hurry"
        )
    if after >= updates:
        raise ConfigError(
            f"--flip-after {after}: there are {updates} updates. Nothing was run. Name one before the last"
        )
    if answers > 1:
        raise ConfigError(
            f"--flip-after {after}: with --answers-per-hint {answers} a session gives several samples, and update "
            f"{after} may be passed before anybody's wish changes. Nothing was run. Leave one of them out"
        )
    if controls:
        raise ConfigError(
            f"--flip-after {after}: --controls {controls} is compared with its method at the last update, and the "
            "method may not have learned the new wishes by then. Nothing was run. Run controls without a flip"
        )


def refuse_unfit(
    scenario: str,
    base: str,
    said: str,
    methods: Sequence[str],
    *,
    problems: Path | None,
    hurry: bool,
    changes_votes: Sequence[str],
    of_requests: Sequence[str] = (),
) -> None:
    """Raise ConfigError for a base, a method or another option that does not go with the scenario."""
    cast = CASTS[scenario]
    unfit = {f"--base {base}": cast.bases} if base not in cast.bases else {}
    if not {*methods} <= set(cast.methods):
        unfit[f"--methods {said}"] = cast.methods
    for option, known in unfit.items():
        raise ConfigError(
            f"{option}: expected {', '.join(known)} with --scenario {scenario}. Nothing was run. Name those"
        )
    of_sums = ["--problems"] if problems is not None else []
    of_people = [*of_sums, *(["--hurry"] if hurry else []), *changes_votes]
    idle = of_people if cast.attempts is not None else of_sums if cast.everyday else []
    if idle := [*idle, *(() if cast.everyday else of_requests)]:
        raise ConfigError(f"{', '.join(idle)}: no effect with --scenario {scenario}. Nothing was run. Leave it out")


def refuse_not_own(settings: Settings, *, at_once: int) -> None:
    """Raise ConfigError for what can't be done with the policy that the settings file names."""
    if not settings.engine.base_policy.is_dir():
        raise ConfigError(
            f"--base own: engine.model_path is {settings.engine.base_policy}, which is no folder. Nothing was run. "
            "Name the policy's Hugging Face folder"
        )
    if settings.weights.url is not None:
        raise ConfigError(
            "--base own: weights.url says that the trainer is elsewhere, and each run has one of its own. Nothing was "
            "run. Take it out of the settings that this command reads"
        )
    if at_once > 1 and settings.engine.urls:
        raise ConfigError(
            f"--at-once {at_once}: --base own has the engines of engine.urls serve one run's weights. Nothing was run. "
            "Leave it out"
        )


def refuse_drawn_votes(asked: str, controls: Sequence[Control], *, changes_votes: Sequence[str]) -> None:
    """Raise ConfigError for what changes a simulated judge's votes, where `asked` says that another judge is asked."""
    if changes_votes:
        raise ConfigError(
            f"{', '.join(changes_votes)}: {asked}, whose votes nobody makes wrong or wordy. Nothing was run. Leave one "
            "of them out"
        )
    if drawn := [control.value for control in controls if control.value != "frozen"]:
        raise ConfigError(
            f"--controls {','.join(drawn)}: these replace what a simulated judge says, and {asked}. Nothing was run. "
            "Take frozen, or leave one of them out"
        )


def refuse_roles(
    scenario: str, *, people: str | None, judge: str | None, scorer: str | None, flip_after: int | None
) -> None:
    """Raise ConfigError for a language model that can't play its part in the scenario; `judge` is any real one."""
    if CASTS[scenario].attempts is not None and (people or scorer):
        raise ConfigError(
            f"{'--people' if people else '--scorer'}: in --scenario {scenario} agents ask, and results are compared. "
            "Nothing was run. Leave it out"
        )
    if people is None:
        return
    if CASTS[scenario].talkers or flip_after is not None:
        raise ConfigError(
            f"--people {people}: a session may give several samples, so people can't change after a given update, as "
            "they do with --flip-after and where they come one after the other. Nothing was run. Take --scenario "
            "student, all or everyday"
        )
    if judge is None:
        raise ConfigError(
            f"--people {people}: the simulated judge knows the words of simulated people alone. Nothing was run. Name "
            "a judge, too: --judge"
        )


def refuse_hint_choices(choices: Sequence[str], methods: Sequence[str], scenario: str) -> None:
    """Raise ConfigError for a choice of hints that comes too late, or that a method can't learn by."""
    said = ",".join(choices)
    if set(choices) != {USUAL_CHOICE} and CASTS[scenario].one_by_one:
        raise ConfigError(
            f"--hint-choices {said}: with --scenario {scenario} the policy is asked for answers to a hint before one "
            "could be chosen. Nothing was run. Take longest"
        )
    if "overlap" in choices and "topk" in methods:
        raise ConfigError(
            f"--hint-choices {said}: overlap learns on the policy's likeliest tokens, and topk on the teacher's. "
            "Nothing was run. Leave one of them out"
        )
