"""How people ask everyday requests, and what they say of the answers: pure.

They look at an answer as people do, roughly: by its full stops, its first word, the little words of a language. The one
rule: this shares nothing with the judge, who sees no wish, and nothing with the scorer.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from clawstream.simulation.everyday import AnswerWish, wishes

THANKS = ("Thanks, that's just right!", "Perfect, thank you.", "Great, that helps me. Thanks!")
NO_ANSWER = (
    "That doesn't answer my question.",
    "Sorry, that's not what I asked about.",
    "And what about my question?",
)
_LEAST_WORDS = 3
_LONG_WORD = 5  # letters: shorter words say little of what a text is about
_SENTENCE_CHARACTERS = 180
_BULLETS = ("- ", "* ", "\u2022 ")
_GREETINGS = ("hello", "hi", "hey", "good", "welcome", "greetings", "dear", "howdy")
_FOREIGN: Mapping[str, str] = MappingProxyType(
    {  # words that English does not have, and letters
        "french": "le les des est une et pour vous dans qui que avec il elle du \u00e9 \u00e8 \u00ea \u00e0 \u00e7",
        "german": "der die das und ist sind nicht ein eine einem man kann mit sie f\u00fcr \u00e4 \u00f6 \u00fc \u00df",
        "spanish": "el los las es una y para que con por en del \u00f1 \u00ed \u00f3 \u00e1 \u00bf",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EverydayTask:
    """A request, who asks it, and how they want the answer to be."""

    persona: str
    system: str  # the message of this person's assistant
    wish: str
    request: str
    held_out: bool = False  # they complain in words that nobody tuned with, too

    @property
    def speaker(self) -> str:
        """Who talks, by the names that the command `talk` takes."""
        return self.persona


@dataclass(frozen=True, slots=True, kw_only=True)
class EverydayPerson:
    """Talks as whoever asks a request; `hint_share` of the complaints about how an answer is say what is wanted."""

    hint_share: float

    def opening(self, task: EverydayTask, rng: random.Random) -> list[dict[str, str]]:
        """Return the messages with which a session begins."""
        del rng
        return [{"role": "system", "content": task.system}, {"role": "user", "content": task.request}]

    def reaction(self, task: EverydayTask, answer: str, rng: random.Random) -> str:
        """Return what the person says of the answer: first of how it is, then of whether it is one."""
        if not looks_as_wished(task.wish, answer):
            wish, says_wish = _WORDS[task.wish], rng.random() < self.hint_share
            usual, others = (wish.says, wish.says_held_out) if says_wish else (wish.rejects, wish.rejects_held_out)
            return rng.choice((*usual, *others) if task.held_out else usual)
        return rng.choice(THANKS if seems_to_answer(task, answer) else NO_ANSWER)


def tasks(text: str) -> list[EverydayTask]:
    """Return the tasks of a file with one JSON object a line; raises ValueError that names an invalid line."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            task = EverydayTask(**json.loads(line))
            _known = _LOOKS[task.wish]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"line {number} is {line!r}, expected persona, system, request and wish (one of {', '.join(_LOOKS)}); "
                "write the file again"
            ) from error
        found.append(task)
    return found


def looks_as_wished(wish: str, answer: str) -> bool:
    """Whether the answer looks to the person as they want answers to be."""
    return bool(answer.strip()) and _LOOKS[wish](answer.strip())


def seems_to_answer(task: EverydayTask, answer: str) -> bool:
    """Whether the person takes the text for an answer: it comes to an end, and is about what they asked."""
    said, asked = answer.strip(), task.request.lower()
    words = said.lower().split()
    if len(words) < _LEAST_WORDS or said[-1].isalnum() or said[-1] in ",:;([":
        return False
    if said.lower() in asked or "the user" in said.lower() or len(set(words)) * 2 < len(words):
        return False
    named = [word.strip(".,!?'\"")[:_LONG_WORD] for word in asked.split()]
    long = [word for word in named if len(word) == _LONG_WORD]
    return task.wish in _FOREIGN or not long or any(word in said.lower() for word in long)


def _one_sentence(answer: str) -> bool:
    stops = sum(answer.count(mark) for mark in (". ", "! ", "? ", "\n"))
    return stops == 0 and len(answer) <= _SENTENCE_CHARACTERS


def _in(language: str) -> Callable[[str], bool]:
    marks = _FOREIGN[language].split()
    own_words, letters = {mark for mark in marks if mark.isascii()}, [mark for mark in marks if not mark.isascii()]

    def looks_foreign(answer: str) -> bool:
        words = [word.strip(".,!?:;\"'()") for word in answer.lower().split()]
        known = sum(word in own_words or any(letter in word for letter in letters) for word in words)
        return known >= 2 and known * 5 >= len(words) and known > words.count("the") + words.count("to")

    return looks_foreign


def _greets(answer: str) -> bool:
    return answer.lower().split()[0].strip("*_.,!:") in _GREETINGS


def _starts(answer: str) -> Sequence[str]:
    return [line.strip()[:2] for line in answer.splitlines() if line.strip()]


def _has_bullets(answer: str) -> bool:
    return sum(start in _BULLETS for start in _starts(answer)) >= 2


def _is_counted(answer: str) -> bool:
    return {"1.", "2."} <= {*_starts(answer)}


_LOOKS: Mapping[str, Callable[[str], bool]] = MappingProxyType(
    {
        "one_sentence": _one_sentence,
        "french": _in("french"),
        "german": _in("german"),
        "spanish": _in("spanish"),
        "greeting": _greets,
        "forty_words": lambda answer: len(answer.split()) <= 40,
        "long": lambda answer: len(answer.split()) >= 80,
        "one_paragraph": lambda answer: "\n" not in answer,
        "no_lists": lambda answer: not _has_bullets(answer) and not _is_counted(answer),
        "bullets": _has_bullets,
        "numbered": _is_counted,
        "lower_case": lambda answer: answer == answer.lower(),
        "ends_with_question": lambda answer: answer.endswith("?"),
        "exclamation": lambda answer: answer.endswith("!"),
        "emoji": lambda answer: any(ord(letter) >= 0x1F300 or 0x2600 <= ord(letter) < 0x27C0 for letter in answer),
        "numbers": lambda answer: sum(any(map(str.isdigit, word)) for word in answer.split() if word[-1] != ".") >= 2,
        "example": lambda answer: "for example" in answer.lower() or "for instance" in answer.lower(),
    }
)
_WORDS: Mapping[str, AnswerWish] = MappingProxyType({wish.id: wish for wish in wishes()})
