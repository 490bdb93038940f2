"""Has the policy of now answer prompts of the past: over the engines that serve people, one attempt at a time.

The one rule: an answer is on record with the weights that sampled it, or it is asked for again. No prefix cache is
shared with anybody, so none that older weights filled is read.
"""

import itertools
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from clawstream.errors import TryLater
from clawstream.events import AnswerRefreshed, Event, float32
from clawstream.events.conversation import dump
from clawstream.inference.adapters import adapter_version, policy_version
from clawstream.inference.behaviour import behaviour, finish_reason
from clawstream.inference.engine import Chunk, EngineRefused, Finish, FinishKind, GenerateRequest
from clawstream.inference.engine import Sampling as EngineSampling
from clawstream.inference.rendering import ParsedAnswer
from clawstream.inference.sglang import SglangEngine
from clawstream.refresh.asking import Ask


class Reader(Protocol):
    """What is needed of a renderer."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...
    def parse(
        self, output_ids: Sequence[int], prompt_ids: Sequence[int], options: Mapping[str, Any]
    ) -> ParsedAnswer: ...


class _Adapter(NamedTuple):
    name: str
    version: int


class Refresher:
    """Answers by the engines of one policy, all of them alike: each attempt goes to the next."""

    def __init__(
        self,
        engines: Sequence[SglangEngine],
        reader: Reader,
        policy_id: str,
        *,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._engines = itertools.cycle(engines)
        self._reader = reader
        self._policy_id = policy_id
        self._now_ms = now_ms

    async def answer(self, ask: Ask) -> Sequence[Event]:
        """Return the answer. Raises TryLater where there is none yet, or nobody knows what sampled it."""
        engine = next(self._engines)
        adapter = await self._adapter(engine)
        try:
            async with aclosing(engine.generate(self._request(ask, adapter))) as stream:
                chunks = [chunk async for chunk in stream]
        except EngineRefused as error:
            if adapter is not None and adapter.name not in await engine.lora_adapters():
                raise TryLater(f"engine {engine.url}: {adapter.name} is not loaded any more; asked again") from error
            return [self._event(ask, error=f"engine {engine.url}: {error.message}")]
        finish = chunks[-1].finish
        if finish is None or finish.kind is FinishKind.ABORT:
            raise TryLater(f"engine {engine.url}: it gave the request up; asked again")
        return [self._answered(ask, chunks, finish, adapter)]

    def give_up(self, ask: Ask, why: str) -> Sequence[Event]:
        """Return that the prompt was not answered before the deadline."""
        return [self._event(ask, error=why)]

    async def _adapter(self, engine: SglangEngine) -> _Adapter | None:
        """Return the newest version's adapter; None: the engine's own weights are the newest."""
        weights = policy_version(await engine.weight_version())
        found = {adapter_version(self._policy_id, name): name for name in await engine.lora_adapters()}
        newest = max((version for version in found if version is not None), default=weights)
        return _Adapter(found[newest], newest) if newest > weights else None

    def _request(self, ask: Ask, adapter: _Adapter | None) -> GenerateRequest:
        asked = ask.seeded
        return GenerateRequest(
            input_ids=ask.prompt_ids,
            sampling=EngineSampling(
                max_new_tokens=asked.max_tokens,
                temperature=asked.temperature,
                top_p=asked.top_p,
                top_k=asked.top_k,
                stop_token_ids=self._reader.stop_token_ids,
                stop=asked.stop,
                sampling_seed=asked.seed,
            ),
            extra_key=f"refresh:{uuid.uuid4().hex}",
            lora_name=None if adapter is None else adapter.name,
        )

    def _answered(self, ask: Ask, chunks: Sequence[Chunk], finish: Finish, adapter: _Adapter | None) -> AnswerRefreshed:
        output_ids = tuple(token for chunk in chunks for token in chunk.token_ids)
        logprobs = [value for chunk in chunks for value in chunk.logprobs_nats]
        sampled = behaviour(chunks[-1].weight_versions, logprobs, None if adapter is None else adapter.version)
        # Without the request's tools a call stands in the text as it was sampled: nobody is to carry it out.
        parsed = self._reader.parse(output_ids, ask.prompt_ids, {})
        return replace(
            self._event(ask, error=None),
            versions=sampled.versions,
            message=dump({"role": "assistant", "content": parsed.content}),
            output_ids=output_ids,
            output_logprobs=float32(sampled.logprobs_nats),
            finish_reason=finish_reason(finish, ()),
        )

    def _event(self, ask: Ask, *, error: str | None) -> AnswerRefreshed:
        return AnswerRefreshed(
            session_id=ask.session_id,
            turn_id=ask.turn_id,
            number=ask.number,
            policy_id=self._policy_id,
            sampling=ask.seeded,
            versions=(),
            message=None,
            output_ids=(),
            output_logprobs=(),
            finish_reason=None,
            error=error,
            answered_at_ms=self._now_ms(),
        )
