"""How fast the projection is rebuilt from a log of the demo's size, and how fast it is verified.

Broker, database and this process share the machine's cores, as they do on a laptop.
"""

import asyncio
import contextlib
import os
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from clawstream.cli.process import leave_what_is_loaded
from clawstream.events import (
    Event,
    ExchangeCompleted,
    HintFound,
    Question,
    RequestDelta,
    SampleAssembled,
    SessionDone,
    TurnPaired,
    TurnType,
    VerdictReached,
    VersionSpan,
    VoteCast,
    VoteStatus,
)
from clawstream.projections import database
from clawstream.projections.rebuild.rebuilding import rebuild as rebuild_tables
from clawstream.projections.rebuild.verifying import verify
from clawstream.projections.write.rows import GROUP
from clawstream.projections.write.stage import project
from clawstream.stream.kafka import admin
from clawstream.stream.kafka.kafka_log import KafkaLog
from tests import servers
from tests.bench.report import report
from tests.parts.projections.one_session import message
from tests.unit.projections.logs import example

PROMPT_TOKENS, ANSWER_TOKENS = 100, 40
VOTES = 3
_APPEND_AT_ONCE = 2000


def rebuild(
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
    events: Annotated[int, typer.Option(min=100)] = 200_000,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
) -> None:
    """Project, rebuild and verify a log of events like the demo's."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bootstrap = stack.enter_context(servers.kafka(folder / "kafka"))
        postgres = stack.enter_context(servers.postgres(folder / "postgres"))
        url = stack.enter_context(servers.database(postgres, "bench_rebuild"))
        database.upgrade(url)
        report(asyncio.run(_measure(bootstrap, url, events, repeats)), json_file)


async def _measure(bootstrap: str, url: str, wanted: int, repeats: int) -> dict[str, object]:
    await admin.apply(bootstrap, "bench.")
    async with KafkaLog.connect(bootstrap, prefix="bench.") as log:
        written = 0
        batch: list[Event] = []
        while written < wanted:
            batch += _session(written)
            written += len(_session(written))
            if len(batch) >= _APPEND_AT_ONCE or written >= wanted:
                await log.append(batch)
                batch = []
        project_s = await _projected(url, log)
        await leave_what_is_loaded(url)  # as the command does
        runs = [await _rebuilt(url, log) for _ in range(repeats)]
        begun = time.perf_counter()
        audit = await verify(url, log, sample=None, tell=lambda *_: None)
        verify_s = time.perf_counter() - begun
    assert audit.records == written, (audit.records, written)
    return {
        "events": written,
        "cores": len(os.sched_getaffinity(0)),
        "project_events_per_s": round(written / project_s),
        "rebuild_events_per_s": max(run["events_per_s"] for run in runs),
        "rebuilds": runs,
        "verify_events_per_s": round(written / verify_s),
        "verify_s": round(verify_s, 2),
        "rows_differ": audit.rows_differ,
        "breaks": len(audit.breaks),
    }


async def _rebuilt(url: str, log: KafkaLog) -> dict[str, Any]:
    """One rebuild: how fast, by phase, and whose processor time; and how busy others kept the machine before."""
    load = os.getloadavg()[0]
    before_s = _cpu_s()
    begun = time.perf_counter()
    made = await rebuild_tables(url, log, keep=False, forget_expired=False, tell=lambda *_: None)
    wall_s = time.perf_counter() - begun
    cpu_s = {name: round(seconds - before_s.get(name, 0), 2) for name, seconds in _cpu_s().items()}
    return {
        "events_per_s": round(made.records / wall_s),
        "wall_s": round(wall_s, 2),
        "phases_s": made.seconds,
        "cpu_s": cpu_s,
        "cpu_us_per_event": round(sum(cpu_s.values()) / made.records * 1e6),
        "load_before": round(load, 1),
    }


def _cpu_s() -> dict[str, float]:
    """The processor time of this process and of each kind of server, in s: wall time also has what others took."""
    used: defaultdict[str, float] = defaultdict(float)
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):  # what has ended meanwhile is in its parent's times
            name, times = process.name(), process.cpu_times()
            used[name] += times.user + times.system + times.children_user + times.children_system
    return dict(used)


async def _projected(url: str, log: KafkaLog) -> float:
    """Let a projector catch up; return how long it took from its start, in s."""
    stop = asyncio.Event()
    begun = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(project(url, log, stop=stop))
        while await log.lag(GROUP) != 0:
            await asyncio.sleep(0.2)
        taken = time.perf_counter() - begun
        stop.set()
    return taken


def _session(n: int) -> list[Event]:
    """Two turns with all that comes of them, of the demo's sizes: characters for tokens."""
    made: list[Event] = []
    session_id = f"session-{n}"
    for turn in range(2):
        turn_id = f"exchange-{n}-{turn}"
        made.append(_exchange(session_id, turn_id))
        made.append(
            TurnPaired(session_id=session_id, turn_id=turn_id, next_exchange_id=f"{turn_id}-next", next_state=(2,))
        )
        about = {
            "session_id": session_id, "turn_id": turn_id, "judge": "judge", "prompt_version": "v1", "revision": 0
        }  # fmt: skip
        said = "The reply asks for another style than that of the answer, so it was not what was wanted. \\boxed{-1}"
        made += [
            example(
                VoteCast, **about, ballot=ballot, status=VoteStatus.READABLE, score=-1, question=question, text=said
            )
            for question in Question
            for ballot in range(VOTES)
        ]
        made.append(example(VerdictReached, **about, score=-1))
        made.append(example(HintFound, **about, hint="Answer in one line, without headings or bold."))
        made.append(
            example(
                SampleAssembled, **about, reward=-1, total_reward=-1.0,
                hint="Answer in one line, without headings or bold.",
                prompt_ids=tuple(range(PROMPT_TOKENS)), hinted_prompt_ids=tuple(range(PROMPT_TOKENS + 50)),
                response_ids=tuple(range(ANSWER_TOKENS)), response_logprobs=(-0.25,) * ANSWER_TOKENS,
                trained=(1,) * ANSWER_TOKENS, versions=(VersionSpan(policy_version=1, num_tokens=ANSWER_TOKENS),),
            )
        )  # fmt: skip
    made.append(SessionDone(session_id=session_id, after_exchange_id=f"exchange-{n}-1"))
    return made


def _exchange(session_id: str, exchange_id: str) -> ExchangeCompleted:
    made: ExchangeCompleted = example(
        ExchangeCompleted, session_id=session_id, exchange_id=exchange_id, turn_type=TurnType.MAIN, client="headers",
        request=RequestDelta(
            parent_exchange_id=None, kept_messages=0, kept_tokens=0,
            messages=(message("user", "What is 12 + 34? Say it in the way that I like."),),
            token_ids=tuple(range(PROMPT_TOKENS)), options=b'{"temperature": 1.0, "max_tokens": 64, "stream": true}',
        ),
        versions=(VersionSpan(policy_version=1, num_tokens=ANSWER_TOKENS),),
        message=message("assistant", "## Answer\n\n**46**, as 12 + 34 is 46."),
        output_ids=tuple(range(ANSWER_TOKENS)), output_logprobs=(-0.25,) * ANSWER_TOKENS,
    )  # fmt: skip
    return made
