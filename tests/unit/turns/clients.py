"""A client that edits its history as OpenClaw does, and says of each message which turn it belongs to."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from hypothesis import strategies as st

from tests.sessions import Json, Session, assistant, user

Trick = Literal["plain", "instructed", "unknown_tool", "lost", "helper", "compacted"]
TRICKS: tuple[Trick, ...] = ("plain", "instructed", "unknown_tool", "lost", "helper", "compacted")
INSTRUCTION = user("The previous attempt did not produce a user-visible answer. Continue from the current state.")
REPORT = user("A background task completed. Use this result to reply to the user in your normal assistant voice.")
SUMMARY = (
    "The conversation history before this point was compacted into the following summary:\n\n<summary>\n</summary>"
)


class Step(NamedTuple):
    """What the person says, what is answered, and what the client makes of it."""

    words: str
    answer: str
    trick: Trick
    kept: int  # messages that a summary leaves
    stopped: bool = False  # the person interrupts the answer


def steps(words: st.SearchStrategy[str], answers: st.SearchStrategy[str]) -> st.SearchStrategy[list[Step]]:
    step = st.builds(Step, words, answers, st.sampled_from(TRICKS), st.integers(0, 4), st.booleans())
    return st.lists(step, max_size=8)


class _Known(NamedTuple):
    message: Json
    answered_by: str | None  # of an answer: the exchange that gave it


@dataclass
class Client:
    """One conversation; `reactions` are those that the requests show, by the exchange that was answered."""

    session: Session = field(default_factory=Session)
    known: list[_Known] = field(default_factory=list)
    sent: dict[str, list[_Known]] = field(default_factory=dict)  # by exchange
    echoed: set[str] = field(default_factory=set)
    summed: bool = False
    stopped: str | None = None  # the answer that the next words are about, as it was interrupted
    reacted: dict[str, str] = field(default_factory=dict)  # interrupted answers, by the request that shows it

    def take(self, step: Step) -> None:
        """Say the words, and record the answer."""
        if step.trick == "compacted" and len(self.known) > step.kept:
            self.known, self.summed = self.known[len(self.known) - step.kept :], True
            self.stopped = self.stopped if self.known else None  # what was asked is summed up too
        self.known.append(_Known(user(step.words), None))
        transient: list[_Known] = []
        if step.trick == "unknown_tool":
            call = {"id": "c1", "type": "function", "function": {"name": "frob", "arguments": "{}"}}
            calling: Json = {"role": "assistant", "content": None, "tool_calls": [call]}
            asked = self._ask([], calling)
            result: Json = {"role": "tool", "tool_call_id": "c1", "content": "Tool frob not found"}
            transient = [_Known(calling, asked), _Known(result, None)]
        if step.trick in ("instructed", "helper"):
            self._ask([], assistant(""))
            transient = [_Known(INSTRUCTION if step.trick == "instructed" else REPORT, None)]
        asked = self._ask(transient, assistant(step.answer), gone=step.stopped)
        if step.stopped:
            self.stopped = asked
        elif step.trick != "lost":
            self.known.append(_Known(assistant(step.answer), asked))

    def _ask(self, transient: list[_Known], answer: Json, *, gone: bool = False) -> str:
        history = [*self.known, *transient]
        messages = [_Known(user(SUMMARY), None), *history] if self.summed else history
        joined: list[_Known] = []
        for known in messages[:-1]:
            before = joined[-1].message if joined else None
            if before is not None and before["role"] == known.message["role"] == "user":
                joined[-1] = _Known(_parts(before, known.message), None)
            else:
                joined.append(known)
        joined.append(messages[-1])  # what is new stands by itself until it was answered
        sent = [known.message for known in joined]
        exchange = self.session.fail(sent, answer["content"]) if gone else self.session.ask(sent, answer)
        if self.stopped is not None:
            self.reacted[exchange.exchange_id], self.stopped = self.stopped, None
        self.sent[exchange.exchange_id] = joined
        self.echoed |= {known.answered_by for known in joined[:-1] if known.answered_by is not None}
        return exchange.exchange_id

    def answered_before(self, exchange_id: str, index: int) -> str | None:
        """The exchange whose answer stands last before a message of a request, or was stopped there."""
        if index == len(self.sent[exchange_id]) - 1 and exchange_id in self.reacted:
            return self.reacted[exchange_id]
        said = [known for known in self.sent[exchange_id][:index] if known.message["role"] == "assistant"]
        return said[-1].answered_by if said else None


def _parts(one: Json, other: Json) -> Json:
    texts = [*(one["content"] if isinstance(one["content"], list) else [{"type": "text", "text": one["content"]}])]
    return {"role": "user", "content": [*texts, {"type": "text", "text": other["content"]}]}
