"""The samples stage: answers, verdicts, hints and feedback -> samples.

The one rule: hinted prompts are made by the code that made the prompt, so the two differ by the hint alone.
"""

from clawstream.samples.joining import Rules, observe
from clawstream.samples.session import Session
from clawstream.stream.stage import DAY_MS, Record, Stage, Step

READS = (
    "clawstream.exchanges.v1",
    "clawstream.turns.v1",
    "clawstream.verdicts.v1",
    "clawstream.hints.v1",
    "clawstream.feedback.v1",
)


def samples_stage(rules: Rules, *, forgets: bool = True, retain_ms: int = DAY_MS) -> Stage[Session, None]:
    """Return the stage that joins what a trainer needs.

    It puts a session away that is done once every judge that has spoken is done with it, unless told not to; feedback
    on any is heard until the session was silent for `retain_ms`.
    """

    def step(session: Session | None, record: Record) -> Step[Session, None]:
        return Step(*observe(session, record.event, rules, forgets=forgets))

    return Stage(name="samples", reads=READS, step=step, retain_ms=retain_ms)
