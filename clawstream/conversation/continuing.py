"""Prompts that continue sampled tokens, and which answers of a history the policy sampled. Pure.

A prompt begins with the template's rendering of all messages before the first answer that the policy sampled. Then
come, for each sampled answer, its ids and the template's text up to the next one. Equal requests after equal answers
give equal token ids, so readers of the log get the gateway's ids again. An answer is recognised by its text and its
calls, and among equal ones by the message before it, since clients rewrite the rest.
"""

import hashlib
import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import orjson

from clawstream.conversation.history import num_equal
from clawstream.conversation.messages import Message, is_ephemeral, meaning, normal_call_id, role_of
from clawstream.errors import UnrenderableRequest
from clawstream.events import TokenIds

_SHAPING = ("tools", "tool_choice")  # options that shape a prompt's beginning


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownAnswer:
    """An answer as it was shown and as it was sampled."""

    message: Message
    output_ids: TokenIds  # the stop token included
    follows: Hashable  # the content of the last message that it answers
    template: Any  # the chat_template_kwargs of its request
    said: Hashable  # its `meaning`


class EchoedAnswer(NamedTuple):
    """An answer of the policy in a history, and its index."""

    at: int
    answer: ShownAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class Echoes:
    """The answers of a history that a prompt can hold as sampled: all after the last one that it can't."""

    found: tuple[EchoedAnswer, ...]
    unbroken: bool  # no other answer is in the history
    expected: bool  # the history has answers, and the session has given some


def answered(
    newest_first: Iterable[Message], options: Mapping[str, Any], message: Message, output_ids: TokenIds
) -> ShownAnswer:
    """Return the answer `message` to a request; no more of the request's messages are read than needed."""
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
    order in which they were given. An answer that comes first, or that no other role follows, can't be continued.
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
    return Echoes(found=tuple(reversed(found)), unbroken=unbroken, expected=any_answer and bool(answers))


def _last_said(newest_first: Iterable[Message]) -> Hashable:
    """Return the content of the newest message that is neither a system prompt nor a client's own block."""
    said = (meaning(one) for one in newest_first if role_of(one) != "system" and not is_ephemeral(one))
    return next(said, None)


def _is_between(messages: Sequence[Message], index: int) -> bool:
    return 0 < index < len(messages) - 1 and role_of(messages[index + 1]) != "assistant"


class Renderer(Protocol):
    """The policy's chat template."""

    @property
    def bridges(self) -> bool:
        """Whether the family's template can go on from sampled tokens at all."""

    def prompt_ids(self, messages: Sequence[Message], options: Mapping[str, Any]) -> TokenIds:
        """The prompt as tokens; raises UnrenderableRequest."""

    def bridge_ids(
        self,
        prompt_ids: Sequence[int],
        answer: Message,
        output_ids: TokenIds,
        between: Sequence[Message],
        options: Mapping[str, Any],
    ) -> TokenIds | None:
        """The ids after `prompt_ids`: `output_ids`, `between`, and the cue for an answer; None: it can't go on."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, markup included."""


class PromptOrigin(StrEnum):
    """How a prompt was made."""

    CONTINUED = "continued"  # every answer in the history stands in it as sampled
    SPLICED = "spliced"  # only the last answers do, after a rendered history
    RENDERED = "rendered"  # the history has no answer, or no answer of this session is known
    FALLBACK = "fallback"  # answers of this session are known, and none could be used


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request: each message parsed and as JSON, and the body without messages."""

    messages: Sequence[Message]
    raw: Sequence[bytes]
    options: Mapping[str, Any]


class _Step(NamedTuple):
    """An answer, and a digest of what else its ids and those up to the next answer follow from.

    That is the call ids in its echo, the messages behind it, and the template of the next answer.
    """

    answer: ShownAnswer
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Continued:
    """A prompt and its parts; `ends` are its token counts after its beginning and after each step."""

    token_ids: TokenIds
    num_spliced: int
    made: PromptOrigin
    beginning: bytes  # the digest of options and messages
    steps: tuple[_Step, ...]
    ends: tuple[int, ...]


def continue_prompt(
    renderer: Renderer,
    request: Request,
    echoes: Echoes,
    known: Sequence[Continued] = (),
    *,
    context_length_tokens: int | None = None,
) -> Continued:
    """Return the prompt of `request`, in which as many of the last `echoes` as the template allows stand as sampled.

    A beginning shared with a `known` prompt is taken from it. A prompt that would fill the context is rendered by the
    template alone. Raises UnrenderableRequest.
    """
    used = echoes.found if renderer.bridges else ()
    while used:
        made = PromptOrigin.CONTINUED if echoes.unbroken and len(used) == len(echoes.found) else PromptOrigin.SPLICED
        spliced = _splice(renderer, request, used, known, made)
        if not isinstance(spliced, Continued):
            used = used[spliced + 1 :]
        elif context_length_tokens is None or len(spliced.token_ids) < context_length_tokens:
            return spliced
        else:
            break
    plain = _splice(renderer, request, (), known, PromptOrigin.FALLBACK if echoes.expected else PromptOrigin.RENDERED)
    assert isinstance(plain, Continued)  # without an echo there is nothing that can't be bridged
    return plain


def num_new_bytes(request: Request, echoes: Echoes, known: Sequence[Continued]) -> int:
    """Return how many bytes of messages and tools are in no known prompt and have to be rendered."""
    beginning, *rest = _parts(request, echoes.found)
    begun, num_steps = _longest_begun(*_plan(request, echoes.found), known)
    new = sum(len(raw) for _, _, *between in rest[num_steps:] for raw in between)
    return new if begun else new + sum(map(len, beginning))


def _splice(
    renderer: Renderer, request: Request, used: Sequence[EchoedAnswer], known: Sequence[Continued], made: PromptOrigin
) -> Continued | int:
    """Return the prompt, or the number in `used` of the last echo that the template can't go on from."""
    beginning, steps = _plan(request, used)
    begun, num_steps = _longest_begun(beginning, steps, known)
    if begun is None:
        try:
            ids = list(_begin(renderer, request, used))
        except UnrenderableRequest:
            if used:
                return 0
            raise
        ends = [len(ids)]
    else:
        ends = list(begun.ends[: num_steps + 1])
        ids = list(begun.token_ids[: ends[-1]])
    impossible = None
    for number in range(num_steps, len(steps)):
        bridge = _bridge(renderer, request, used, number, ids)
        if bridge is None:
            impossible = number  # go on: a later one may fail too, and the last failure counts
        else:
            ids += bridge
            ends.append(len(ids))
    if impossible is not None:
        return impossible
    return Continued(
        token_ids=tuple(ids), num_spliced=len(used), made=made, beginning=beginning, steps=steps, ends=tuple(ends)
    )


def _begin(renderer: Renderer, request: Request, used: Sequence[EchoedAnswer]) -> TokenIds:
    """Return the prompt up to the first echo, with the cue that asked for that answer."""
    if not used:
        return renderer.prompt_ids(request.messages, request.options)
    first = used[0]
    return renderer.prompt_ids(request.messages[: first.at], _asking(request.options, first.answer.template))


def _bridge(
    renderer: Renderer, request: Request, used: Sequence[EchoedAnswer], number: int, prompt_ids: Sequence[int]
) -> TokenIds | None:
    """Return the ids after the prompt so far: the answer as sampled, and all up to the cue for the next answer."""
    at, answer = used[number]
    options, end = request.options, len(request.messages)
    if number + 1 < len(used):
        options, end = _asking(options, used[number + 1].answer.template), used[number + 1].at
    between = _under_sampled_ids(request.messages[at], answer.message, request.messages[at + 1 : end])
    return renderer.bridge_ids(prompt_ids, answer.message, answer.output_ids, between, options)


def _plan(request: Request, used: Sequence[EchoedAnswer]) -> tuple[bytes, tuple[_Step, ...]]:
    """Return the digests that identify the prompt: equal values mean equal prompts."""
    beginning, *rest = map(_digest, _parts(request, used))
    return beginning, tuple(_Step(echo.answer, digest) for echo, digest in zip(used, rest, strict=True))


def _parts(request: Request, used: Sequence[EchoedAnswer]) -> list[tuple[bytes, ...]]:
    """Return the inputs of the beginning and of each step, apart from the answers themselves."""
    templates = [_json(echo.answer.template) for echo in used]
    templates.append(_json(request.options.get("chat_template_kwargs")))
    starts = [*(echo.at for echo in used), len(request.raw)]
    shape = _json([request.options.get(key) for key in _SHAPING])
    steps = (
        (_call_ids(request.messages[echo.at]), template, *request.raw[echo.at + 1 : end])
        for echo, end, template in zip(used, starts[1:], templates[1:], strict=True)
    )
    return [(shape, templates[0], *request.raw[: starts[0]]), *steps]


def _call_ids(echo: Message) -> bytes:
    return _json([normal_call_id(str(call.get("id", ""))) for call in echo.get("tool_calls") or ()])


def _digest(parts: Sequence[bytes]) -> bytes:
    """Return a hash of the parts: a session is remembered for 12 hours, and one message may be 8 MB."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(len(part).to_bytes(8, "big"))
        found.update(part)
    return found.digest()


def _longest_begun(
    beginning: bytes, steps: tuple[_Step, ...], known: Sequence[Continued]
) -> tuple[Continued | None, int]:
    """Return the known prompt with the longest common beginning, and how many steps it shares."""
    begun = ((prompt, num_equal(prompt.steps, steps)) for prompt in known if prompt.beginning == beginning)
    return max(begun, key=itemgetter(1), default=(None, 0))


def _under_sampled_ids(echo: Message, answer: Message, between: Sequence[Message]) -> list[Message]:
    """Return `between` with tool results under the call ids that the model sampled, where the client rewrote them."""
    given = {
        normal_call_id(str(echoed.get("id", ""))): str(call.get("id", ""))
        for echoed, call in zip(echo.get("tool_calls") or (), answer.get("tool_calls") or (), strict=False)
    }
    found: list[Message] = []
    for message in between:
        call_id = message.get("tool_call_id")
        sampled_id = given.get(normal_call_id(call_id)) if isinstance(call_id, str) else None
        found.append(message if sampled_id is None else {**message, "tool_call_id": sampled_id})
    return found


def _asking(options: Mapping[str, Any], template: Any) -> Mapping[str, Any]:
    """Return the options with `template` as chat_template_kwargs."""
    others = {key: value for key, value in options.items() if key != "chat_template_kwargs"}
    return others if template is None else {**others, "chat_template_kwargs": template}


def _json(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value).encode("ascii")
