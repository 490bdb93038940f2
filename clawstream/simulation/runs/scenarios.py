"""The scenarios of a simulation: its people, the programs that play them, and the settings of its runs.

Simulations differ only in what is here; events and parts are the same for all. No problem is both asked by people and
scored, and the base policies were built on neither kind.

Each run has settings of its own for its data, log, database and people, and for training where runs are compared. What
they leave open in the sections policy, engine, judge and training comes from the user's settings (`blended`).
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import re
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from clawstream.config import IDLE, EngineSettings, Section, Settings, TrainingSettings
from clawstream.config.training import OF_REWARDS
from clawstream.errors import TryLater
from clawstream.inference.clients import engine_client, engine_session
from clawstream.inference.engine import EngineRefused, policy_version
from clawstream.inference.http_engine import HttpEngine
from clawstream.simulation.everyday import personas as everyday_personas
from clawstream.simulation.opinions import HINTS, Control, Wish
from clawstream.simulation.problems import SUBJECTS, UNRELATED, Sum, SumSet, all_of, scored
from clawstream.simulation.reactions import wordings_of

NUM_SCORED = 500
SCORED_FLIPPED = "scored-flipped.jsonl"
_INTEGER = re.compile(r"[0-9]+|[0-9]{1,3}(,[0-9]{3})+")
STEPS_A_ROUND = 96  # agents' steps between two scores, at least; all arms get as many steps, not as many updates
log = logging.getLogger(__name__)
MAX_TOKENS = 512  # of an answer
BASE_VERSION = "0"
S = TypeVar("S", bound=Section)


@dataclass(frozen=True, slots=True, kw_only=True)
class Persona:
    """One kind of person; wordings, reactions and scoring are looked up by the name."""

    name: str
    hint: str  # the wanted style; the ceiling is the untrained policy's score with this hint in the prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The people of one simulation; `ScenarioPrograms.talkers` says whether they talk one after the other."""

    personas: tuple[Persona, ...]
    hint_share: float  # the share of complaints that name the wanted style; the others only reject the answer
    num_scored: int
    num_scored_wordings: int | None = None  # how many wordings of each person the scored questions use; None: all
    speaks_of_else: bool = False  # the first persona also speaks of subjects that are not scored

    def flipped(self, who: Persona) -> Persona:
        """The persona whose wish `who` takes over at a flip: the one before it in the list, for the first the last.

        Base policies answer `who` most often in the style of the next persona, and least often in that of the one
        before. So a policy that falls back to its base does not meet the wish after a flip.
        """
        return self.personas[self.personas.index(who) - 1]


class UnusableProblems(ValueError):
    """A file of real problems does not have the expected form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    question: str
    answer: str


STUDENT = Persona(name="student", hint=HINTS[Wish.PLAIN][0])
TEACHER = Persona(name="teacher", hint=HINTS[Wish.HEADED][0])
TA = Persona(name="ta", hint=HINTS[Wish.VERDICT][0])
SCENARIOS: Mapping[str, Scenario] = MappingProxyType(
    {
        "student": Scenario(personas=(STUDENT,), hint_share=1.0, num_scored=200, num_scored_wordings=1),
        "all": Scenario(personas=(STUDENT, TEACHER, TA), hint_share=0.5, num_scored=NUM_SCORED),
        "blocks": Scenario(personas=(STUDENT, TEACHER, TA), hint_share=0.5, num_scored=NUM_SCORED),
        "corrections": Scenario(personas=(STUDENT, TEACHER, TA), hint_share=1.0, num_scored=NUM_SCORED),
        "unrelated": Scenario(personas=(STUDENT,), hint_share=1.0, num_scored=200, speaks_of_else=True),
    }
)


def write(scenario: Scenario, folder: Path, *, problems: Path | None = None) -> tuple[Path, Path]:
    """Write students.jsonl and scored.jsonl, each line a problem and who asks it, and return their paths.

    A third file, SCORED_FLIPPED, has the scored problems with the wishes after a flip.
    `problems` is a file of real problems, [{"question", "ground_truth_answer"}], to use in place of sums. Half of them
    are scored, `num_scored` at most. Raises UnusableProblems.
    """
    asked, held_out = _sums(scenario.num_scored) if problems is None else _real(problems, scenario.num_scored)
    folder.mkdir(parents=True, exist_ok=True)
    students_path, scored_path = folder / "students.jsonl", folder / "scored.jsonl"
    _write(students_path, [*(_asked(scenario, problem) for problem in asked), *_of_else(scenario)])
    rows = [(problem, _scored(scenario, problem, real=problems is not None)) for problem in held_out]
    _write(scored_path, [row for _, row in rows])
    _write(folder / SCORED_FLIPPED, [row | _flipped(scenario, problem) for problem, row in rows])
    return students_path, scored_path


def _sums(num_scored: int) -> tuple[list[Problem], list[Problem]]:
    def named(sums: Sequence[Sum]) -> list[Problem]:
        return [Problem(question=s.text, answer=str(s.total)) for s in sums]

    return named(all_of(SumSet.STUDENTS)), named(scored(num_scored))


def _real(file: Path, num_scored: int) -> tuple[list[Problem], list[Problem]]:
    try:
        read = json.loads(file.read_text())
        rows = [(str(row["question"]), str(row["ground_truth_answer"])) for row in read]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnusableProblems(
            f"{file}: {type(error).__name__}: {error}; expected a list of objects, each with question and "
            "ground_truth_answer. Nothing was written"
        ) from error
    found: dict[str, Problem] = {}
    for index, (question, answer) in enumerate(rows):
        if _INTEGER.fullmatch(answer) is None:
            raise UnusableProblems(
                f"{file}[{index}]: ground_truth_answer is {answer!r}, expected an integer of digits, as 1200 or 1,200: "
                "answers are marked by their last number. Nothing was written. Take the problem out"
            )
        known = found.setdefault(question, Problem(question=question, answer=answer.replace(",", "")))
        if known.answer != answer.replace(",", ""):
            raise UnusableProblems(
                f"{file}[{index}]: {question!r} has the answer {answer}, and {known.answer} before. Nothing was "
                "written. Take the wrong one out"
            )
    if len(found) < 2:
        raise UnusableProblems(f"{file}: {len(found)} different problems, expected two or more. Nothing was written")
    ordered = sorted(found.values(), key=lambda problem: _digest("half", problem))
    held_out = ordered[: min(num_scored, len(ordered) // 2)]
    return ordered[len(held_out) :], held_out


def _who(scenario: Scenario, problem: Problem) -> Persona:
    """The persona that asks this problem: always the same one; each asks nearly as many as the others."""
    return scenario.personas[_digest("who", problem) % len(scenario.personas)]


def _asked(scenario: Scenario, problem: Problem) -> dict[str, str]:
    who = _who(scenario, problem)
    return asdict(problem) | {"persona": who.name, "flipped": scenario.flipped(who).name}


def _of_else(scenario: Scenario) -> list[dict[str, str]]:
    """Return the requests about other subjects than problems, each with its subject."""
    who = scenario.personas[0].name
    return [
        {"persona": who, "question": request, "answer": "", "subject": name}
        for name, subject in SUBJECTS.items()
        for request in subject.requests
        if scenario.speaks_of_else
    ]


def _flipped(scenario: Scenario, problem: Problem) -> dict[str, str]:
    other = scenario.flipped(_who(scenario, problem))
    return {"wants": other.name, "hint": other.hint}


def _scored(scenario: Scenario, problem: Problem, *, real: bool) -> dict[str, str]:
    who = _who(scenario, problem)
    wordings = wordings_of(who.name, real=real)[: scenario.num_scored_wordings]
    prompt = wordings[_digest("wording", problem) % len(wordings)].format(question=problem.question)
    return asdict(problem) | {"persona": who.name, "prompt": prompt, "hint": who.hint}


def _digest(purpose: str, problem: Problem) -> int:
    material = "\x1f".join((purpose, problem.question, problem.answer))
    return int.from_bytes(hashlib.sha256(material.encode("utf-8", "surrogatepass")).digest()[:8])


def _write(path: Path, rows: Sequence[Mapping[str, str]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


_OF_PEOPLE, _OF_AGENTS = ("binary", "opd", "combined", "topk"), ("outcome", "stepwise")  # methods


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimits:
    """How long a run waits; on busy cores a larger policy takes longer for everything."""

    update_s: float = 300.0  # a run that makes no version for this long has failed
    pause_s: float = 120.0  # so have people whom nobody answers for this long
    request_s: float = 120.0  # of one answer
    ready_s: float = 120.0  # until an engine serves a policy that is scored


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioPrograms:
    """The programs of a scenario, and how its runs train and are compared."""

    asks: str = "clawstream.simulation.student"  # a module
    scores: tuple[str, ...] = ("clawstream.simulation.scorer",)  # a module, and options of it
    everyday: bool = False  # people ask everyday requests, of a policy that was trained elsewhere
    methods: tuple[str, ...] = _OF_PEOPLE
    bases: tuple[str, ...] = ("standard", "standard_2", "standard_3", "hard", "demo", "own")
    votes: int = 3  # on each answer
    attempts: int | None = None  # at each task, together a group; None: people talk, and there are no tasks
    batch_samples: int = 16
    samples_a_session: int = 1  # of a session with people
    adapter_rate: float = 1e-3  # the learning rate of adapters, if nobody names another
    temperature: float = 1.0  # of people's requests, and of scores
    answer_tokens: int | None = None  # the policy's own limit; None: what its context leaves
    renderer: str = "qwen3"
    limits: TimeLimits = TimeLimits()
    unit: str = "updates"  # the unit in which a run counts its progress
    updates: int = 16  # by default, without the `unrelated_updates`
    talkers: tuple[str, ...] = ()  # who talks one after the other; none: all in one stream
    unrelated_updates: int = 0  # of a last talker, whose subjects are not scored; 0: there is no such talker
    one_by_one: bool = False  # a session at a time, and each correction is trained on at once
    scored_after: tuple[int, ...] = ()  # which of the last talker's updates are scored, besides their last one
    controls: Mapping[Control, tuple[str, ...]]  # the methods that each control changes
    silenced: Mapping[Control, tuple[str, ...]]  # the methods that a control leaves nothing to learn from


_PEOPLE = ScenarioPrograms(
    controls=MappingProxyType(  # opd and topk learn from hints alone, so a changed verdict changes nothing
        {Control.SHUFFLED: _OF_PEOPLE, Control.COIN: ("binary", "combined"), Control.FROZEN: _OF_PEOPLE}
    ),
    silenced=MappingProxyType(  # combined also learns from hints
        {Control.SHUFFLED: _OF_PEOPLE, Control.COIN: ("binary",), Control.FROZEN: _OF_PEOPLE}
    ),
)
_OF_HINTS = ("combined", "opd", "topk")
_EVERYDAY = replace(
    _PEOPLE,
    everyday=True,
    scores=("clawstream.simulation.scorer", "--everyday"),
    bases=("smollm2",),
    temperature=0.6,  # at 1 a model of 135 million parameters babbles
    answer_tokens=80,
    renderer="auto",
    limits=TimeLimits(update_s=2400.0, pause_s=600.0, request_s=900.0, ready_s=600.0),
)
CASTS: Mapping[str, ScenarioPrograms] = MappingProxyType(
    {
        "student": _PEOPLE,
        "all": _PEOPLE,
        "blocks": replace(
            # The last talker decides the score, so a control is compared like a method, not checked.
            _PEOPLE,
            updates=30,
            talkers=("student", "teacher", "ta"),
            silenced=MappingProxyType({}),
        ),
        "corrections": ScenarioPrograms(
            methods=_OF_HINTS,
            talkers=("student",),
            one_by_one=True,
            adapter_rate=2e-3,  # not the rate but the number of passes keeps a step small
            updates=3,
            controls=MappingProxyType({Control.FROZEN: _OF_HINTS}),
            silenced=MappingProxyType({}),
        ),
        "unrelated": ScenarioPrograms(
            methods=_OF_HINTS,
            talkers=("student", UNRELATED),
            unrelated_updates=4,
            scored_after=(1, 2),
            controls=MappingProxyType(
                {Control.SHUFFLED: _OF_HINTS, Control.COIN: ("combined",), Control.FROZEN: _OF_HINTS}
            ),
            silenced=MappingProxyType({}),
        ),
        "everyday": _EVERYDAY,
        "everyday_blocks": replace(
            _EVERYDAY,
            updates=18,
            talkers=tuple(persona.name for persona in everyday_personas()),
            silenced=MappingProxyType({}),
        ),
        "tools": ScenarioPrograms(
            asks="clawstream.simulation.agent",
            scores=("clawstream.simulation.agent", "--score"),
            methods=_OF_AGENTS,
            bases=("tools",),
            votes=1,  # so the share of wrong verdicts is that of wrong votes
            attempts=4,
            batch_samples=32,
            adapter_rate=1.5e-3,
            unit="rounds",
            controls=MappingProxyType(  # the method outcome uses no verdicts
                {Control.SHUFFLED: ("stepwise",), Control.COIN: ("stepwise",), Control.FROZEN: _OF_AGENTS}
            ),
            silenced=MappingProxyType({Control.FROZEN: _OF_AGENTS}),  # stepwise also learns from outcomes
        ),
    }
)


def names_of(scenario: str) -> tuple[str, ...]:
    """Return the names of a scenario's people."""
    people = everyday_personas() if CASTS[scenario].everyday else SCENARIOS[scenario].personas
    return tuple(who.name for who in people)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A part of a run in which one talker talks alone."""

    talker: str
    end: int  # the last update that learns from them


def blocks_of(scenario: str, updates: int) -> tuple[Block, ...]:
    """Return who talks up to which of the updates, in their order; none where all talk in one stream."""
    cast = CASTS[scenario]
    shared = len(cast.talkers) - bool(cast.unrelated_updates)
    ends = [(updates - cast.unrelated_updates) * (number + 1) // shared for number in range(shared)]
    return tuple(Block(talker=who, end=end) for who, end in zip(cast.talkers, [*ends, updates], strict=False))


def blended(run: Settings, own: Settings) -> Settings:
    """Return the settings of a run; where it sets nothing, the user's `own` settings hold. Nothing is validated."""
    idle, _ = IDLE.get(run.training.method, ((), ""))  # settings that this method ignores, though others need them
    unfit = {*idle, "w_binary"} if run.training.method in OF_REWARDS and own.training.w_binary == 0 else {*idle}
    training = own.training.model_copy(update={name: TrainingSettings.model_fields[name].default for name in unfit})
    return run.model_copy(
        update={
            "policy": _over(own.policy, run.policy, run.policy.model_fields_set - {"renderer", "enable_thinking"}),
            "engine": _over(own.engine, run.engine, run.engine.model_fields_set),
            "judge": run.judge if own.judge.url is None else own.judge,
            "teacher": own.teacher,
            "training": _over(training, run.training, run.training.model_fields_set),
        }
    )


def digest(own: Settings) -> str:
    """Return a hash of the base policy's files and of the sections about it; raises OSError without its folder."""
    folder = own.engine.base_policy
    files = sorted((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in folder.iterdir() if p.is_file())
    sections = [section.model_dump_json() for section in (own.policy, own.engine, own.judge, own.training)]
    return hashlib.sha256(json.dumps([files, *sections]).encode()).hexdigest()[:16]


@contextlib.asynccontextmanager
async def lent(engine: EngineSettings, base: Path) -> AsyncIterator[None]:
    """Lend the engines of `engine.urls` to a run: they serve the base at the block's beginning and again at its end.

    Adapters that the block loaded are unloaded. No other client may use the engines meanwhile. Embedded engines have no
    address and end with their run. Raises TryLater where an engine does not answer at the beginning. An engine that
    does not answer at the end, or refuses, is logged, and the others are given back.
    """
    async with engine_session(engine) as http:
        engines = [engine_client(engine)(http, url) for url in engine.urls]
        known = [set(await one.lora_adapters()) for one in engines]
        for one in engines:
            await _reset(one, base)
        try:
            yield
        finally:
            for one, before in zip(engines, known, strict=True):
                try:
                    await _give_back(one, base, before)
                except (TryLater, EngineRefused) as error:
                    log.warning(
                        "engine=%s state=not given back reason=%s; restart it, or load %s", one.url, error, base
                    )


async def _give_back(engine: HttpEngine, base: Path, before: set[str]) -> None:
    for name in set(await engine.lora_adapters()) - before:
        await engine.unload_lora_adapter(name)
    await _reset(engine, base)


async def _reset(engine: HttpEngine, base: Path) -> None:
    if await engine.quantization() is not None and policy_version(await engine.weight_version()) == int(BASE_VERSION):
        return  # it takes no full weights, so it serves what it was started with
    await engine.pause(retract=True)
    try:
        await engine.update_weights(str(await asyncio.to_thread(base.absolute)), BASE_VERSION, flush_cache=True)
    finally:
        await engine.resume()


def _over(own: S, run: S, names: Iterable[str]) -> S:
    return own.model_copy(update={name: getattr(run, name) for name in names})
