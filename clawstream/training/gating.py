"""The gate of one step: it measures where the step leads, and refuses an outcome that may not be published.

A refusal raises StepRefused; then the trainer has to be restored. Nothing here has a gradient or changes the policy.
The way that a step should go is worked out apart from the loss, so a loss with a wrong sign shows. Where several
processes train the policy, each measures its share, and all decide by the same numbers.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import isfinite, isnan

from clawstream.config import TrainingSettings
from clawstream.errors import GradientNotFinite, StepRefused, TrainingDiverged
from clawstream.events import SampleAssembled
from clawstream.training.model import Model
from clawstream.training.publishing import (
    ANSWERED,
    KL_NATS,
    RECENT,
    REJECTED_IN_A_ROW,
    WRITTEN_TOKENS,
    AnswerLikelihood,
    Canary,
    GateMemory,
    Way,
    astray,
    harm,
    is_near,
    misspoken,
    one_sided,
    stopped,
)
from clawstream.training.step.batch_loss import Scored
from clawstream.training.step.losses import GAP_CLIP_NATS, Suffix
from clawstream.training.writing import write

WRITES_EVERY = 4  # versions, even if each step changes the policy little: many small steps go far too


class Gate:
    """The checks of one step, on some of its samples and on the canaries."""

    def __init__(
        self, model: Model, settings: TrainingSettings, samples: Sequence[SampleAssembled], memory: GateMemory, *,
        scored: Scored, mine: Sequence[int], num_rejected: int,
    ) -> None:  # fmt: skip
        """Measure the policy before its step; `scored` holds this process' samples, whose indices are `mine`.

        Raises StepRefused where the rewards teach nothing. After `REJECTED_IN_A_ROW` rejections a person was told; if
        the judge has not changed by then, it is accepted as it is.
        """
        judged = settings.weights[0] > 0 and scored.advantages is None  # given advantages are never one-sided
        refusal = one_sided(samples, memory) if judged and not memory.as_it_is else None
        if refusal is not None and num_rejected < REJECTED_IN_A_ROW:
            raise StepRefused(refusal)
        self.as_it_is = refusal is not None  # the step learns from rewards that teach nothing
        self._model = model
        self._settings = settings
        wanted = model.together({index: scored.wanted(place) for place, index in enumerate(mine)})
        self._chosen = _telling(samples, wanted, RECENT)
        chosen = [samples[index] for index in self._chosen]
        measured: list[SampleAssembled | Canary] = [*chosen, *memory.canaries]
        self._suffixes = [Suffix(s.prompt_ids, s.response_ids, s.temperature) for s in measured]
        self._stopped = [*map(stopped, chosen), *(c.stopped for c in memory.canaries)]
        self._before = self._measured(self._suffixes)
        self._ahead = self._before[: len(self._chosen)]
        seen = zip(self._chosen, self._before, strict=False)
        ways = model.together({at: self._way(scored, mine.index(at), one) for at, one in seen if at in mine})
        self._wanted = [ways[index] for index in self._chosen]

    def look_ahead(self, learning_rate: float) -> None:
        """Measure where the first gradient alone leads, since momentum may hide that it is wrong.

        The gradient is scaled so that its RMS entry moves a weight by `learning_rate`.
        """
        rms = self._model.gradient_rms()
        if rms == 0 or not isfinite(rms):
            return
        pace = learning_rate / rms
        ahead = {
            name: p.detach() if p.grad is None else p.detach() - pace * p.grad
            for name, p in self._model.trained.items()
        }
        with self._model.holding(ahead):
            self._ahead = self._measured(self._suffixes[: len(self._chosen)])

    def let_out(self, *, version: int, seed: int) -> None:
        """Return only if the policy may be published as it is now; else raise StepRefused."""
        after = self._measured(self._suffixes)
        refusal = harm(self._before, after, kl_nats=KL_NATS)
        refusal = refusal or astray(self._before, after, self._ahead, self._wanted)
        if refusal is None and not (is_near(self._before, after) and version % WRITES_EVERY):
            refusal = self._misspoken(seed)
        if refusal is not None:
            raise StepRefused(refusal)

    def _misspoken(self, seed: int) -> str | None:
        asked = [*_spread(len(self._chosen), ANSWERED), *range(len(self._chosen), len(self._suffixes))]
        answers = write(
            self._model, [self._suffixes[place] for place in asked], limit_tokens=WRITTEN_TOKENS, seed=seed,
            budget_tokens=self._settings.micro_batch_tokens,
        )  # fmt: skip
        if answers is None:
            return "the policy gives its next tokens no finite probabilities"
        known = zip(asked, answers, strict=True)
        return misspoken([replace(a, ended=None) if self._stopped[place] else a for place, a in known])

    def _measured(self, suffixes: Sequence[Suffix]) -> list[AnswerLikelihood]:
        mine = self._model.share([suffix.num_tokens for suffix in suffixes])
        found = self._model.likelihoods(
            [suffixes[place] for place in mine], budget_tokens=self._settings.micro_batch_tokens
        )
        everyones = self._model.together(dict(zip(mine, found, strict=True)))
        return [everyones[place] for place in range(len(suffixes))]

    def _way(self, scored: Scored, index: int, seen: AnswerLikelihood) -> Way | None:
        """Return how strongly each token of a sample is to become likelier (below 0: less so); None: no signal says.

        A hint gives a value for each token; without a hint the reward gives one value for all tokens.
        """
        clip = GAP_CLIP_NATS
        teacher = scored.hinted.get(index)
        if teacher is not None:
            student = scored.students.get(index)
            pairs = zip(teacher.tolist(), seen.logps if student is None else student.tolist(), strict=True)
            gaps = [theirs - ours for theirs, ours in pairs]
            return tuple(0.0 if isnan(gap) else max(-clip, min(clip, gap)) for gap in gaps)  # NaN: the gap is not known
        wanted = scored.wanted(index)
        if wanted is None or self._settings.weights[0] == 0:
            return None
        return (wanted,) * len(seen.logps)


def _telling(samples: Sequence[SampleAssembled], wanted: Mapping[int, float | None], at_most: int) -> list[int]:
    """Return `at_most` samples of a step, hinted or badly rewarded ones first: they make most of its gradient."""
    order = sorted(range(len(samples)), key=lambda i: samples[i].hinted_prompt_ids is None and (wanted[i] or 0) > 0)
    return order[:at_most]


def _spread(num: int, at_most: int) -> list[int]:
    count = min(num, at_most)
    return [position * num // count for position in range(count)]


@contextmanager
def refused() -> Iterator[None]:
    """Turn an error that would end the training into a refusal of this step alone."""
    try:
        yield
    except GradientNotFinite as error:
        raise StepRefused("the gradient is not finite") from error
    except TrainingDiverged as error:
        raise StepRefused(str(error)) from error
