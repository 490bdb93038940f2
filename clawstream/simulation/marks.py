"""Marks the answers that the simulation's scorer gets, and computes their share with its interval. Pure.

Of everyday requests everyday/scorer.py says whether an answer is one, and as wished. Of sums the rule is:

an answer counts if its result is right and it has every part of the style that this person wants:
student   no markup and no labels, every step kept, the result last
teacher   two headings or more, the question's numbers named, a friendly word, every step kept, the result last
ta        the verdict before any number (of a sum: whether it carries), then every step, the result last; no markup
          (of another problem the result itself is the verdict, and comes before any working)
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from types import MappingProxyType

from clawstream.simulation.everyday import GeneralQuestion
from clawstream.simulation.everyday.scorer import WISH_IDS, holds, is_answer

HINT_MARKER = "[user's hint / instruction]"
_Z95 = 1.959963984540054
_MARKUP = ("#", "*", "`", "_")
_LISTED = re.compile(r"^\s*(?:-|\d+[.)])\s", re.MULTILINE)
_LABEL = re.compile(r"^\s*[A-Za-z]+:", re.MULTILINE)
_HEADING = re.compile(r"^#{1,6} +\S", re.MULTILINE)
_EQUATION = re.compile(r"(\d+)\s*[+*/x-]\s*(\d+)\s*=\s*\d+")
_SUM = re.compile(r"(\d+) \+ (\d+)")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_FRIENDLY = ("well done", "nice", "great", "good", "lovely", "bravo", "kind", "proud", "happy")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutQuestion:
    """One held-out problem, as one person asks it."""

    persona: str
    prompt: str
    hint: str  # says what this person wants
    question: str
    answer: str
    wants: str | None = None  # whose style; None: their own

    @property
    def wish(self) -> str:
        """The person whose style is wanted."""
        return self.wants or self.persona

    def messages(self, *, hinted: bool) -> list[dict[str, str]]:
        """Return the messages of the request, with the hint where the trainer's teacher reads it."""
        return [{"role": "user", "content": _with_hint(self.prompt, self.hint) if hinted else self.prompt}]

    def mark(self, answer: str, *, finished: bool, hinted: bool, mean_nats: float | None = None) -> "AnswerMark":
        """Return the marks of an answer."""
        del finished, hinted, mean_nats
        return mark(self, answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class EverydayQuestion:
    """One everyday request, as one person asks it."""

    persona: str
    system: str
    question: str
    wish: str
    hint: str  # says what the wish is

    def messages(self, *, hinted: bool) -> list[dict[str, str]]:
        """Return the messages of the request, with the hint where the trainer's teacher reads it."""
        asked = _with_hint(self.question, self.hint) if hinted else self.question
        return [{"role": "system", "content": self.system}, {"role": "user", "content": asked}]

    def mark(self, answer: str, *, finished: bool, hinted: bool, mean_nats: float | None = None) -> "AnswerMark":
        """Return the marks of an answer, which the model `finished` or not; right is what answers the request.

        `mean_nats`: a token's mean log-prob under the untrained model with the hint; None: it is not known.
        """
        hint = f"{HINT_MARKER}\n{self.hint}" if hinted else None
        right = is_answer(answer, self.question, wish=self.wish, finished=finished, hint=hint, mean_nats=mean_nats)
        return AnswerMark(right=right, styled=holds(self.wish, answer))


ScoredQuestion = HeldOutQuestion | EverydayQuestion


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerMark:
    """What an answer is worth: by rules whether it is right and styled, by a language model a grade."""

    right: bool | None = None  # None, here and below: a language model graded it
    styled: bool | None = None
    grade: float | None = None  # 0 to 1; None: rules marked it

    @property
    def value(self) -> float:
        return float(bool(self.right and self.styled)) if self.grade is None else self.grade


def _with_hint(prompt: str, hint: str) -> str:
    return f"{prompt}\n\n{HINT_MARKER}\n{hint}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreEstimate:
    """The share of answers that are right and styled, with its 95 % interval by Wilson; or the mean grade, with one by
    the normal distribution.
    """

    score: float
    ci95_low: float
    ci95_high: float
    n: int
    right: int | None  # None, here and below: a language model graded the answers
    styled: int | None
    ungraded: int = 0  # answers that have no grade, and are none of the `n`


def questions(text: str) -> list[HeldOutQuestion]:
    """Return the problems of a file with one JSON object a line; raises ValueError for any other, and for none."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            question = HeldOutQuestion(**json.loads(line))
            _STYLED[question.persona], _STYLED[question.wish]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"line {number} is {line!r}, expected an object with persona (one of {', '.join(_STYLED)}), prompt, "
                "hint, question and answer; write the file again"
            ) from error
        found.append(question)
    if not found:
        raise ValueError("found no line, expected at least one problem; write the file again")
    return found


def everyday_questions(text: str) -> list[EverydayQuestion]:
    """Return the requests of a file with one JSON object a line; raises ValueError for any other, and for none."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            question = EverydayQuestion(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"line {number} is {line!r}, expected an object with persona, system, question, wish and hint; write "
                "the file again"
            ) from error
        if question.wish not in WISH_IDS:
            raise ValueError(f"line {number} has the wish {question.wish!r}, expected one of {', '.join(WISH_IDS)}")
        found.append(question)
    if not found:
        raise ValueError("found no line, expected at least one request; write the file again")
    return found


def mark(question: HeldOutQuestion, answer: str) -> AnswerMark:
    """Return the marks of `answer`; its result is the last number, or the first where the result is the verdict."""
    asked = _SUM.fullmatch(question.question)
    said = _NUMBER.findall(answer if asked else answer.replace(",", ""))
    found = said[:1] if question.wish == "ta" and not asked else said[-1:]
    right = [float(number) for number in found] == [float(question.answer.replace(",", ""))]
    if question.wish == "ta" and asked:
        left, added = map(int, asked.groups())
        right = right and _says_carry(answer) is (left % 10 + added % 10 > 9)
    return AnswerMark(right=right, styled=_STYLED[question.wish](question, answer) and _has_steps(question, answer))


def knows(answer: str, wanted: GeneralQuestion) -> bool:
    """Whether the answer has one of the wanted ones, as whole words."""
    said = answer.lower()
    return any(re.search(rf"(?<!\w){re.escape(one.lower())}(?!\w)", said) for one in wanted.answers)


def by_persona(asked: Sequence[ScoredQuestion], marks: Sequence[AnswerMark | None]) -> dict[str, float]:
    """Return each person's share of answers that are right and styled, or their mean grade."""
    worth: dict[str, list[float]] = {}
    for question, given in zip(asked, marks, strict=True):
        if given is not None:
            worth.setdefault(question.persona, []).append(given.value)
    return {persona: fmean(each) for persona, each in sorted(worth.items())}


def total(given: Sequence[AnswerMark | None]) -> ScoreEstimate:
    """Return the score of all answers that have a mark; there has to be at least one."""
    marks = [one for one in given if one is not None]
    values = [one.value for one in marks]
    graded = any(one.grade is not None for one in marks)
    low, high = _of_grades(values) if graded else wilson(round(sum(values)), len(marks))
    return ScoreEstimate(
        score=fmean(values),
        ci95_low=low,
        ci95_high=high,
        n=len(marks),
        right=None if graded else sum(bool(one.right) for one in marks),
        styled=None if graded else sum(bool(one.styled) for one in marks),
        ungraded=len(given) - len(marks),
    )


def _of_grades(grades: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of a mean grade; one grade says nothing about it."""
    if len(grades) < 2:
        return 0.0, 1.0
    half = _Z95 * stdev(grades) / math.sqrt(len(grades))
    return max(0.0, fmean(grades) - half), min(1.0, fmean(grades) + half)


def wilson(successes: int, n: int) -> tuple[float, float]:
    """Return the 95 % interval of a share by Wilson's score method."""
    share, z2 = successes / n, _Z95**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    # Rounding may leave a bound on the share's wrong side where the share is 0 or 1.
    return min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half))


def _has_steps(question: HeldOutQuestion, answer: str) -> bool:
    """Whether ones and tens are added up in writing; of another problem than a sum, whether anything is worked out."""
    written = {(int(left), int(right)) for left, right in _EQUATION.findall(answer)}
    asked = _SUM.fullmatch(question.question)
    if asked is None:
        return written != set()
    left, right = map(int, asked.groups())
    return {(left % 10, right % 10), (left // 10 * 10, right // 10 * 10)} <= written


def _bare(answer: str) -> bool:
    return not any(sign in answer for sign in _MARKUP) and _LISTED.search(answer) is None


def _plain(_question: HeldOutQuestion, answer: str) -> bool:
    return _bare(answer) and _LABEL.search(answer) is None


def _lesson(question: HeldOutQuestion, answer: str) -> bool:
    numbers = set(re.findall(r"\d+", answer))
    return (
        len(_HEADING.findall(answer)) >= 2
        and set(re.findall(r"\d+", question.question)) <= numbers
        and any(word in answer.lower() for word in _FRIENDLY)
    )


def _verdict_first(question: HeldOutQuestion, answer: str) -> bool:
    if _SUM.fullmatch(question.question):
        return _bare(answer) and _says_carry(answer) is not None
    first, worked_out = _NUMBER.search(answer), _EQUATION.search(answer)
    return _bare(answer) and first is not None and worked_out is not None and first.end() <= worked_out.start()


def _says_carry(answer: str) -> bool | None:
    """Whether there is a carry, by the words before the first number; None where they do not say."""
    before = re.split(r"\d", answer, maxsplit=1)[0].lower()
    if "carr" not in before:
        return None
    return re.search(r"\b(?:no|not|without)\b", before) is None


_STYLED: Mapping[str, Callable[[HeldOutQuestion, str], bool]] = MappingProxyType(
    {"student": _plain, "teacher": _lesson, "ta": _verdict_first}
)
