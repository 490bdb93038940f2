"""How the simulated student asks, reads an answer and reacts to it: pure.

The one rule: an answer is read as a person reads it, by its look and its last number. The student wants plain, casual
answers with all the steps kept, says so in words, and never names a style by any other sign.
"""

import random
import re
from dataclasses import dataclass
from enum import StrEnum

QUESTIONS = (
    "What is {left} + {right}?",
    "what's {left} + {right}?",
    "hey, how much is {left} + {right}?",
    "can you add {left} + {right} for me?",
    "i need {left} + {right}, with the steps",
)
_FORMATTING = re.compile(r"^\s{0,3}#|\*\*|__|^\s*(?:[-*]|\d+[.)])\s", re.MULTILINE)
_STEP = re.compile(r"\d+\s*\+\s*\d+\s*(?:=|is)\s*\d+")
_NUMBER = re.compile(r"\d+")


class Impression(StrEnum):
    """How an answer strikes the student."""

    STIFF = "stiff"
    STEPS_MISSING = "steps_missing"
    WRONG = "wrong"
    GOOD = "good"


REACTIONS = {
    Impression.STIFF: (
        "no headings or bold please, just say it plainly",
        "ugh, that looks like a robot wrote it. plain words please",
        "can you redo that without the bold stuff? keep the steps",
        "too fancy, just write it like a friend would",
    ),
    Impression.STEPS_MISSING: ("you left out the steps, keep them in please",),
    Impression.WRONG: (
        "that's not right, check it again",
        "hm, the number is wrong, try again",
        "i don't think that adds up",
    ),
    Impression.GOOD: ("thanks, that's perfect!", "great, thank you!", "nice, that's how i like it, thanks"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The sum that a student has to hand in."""

    left: int
    right: int


def tasks(text: str) -> list[Task]:
    """Return the tasks of a file with one `LEFT RIGHT` a line; raises ValueError naming the line that is not."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if len(words) != 2 or not all(word.isdecimal() for word in words):
            raise ValueError(f"line {number} is {line!r}, expected two whole numbers; write the file anew")
        found.append(Task(left=int(words[0]), right=int(words[1])))
    return found


def ask(task: Task, rng: random.Random) -> str:
    """Return a question in one of the student's wordings."""
    return rng.choice(QUESTIONS).format(left=task.left, right=task.right)


def impression(task: Task, answer: str) -> Impression:
    """Return how `answer` strikes the student; the look comes before the number, as it does to the eye."""
    if _FORMATTING.search(answer):
        return Impression.STIFF
    numbers = _NUMBER.findall(answer)
    if not numbers or int(numbers[-1]) != task.left + task.right:
        return Impression.WRONG
    return Impression.GOOD if len(_STEP.findall(answer)) >= 2 else Impression.STEPS_MISSING


def react(felt: Impression, rng: random.Random) -> str:
    """Return what the student says about an answer that struck them so."""
    return rng.choice(REACTIONS[felt])
