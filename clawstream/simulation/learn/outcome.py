"""The outcome of one cell of a grid, as a value and as the object of the report's JSON. Pure.

A figure that was not measured is None, and a failed cell has its error and no figure.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, TypeVar

from pydantic import TypeAdapter

from clawstream.events import StepTaken
from clawstream.simulation.learn.grid import Cell
from clawstream.simulation.runs.figures import VersionScore
from clawstream.simulation.runs.scenarios import CASTS, Block

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The base policy, asked as it is and with the hint in its prompt: the same for all cells on it."""

    baseline: VersionScore
    ceiling: VersionScore
    flipped: "Reference | None" = None  # by what people want after the flip; None: nobody's wish is exchanged
    ceiling_held_out: VersionScore | None = None  # with a hint in words that no judge uses; None: there is no such hint

    def closed(self, score: float) -> float | None:
        """Return how much of the gap between base and ceiling a score closes; None: the ceiling is not above."""
        gap = self.ceiling.score - self.baseline.score
        return (score - self.baseline.score) / gap if gap > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """The figures of one step of the trainer, under the names that the report has."""

    update: int
    loss_tokens: int
    samples: int
    kl: float | None  # to the base, nats a token
    entropy: float | None  # nats a token
    mean_length: float | None  # tokens an answer
    mean_reward: float | None
    grad_norm: float | None
    learning_rate: float
    versions_behind: float
    weights_changed_share: float | None
    version: int  # the numbers that are missing are those of rejected steps


@dataclass(frozen=True, slots=True, kw_only=True)
class CellOutcome:
    """What a run measured."""

    scores: Mapping[int, VersionScore]  # by update, without the base's
    interactions: Mapping[int, int]  # by update: answers that people had got when its batch was planned
    turns: int
    samples: int
    corrections: int  # turns judged bad, or with a hint
    refusals: Mapping[str, int]  # by reason
    correction_to_policy_s: float | None  # median; None: nobody asked again after a correction
    correction_to_policy_p90_s: float | None
    correction_to_served_s: float | None = None  # median over hints; None, here and below: none was served
    correction_to_served_max_s: float | None = None
    steps: tuple[StepFigures, ...]
    run_s: float
    code: str  # a hash of the package that ran it
    rejected: int  # rejected steps, which made no update
    requests_failed: int
    at_flip: VersionScore | None  # of the version at the flip, by what people want from then on; None: there was none
    environment_steps: int | None  # answers that agents got; None: people talked


_OF_CELL = (
    "method", "base", "seed", "control", "scenario", "updates", "learning_rate", "epochs", "answers_per_hint", "w_topk",
    "lora_rank", "hurry", "votes_together", "adapters", "hint_choice", "wordy_hints",
    "split",
)  # fmt: skip
_OF_OUTCOME = (
    "rejected", "requests_failed", "environment_steps", "turns", "samples", "corrections", "refusals",
    "correction_to_policy_s", "correction_to_policy_p90_s", "correction_to_served_s", "correction_to_served_max_s",
    "run_s", "code",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRow:
    """A cell of the report: its plan, the base's scores, and its outcome or why there is none."""

    cell: Cell
    reference: Reference
    outcome: CellOutcome | None
    error: str | None

    def score(self, update: int) -> VersionScore | None:
        """Return the score at `update`; None where there is none."""
        if update == 0:
            return self.reference.baseline
        return None if self.outcome is None else self.outcome.scores.get(update)

    def by_person(self) -> dict[int, Mapping[str, float]]:
        """Return each person's score, by update."""
        found = {update: self.score(update) for update in self.cell.score_at}
        return {update: score.by_persona for update, score in found.items() if score and score.by_persona}

    def reference_at(self, update: int) -> Reference:
        """Return the base's scores by what people want at `update`."""
        flipped = self.reference.flipped if self.cell.is_flipped(update) else None
        return flipped or self.reference

    def rejected_share(self, until: int) -> float | None:
        """Return the share of steps up to update `until` that were rejected; None: no such update, or rounds count."""
        if self.outcome is None or CASTS[self.cell.scenario].attempts is not None:
            return None
        steps = self.outcome.steps
        version = next((step.version for step in steps if step.update == until), None)
        return None if version is None else (version - until) / version

    def interactions(self, update: int) -> int | None:
        """Return how many answers people had got when `update`'s batch was planned; None: that was not counted."""
        if update == 0:
            return 0
        return None if self.outcome is None else self.outcome.interactions.get(update)

    def as_json(self) -> dict[str, Any]:
        """The object of the report."""
        cell, outcome, reference = self.cell, self.outcome, self.reference
        head: dict[str, Any] = {name: getattr(cell, name) for name in _OF_CELL}
        head |= {"ceiling": reference.ceiling.score, "baseline": reference.baseline.score}
        head["changed"] = dict(cell.changed)
        held_out = reference.ceiling_held_out
        head |= {"ceiling_held_out": None if held_out is None else held_out.score}
        head |= {"ceiling_by_persona": reference.ceiling.by_persona}
        asked = {"plain": reference.baseline.prompt_tokens, "with_hint": reference.ceiling.prompt_tokens}
        head |= {"prompt_tokens": None if None in asked.values() else asked}
        head |= {"teacher": cell.taught_by, "flip_after": cell.flip_after}
        head |= {"roles": None if cell.roles is None else asdict(cell.roles)}
        if outcome is None:
            return head | {"error": self.error}
        scores = {0: reference.baseline, **outcome.scores}
        last = outcome.steps[-1] if outcome.steps else None
        return head | {
            "scores": {str(update): score.score for update, score in scores.items()},
            "intervals": {str(update): [score.low, score.high] for update, score in scores.items()},
            "interactions": {str(update): self.interactions(update) for update in scores},
            "right": {str(update): score.num_right for update, score in scores.items()},
            "styled": {str(update): score.num_styled for update, score in scores.items()},
            "ungraded": {str(update): score.num_ungraded for update, score in scores.items()},
            "by_persona": {str(update): score.by_persona for update, score in scores.items()},
            "gap_closed": {str(update): reference.closed(score.score) for update, score in scores.items()},
            "general": {str(u): asdict(score.general) for u, score in scores.items() if score.general} or None,
            "flip": self._flip(),
            "blocks": {block.talker: block.end for block in cell.blocks} or None,
            "kept": kept(cell.blocks, self.by_person()),
            "newest": newest(cell.blocks, self.by_person()),
            "others_lost": others_lost(cell.blocks, self.by_person()),
            "rejected_share": self.rejected_share(cell.updates),
            "loss_tokens": sum(step.loss_tokens for step in outcome.steps),
            "kl": None if last is None else last.kl,
            "entropy": None if last is None else last.entropy,
            "mean_length": None if last is None else last.mean_length,
            "problems": reference.baseline.num_problems,
            "steps": [asdict(step) for step in outcome.steps],
            **{name: getattr(outcome, name) for name in _OF_OUTCOME},
        }

    def _flip(self) -> dict[str, Any] | None:
        """The scores by the wishes after the flip, by the number of updates since; None: there was no flip."""
        after, flipped, outcome = self.cell.flip_after, self.reference.flipped, self.outcome
        if after is None or flipped is None or outcome is None or outcome.at_flip is None:
            return None
        scores = {after: outcome.at_flip, **{u: s for u, s in outcome.scores.items() if u > after}}
        return {
            "baseline": flipped.baseline.score,
            "ceiling": flipped.ceiling.score,
            "scores": {str(update - after): score.score for update, score in scores.items()},
        }


def kept(blocks: Sequence[Block], by_person: Mapping[int, Mapping[str, float]]) -> float | None:
    """Return how much the policy kept of what it learned from each person: the mean, over people, of the score at the
    end divided by the score when that person's block ended.

    The person who talked last does not count, nor does anybody whose score was 0 when their block ended, or who has no
    score at the end. None: nobody counts. `by_person` is by update.
    """
    if not blocks or blocks[-1].end not in by_person:
        return None
    last = by_person[blocks[-1].end]
    then = {block.talker: by_person.get(block.end, {}).get(block.talker) for block in blocks[:-1]}
    shares = [last[who] / score for who, score in then.items() if score and who in last]
    return fmean(shares) if shares else None


def newest(blocks: Sequence[Block], by_person: Mapping[int, Mapping[str, float]]) -> float | None:
    """Return the last talker's score at the end; None: that person has no score, or there are no blocks."""
    return by_person.get(blocks[-1].end, {}).get(blocks[-1].talker) if blocks else None


def others_lost(blocks: Sequence[Block], by_person: Mapping[int, Mapping[str, float]]) -> float | None:
    """Return how much lower the scores of people who never talked are at the end than the base's: the mean over them.

    None: everybody talked, or no score is known.
    """
    if not blocks or not {0, blocks[-1].end} <= by_person.keys():
        return None
    base, last = by_person[0], by_person[blocks[-1].end]
    silent = base.keys() & last.keys() - {block.talker for block in blocks}
    return fmean(base[who] - last[who] for who in silent) if silent else None


def update_of(step: StepTaken, update: int) -> StepFigures:
    """Return the report's figures of a step, the one that made update number `update`."""
    return StepFigures(
        update=update,
        loss_tokens=step.num_tokens,
        samples=step.num_samples,
        kl=step.kl_reference_nats,
        entropy=step.entropy_nats,
        mean_length=step.mean_response_tokens,
        mean_reward=step.mean_reward,
        grad_norm=step.grad_norm,
        learning_rate=step.learning_rate,
        versions_behind=step.mean_versions_behind,
        weights_changed_share=step.weights_changed_share,
        version=step.policy_version,
    )


def read_as(kind: type[T], text: str) -> T:
    """Return a value of a dataclass that was written as JSON of its `asdict`; raises ValueError for any other text."""
    return TypeAdapter(kind).validate_python(json.loads(text))
