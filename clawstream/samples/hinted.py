"""The prompt with the hint in it, and the question to a teacher about it. Pure.

The hinted prompt differs from the recorded prompt by the hint alone. So the prompt is first made again without the
hint, from the same sampled answers. If that is not the recorded prompt, token by token, there is no hinted prompt.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, NamedTuple

from clawstream.conversation.continuing import (
    Echoes,
    Renderer,
    Request,
    ShownAnswer,
    answered,
    continue_prompt,
    find_echoes,
)
from clawstream.conversation.history import WholeRequest, rebuild
from clawstream.conversation.messages import Message, dump, is_ephemeral, parse, role_of
from clawstream.conversation.pictures import without_marks
from clawstream.errors import UnrenderableRequest, UnusableExchange
from clawstream.events import RequestDelta, TeacherScored, TeacherStatus, TokenIds, scoring_id_of, sha256_of
from clawstream.inference.engine import ScoreRequest
from clawstream.samples.session import CandidateAnswer, JoiningState, RecalledPrompts, SampledAnswer, VerdictKey

MARKER = "[user's hint / instruction]"


def with_hint(messages: Sequence[Message], hint: str) -> tuple[Message, ...]:
    """Return the messages with `hint` at the end of the last user message that is not a client's own block.

    Content that comes in parts keeps its shape. Where no user has spoken, the hint is a user message at the end. A hint
    shows no picture: one who read a picture's mark may have repeated it.
    """
    hint = without_marks(hint)
    said = [
        number for number, message in enumerate(messages) if role_of(message) == "user" and not is_ephemeral(message)
    ]
    if not said:
        return (*messages, {"role": "user", "content": f"{MARKER}\n{hint}"})
    last = said[-1]
    hinted = {**messages[last], "content": _extended(messages[last].get("content"), f"\n\n{MARKER}\n{hint}")}
    return (*messages[:last], hinted, *messages[last + 1 :])


class Hinted(NamedTuple):
    """The prompt with the hint in it; None where it would differ from the recorded prompt by more than the hint."""

    token_ids: TokenIds | None
    recalled: RecalledPrompts  # for the session's next hinted prompt


def hinted_prompt(
    session: JoiningState, answer: CandidateAnswer, asked: WholeRequest, hint: str, renderer: Renderer
) -> Hinted:
    recalled = session.recalled
    if answer.exchange.num_spliced:
        recalled = recalled._replace(given=_given_before(session, answer))
    messages = tuple(map(parse, asked.messages))
    request = Request(messages=messages, raw=asked.messages, options=parse(asked.options))
    echoes = _echoes(answer, messages, recalled)
    try:
        again = continue_prompt(renderer, request, echoes, recalled.prompts)
        if again.token_ids != asked.token_ids:
            return Hinted(None, recalled)
        again = replace(again, token_ids=asked.token_ids)  # equal; keeping one object makes later comparisons quick
        recalled = recalled._replace(prompts=(again,))
        with_it = with_hint(messages, hint)
        raw = [known if new is old else dump(new) for known, old, new in zip_longest(asked.messages, messages, with_it)]
        hinted = continue_prompt(renderer, replace(request, messages=with_it, raw=raw), echoes, (again,))
    except UnrenderableRequest:
        return Hinted(None, recalled)
    return Hinted(hinted.token_ids if hinted.num_spliced == again.num_spliced else None, recalled)


def _echoes(answer: CandidateAnswer, messages: Sequence[Message], recalled: RecalledPrompts) -> Echoes:
    """Return the earlier answers of the same era that stand in the prompt as sampled."""
    num_spliced = answer.exchange.num_spliced
    if not num_spliced:
        return find_echoes(messages, ())
    echoes = find_echoes(messages, tuple(recalled.given.values()))
    return replace(echoes, found=echoes.found[-num_spliced:])


def _given_before(session: JoiningState, answer: CandidateAnswer) -> Mapping[str, ShownAnswer]:
    """Return the answers given before `answer` in its era, in order, by exchange."""
    deltas: dict[str, RequestDelta] = {}
    given: dict[str, ShownAnswer] = {}
    for exchange_id, asked in session.requests.items():
        if exchange_id == answer.exchange.exchange_id:
            break
        if asked.era != answer.era:
            continue
        deltas[exchange_id] = asked.delta
        known = session.recalled.given.get(exchange_id)
        if known is None and asked.sampled is not None:
            with contextlib.suppress(UnusableExchange):
                known = _answered(rebuild(exchange_id, deltas), asked.sampled)
        if known is not None:
            given[exchange_id] = known
    return MappingProxyType(given)


def _answered(request: WholeRequest, sampled: SampledAnswer) -> ShownAnswer:
    newest_first = map(parse, reversed(request.messages))
    return answered(newest_first, parse(request.options), parse(sampled.message), sampled.output_ids)


def _extended(content: Any, addition: str) -> Any:
    if isinstance(content, list):
        return [*content, {"type": "text", "text": addition}]
    return f"{content if isinstance(content, str) else ''}{addition}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """A request for scores of one answer, to a teacher and to the policy's engine."""

    session_id: str
    key: VerdictKey  # of the hint
    teacher: str
    wanted: ScoreRequest

    def event(self, status: TeacherStatus, error: str | None, *, latency_ms: int, at_ms: int) -> TeacherScored:
        """Return the event of the result, as yet without log-probs."""
        return TeacherScored(
            session_id=self.session_id,
            **self.key._asdict(),
            teacher=self.teacher,
            scored_sha256=self._scored_sha256,
            policy_id=self.wanted.policy_id,
            status=status,
            teacher_logprobs=None,
            student_logprobs=None,
            student_version=None,
            error=error,
            latency_ms=latency_ms,
            scored_at_ms=at_ms,
        )

    @property
    def id(self) -> str:
        """The `scoring_id` of its events."""
        return scoring_id_of(**self.key._asdict(), teacher=self.teacher, scored_sha256=self._scored_sha256)

    @property
    def _scored_sha256(self) -> str:
        return sha256_of(self.wanted.hinted_ids, self.wanted.prompt_ids, self.wanted.response_ids)
