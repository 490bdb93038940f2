"""Which messages of a request are the conversation, and which the client's own. Pure.

Between two messages of a person a client asks the model for things of its own, such as a heartbeat. Those questions and
their answers are no part of the conversation, nor are system messages and a client's blocks for one request alone.
"""

from collections.abc import Iterator, Sequence

from clawstream.conversation.authors import Author
from clawstream.conversation.messages import Message, is_ephemeral, is_housekeeping, parse, role_of, written_in


def main_messages(messages: Sequence[bytes], start: int = 0) -> Iterator[tuple[int, Message]]:
    """Yield the conversation's messages from `start` on, each with its index.

    Raises UnusableExchange at a damaged message.
    """
    aside = _is_aside(messages[:start])
    for index in range(start, len(messages)):
        message = parse(messages[index])
        if not _belongs(message):
            continue
        if role_of(message) == "user":
            aside = is_housekeeping(message)
        if not aside:
            yield index, message


def answer_before(messages: Sequence[bytes], index: int) -> int:
    """Return the index of the answer that the message at `index` reacts to.

    Raises UnusableExchange at a damaged message, ValueError where the conversation has no answer before it.
    """
    return max(at for at, message in main_messages(messages[:index]) if role_of(message) == "assistant")


def _belongs(message: Message) -> bool:
    """Return whether the message is of the conversation or the client's own question; an instruction is neither."""
    if role_of(message) == "system" or is_ephemeral(message):
        return False
    if role_of(message) != "user" or is_housekeeping(message):
        return True
    pieces = written_in(message)
    return not pieces or any(piece.author is not Author.CLIENT for piece in pieces)


def _is_aside(before: Sequence[bytes]) -> bool:
    """Return whether the message behind `before` answers a question of the client's own."""
    for raw in reversed(before):
        message = parse(raw)
        if role_of(message) == "user" and _belongs(message):
            return is_housekeeping(message)
    return False
