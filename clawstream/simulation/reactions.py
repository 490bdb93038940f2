"""How simulated people ask, read an answer and react to it: pure.

An answer is read as a person reads it, by its look and its result. Each person wants a style of their own. A complaint
about the style names the wanted one, or says only that this one was wrong. When preferences flip, each wants another
person's style from then on, and complains as that person did.
"""

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

from clawstream.simulation.problems import SUBJECTS, UNRELATED

_LABEL = re.compile(r"\s*\w+\s?:")
_FORMATTING = re.compile(r"^\s{0,3}#|\*\*|__|^\s*(?:[-*]|\d+[.)])\s", re.MULTILINE)
_HEADING = re.compile(r"^#+ ", re.MULTILINE)
_PRAISE = re.compile(r"\b(?:well done|nice|great|good|lovely|bravo)\b", re.IGNORECASE)
_STEP = re.compile(r"\d+\s*\+\s*\d+\s*(?:=|is)\s*\d+")
_VERDICT = re.compile(r"(?P<no>\D*\b(?:no|not|doesn't|without) )?\D*\bcarr(?:y|ies)\b")
_RESULT_FIRST = re.compile(r"[^\d\n]*\d+(?!\d|\s*[-+*/=])")  # no calculation stands before it
_NUMBER = re.compile(r"\d+")


class Impression(StrEnum):
    """How an answer strikes the person who asked."""

    OFF_STYLE = "off_style"
    STEPS_MISSING = "steps_missing"
    WRONG = "wrong"
    GOOD = "good"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How one kind of person talks."""

    questions: Sequence[str]
    about_texts: Sequence[str]  # how they ask what is more than a sum
    complaints: Sequence[str]  # about the style, saying what is wanted


MANNERS: Mapping[str, Manner] = MappingProxyType(
    {
        "student": Manner(
            questions=(
                "What is {question}?",
                "what's {question}?",
                "hey, how much is {question}?",
                "can you add {question} for me?",
                "i need {question}, with the steps",
            ),
            about_texts=("hey, can you help me with this? {question}", "i don't get this one: {question}"),
            complaints=(
                "no headings or bold please, just say it plainly",
                "ugh, that looks like a robot wrote it. plain words please",
                "can you redo that without the bold stuff? keep the steps",
                "too fancy, just write it like a friend would",
            ),
        ),
        "teacher": Manner(
            questions=(
                "Please explain {question} to my class.",
                "My pupils ask about {question}. Please help.",
                "How would you teach {question} to my pupils?",
                "For my lesson, please: {question}.",
            ),
            about_texts=("Please explain this to my class: {question}", "For my lesson, please: {question}"),
            complaints=(
                "Please put it under headings, and name the sum.",
                "My class needs headings and a friendly word.",
                "That is too terse: headings, all details and some praise, please.",
            ),
        ),
        "ta": Manner(
            questions=(
                "Grading: {question}, any carry?",
                "TA here. Does {question} carry?",
                "To mark a test: {question}, carry or not?",
                "Checking an exam: {question}. A carry?",
            ),
            about_texts=("To mark a test: {question}", "TA here. Key for this? {question}"),
            complaints=(
                "The verdict first, please, then why.",
                "I need the result up front, the reasons after it.",
                "Start with the verdict; the working can follow.",
            ),
        ),
    }
)
VAGUE = ("that's not how i like it", "not like this, please", "hm, not what i was hoping for")
REACTIONS = {
    Impression.STEPS_MISSING: ("you left out the steps, keep them in please",),
    Impression.WRONG: (
        "that's not right, check it again",
        "hm, the number is wrong, try again",
        "i don't think that adds up",
    ),
    Impression.GOOD: ("thanks, that's perfect!", "great, thank you!", "nice, that's how i like it, thanks"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PersonTask:
    """What a person has to find out."""

    persona: str
    question: str
    answer: str
    wants: str | None = None  # whose style; None: their own
    flipped: str | None = None  # whose style they want once preferences flip; None: the one that they want now
    subject: str | None = None  # of the question; None: a problem, whose answer counts

    @property
    def speaker(self) -> str:
        """Who talks, by the names that the command `talk` takes."""
        return self.persona if self.subject is None else UNRELATED

    @property
    def wish(self) -> str:
        return self.wants or self.persona

    @property
    def is_sum(self) -> bool:
        """Whether it is two numbers to add, and no text."""
        return re.fullmatch(r"\d+ \+ \d+", self.question) is not None

    @property
    def carries(self) -> bool:
        """Whether adding up the ones of this sum gives ten or more."""
        left, right = self.question.split(" + ")
        return int(left[-1]) + int(right[-1]) >= 10


@dataclass(frozen=True, slots=True, kw_only=True)
class SumPerson:
    """Talks as whoever asks a problem; `hint_share` of the complaints about the style say what is wanted."""

    hint_share: float

    def opening(self, task: PersonTask, rng: random.Random) -> list[dict[str, str]]:
        """Return the messages with which a session begins."""
        return [{"role": "user", "content": ask(task, rng)}]

    def reaction(self, task: PersonTask, answer: str, rng: random.Random) -> str:
        """Return what the person says of the answer."""
        return react(task, impression(task, answer), rng, hint_share=self.hint_share)


def tasks(text: str) -> list[PersonTask]:
    """Return the tasks of a file with one JSON object a line; raises ValueError naming a line that is no task."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            row = json.loads(line)
            task = PersonTask(
                persona=row["persona"], question=row["question"], answer=row["answer"], flipped=row.get("flipped"),
                subject=row.get("subject"),
            )  # fmt: skip
            _known = MANNERS[task.persona], MANNERS[task.flipped or task.persona]
            _known_subject = task.subject is None or SUBJECTS[task.subject]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"line {number} is {line!r}, expected persona (one of {', '.join(MANNERS)}), question and answer; "
                "write the file again"
            ) from error
        found.append(task)
    return found


def flip(task: PersonTask) -> PersonTask:
    """Return the task as it is once preferences have flipped: asked by the same person in the same words."""
    return replace(task, wants=task.flipped or task.wish)


def wordings_of(persona: str, *, real: bool) -> Sequence[str]:
    """Return how this person asks: for a sum, or about a text."""
    return MANNERS[persona].about_texts if real else MANNERS[persona].questions


def ask(task: PersonTask, rng: random.Random) -> str:
    if task.subject is not None:
        return task.question
    return rng.choice(wordings_of(task.persona, real=not task.is_sum)).format(question=task.question)


def impression(task: PersonTask, answer: str) -> Impression:
    """Return how `answer` strikes the asker; its look counts before its number."""
    if not _LOOKS_RIGHT[task.wish](task, answer):
        return Impression.OFF_STYLE
    if not _is_right(task, answer):
        return Impression.WRONG
    return Impression.GOOD if len(_STEP.findall(answer)) >= 2 else Impression.STEPS_MISSING


def react(task: PersonTask, felt: Impression, rng: random.Random, *, hint_share: float) -> str:
    """Return what the person says; `hint_share` of complaints about the style say what is wanted instead.

    About another subject, the reaction is the same whatever the answer was.
    """
    if task.subject is not None:
        return SUBJECTS[task.subject].reaction
    words = MANNERS[task.wish].complaints if felt is Impression.OFF_STYLE else REACTIONS[felt]
    said = rng.choice(words)
    if felt is Impression.OFF_STYLE and rng.random() >= hint_share:
        return rng.choice(VAGUE)
    return said


def _is_right(task: PersonTask, answer: str) -> bool:
    numbers = _NUMBER.findall(answer if task.is_sum else answer.replace(",", ""))
    if task.wish != "ta":
        return numbers[-1:] == [task.answer]
    if not task.is_sum:
        return numbers[:1] == [task.answer]
    verdict = _VERDICT.match(answer.lower())
    return numbers[-1:] == [task.answer] and verdict is not None and (verdict["no"] is None) is task.carries


def _is_plain(_task: PersonTask, answer: str) -> bool:
    return _FORMATTING.search(answer) is None and _LABEL.match(answer) is None


def _is_lesson(_task: PersonTask, answer: str) -> bool:
    return len(_HEADING.findall(answer)) >= 2 and _PRAISE.search(answer) is not None


def _is_verdict(task: PersonTask, answer: str) -> bool:
    first = _VERDICT.match(answer.lower()) if task.is_sum else _RESULT_FIRST.match(answer)
    return _FORMATTING.search(answer) is None and first is not None


_LOOKS_RIGHT = {"student": _is_plain, "teacher": _is_lesson, "ta": _is_verdict}
