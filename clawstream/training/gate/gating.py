"""The gate of one step: it lets the step begin, looks where it leads, and refuses an outcome that may not be published.

The one rule: a refusal raises StepRefused, and the trainer has to be restored before it is used again.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from clawstream.config import TrainingSettings
from clawstream.errors import GradientNotFinite, StepRefused, TrainingDiverged
from clawstream.events import SampleAssembled
from clawstream.training.gate.probing import Probe
from clawstream.training.gate.publishing import REJECTED_IN_A_ROW, GateMemory, one_sided
from clawstream.training.models.model import Model
from clawstream.training.step.batch_loss import Scored


class Gate:
    """The checks that one step has to pass."""

    def __init__(
        self, model: Model, settings: TrainingSettings, samples: Sequence[SampleAssembled], memory: GateMemory, *,
        scored: Scored, mine: Sequence[int], num_rejected: int,
    ) -> None:  # fmt: skip
        """Look at the policy before its step. Raises StepRefused where the rewards teach nothing.

        After `REJECTED_IN_A_ROW` rejections a person was told; if the judge has not changed by then, it is accepted as
        it is.
        """
        judged = settings.weights[0] > 0 and scored.advantages is None  # given advantages are never one-sided
        refusal = one_sided(samples, memory) if judged and not memory.as_it_is else None
        if refusal is not None and num_rejected < REJECTED_IN_A_ROW:
            raise StepRefused(refusal)
        self.as_it_is = refusal is not None  # the step learns from rewards that teach nothing
        self._probe = Probe(model, settings, samples, memory, scored=scored, mine=mine)

    def look_ahead(self, learning_rate: float) -> None:
        """Look where the first gradient leads, while it stands in the weights."""
        self._probe.look_ahead(learning_rate)

    def let_out(self, *, version: int, seed: int) -> None:
        """Return only if the policy may be published as it is now; else raise StepRefused."""
        refusal = self._probe.refusal(version=version, seed=seed)
        if refusal is not None:
            raise StepRefused(refusal)


@contextmanager
def refused() -> Iterator[None]:
    """Turn an error that would end the training into a refusal of this step alone."""
    try:
        yield
    except GradientNotFinite as error:
        raise StepRefused("the gradient is not finite") from error
    except TrainingDiverged as error:
        raise StepRefused(str(error)) from error
