"""Which answers of a history the policy gave, so that they can stand in a prompt as they were sampled. Pure.

An answer is recognised by its text and calls and by the message before it, since clients rewrite the rest. Answers
before one that the policy did not give are not looked for, since that part may be anything.
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
    follows: Hashable  # the content of the last message that it answers
    template: Any  # the chat_template_kwargs of its request
    said: Hashable


class EchoedAnswer(NamedTuple):
    """An answer of the policy in a history, and its index."""

    at: int
    answer: ShownAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class Echoes:
    """The answers that can stand as sampled: all behind the last one that can't."""

    found: tuple[EchoedAnswer, ...]
    unbroken: bool  # no other answer is in the history
    expected: bool  # the history has answers, and the session has given some


def answered(
    newest_first: Iterable[Message], options: Mapping[str, Any], message: Message, output_ids: TokenIds
) -> ShownAnswer:
    """Return the answer `message` to a request; of its messages no more are taken than needed."""
    return ShownAnswer(
        message=message,
        output_ids=output_ids,
        follows=_last_said(newest_first),
        template=options.get("chat_template_kwargs"),
        said=meaning(message),
    )


def find_echoes(messages: Sequence[Message], answers: Sequence[ShownAnswer]) -> Echoes:
    """Return where the session's `answers`, oldest first, stand in a history.

    Of equal answers, the one given to the preceding message counts, else the newest. Each answer counts once, in the
    order in which they were given. An answer that is not followed by a message of another role can't be continued.
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
    """Return the content of the newest message that is neither a system prompt nor a client's own block."""
    for message in newest_first:
        if role_of(message) != "system" and not is_ephemeral(message):
            return meaning(message)
    return None


def _is_between(messages: Sequence[Message], index: int) -> bool:
    """Whether a message stands before the index, and one that is no answer directly behind it."""
    return 0 < index < len(messages) - 1 and role_of(messages[index + 1]) != "assistant"
