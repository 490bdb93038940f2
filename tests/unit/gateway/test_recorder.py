"""What an exchange may refer to: a parent that every stage still knows, and nothing else."""

from collections.abc import Callable

import pytest

from clawstream.conversation.history import WholeRequest
from clawstream.events import (
    ExchangeCompleted,
    FinishReason,
    RequestDelta,
    Sampling,
    SessionDone,
    TurnType,
    VersionSpan,
)
from clawstream.gateway.outbox.recorder import PARENT_FOR_MS, Recorder
from tests.fakes.memory_log import MemoryLog

REQUEST = WholeRequest(messages=(b'{"role":"user","content":"hi"}',), token_ids=(1, 2, 3), options=b"{}")


def exchange(name: str, at_ms: int) -> Callable[[RequestDelta], ExchangeCompleted]:
    def made(delta: RequestDelta) -> ExchangeCompleted:
        return ExchangeCompleted(
            session_id="s", exchange_id=name, turn_type=TurnType.MAIN, client="headers", key_name=None, model="policy",
            request=delta, num_spliced=0, request_sha256=name, retry_count=None, policy_id="policy", message=b"{}",
            output_ids=(4,),
            sampling=Sampling(temperature=1.0, top_p=1.0, top_k=None, max_tokens=8, seed=None, stop=()),
            versions=(VersionSpan(policy_version=0, num_tokens=1),), output_logprobs=(-1.0,), cached_tokens=None,
            finish_reason=FinishReason.STOP, trace_id=None, received_at_ms=at_ms, first_token_at_ms=at_ms,
            finished_at_ms=at_ms,
        )  # fmt: skip

    return made


async def test_a_second_exchange_of_a_session_rests_on_the_first() -> None:
    recorder = Recorder(MemoryLog())
    await recorder.write("s", REQUEST, exchange("first", 0))

    second = await recorder.write("s", REQUEST, exchange("second", 1000))

    assert (second.request.parent_exchange_id, second.request.kept_messages) == ("first", 1)


async def test_after_the_session_is_done_the_next_exchange_is_whole() -> None:
    recorder = Recorder(MemoryLog())
    done = SessionDone(session_id="s", after_exchange_id="first")
    await recorder.write("s", REQUEST, exchange("first", 0), then=[done])

    second = await recorder.write("s", REQUEST, exchange("second", 1000))

    assert second.request.parent_exchange_id is None


@pytest.mark.parametrize(("silence_ms", "parent"), [(PARENT_FOR_MS, "first"), (PARENT_FOR_MS + 1, None)])
async def test_a_parent_that_stages_may_have_forgotten_is_not_referred_to(silence_ms: int, parent: str | None) -> None:
    recorder = Recorder(MemoryLog())
    await recorder.write("s", REQUEST, exchange("first", 0))

    second = await recorder.write("s", REQUEST, exchange("second", silence_ms))

    assert second.request.parent_exchange_id == parent


async def test_no_chain_of_parents_grows_longer_than_thirty_two() -> None:
    recorder = Recorder(MemoryLog())

    written = [await recorder.write("s", REQUEST, exchange(str(n), n)) for n in range(70)]

    whole = [n for n, event in enumerate(written) if event.request.parent_exchange_id is None]
    assert whole == [0, 32, 64]
