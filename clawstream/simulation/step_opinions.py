"""The opinion that a simulated judge of agents' steps has of a prompt: pure. It reads request and answer alone.

The one rule: the judge is blind to the outcome. It judges a step by the task and the results before it, and never works
out the task's result. A stated share of its opinions is wrong, drawn from the prompt, the judge's seed and the vote's
own seed.
"""

import hashlib
import re
from dataclasses import dataclass

from clawstream.simulation.opinions import HINT_MARK

_REQUEST = re.compile(r"<request>\s*(.*?)\s*</request>", re.DOTALL)
_ANSWER = re.compile(r"<answer>\s*(.*?)\s*</answer>", re.DOTALL)
_TOLD = re.compile(r"\b(?:(take)|(add)|(times)|(minus)) ([0-9]+)")
_SIGNS = {"add": "+", "times": "*", "minus": "-"}
_CALL = re.compile(r'\(calls \w+ with \{"expression":\s*"([^"]*)"\}\)')
_SHOWN = re.compile(r"\[tool\]\s*(-?[0-9]+)")  # an error shows none
_NUMBER = re.compile(r"-?[0-9]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepJudge:
    """One judge of steps."""

    wrong_share: float
    seed: int

    def reply(self, system: str, prompt: str, vote_seed: int) -> str:
        """Return the text that this judge answers to one vote; it has no hints to give."""
        if HINT_MARK in system:
            return "No word beforehand would have helped.\n\\boxed{-1}"
        material = "\x1f".join(("wrong", str(self.seed), str(vote_seed), system, prompt))
        drawn = int.from_bytes(hashlib.sha256(material.encode("utf-8", "surrogatepass")).digest()[:7]) / 2**56
        right = is_due(prompt) is not (drawn < self.wrong_share)
        return f"The step {'follows' if right else 'does not follow'}.\n\\boxed{{{1 if right else -1}}}"


def is_due(prompt: str) -> bool:
    """Whether the answer makes one call, of the next operation on the last result, or says that where none is left."""
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
    told = [(word.lower(), number) for *words, number in _TOLD.findall(request.lower()) for word in words if word]
    shown = [told[0][1] if told else "", *_SHOWN.findall(request)]
    if len(shown) >= len(told):
        return None
    word, number = told[len(shown)]
    return f"{shown[-1]}{_SIGNS[word]}{number}"
