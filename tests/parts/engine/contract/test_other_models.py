"""The weights of another model, published by mistake, are not put to an engine, and it goes on answering."""

import asyncio
from pathlib import Path

import orjson

from clawstream.events import PolicyRejected
from clawstream.weights.stage import keep_current
from tests.parts.engine.conftest import Subject
from tests.parts.engine.contract.asking import answer, asking
from tests.parts.engine.tiny_model import make_model
from tests.unit.monitoring.said import published
from tests.unit.weights.engines import PolicyTopic

PROMPT = tuple(range(40, 60))


async def test_weights_of_another_model_are_refused_and_the_next_version_is_taken_over(
    subject: Subject, tmp_path: Path
) -> None:
    ours = orjson.loads((subject.model / "config.json").read_bytes())
    wider = make_model(tmp_path / "wider", width=64, tied=ours["tie_word_embeddings"])
    before = await answer(subject.engine, asking(PROMPT))
    log, stop = PolicyTopic(published(2, str(wider))), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(keep_current([subject.engine], log, policy_id="policy", stop=stop, ask_every_s=0.05))
        await log.until(lambda: log.said(PolicyRejected) != [])
        after = await answer(subject.engine, asking(PROMPT))
        await log.append([published(3, str(subject.other_model))])
        await log.until(lambda: log.active() != [])
        stop.set()
    [refusal] = log.said(PolicyRejected)
    assert isinstance(refusal, PolicyRejected)
    first = "model.embed_tokens" if ours["tie_word_embeddings"] else "lm_head"
    assert f"{first}.weight: found F32 [265, 64], expected F32 [265, {ours['hidden_size']}]" in refusal.reason
    assert after.token_ids == before.token_ids
    assert await subject.engine.weight_version() == "3"
