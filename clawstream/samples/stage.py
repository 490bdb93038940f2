"""The samples stage: answers, verdicts and hints -> samples.

The one rule: hinted prompts are made by the code that made the prompt, so the two differ by the hint alone.
"""

from clawstream.events import OffDistribution
from clawstream.inference.continuing import Renderer
from clawstream.samples.joining import observe
from clawstream.samples.session import Session
from clawstream.stream.stage import Record, Stage, Step

READS = ("clawstream.exchanges.v1", "clawstream.turns.v1", "clawstream.verdicts.v1", "clawstream.hints.v1")


def samples_stage(
    renderer: Renderer, off_distribution: OffDistribution | None = OffDistribution.REFUSE, *, forgets: bool = True
) -> Stage[Session, None]:
    """Return the stage that joins what a trainer needs.

    It forgets a session that is done once every judge that has spoken is done with it, unless told not to.
    """

    def step(session: Session | None, record: Record) -> Step[Session, None]:
        return Step(*observe(session, record.event, renderer, off_distribution=off_distribution, forgets=forgets))

    return Stage(name="samples", reads=READS, step=step)
