"""The prompt with the hint in it, as the teacher sees it. Pure.

The one rule: it differs from the prompt that was asked by the hint alone, so it is made as that was, of the same
answers as they were sampled; where that does not give the prompt that was asked, there is none.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile, zip_longest
from typing import Any

from clawstream.errors import UnusableExchange
from clawstream.events import TokenIds
from clawstream.events.conversation import Message, dump, is_ephemeral, parse, role_of
from clawstream.events.history import WholeRequest, whole
from clawstream.inference.continuing import Renderer, Request, continue_prompt
from clawstream.inference.echoes import Answered, Echoes, answered, find_echoes
from clawstream.inference.rendering import UnrenderableRequest
from clawstream.samples.session import Answer, Session

MARKER = "[user's hint / instruction]"


def with_hint(messages: Sequence[Message], hint: str) -> tuple[Message, ...]:
    """Return the messages with `hint` at the end of the last user message that is not a client's own block.

    Content that comes in parts keeps its shape. Where no user has spoken, the hint is a user message at the end.
    """
    said = [
        number for number, message in enumerate(messages) if role_of(message) == "user" and not is_ephemeral(message)
    ]
    if not said:
        return (*messages, {"role": "user", "content": f"{MARKER}\n{hint}"})
    last = said[-1]
    hinted = {**messages[last], "content": _extended(messages[last].get("content"), f"\n\n{MARKER}\n{hint}")}
    return (*messages[:last], hinted, *messages[last + 1 :])


def hinted_prompt(
    session: Session, answer: Answer, asked: WholeRequest, hint: str, renderer: Renderer
) -> TokenIds | None:
    """Return the prompt with the hint in it; None where it would differ from the prompt that was asked by more."""
    messages = tuple(map(parse, asked.messages))
    request = Request(messages=messages, raw=asked.messages, options=json.loads(asked.options))
    echoes = _echoes(session, answer, messages)
    try:
        again = continue_prompt(renderer, request, echoes)
        if again.token_ids != asked.token_ids:
            return None
        with_it = with_hint(messages, hint)
        raw = [known if new is old else dump(new) for known, old, new in zip_longest(asked.messages, messages, with_it)]
        hinted = continue_prompt(renderer, replace(request, messages=with_it, raw=raw), echoes, (again,))
    except UnrenderableRequest:
        return None
    return hinted.token_ids if hinted.num_spliced == again.num_spliced else None


def _echoes(session: Session, answer: Answer, messages: Sequence[Message]) -> Echoes:
    """Return the answers that stand in the prompt as sampled: those of its era that were given before."""
    num_spliced = answer.exchange.num_spliced  # None: it was asked by a gateway that spliced none
    if not num_spliced:
        return find_echoes(messages, ())
    echoes = find_echoes(messages, _given_before(session, answer))
    return replace(echoes, found=echoes.found[-num_spliced:])


def _given_before(session: Session, answer: Answer) -> list[Answered]:
    given: list[Answered] = []
    known: dict[str, WholeRequest] = {}
    earlier = takewhile(lambda item: item[0] != answer.exchange.exchange_id, session.requests.items())
    for exchange_id, asked in earlier:
        if asked.era != answer.era:
            continue
        try:
            request = whole(replace(asked.delta, kept_tokens=0, token_ids=()), known)
        except UnusableExchange:
            continue
        known[exchange_id] = request
        if asked.sampled is not None:
            message, newest_first = parse(asked.sampled.message), map(parse, reversed(request.messages))
            given.append(answered(newest_first, json.loads(request.options), message, asked.sampled.output_ids))
    return given


def _extended(content: Any, addition: str) -> Any:
    if isinstance(content, list):
        return [*content, {"type": "text", "text": addition}]
    return f"{content if isinstance(content, str) else ''}{addition}"
