"""The samples stage: answers, verdicts and hints -> samples.

The one rule: hinted prompts are rendered by the code that rendered the prompt, so the two differ by the hint alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from clawstream.events import TokenIds
from clawstream.events.conversation import Message
from clawstream.inference.rendering import UnrenderableRequest
from clawstream.samples.joining import observe
from clawstream.samples.session import Session
from clawstream.stream.stage import Record, Stage, Step

READS = ("clawstream.exchanges.v1", "clawstream.turns.v1", "clawstream.verdicts.v1", "clawstream.hints.v1")


class Renderer(Protocol):
    """The policy's chat template."""

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> TokenIds:
        """The prompt as tokens; raises UnrenderableRequest."""


def samples_stage(renderer: Renderer) -> Stage[Session, None]:
    """Return the stage that joins what a trainer needs."""

    def render(messages: Sequence[Message], options: Mapping[str, Any]) -> TokenIds | None:
        try:
            return renderer.prompt_ids(messages, options)
        except UnrenderableRequest:
            return None

    def step(session: Session | None, record: Record) -> Step[Session, None]:
        return Step(*observe(session, record.event, render))

    return Stage(name="samples", reads=READS, step=step)
