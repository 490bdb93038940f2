"""Which answers of a history are ours, so that they can stand in a prompt as they were sampled. Pure.

The one rule: an answer is recognised by what it says and by what it answers, as clients rewrite the rest. What stands
before an answer that is not ours may be anything, so nothing is looked for there.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from clawstream.conversation.messages import Message, is_ephemeral, meaning, role_of
from clawstream.events import TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownAnswer:
    """An answer as it was shown and as it was sampled."""

    message: Message
    output_ids: TokenIds  # the stop token included
    follows: Hashable  # what the last message that it answers says
    template: Any  # the chat_template_kwargs that it was asked with
    said: Hashable


class EchoedAnswer(NamedTuple):
    """An answer of ours in a history, and where."""

    at: int
    answer: ShownAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class Echoes:
    """The answers that can stand as sampled: all from the last that can't on."""

    found: tuple[EchoedAnswer, ...]
    unbroken: bool  # no other answer is in the history
    expected: bool  # the history has answers, and the session has given some


def answered(
    newest_first: Iterable[Message], options: Mapping[str, Any], message: Message, output_ids: TokenIds
) -> ShownAnswer:
    """Return the answer `message` to the messages of a request, of which no more are taken than are needed."""
    return ShownAnswer(
        message=message,
        output_ids=output_ids,
        follows=_last_said(newest_first),
        template=options.get("chat_template_kwargs"),
        said=meaning(message),
    )


def find_echoes(messages: Sequence[Message], answers: Sequence[ShownAnswer]) -> Echoes:
    """Return where the session's `answers`, oldest first, stand in a history.

    Of answers that say the same the one counts that answered the message before it, else the newest; each counts once,
    and in the order in which they were given. An answer with no other message after it can't be gone on from.
    """
    numbers: dict[Hashable, list[int]] = {}
    for number, answer in enumerate(answers):
        numbers.setdefault(answer.said, []).append(number)
    found: list[EchoedAnswer] = []
    before, unbroken, any_answer = len(answers), True, False
    for index in range(len(messages) - 1, -1, -1):
        if role_of(messages[index]) != "assistant":
            continue
        any_answer = True
        same = [number for number in numbers.get(meaning(messages[index]), ()) if number < before]
        if len(same) > 1:
            follows = _last_said(reversed(messages[:index]))
            same = [number for number in same if answers[number].follows == follows] or same
        if not same or not _is_between(messages, index):
            unbroken = False
            break
        before = same[-1]
        found.append(EchoedAnswer(index, answers[before]))
    return Echoes(
        found=tuple(reversed(found)),
        unbroken=unbroken,
        expected=any_answer and bool(answers),
    )


def _last_said(newest_first: Iterable[Message]) -> Hashable:
    """Return what the newest message says that is no system prompt and no client's own block."""
    for message in newest_first:
        if role_of(message) != "system" and not is_ephemeral(message):
            return meaning(message)
    return None


def _is_between(messages: Sequence[Message], index: int) -> bool:
    """Whether there is something before, and something after it that is no answer."""
    return 0 < index < len(messages) - 1 and role_of(messages[index + 1]) != "assistant"
