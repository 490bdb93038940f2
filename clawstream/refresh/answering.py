"""Asks the policy's current weights to answer recorded prompts, on the engines that serve people.

Each answer is recorded with the weights that sampled it. Requests with the same prompt, people's included, share one
prefix cache: the cache key names the weights that the engine says it serves, as the gateway's does. An answer that
other weights began, from tokens cached under this key, is thrown away and asked for again.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Protocol

from clawstream.conversation.floor import mask
from clawstream.conversation.messages import dump
from clawstream.errors import NotYet, TryLater
from clawstream.events import (
    NOBODY,
    AnswerRefreshed,
    Event,
    RefusalReason,
    RehearsalAsked,
    SampleAssembled,
    SampleRefused,
    float32,
)
from clawstream.inference.engine import (
    Chunk,
    EngineRefused,
    Finish,
    FinishKind,
    GenerateRequest,
    Served,
    as_recorded,
    behaviour,
    finish_reason,
    policy_version,
    served,
)
from clawstream.inference.http_engine import HttpEngine
from clawstream.refresh.asking import RefreshRequest
from clawstream.rendering.renderer import ParsedAnswer
from clawstream.stream.stage import now_ms


class Reader(Protocol):
    """The part of a renderer that is needed here."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...
    def parse(
        self, output_ids: Sequence[int], prompt_ids: Sequence[int], options: Mapping[str, Any]
    ) -> ParsedAnswer: ...


class Refresher:
    """Asks the engines in turn: each attempt goes to the next engine, and to the policy whose prompt it is."""

    def __init__(
        self,
        engines: Sequence[HttpEngine],
        reader: Reader,
        *,
        now_ms: Callable[[], int] = now_ms,
    ) -> None:
        self._engines = itertools.cycle(engines)
        self._reader = reader
        self._now_ms = now_ms

    async def answer(self, ask: RefreshRequest) -> Sequence[Event]:
        """Return the answer (a rehearsal's with its sample) or the engine's refusal; raises TryLater without either.

        Raises NotYet if the answer was begun from tokens that other weights cached; the engine is not away then.
        """
        engine = next(self._engines)
        now = await served(engine, ask.policy_id)
        try:
            async with aclosing(engine.generate(self._request(ask, now))) as stream:
                chunks = [chunk async for chunk in stream]
        except EngineRefused as error:
            if now.adapter is not None and now.adapter not in await engine.lora_adapters():
                raise TryLater(f"engine {engine.url}: {now.adapter} is not loaded any more; asked again") from error
            return [self._event(ask, error=f"engine {engine.url}: {error.message}")]
        finish = chunks[-1].finish
        if finish is None or finish.kind is FinishKind.ABORT:
            raise TryLater(f"engine {engine.url}: it gave the request up; asked again")
        began_by = next((policy_version(span.version) for span in chunks[-1].weight_versions if span.num_tokens), None)
        if began_by not in (None, now.weights) and chunks[0].cached_tokens != 0:
            raise NotYet(
                f"engine {engine.url}: {chunks[0].cached_tokens} tokens were cached under version {now.weights}, and "
                f"version {began_by} went on from them; asked again"
            )
        answered = self._answered(ask, chunks, finish, now)
        return [answered] if ask.rehearsal is None else [answered, rehearsed(answered, ask.rehearsal)]

    def give_up(self, ask: RefreshRequest, why: str) -> Sequence[Event]:
        """Return the event that says that the prompt was not answered before the deadline."""
        return [self._event(ask, error=why)]

    def _request(self, ask: RefreshRequest, now: Served) -> GenerateRequest:
        return GenerateRequest(
            input_ids=ask.prompt_ids,
            sampling=as_recorded(ask.seeded, self._reader.stop_token_ids),
            extra_key=now.cache_key(),
            lora_name=now.adapter,
        )

    def _answered(self, ask: RefreshRequest, chunks: Sequence[Chunk], finish: Finish, now: Served) -> AnswerRefreshed:
        output_ids = tuple(token for chunk in chunks for token in chunk.token_ids)
        logprobs = [value for chunk in chunks for value in chunk.logprobs_nats]
        adapter_version = None if now.adapter is None else now.version
        sampled = behaviour(chunks[-1].weight_versions, logprobs, adapter_version)
        # Parsed without the request's tools: a call stays text as sampled, since nobody is to carry it out.
        parsed = self._reader.parse(output_ids, ask.prompt_ids, {})
        return replace(
            self._event(ask, error=None),
            versions=sampled.versions,
            message=dump({"role": "assistant", "content": parsed.content}),
            output_ids=output_ids,
            output_logprobs=float32(sampled.logprobs_nats),
            finish_reason=finish_reason(finish, ()),
        )

    def _event(self, ask: RefreshRequest, *, error: str | None) -> AnswerRefreshed:
        return AnswerRefreshed(
            session_id=ask.session_id,
            turn_id=ask.turn_id,
            number=ask.number,
            policy_id=ask.policy_id,
            sampling=ask.seeded,
            versions=(),
            message=None,
            output_ids=(),
            output_logprobs=(),
            finish_reason=None,
            error=error,
            answered_at_ms=self._now_ms(),
        )


def rehearsed(answer: AnswerRefreshed, asked: RehearsalAsked) -> SampleAssembled | SampleRefused:
    """Return the sample of an answer that rehearses a hint, with the hint alone, or why there is none."""
    trained = mask(answer, rewarded=False)
    if isinstance(trained, RefusalReason):
        return SampleRefused(
            session_id=asked.session_id,
            turn_id=asked.turn_id,
            judge=NOBODY,
            prompt_version=NOBODY,
            revision=0,
            reason=trained,
            refreshed_id=answer.event_id,
        )
    return SampleAssembled(
        session_id=asked.session_id,
        turn_id=asked.turn_id,
        judge=NOBODY,
        prompt_version=NOBODY,
        revision=0,
        reward=None,
        hint=asked.hint,
        prompt_ids=asked.prompt_ids,
        hinted_prompt_ids=asked.hinted_prompt_ids,
        response_ids=answer.output_ids,
        response_logprobs=answer.output_logprobs,
        trained=trained,
        temperature=answer.sampling.temperature,
        sampling=answer.sampling,
        policy_id=answer.policy_id,
        versions=answer.versions,
        num_earlier_turns=asked.num_earlier_turns,
        total_reward=None,
        refreshed_id=answer.event_id,
        hint_by_person=asked.hint_by_person,
        hint_id=asked.hint_id,
    )
