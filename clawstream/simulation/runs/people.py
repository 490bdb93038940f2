"""The people of a scenario and their questions, written where the programs that simulate them read them."""

import hashlib
import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from pathlib import Path

import orjson

from clawstream.simulation.everyday import Split, personas, requests_of, wish_of
from clawstream.simulation.problems import Chain, ChainTask, SumSet, of_group
from clawstream.simulation.roles import BY_CODE, Roles
from clawstream.simulation.runs.scenarios import (
    CASTS,
    SCENARIOS,
    SCORED_FLIPPED,
    ScenarioPrograms,
    UnusableProblems,
    write,
)

NUM_TRIED, NUM_HELD_OUT = 1500, 300
NUM_REQUESTS = 30  # that are scored, of each person: an answer of a pretrained model takes a second or more
_SAMPLES_A_PLAYED_SESSION = 4  # about: a language model that plays a person is answered two to eight times
_HINT_SHARE = 0.5  # of complaints about everyday answers: the share that says what is wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class People:
    """Who talks to the policy in a run, and what is asked of it for a score."""

    scenario: str
    hint_share: float  # of complaints: the share that says what is wanted
    asked: Path  # a problem a line
    scored: Path  # a problem a line; people ask none of these
    scored_flipped: Path  # the same problems, with the wishes after a flip
    scored_held_out: Path | None = None  # the same, with hints in words that no judge uses; None: there are none
    roles: Roles = BY_CODE

    @property
    def cast(self) -> ScenarioPrograms:
        usual = CASTS[self.scenario]
        return usual if self.roles.people is None else replace(usual, samples_a_session=_SAMPLES_A_PLAYED_SESSION)

    @property
    def sha(self) -> str:
        """The start of a hash of all that is asked, and of who scores; wishes after a flip are no part of it."""
        rows = [json.loads(line) for line in self.asked.read_text().splitlines()]
        asked = "".join(f"{json.dumps({k: v for k, v in row.items() if k != 'flipped'})}\n" for row in rows)
        grader = (self.roles.scorer or "").encode()
        return hashlib.sha256(asked.encode() + self.scored.read_bytes() + grader).hexdigest()[:12]


def people_of(
    name: str,
    folder: Path,
    *,
    problems: Path | None = None,
    split: Split = Split.REPORT,
    num_scored: int = NUM_REQUESTS,
) -> People:
    """Return the people of a scenario; `problems` are real ones in place of sums. Raises UnusableProblems.

    Of everyday requests `num_scored` of `split` are scored for each person.
    """
    if CASTS[name].attempts is not None:
        return _agents(name, folder)
    if CASTS[name].everyday:
        return _everyday(name, folder, split, num_scored)
    scenario = SCENARIOS[name]
    asked, scored = write(scenario, folder, problems=problems)
    return People(
        scenario=name,
        hint_share=scenario.hint_share,
        asked=asked.absolute(),
        scored=scored.absolute(),
        scored_flipped=scored.with_name(SCORED_FLIPPED).absolute(),
    )


def _everyday(name: str, folder: Path, split: Split, num_scored: int) -> People:
    """Return the people who ask everyday requests: in a run each asks all of them, for a score each asks others."""
    held_out, who = requests_of(split), personas()
    if num_scored > len(held_out):
        raise UnusableProblems(
            f"{num_scored} requests of each person are to be scored, and the split {split} has {len(held_out)}. "
            "Nothing was written. Name fewer"
        )
    asked_path, scored_path, others_path = (
        folder / f"{file}.jsonl" for file in ("requests", "scored", "scored-held-out")
    )
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"persona": one.name, "system": one.system, "wish": one.wish} for one in who]
    _write_rows(
        asked_path,
        [
            {**row, "request": request, "held_out": split is Split.REPORT}
            for request in requests_of(Split.PEOPLE)
            for row in rows
        ],
    )
    scored, others = [], []
    for number, (one, row) in enumerate(zip(who, rows, strict=True)):
        start, wish = number * len(held_out) // len(who), wish_of(one)
        questions = [row | {"question": request} for request in (*held_out[start:], *held_out[:start])[:num_scored]]
        scored += [row | {"hint": hint} for row, hint in zip(questions, cycle(wish.hints), strict=False)]
        others += [row | {"hint": hint} for row, hint in zip(questions, cycle(wish.hints_held_out), strict=False)]
    _write_rows(scored_path, scored)
    _write_rows(others_path, others)
    return People(
        scenario=name,
        hint_share=_HINT_SHARE,
        asked=asked_path.absolute(),
        scored=scored_path.absolute(),
        scored_flipped=scored_path.absolute(),  # nobody's wish is exchanged
        scored_held_out=others_path.absolute(),
    )


def _agents(name: str, folder: Path) -> People:
    """Return the agents, who need no hints; the same tasks each time."""
    from clawstream.simulation.policy.lessons import HINT  # what base policies are made of, which a run does not need

    tried, held_out = folder / "tasks.jsonl", folder / "scored.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    _write(tried, islice(of_group(SumSet.STUDENTS, random.Random("tried")), NUM_TRIED), HINT)
    _write(held_out, islice(of_group(SumSet.SCORED, random.Random("scored")), NUM_HELD_OUT), HINT)
    return People(
        scenario=name,
        hint_share=0.0,
        asked=tried.absolute(),
        scored=held_out.absolute(),
        scored_flipped=held_out.absolute(),  # whose wishes can't be exchanged
    )


def _write(path: Path, chains: Iterable[Chain], hint: str) -> None:
    asked = [ChainTask(question=chain.text, answer=str(chain.result), hint=hint) for chain in chains]
    _write_rows(path, [asdict(task) for task in asked])


def _write_rows(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
