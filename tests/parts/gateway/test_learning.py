"""What a gateway makes of the log as it starts, whatever stands there."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.config import EngineSettings, GatewaySettings, PolicySettings, Settings
from clawstream.errors import TryLater
from clawstream.events import ExchangeCompleted, RequestDelta, SessionDone
from clawstream.gateway.access.owners import Owners
from clawstream.gateway.app import serve
from clawstream.gateway.sessions import Conversations, SampledAnswers, SessionIndex
from clawstream.gateway.watching import SessionLearner, learn_sessions
from clawstream.stream.log import Arrived, Start
from tests import strategies
from tests.fakes.memory_log import MemoryLog
from tests.parts.gateway.running_gateway import WITHIN_S, running_gateway
from tests.sessions import Session, user

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | strategies.TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["content", "user", "text"]), inner),
    max_leaves=6,
)
KEYS = st.sampled_from(["role", "content", "tool_calls", "tool_call_id", "user", "prompt_cache_key"])
DEEP = st.sampled_from([b'{"content":' + b"[" * 5000, b'{"content":' * 300 + b"1" + b"}" * 300, b"1" * 5000])
FACTS = st.dictionaries(KEYS, JSON).map(lambda found: json.dumps(found).encode()) | st.binary(max_size=8) | DEEP
REQUESTS = st.builds(
    RequestDelta,
    parent_exchange_id=st.none() | st.sampled_from(["x", "y", "z"]),
    kept_messages=strategies.INT32,
    kept_tokens=strategies.INT32,
    messages=st.lists(FACTS, max_size=3).map(tuple),
    token_ids=strategies.TOKEN_IDS,
    options=st.none() | FACTS,
)
EXCHANGES = strategies.of(
    ExchangeCompleted, exchange_id=st.sampled_from(["x", "y", "z"]), request=REQUESTS, message=FACTS
)


@pytest.fixture(scope="module")
def owners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owners]:
    with closing(Owners(tmp_path_factory.mktemp("owners") / "sessions.sqlite", lambda: 0)) as found:
        yield found


def asked(session_id: str, options: bytes | None = None) -> ExchangeCompleted:
    session = Session(session_id)
    session.ask([user("hello")], "hi")
    [exchange] = session.written
    assert isinstance(exchange, ExchangeCompleted)
    now_ms = int(time.time() * 1000)
    exchange = replace(exchange, received_at_ms=now_ms, finished_at_ms=now_ms)
    return exchange if options is None else replace(exchange, request=replace(exchange.request, options=options))


@given(st.lists(EXCHANGES | strategies.of(SessionDone), max_size=6))
def test_no_exchange_stops_a_start(owners: Owners, events: list[ExchangeCompleted | SessionDone]) -> None:
    SessionLearner(SessionIndex(1000), SampledAnswers(), Conversations(1000), owners, "policy").learn(events)


@pytest.mark.slow
@pytest.mark.parametrize("options", [b"junk", b"[]", b"\xff", b"[" * 5000])
async def test_an_exchange_whose_options_are_no_json_is_left_out_and_said_once(
    tokenizer_folder: Path, options: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    log = MemoryLog()
    odd = [asked("a", options), asked("b", options)]
    await log.append([*odd, odd[0], asked("c")])
    with caplog.at_level(logging.INFO, "clawstream.gateway.watching"):
        async with running_gateway(tokenizer_folder, log=log) as gateway:
            assert (await gateway.chat(session_id="a")).status == 200
    [said] = [record.getMessage() for record in caplog.records if "left_out" in record.getMessage()]
    assert said.startswith(f"sessions=left_out exchanges=2 first={odd[0].exchange_id} reason=its options ")
    assert "sessions=learned exchanges=1 unknown_parents=0 answers=1" in caplog.text


class Interrupted(MemoryLog):
    """A log whose broker goes away while it is read, some times."""

    times = 2

    async def follow(
        self, topics: Sequence[str], start: Start = "earliest", *, until_end: bool = False
    ) -> AsyncGenerator[Sequence[Arrived], None]:
        """Yield what there is, or the first of it."""
        async for records in super().follow(topics, start, until_end=until_end):
            yield records
            if self.times:
                self.times -= 1
                raise TryLater("the broker went away")


async def test_a_log_that_goes_away_while_it_is_read_is_waited_for(
    owners: Owners, caplog: pytest.LogCaptureFixture
) -> None:
    log, index, answers = Interrupted(), SessionIndex(86_400_000), SampledAnswers()
    sessions = list(map(str, range(9)))
    await log.append([asked(session_id) for session_id in sessions])
    await learn_sessions(log, index, answers, Conversations(1000), owners, policy_id="policy", from_ms=0)
    assert all(index.newest_exchange(session_id) for session_id in sessions)
    assert caplog.text.count("sessions=unread state=waiting") == 2
    assert len(answers.of("0", int(time.time() * 1000)).answers) == 1


def test_a_session_does_not_go_on_from_the_tokens_of_another_policy(owners: Owners) -> None:
    index, answers = SessionIndex(86_400_000), SampledAnswers()
    mine, others = asked("mine"), replace(asked("others"), policy_id="tiny")
    SessionLearner(index, answers, Conversations(1000), owners, mine.policy_id).learn([mine, others])
    assert index.newest_exchange("others") is not None
    now_ms = int(time.time() * 1000)
    assert [len(answers.of(session_id, now_ms).answers) for session_id in ("mine", "others")] == [1, 0]


@pytest.mark.parametrize("by_key", [True, False])
def test_a_session_goes_on_from_the_tokens_of_its_keys_policy_where_each_key_has_one(
    owners: Owners, by_key: bool
) -> None:
    answers, of_key = SampledAnswers(), replace(asked("s"), policy_id="policy+ben")
    learner = SessionLearner(SessionIndex(86_400_000), answers, Conversations(1000), owners, "policy", by_key=by_key)
    learner.learn([of_key])
    assert len(answers.of("s", int(time.time() * 1000)).answers) == by_key


async def test_a_gateway_that_waits_for_the_log_stops_when_it_is_told_to(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    log = Interrupted()
    log.times = 10**6
    await log.append([asked("a")])
    stop = asyncio.Event()
    settings = Settings(
        data_dir=tmp_path,
        engine=EngineSettings(urls=("http://127.0.0.1:1",), model_path=tokenizer_folder),
        policy=PolicySettings(renderer="qwen3"), gateway=GatewaySettings(port=0),
    )  # fmt: skip
    async with asyncio.timeout(WITHIN_S):
        serving = asyncio.create_task(serve(settings, log, stop=stop))
        while log.times == 10**6:
            await asyncio.sleep(0.01)
        assert not serving.done()
        stop.set()
        await serving
