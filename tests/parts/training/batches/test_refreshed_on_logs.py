"""The whole way round on a log: a thumb comes late, the policy answers again, and the trainer learns from the hint."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from clawstream.config import JudgeSettings
from clawstream.events import AnswerRefreshed, BatchPlanned, SampleAssembled, StepTaken, VersionSpan
from clawstream.inference.sglang import SglangEngine
from clawstream.judging.stage import judging_stage
from clawstream.refresh.answering import Refresher
from clawstream.refresh.stage import refresh_stage
from clawstream.rendering.renderer import ParsedAnswer
from clawstream.samples.joining import SampleRules
from clawstream.samples.stage import samples_stage
from clawstream.turns.stage import turns_stage
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.fakes.scripted_engine import Fault, ScriptedAnswer, ScriptedBackend, serving
from tests.flow import Oracle
from tests.parts.training import tiny
from tests.parts.training.test_loop import settings, trained_until
from tests.sessions import ANSWERS, SAMPLES, Letters, Session, assistant, user
from tests.unit.refresh.refresher import HINT
from tests.unit.stream import toys


class Small(Letters):
    """Prompts within the tiny policy's vocabulary; what was sampled reads as x."""

    stop_token_ids = (1,)

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> tuple[int, ...]:
        return tuple(token % tiny.VOCABULARY for token in super().prompt_ids(messages, options))

    def parse(
        self,
        output_ids: Sequence[int],
        prompt_ids: Sequence[int],  # noqa: ARG002
        options: Mapping[str, Any],  # noqa: ARG002
    ) -> ParsedAnswer:
        return ParsedAnswer(content="x" * len(output_ids), reasoning="", tool_calls=(), unfinished="")


@asynccontextmanager
async def stages_from_turns_to_answers(log: MemoryLog, engine: ScriptedBackend) -> AsyncIterator[None]:
    """The stages that make samples of what is on the log, and have the engine answer prompts again."""
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(serving(engine))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        policy = Refresher([SglangEngine(http, url)], Small())
        for stage in (
            turns_stage(),
            judging_stage(JudgeSettings(votes=1), Oracle(HINT)),
            samples_stage(SampleRules(Small())),
            refresh_stage(policy, "policy", answers_per_hint=1),
        ):
            await stack.enter_async_context(toys.running(stage, log))
        yield


async def test_a_thumb_on_a_turn_that_was_trained_on_has_the_policy_answer_again_and_learn_from_the_hint(
    base: Path,
    tmp_path: Path,
) -> None:
    session = Session(renderer=Small(), sampled=lambda text: tuple(byte % tiny.VOCABULARY for byte in text.encode()))
    first = session.ask([user("2+2?")], "**4**")
    session.ask([user("2+2?"), assistant("**4**"), user("no bold")], "4")
    exchanges = list(session.written)
    thumb = session.rate(first.exchange_id, -1.0, name="thumb")
    log = MemoryLog(MemoryBroker())
    await log.append(exchanges)
    chosen = settings(base, tmp_path, late="refresh", batch_samples=1, gate=False, rehearsal_share=0.0)
    engine = ScriptedBackend(script=lambda _: ScriptedAnswer(token_ids=(7, 8, 9, 1)), version="1")
    engine.faults.append(Fault(status=503))

    async with stages_from_turns_to_answers(log, engine):
        await trained_until(log, chosen, 1)
        await log.append([thumb])
        said = await trained_until(log, chosen, 2)

    samples = [one.event for one in await toys.read(log, SAMPLES) if isinstance(one.event, SampleAssembled)]
    own, late, refreshed = samples
    assert late.person_reward == -1.0
    [answer] = [one.event for one in await toys.read(log, ANSWERS) if isinstance(one.event, AnswerRefreshed)]
    assert answer.versions == (VersionSpan(policy_version=1, num_tokens=4),)
    assert (refreshed.refreshed_id, refreshed.turn_id) == (answer.event_id, own.turn_id)
    assert [tuple(call.request.input_ids) for call in engine.calls][-1] == own.prompt_ids == refreshed.prompt_ids
    assert refreshed.response_ids == answer.output_ids == (7, 8, 9, 1)
    assert refreshed.hinted_prompt_ids == own.hinted_prompt_ids
    plans = [event for event in said if isinstance(event, BatchPlanned)]
    assert [plan.sample_ids for plan in plans] == [(own.sample_id,), (refreshed.sample_id,)]
    step = [event for event in said if isinstance(event, StepTaken)][-1]
    assert (step.num_hinted, step.num_rewarded, step.max_versions_behind) == (1, 0, 0)
