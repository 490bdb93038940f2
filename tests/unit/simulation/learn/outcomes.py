"""Rows of a report as tests write them."""

from collections.abc import Collection, Mapping
from dataclasses import replace

from clawstream.simulation.learn.grid import Cell
from clawstream.simulation.learn.outcome import CellOutcome, Reference, ReportRow, StepFigures
from clawstream.simulation.opinions import Control
from clawstream.simulation.runs.figures import GeneralScore, VersionScore

STEP = StepFigures(
    update=16, loss_tokens=500, samples=16, kl=0.06, entropy=0.5, mean_length=30.5, mean_reward=0.75, grad_norm=0.4,
    learning_rate=2e-4, versions_behind=0.5, weights_changed_share=0.99, version=16,
)  # fmt: skip


def score(update: int, share: float) -> VersionScore:
    return VersionScore(
        update=update, score=share, low=share - 0.04, high=share + 0.04, num_problems=500,
        num_right=450, num_styled=300, by_persona={"student": share, "ta": share},
    )  # fmt: skip


FLIPPED = Reference(baseline=score(0, 0.1), ceiling=score(0, 0.5))
REFERENCE = Reference(baseline=score(0, 0.2), ceiling=score(0, 0.8))


def long_row(
    scores: Mapping[int, float], *, flip_after: int | None = None, at_flip: float | None = None, seed: int = 0,
    teacher: str = "usual", rejected: Collection[int] = (),
    figures: Mapping[int, tuple[float, float]] | None = None,
) -> ReportRow:  # fmt: skip
    """A run scored at these updates; versions `rejected` were none, `figures` are (entropy, length) of some updates."""
    last = max(scores)
    versions = [version for version in range(1, last + len(rejected) + 1) if version not in rejected]
    steps = tuple(
        replace(STEP, update=update, version=version, entropy=entropy, mean_length=length)
        for update, version in enumerate(versions, 1)
        for entropy, length in [(figures or {}).get(update, (0.5, 30.0))]
    )
    return ReportRow(
        cell=replace(cell(seed=seed), updates=last, score_at=(0, *scores), flip_after=flip_after, teacher=teacher),
        reference=REFERENCE if flip_after is None else replace(REFERENCE, flipped=FLIPPED),
        outcome=replace(
            outcome(0.4, 0.6),
            scores={update: score(update, share) for update, share in scores.items()},
            interactions={update: 16 * update for update in scores},
            steps=steps,
            rejected=len(rejected),
            at_flip=None if at_flip is None else score(flip_after or 0, at_flip),
        ),
        error=None,
    )


def block_row(
    by_person: Mapping[int, Mapping[str, float]], *, scenario: str = "blocks", seed: int = 0,
    control: Control | None = None,
) -> ReportRow:  # fmt: skip
    """A run in which people talk one after the other, with these scores by update and person."""
    last = max(by_person)
    return ReportRow(
        cell=replace(
            cell(seed=seed, control=control), scenario=scenario, updates=last, score_at=(0, *sorted({*by_person} - {0}))
        ),
        reference=REFERENCE,
        outcome=replace(
            outcome(0.4, 0.6),
            scores={
                update: replace(score(update, sum(each.values()) / len(each)), by_persona=each)
                for update, each in by_person.items()
            },
            interactions={update: 16 * update for update in by_person},
        ),
        error=None,
    )


def everyday_row(last: float, *, perplexity: float | None, control: Control | None = None) -> ReportRow:
    """A run with everyday requests, scored at its end; the base scores 0.2, and with the hint 0.8."""
    known = GeneralScore(facts=0.8, sums=0.5, perplexity=18.0)
    reference = Reference(
        baseline=replace(score(0, 0.2), general=known, prompt_tokens=40.4),
        ceiling=replace(score(0, 0.8), prompt_tokens=55.0),
        ceiling_held_out=score(0, 0.6),
    )
    left = GeneralScore(facts=0.7, sums=0.4, perplexity=perplexity)
    return ReportRow(
        cell=replace(cell(control=control), scenario="everyday", base="smollm2", split="report", score_at=(0, 16)),
        reference=reference,
        outcome=replace(outcome(0.4, 0.6), scores={16: replace(score(16, last), general=left)}, interactions={16: 99}),
        error=None,
    )


def cell(method: str = "combined", *, seed: int = 0, control: Control | None = None) -> Cell:
    return Cell(
        scenario="all", base="standard", base_sha="a", problems_sha="a", method=method, seed=seed, control=control,
        updates=16, learning_rate=2e-4, epochs=1, answers_per_hint=1, lora_rank=None, hurry=False, score_at=(0, 8, 16),
    )  # fmt: skip


def outcome(half_way: float, last: float) -> CellOutcome:
    return CellOutcome(
        scores={8: score(8, half_way), 16: score(16, last)},
        interactions={8: 250, 16: 510},
        turns=270,
        samples=260,
        corrections=120,
        refusals={"cut_off": 3},
        correction_to_policy_s=4.5,
        correction_to_policy_p90_s=9.0,
        steps=(STEP, STEP),
        run_s=80.0,
        code="abc",
        rejected=2,
        requests_failed=1,
        at_flip=None,
        environment_steps=None,
    )


def row(
    half_way: float, last: float, *, method: str = "combined", seed: int = 0, control: Control | None = None
) -> ReportRow:
    return ReportRow(
        cell=cell(method, seed=seed, control=control), reference=REFERENCE, outcome=outcome(half_way, last), error=None
    )


def failed(method: str = "combined", *, seed: int = 0, control: Control | None = None) -> ReportRow:
    return ReportRow(
        cell=cell(method, seed=seed, control=control), reference=REFERENCE, outcome=None, error="no broker"
    )
