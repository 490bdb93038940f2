"""What the simulated judge understands of a reaction to an everyday answer, and which hints it then gives. Pure.

It knows all wordings that people use for each wish, as a language model knows what they mean, and of the conversation
the person's next words alone. The one rule: this shares nothing with those who talk, and nothing with the scorer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from clawstream.simulation.everyday import AnswerWish, wishes
from clawstream.simulation.opinions import Reaction

_CONTENT = ("thank", "perfect", "great")
_NOT_CONTENT = ("doesn't answer", "not what i asked", "what about my question")
_BY_THE_WAY = "Answer the request itself, and bring the answer to an end."  # a hint where nothing was to be said


@dataclass(frozen=True, slots=True, kw_only=True)
class EverydayListener:
    """Tells which wish a complaint is about, be it said or not."""

    known: Sequence[AnswerWish]
    inventions: Sequence[str] = (_BY_THE_WAY,)

    def reaction(self, said: str) -> Reaction:
        """Return how the words read."""
        if self._wish(said) is not None:
            return Reaction.WANTS_STYLE
        if any(cue in said for cue in _NOT_CONTENT):
            return Reaction.DISPLEASED
        return Reaction.PLEASED if any(cue in said for cue in _CONTENT) else Reaction.UNCLEAR

    def hints(self, said: str) -> Sequence[str]:
        """Return the hints that the words give reason to; none where no wish shows in them."""
        wish = self._wish(said)
        return () if wish is None else wish.hints

    def _wish(self, said: str) -> AnswerWish | None:
        return next((w for w in self.known if any(words.lower() in said for words in w.complaints)), None)


_LISTENER = EverydayListener(known=wishes())
LISTENERS: Mapping[str, EverydayListener] = MappingProxyType({"everyday": _LISTENER, "everyday_blocks": _LISTENER})
