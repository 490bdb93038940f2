"""An engine whose answers are made up: the client gets an error in words, and the log a failed exchange."""

import asyncio
import json
from pathlib import Path

import pytest

from clawstream.events import ExchangeCompleted, ExchangeFailed, FailureReason
from tests.parts.gateway.running_gateway import everything, running_gateway, until
from tests.parts.inference.test_odd_answers import STOP, event, spans
from tests.rogue import Rogue, head, piece, rogue


@pytest.mark.parametrize(
    "last",
    [
        event([10**12], finish_reason=STOP, weight_versions=spans(("3", 0, 1))),
        event([7] * 5000, finish_reason=STOP, weight_versions=spans(("3", 0, 5000))),
        event([7], output_token_logprobs=[[5.0, 7]], finish_reason=STOP, weight_versions=spans(("3", 0, 1))),
        event([7, 8], finish_reason=STOP, weight_versions=spans(("7", 0, 1), ("5", 1, 2))),
        event([7, 8], finish_reason=STOP, weight_versions=spans(("9" * 30, 0, 2))),
    ],
)
async def test_what_an_engine_made_up_is_a_failed_exchange_and_never_an_answer_on_the_log(
    tokenizer_folder: Path, last: bytes
) -> None:
    controls = {
        "/model_info": {"model_path": "m", "weight_version": "3"},
        "/v1/models": {"data": [{"max_model_len": 2048}]},
    }

    async def say(found: Rogue, writer: asyncio.StreamWriter) -> None:
        path = found.heads[-1].split()[1].decode()
        content = last if path == "/generate" else json.dumps(controls[path]).encode()
        writer.write(head() + piece(content) + b"0\r\n\r\n")

    async with rogue(say) as engine, running_gateway(tokenizer_folder, engine_urls=(engine.url,)) as gateway:
        await until(gateway.ready)
        answer = await gateway.chat(max_tokens=8)
        assert answer.status == 503
        (failed,) = await gateway.recorded(ExchangeFailed)
        assert failed.reason is FailureReason.ENGINE_FAILED
        assert len(failed.detail) < 600
        assert not [one for one in await everything(gateway.log) if isinstance(one, ExchangeCompleted)]
