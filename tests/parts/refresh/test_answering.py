"""How engines are asked to answer again: the recorded prompt, by the newest version, on record as sampled."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from clawstream.errors import NotYet, TryLater
from clawstream.events import AnswerRefreshed, FinishReason, Sampling, Shaping, VersionSpan
from clawstream.inference.dialect import Call
from clawstream.inference.service import Generation
from clawstream.inference.sglang import SglangEngine
from clawstream.refresh.answering import Refresher
from clawstream.refresh.asking import RefreshRequest
from clawstream.rendering.renderer import ParsedAnswer
from tests.fakes.scripted_engine import Fault, ScriptedAnswer, ScriptedBackend, counting, serving
from tests.parts.gateway.test_replicas import Cached

PROMPT = (5, 6, 7)
STOP = 2
SAMPLING = Sampling(temperature=0.7, top_p=0.9, top_k=5, max_tokens=64, seed=3, stop=())
ASK = RefreshRequest(
    session_id="s", turn_id="t", number=1, policy_id="policy", prompt_ids=PROMPT, sampling=SAMPLING, at_ms=0
)


class Numbers:
    """Reads an answer as its numbers, and stops at 2."""

    stop_token_ids = (STOP,)

    def parse(
        self,
        output_ids: Sequence[int],
        prompt_ids: Sequence[int],  # noqa: ARG002
        options: Mapping[str, Any],  # noqa: ARG002
    ) -> ParsedAnswer:
        said = " ".join(str(token) for token in output_ids if token != STOP)
        return ParsedAnswer(content=said, reasoning="", tool_calls=(), unfinished="")


@asynccontextmanager
async def asked(*backends: ScriptedBackend) -> AsyncIterator[Refresher]:
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        urls = [await stack.enter_async_context(serving(backend)) for backend in backends]
        yield Refresher([SglangEngine(session, url) for url in urls], Numbers(), now_ms=lambda: 11)


def backend(version: str = "4") -> ScriptedBackend:
    """An engine that says 9, 8 and stops."""
    said = ScriptedAnswer(token_ids=(9, 8, STOP), logprobs_nats=(-0.5, -0.25, -1.0))
    return ScriptedBackend(script=lambda _: said, version=version)


async def answer(refresher: Refresher, ask: RefreshRequest = ASK) -> AnswerRefreshed:
    [event] = await refresher.answer(ask)
    assert isinstance(event, AnswerRefreshed)
    return event


async def test_an_answer_is_on_record_with_its_tokens_log_probs_and_the_weights_that_sampled_it() -> None:
    engine = backend()
    async with asked(engine) as refresher:
        given = await answer(refresher)
    assert (given.session_id, given.turn_id, given.number) == ("s", "t", 1)
    assert (given.output_ids, given.output_logprobs) == ((9, 8, STOP), (-0.5, -0.25, -1.0))
    assert given.versions == (VersionSpan(policy_version=4, num_tokens=3),)
    assert (given.message, given.finish_reason) == (b'{"role":"assistant","content":"9 8"}', FinishReason.STOP)
    assert (given.error, given.sampling, given.answered_at_ms) == (None, ASK.seeded, 11)
    [call] = engine.calls
    assert tuple(call.request.input_ids) == PROMPT
    sampling = call.request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 0.9, 5)
    assert (sampling.sampling_seed, sampling.stop_token_ids) == (ASK.seeded.seed, (STOP,))
    assert (sampling.max_new_tokens, sampling.stop) == (64, ())


async def test_a_new_answer_is_sampled_under_the_penalties_and_the_grammar_of_the_recorded_one() -> None:
    shaping, engine = Shaping(repetition_penalty=1.3, min_new_tokens=2, ebnf='root ::= "9"'), backend()
    async with asked(engine) as refresher:
        given = await answer(refresher, replace(ASK, sampling=replace(SAMPLING, shaping=shaping)))
    assert [call.request.sampling.shaping for call in engine.calls] == [given.sampling.shaping] == [shaping]


async def test_answers_share_a_cache_with_all_that_the_same_weights_answer_and_with_no_others() -> None:
    engine = backend("4")
    async with asked(engine) as refresher:
        for version in ("4", "4", "5"):
            engine.version = version
            await answer(refresher)
    keys = [call.request.extra_key for call in engine.calls]
    assert keys == ["policy:4", "policy:4", "policy:5"]


@pytest.mark.parametrize(("cached_tokens", "thrown_away"), [(64, True), (0, False)])
async def test_what_new_weights_made_of_an_older_ones_cache_is_thrown_away(
    cached_tokens: int, thrown_away: bool
) -> None:
    class Renewed(ScriptedBackend):
        async def start(self, call: Call) -> Generation:
            self.version = "5"
            return Cached(await ScriptedBackend.start(self, call), cached_tokens)

    engine = Renewed(script=backend().script, version="4")
    async with asked(engine) as refresher:
        with pytest.raises(NotYet, match="64 tokens were cached") if thrown_away else nullcontext():
            assert (await answer(refresher)).versions == (VersionSpan(policy_version=5, num_tokens=3),)
        assert (await answer(refresher)).versions == (VersionSpan(policy_version=5, num_tokens=3),)


async def test_the_newest_adapter_answers_and_is_the_version_on_record() -> None:
    engine = backend("4")
    for name in ("policy-v6", "policy-v7", "other-v9"):
        await engine.load_lora(name, "folder")
    async with asked(engine) as refresher:
        given = await answer(refresher)
    assert [call.request.lora_name for call in engine.calls] == ["policy-v7"]
    assert given.versions == (VersionSpan(policy_version=7, num_tokens=3),)


async def test_weights_newer_than_every_adapter_answer_themselves() -> None:
    engine = backend("8")
    await engine.load_lora("policy-v7", "folder")
    async with asked(engine) as refresher:
        given = await answer(refresher)
    assert [call.request.lora_name for call in engine.calls] == [None]
    assert given.versions == (VersionSpan(policy_version=8, num_tokens=3),)


async def test_an_answer_that_is_cut_off_is_on_record_as_such() -> None:
    engine = backend()
    engine.script = counting(100)
    async with asked(engine) as refresher:
        given = await answer(refresher)
    assert given.finish_reason is FinishReason.LENGTH
    assert len(given.output_ids) == SAMPLING.max_tokens


async def test_what_an_engine_refuses_is_on_record_with_its_words_and_what_it_does_not_answer_is_for_later() -> None:
    engine = backend()
    engine.faults.extend([Fault(status=400, message="too long"), Fault(status=503), Fault(cut_after_tokens=1)])
    async with asked(engine) as refresher:
        refused = await answer(refresher)
        with pytest.raises(TryLater):
            await answer(refresher)
        with pytest.raises(TryLater):
            await answer(refresher)
        assert (await answer(refresher)).error is None
    assert refused.error is not None
    assert "too long" in refused.error
    assert (refused.output_ids, refused.versions, refused.message, refused.finish_reason) == ((), (), None, None)
    assert refused.event_id == refresher.give_up(ASK, "away")[0].event_id


async def test_an_adapter_that_was_unloaded_meanwhile_is_no_refusal() -> None:
    class Unloading(ScriptedBackend):
        async def start(self, call: Call) -> Generation:
            self._adapters.clear()
            return await ScriptedBackend.start(self, call)

    engine = Unloading(script=counting(3), version="4")
    await engine.load_lora("policy-v7", "folder")
    async with asked(engine) as refresher:
        with pytest.raises(TryLater, match="policy-v7 is not loaded any more"):
            await answer(refresher)


async def test_an_attempt_after_one_that_failed_goes_to_the_next_engine() -> None:
    down, up = backend(), backend("5")
    down.faults.append(Fault(status=503))
    async with asked(down, up) as refresher:
        with pytest.raises(TryLater):
            await answer(refresher)
        given = await answer(refresher)
    assert given.versions == (VersionSpan(policy_version=5, num_tokens=3),)
    assert len(up.calls) == 1


async def test_a_prompt_of_a_keys_policy_is_answered_by_that_keys_adapter_or_else_by_what_all_share() -> None:
    engine = backend("0")
    async with asked(engine) as refresher:
        for name in ("policy-v6", "policy+ben-v3", "policy+anna-v9"):
            await engine.load_lora(name, "/adapter")
        given = [await answer(refresher, replace(ASK, policy_id=f"policy+{key}")) for key in ("ben", "cid")]
    assert [(event.policy_id, event.versions[0].policy_version) for event in given] == [
        ("policy+ben", 3), ("policy+cid", 6),
    ]  # fmt: skip
    assert [(call.request.extra_key, call.request.lora_name) for call in engine.calls] == [
        ("policy+ben:policy+ben-v3:0", "policy+ben-v3"), ("policy+cid:policy-v6:0", "policy-v6"),
    ]  # fmt: skip
