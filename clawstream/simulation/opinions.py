"""The opinions that the simulated judges have of answers and of agents' steps, and of control runs. Pure.

An opinion of an answer follows from the words of the next state alone. An opinion of a step follows from the task and
the results before it: this judge is blind to the outcome, and never works out the task's result. A stated share of
opinions is wrong; which ones follows from the prompt, the judge's seed and the vote's own seed.

In a control run what people say, or a part of it, does not reach the policy. A control changes one thing and leaves the
rest of the pipeline as it is. `coin` and `shuffled` change the judge's answers, `frozen` the learning rate.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Protocol

HINT_MARK = "[HINT_START]"
_SECTION = re.compile(r'<next_state\b[^>]*?(?:role="(?P<role>\w+)")?[^>]*>(?P<text>.*?)</next_state>', re.DOTALL)
_ABOUT_SOMETHING = ("not how i like", "not like this", "not what i")
_ABOUT_NUMBER = ("not right", "wrong", "add up", "adds up", "check it", "mistake", "try again")
_PRAISE = ("thank", "perfect", "great", "nice", "love it", "cheers")
_CHECK = "Add the ones and the tens again and check the total"
_REQUEST = re.compile(r"<request>\s*(.*?)\s*</request>", re.DOTALL)
_ANSWER = re.compile(r"<answer>\s*(.*?)\s*</answer>", re.DOTALL)
_OPERATION = re.compile(r"\b(?:(take)|(add)|(times)|(minus)) ([0-9]+)")
_SIGNS = {"add": "+", "times": "*", "minus": "-"}
_CALL = re.compile(r'\(calls \w+ with \{"expression":\s*"([^"]*)"\}\)')
_SHOWN = re.compile(r"\[tool\]\s*(-?[0-9]+)")  # an error shows none
_NUMBER = re.compile(r"-?[0-9]+")
_CASE = re.compile(r"<request>.*</next_state>", re.DOTALL)
_OPENING = re.compile(r"<request>\s*(.*?)\s*(?:\n\n\[assistant\]\n|</request>)", re.DOTALL)
_OPENING_CHARACTERS = 500  # well within the kept part of a request that is cut, so all turns of a session agree on it


class Wish(StrEnum):
    """The styles that a next state may ask for."""

    PLAIN = "plain"
    HEADED = "headed"
    VERDICT = "verdict"


HINTS: Mapping[Wish, Sequence[str]] = {
    Wish.PLAIN: (
        "Write in plain, casual words without headings or bold, and keep every step.",
        "Leave out the markdown: no headings and no bold, just talk it through with all the steps.",
        "The user wants a relaxed, plain answer with all steps, so no headings and no bold text.",
        "Answer as a friend would in a chat: plain sentences, every step kept, no formatting.",
    ),
    Wish.HEADED: (
        "Use headings, name the sum, give all details and add a friendly word.",
        "The user teaches: headings, the very sum by name, details and praise.",
        "Be specific, detailed and friendly, under headings.",
    ),
    Wish.VERDICT: (
        "Give the verdict first, and the reasons after it.",
        "The user marks tests: verdict up front, then the working.",
        "Start with the verdict; let the steps follow.",
    ),
}

_ABOUT_STYLE = (  # the first that fits counts: "heading" stands in a wish for headings too
    (Wish.VERDICT, ("verdict", "up front", "result first", "answer first")),
    (Wish.HEADED, ("under headings", "needs headings", "headings, all", "more headings", "praise", "friendly")),
    (Wish.PLAIN, ("heading", "bold", "plain", "robot", "fancy", "markdown", "casual", "format", "steps", "stiff")),
)
_ABOUT_ANOTHER_SUBJECT = (  # what is said of answers that are no sums, and the hint in it
    ("no meat", "The user eats no meat: name dishes of vegetables, beans or eggs alone."),
    ("the wind", "The user cycles to work: say how strong the wind is, and from where."),
    ("no car", "The user has no car: name trains and buses, and where to change."),
    ("freezes", "It freezes in the user's garden until May: name dates after that."),
    ("okafor", "Address the landlord as Mr. Okafor, and sign with the user's name."),
    ("scary", "Children watch too: choose films without fear or violence."),
    ("my knee", "The user's knee hurts: keep each run short, flat and slow."),
    ("pronounced", "Put the pronunciation in brackets after each foreign word."),
    ("the cello", "The user plays the cello: choose pieces for strings."),
    ("puppy", "The dog is ten weeks old: say what is good for puppies."),
    ("cost less", "Choose a gift that costs less than a book does."),
    ("the paper", "Name the newspaper and the day of each report."),
)


# What wordy hints begin with. The base policy still follows such a hint in most answers. What comes after a hint, or
# both the complaint and some advice before it, leads it astray.
BESIDE_THE_POINT = (
    "The user was not content with this answer and wrote so in reply, and that could have been avoided.",
    "It may also help to say where such sums come up, and to offer another one.",
    "Beyond that, mind the spelling of names, and keep the tone polite from the first word to the last.",
    "Keep in mind that numbers of four digits and more are easier to read in groups of three.",
    "In general an answer should fit on one screen, and nothing in it should be said twice.",
)


class Reaction(StrEnum):
    """How a next state reads."""

    WANTS_STYLE = "wants another style"
    DISPLEASED = "is not pleased, and does not say why"
    WANTS_CORRECTION = "wants the number corrected"
    ADDS = "adds what to keep in mind, and calls nothing good or bad"
    PLEASED = "is pleased"
    UNCLEAR = "says neither"


class Listener(Protocol):
    """What a judge understands of the words that a person said next, which are given in small letters."""

    @property
    def inventions(self) -> Sequence[str]:
        """The hints of a wrong vote, where there was nothing to suggest."""
        ...

    def reaction(self, said: str) -> Reaction:
        """Return how the words read."""
        ...

    def hints(self, said: str) -> Sequence[str]:
        """Return the hints to draw from; empty where there is nothing to suggest."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """Understands people who ask sums, and has suggestions of its own where no wish is named."""

    corrections: Sequence[str]  # for a person who wants the number corrected
    inventions: Sequence[str]

    def reaction(self, said: str) -> Reaction:
        """Return how the words read; UNCLEAR where there are none."""
        if other_hint(said) is not None:
            return Reaction.ADDS
        if _wish(said) is not None:
            return Reaction.WANTS_STYLE
        if _has(said, _ABOUT_SOMETHING):
            return Reaction.DISPLEASED
        if _has(said, _ABOUT_NUMBER):
            return Reaction.WANTS_CORRECTION
        return Reaction.PLEASED if _has(said, _PRAISE) else Reaction.UNCLEAR

    def hints(self, said: str) -> Sequence[str]:
        """Return the hints that the words give reason to."""
        match self.reaction(said):
            case Reaction.WANTS_CORRECTION:
                return self.corrections
            case Reaction.ADDS:
                other = other_hint(said)
                return () if other is None else (other,)
        wish = _wish(said)
        return () if wish is None else HINTS[wish]


_OF_STUDENT = Habits(corrections=(f"{_CHECK}; plain words, all steps kept.",), inventions=HINTS[Wish.PLAIN])
_OF_ALL = Habits(corrections=(f"{_CHECK}.",), inventions=(f"{_CHECK}.",))
HABITS: Mapping[str, Habits] = MappingProxyType(
    {"student": _OF_STUDENT, "all": _OF_ALL, "blocks": _OF_ALL, "unrelated": _OF_STUDENT, "corrections": _OF_ALL}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedJudge:
    wrong_share: float
    seed: int
    listener: Listener = HABITS["student"]
    together_share: float = 0.0  # of turns: those on which all votes are wrong, or none
    wordy_share: float = 0.0  # of hints: those that begin with the complaint, or with what nobody asked for

    def reply(self, system: str, prompt: str, vote_seed: int) -> str:
        said = _last_said(prompt)
        reaction = self.listener.reaction(said)
        together = drawn("together", self.seed, system, prompt) < self.together_share
        votes = () if together else (vote_seed,)
        wrong = drawn("wrong", self.seed, *votes, system, prompt) < self.wrong_share
        if HINT_MARK not in system:
            return _score(reaction, wrong=wrong)
        due = self.listener.hints(said)
        if bool(due) == wrong:
            return "Nothing in the reply says how the answer could have been better.\n\\boxed{-1}"
        hints = due or self.listener.inventions
        hint = hints[int(drawn("wording", self.seed, vote_seed, system, prompt) * len(hints))]
        if drawn("wordy", self.seed, vote_seed, system, prompt) < self.wordy_share:
            beside = int(drawn("beside", self.seed, vote_seed, system, prompt) * len(BESIDE_THE_POINT))
            hint = f"{BESIDE_THE_POINT[beside]} {hint}"
        return f"The user {reaction.value}, and that could have been known.\n\\boxed{{1}}\n[HINT_START]{hint}[HINT_END]"


def drawn(*material: object) -> float:
    """Return a number from 0 up to 1 that follows from the material alone."""
    text = "\x1f".join(map(str, material))
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:7]) / 2**56


def read(prompt: str) -> Reaction:
    """Return how the last next state of a prompt about sums reads; UNCLEAR where there is none."""
    return _OF_ALL.reaction(_last_said(prompt))


def other_hint(said: str) -> str | None:
    """Return the hint for what is said, in lower case, about another subject than sums; None: it is about sums."""
    return next((hint for cue, hint in _ABOUT_ANOTHER_SUBJECT if cue in said), None)


def _last_said(prompt: str) -> str:
    """Return the words of the last next state of `prompt`, in small letters; "" where there is none."""
    states = [m["text"].lower() for m in _SECTION.finditer(prompt) if m["text"].strip()]
    return states[-1] if states else ""


def _wish(said: str) -> Wish | None:
    return next((wish for wish, cues in _ABOUT_STYLE if _has(said, cues)), None)


def _has(said: str, cues: tuple[str, ...]) -> bool:
    return any(cue in said for cue in cues)


def _score(reaction: Reaction, *, wrong: bool) -> str:
    score = {Reaction.PLEASED: 1, Reaction.UNCLEAR: 0, Reaction.ADDS: 0}.get(reaction, -1)
    if wrong and reaction is not Reaction.ADDS:  # so nothing of another subject is ever rewarded
        score = -score if score else 1
    return f"The user {reaction.value}, as I read the reply.\n\\boxed{{{score}}}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepJudge:
    wrong_share: float
    seed: int

    def reply(self, system: str, prompt: str, vote_seed: int) -> str:
        """Return the text that this judge answers to one vote; it has no hints to give."""
        if HINT_MARK in system:
            return "No word beforehand would have helped.\n\\boxed{-1}"
        wrong = drawn("wrong", self.seed, vote_seed, system, prompt) < self.wrong_share
        right = is_due(prompt) is not wrong
        return f"The step {'follows' if right else 'does not follow'}.\n\\boxed{{{1 if right else -1}}}"


def is_due(prompt: str) -> bool:
    """Whether the answer makes one call, the next operation on the last result; or, with none left, says the result."""
    request, answer = _REQUEST.search(prompt), _ANSWER.search(prompt)
    if request is None or answer is None:
        return False
    calls = [re.sub(r"\s", "", call) for call in _CALL.findall(answer[1])]
    due = _next(request[1])
    if due is not None:
        return calls == [due]
    return not calls and _NUMBER.findall(answer[1])[-1:] == _SHOWN.findall(request[1])[-1:]


def _next(request: str) -> str | None:
    """Return the call that is due; None: every operation has a result."""
    found = _OPERATION.findall(request.lower())
    operations = [(word, number) for *words, number in found for word in words if word]
    shown = [operations[0][1] if operations else "", *_SHOWN.findall(request)]
    if len(shown) >= len(operations):
        return None
    word, number = operations[len(shown)]
    return f"{shown[-1]}{_SIGNS[word]}{number}"


class Control(StrEnum):
    """The change to a run that keeps it from learning from what people said (`coin`: from verdicts only)."""

    SHUFFLED = "shuffled"  # verdict and hint are those of another session's turn
    COIN = "coin"  # verdicts are drawn; hints stay
    FROZEN = "frozen"  # the learning rate is 0


class Replies(Protocol):
    """How a judge answers one vote."""

    def reply(self, system: str, prompt: str, vote_seed: int) -> str:
        """Return the text of the answer."""
        ...


class RandomJudge:
    """A judge with random scores, -1 as often as 1; its hints come from the judge behind it."""

    def __init__(self, judge: Replies, *, seed: int) -> None:
        self._judge, self._seed = judge, seed

    def reply(self, system: str, prompt: str, vote_seed: int) -> str:
        said = self._judge.reply(system, prompt, vote_seed)
        if HINT_MARK in system:
            return said
        score = 1 if drawn("coin", self._seed, vote_seed, system, prompt) < 0.5 else -1
        return f"Whatever the user said, the coin decides.\n\\boxed{{{score}}}"


class ShuffledJudge:
    """A judge that mixes up reactions: each turn is judged by the reaction to an earlier turn of another session.

    All votes on a turn, scores and hints, rest on the same other turn. Sessions that open with the same words can't be
    told apart, so they count as one. A turn before which no other session spoke gets no opinion.
    """

    def __init__(self, judge: Replies, *, seed: int) -> None:
        self._judge, self._seed = judge, seed
        self._cases: dict[str, str] = {}  # by a turn's sections: the opening of its session; in order of arrival
        self._instead: dict[str, str] = {}  # by a turn's sections: the sections that are judged in place of them

    def reply(self, system: str, prompt: str, vote_seed: int) -> str:
        found = _CASE.search(prompt)
        return self._judge.reply(system, "" if found is None else self.other_than(found[0]), vote_seed)

    def other_than(self, case: str) -> str:
        """Return the sections of the turn that stands in for `case`, always the same one; "" where there was none."""
        if case not in self._instead:
            opening = opening_of(case)
            others = [other for other, its_opening in self._cases.items() if its_opening != opening]
            number = int(drawn("shuffled", self._seed, case) * len(others))
            self._instead[case] = others[number] if others else ""
            self._cases[case] = opening
        return self._instead[case]


def controlled(judge: Replies, control: Control | None, *, seed: int) -> Replies:
    """Return the judge as it answers under `control`."""
    match control:
        case Control.COIN:
            return RandomJudge(judge, seed=seed)
        case Control.SHUFFLED:
            return ShuffledJudge(judge, seed=seed)
        case _:
            return judge


def opening_of(case: str) -> str:
    """Return how the session of a turn opens, the same for all turns of a session."""
    found = _OPENING.search(case)
    return "" if found is None else found[1][:_OPENING_CHARACTERS]
