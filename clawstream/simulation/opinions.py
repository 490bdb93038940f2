"""What the judge that simulates a judge model makes of a prompt: pure. It sees the prompt's sections, and nothing else.

The one rule: an opinion follows from the next state's words alone, save that a stated share of opinions is wrong, drawn
from the prompt, the judge's seed and the vote's own seed, so that the same three always give the same opinion.
"""

import hashlib
import re
from dataclasses import dataclass
from enum import StrEnum

HINT_MARK = "[HINT_START]"

STYLE_HINTS = (
    "Write in plain, casual words without headings or bold, and keep every step.",
    "Leave out the markdown: no headings and no bold, just talk it through with all the steps.",
    "The user wants a relaxed, plain answer with all steps, so no headings and no bold text.",
    "Answer as a friend would in a chat: plain sentences, every step kept, no formatting.",
)
CORRECTION_HINTS = ("Add the ones and the tens again and check the total; plain words, all steps kept.",)

_SECTION = re.compile(r'<next_state\b[^>]*?(?:role="(?P<role>\w+)")?[^>]*>(?P<text>.*?)</next_state>', re.DOTALL)
_ABOUT_STYLE = ("heading", "bold", "plain", "robot", "fancy", "markdown", "casual", "format", "steps", "stiff")
_ABOUT_NUMBER = ("not right", "wrong", "add up", "adds up", "check it", "mistake", "try again")
_PRAISE = ("thank", "perfect", "great", "nice", "love it", "cheers")


class Question(StrEnum):
    """What a prompt asks for."""

    SCORE = "score"
    HINT = "hint"


class Reaction(StrEnum):
    """How a next state reads."""

    WANTS_STYLE = "wants another style"
    WANTS_CORRECTION = "wants the number corrected"
    PLEASED = "is pleased"
    UNCLEAR = "says neither"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """One judge's habits."""

    wrong_share: float
    seed: int

    def reply(self, system: str, prompt: str, vote_seed: int) -> str:
        """Return the text that this judge answers to one vote."""
        question = Question.HINT if HINT_MARK in system else Question.SCORE
        reaction = read(prompt)
        wrong = self._drawn("wrong", system, prompt, vote_seed) < self.wrong_share
        if question is Question.SCORE:
            return _score(reaction, wrong=wrong)
        return _hint(reaction, self._drawn("wording", system, prompt, vote_seed), wrong=wrong)

    def _drawn(self, purpose: str, system: str, prompt: str, vote_seed: int) -> float:
        material = "\x1f".join((purpose, str(self.seed), str(vote_seed), system, prompt))
        return int.from_bytes(hashlib.sha256(material.encode("utf-8", "surrogatepass")).digest()[:7]) / 2**56


def read(prompt: str) -> Reaction:
    """Return how the last next state of `prompt` reads; UNCLEAR where there is none."""
    states = [m["text"].lower() for m in _SECTION.finditer(prompt) if m["text"].strip()]
    if not states:
        return Reaction.UNCLEAR
    said = states[-1]
    if _has(said, _ABOUT_STYLE):
        return Reaction.WANTS_STYLE
    if _has(said, _ABOUT_NUMBER):
        return Reaction.WANTS_CORRECTION
    return Reaction.PLEASED if _has(said, _PRAISE) else Reaction.UNCLEAR


def _has(said: str, cues: tuple[str, ...]) -> bool:
    return any(cue in said for cue in cues)


def _score(reaction: Reaction, *, wrong: bool) -> str:
    score = {Reaction.PLEASED: 1, Reaction.UNCLEAR: 0}.get(reaction, -1)
    if wrong:
        score = -score if score else 1
    return f"The user {reaction.value}, as I read the reply.\n\\boxed{{{score}}}"


def _hint(reaction: Reaction, drawn: float, *, wrong: bool) -> str:
    due = reaction in (Reaction.WANTS_STYLE, Reaction.WANTS_CORRECTION)
    if due == wrong:
        return "Nothing in the reply says how the answer could have been better.\n\\boxed{-1}"
    hints = CORRECTION_HINTS if reaction is Reaction.WANTS_CORRECTION else STYLE_HINTS
    hint = hints[int(drawn * len(hints))]
    return f"The user {reaction.value}, and that could have been known.\n\\boxed{{1}}\n[HINT_START]{hint}[HINT_END]"
