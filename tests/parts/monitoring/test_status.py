"""The status says what can be known, and why the rest is not."""

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from clawstream.cli.status import blocks, plain, shown
from clawstream.config import KafkaSettings
from clawstream.events import CUT, VoteStatus
from clawstream.local.running import Addresses, PartState
from clawstream.local.servers.server_process import reserved
from clawstream.monitoring.alarm import ReadVotes
from clawstream.monitoring.live import Live, as_json
from clawstream.monitoring.policy import LearnedFrom, PolicyBoard
from clawstream.monitoring.status import GROUPED, REFRESHING, LogStatus, RecentVerdict, Status, read_log, status
from clawstream.monitoring.windows import alarm
from clawstream.stream.kafka import admin
from clawstream.stream.kafka.kafka_log import KafkaLog
from tests.unit.monitoring.said import activated, plan, published, rejected, sample, verdict, vote

NOW_MS = 1_800_000_000_000
ADDRESSES = Addresses(
    supervisor_pid=1,
    kafka="127.0.0.1:9092",
    postgres="postgresql+psycopg://me:hunter2@127.0.0.1:5432/clawstream",
    engines=("http://127.0.0.1:30010",),
    gateway="http://127.0.0.1:30000",
    monitor="http://127.0.0.1:30066",
)
PARTS = (
    PartState(name="turns", pid=7, restarts=0, since_ms=NOW_MS - 5000, failure=None),
    PartState(name="judging", pid=None, restarts=2, since_ms=NOW_MS - 90_000, failure="exited with 2 3 times"),
)
FOUND = Status(
    log=LogStatus(
        lag_records={"turns": 0, "judging": 12, "project": None},
        published_version=3,
        active_versions={"http://127.0.0.1:30010": 2},
        rejected_version=4,
        rejected_because="the gradient is not finite",
        alarm="every step was rejected",
        samples_waiting=5,
        oldest_waiting_at_ms=NOW_MS - 7_200_000,
        last_verdicts=(
            RecentVerdict(at_ms=NOW_MS - 1000, session_id="ann", turn_id="t-1", status="decided", score=-1),
        ),
    ),
    monitor=as_json(Live(PolicyBoard("policy"), {}).report(NOW_MS)),
)


def seen(addresses: Addresses | None, parts: tuple[PartState, ...], found: Status) -> str:
    out = io.StringIO()
    console = Console(file=out, width=200)
    for block in blocks(Path("/data"), addresses, parts, found, now_ms=NOW_MS):
        console.print(block)
    return out.getvalue()


def test_a_person_sees_parts_addresses_lags_policy_verdicts_and_windows() -> None:
    text = seen(ADDRESSES, PARTS, FOUND)
    for words in ("turns", "runs", "exited with 2 3 times", "http://127.0.0.1:30000", "12", "published", "2 h ago"):
        assert words in text
    for words in ("learning stands still: every step was rejected", "rejected 4", "the gradient is not finite"):
        assert words in text
    for words in ("ann", "t-1", "decided", "-1", "last minute", "5 s ago", "1 min ago"):
        assert words in text


def test_a_person_sees_how_many_samples_were_taught_by_thumbs() -> None:
    assert FOUND.log is not None
    told = LearnedFrom(samples=9, with_feedback=7, judged=4, hinted=2)
    text = seen(ADDRESSES, PARTS, replace(FOUND, log=replace(FOUND.log, learned_from=told)))
    assert "9 samples: 7 with feedback, 4 judged, 2 with a hint" in text
    assert "thumbs" not in seen(ADDRESSES, PARTS, FOUND)


def test_a_broker_whose_clock_is_wrong_is_an_alarm_of_its_own_said_once() -> None:
    assert FOUND.log is not None
    assert FOUND.monitor is not None
    assert "clock is wrong" not in seen(ADDRESSES, PARTS, FOUND)
    log, monitor = replace(FOUND.log, clock_alarm=alarm(3_000_000)), {**FOUND.monitor, "clock_alarm": alarm(3_001_000)}
    for found in (Status(log=log, monitor=monitor), Status(log=log, monitor=None), Status(log=None, monitor=monitor)):
        assert seen(ADDRESSES, PARTS, found).count("the broker's clock is wrong: the newest exchanges are dated") == 1
        assert "3,00" in json.dumps(plain(Path("/data"), ADDRESSES, PARTS, found))


def test_the_database_password_is_never_shown() -> None:
    assert "hunter2" not in seen(ADDRESSES, PARTS, FOUND)
    assert "hunter2" not in json.dumps(plain(Path("/data"), ADDRESSES, PARTS, FOUND))
    assert shown(ADDRESSES)["postgres"] == "postgresql+psycopg://me:***@127.0.0.1:5432/clawstream"


def test_where_nothing_runs_it_says_so_and_what_is_not_known() -> None:
    text = seen(None, (), Status(log=None, monitor=None, problems=("no broker runs here",)))
    assert "nothing runs on /data" in text
    assert "not known: no broker runs here" in text


def test_the_command_ends_well_where_nothing_runs(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CLAWSTREAM_")}
    environment["CLAWSTREAM_DATA_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "clawstream", "status", "--json"]
    said = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    told: dict[str, Any] = json.loads(said.stdout)
    assert (told["running"], told["parts"], told["log"], told["monitor"]) == (False, [], None, None)
    assert told["problems"] == ["no broker runs here and none is set (kafka.bootstrap)"]


async def test_a_broker_and_a_monitor_that_do_not_answer_are_named() -> None:
    with reserved() as port:
        found = await status(
            KafkaSettings(bootstrap=f"127.0.0.1:{port}"),
            policy_id="policy",
            optional=(),
            monitor_url=f"http://127.0.0.1:{port}",
        )
    assert (found.log, found.monitor) == (None, None)
    assert sorted(problem.split("(")[0].strip() for problem in found.problems) == [
        f"no Kafka broker answers at 127.0.0.1:{port}",
        f"the monitor at http://127.0.0.1:{port} does not answer",
    ]


@pytest.mark.slow
async def test_the_log_says_how_the_policy_fares_and_what_was_judged_last(
    kafka_bootstrap: str, topic_prefix: str
) -> None:
    await admin.apply(kafka_bootstrap, topic_prefix)
    samples = [sample(str(number)) for number in range(4)]
    async with KafkaLog.connect(kafka_bootstrap, prefix=topic_prefix) as log:
        await log.append([*samples, published(0), published(1), activated(0), plan(1, (samples[0],), {})])
        await log.append([rejected(2, "it looped")])
        for number in range(7):
            await log.append([verdict(f"t-{number}", 1)])
        unread = replace(vote(1, VoteStatus.UNREADABLE), ballot=1, error=f"{CUT} 1024")
        await log.append([unread, replace(vote(0, VoteStatus.FAILED), error="status 404, no such model")])
        found = await read_log(log, PolicyBoard("policy"), (), "judge")
        grouped = await read_log(log, PolicyBoard("policy"), (*REFRESHING, *GROUPED))
    assert (found.published_version, found.active_versions) == (1, {"http://engine": 0})
    assert (found.rejected_version, found.rejected_because) == (2, "it looped")
    assert found.samples_waiting == 3
    assert found.oldest_waiting_at_ms is not None
    assert found.judge is not None
    assert (found.judge.error, grouped.judge) == ("status 404, no such model", None)
    assert found.votes == ReadVotes(replies=1, cut=1, cut_tokens=1024, without=0, broken=0)
    assert grouped.votes is None
    assert found.trainer is not None
    assert found.trainer.what == "version 2 rejected"
    assert [one.turn_id for one in found.last_verdicts] == ["t-6", "t-5", "t-4", "t-3", "t-2"]
    assert found.lag_records == {
        "turns": None,
        "judging": None,
        "heuristics": None,
        "samples": None,
        "project": None,
        "monitor": None,
    }
    assert grouped.lag_records == {**found.lag_records, "refresh": None, "trajectories": None, "groups": None}


def test_refused_samples_are_counted_by_their_reasons_those_of_answers_given_again_apart(tmp_path: Path) -> None:
    part = {
        "exchanges": {"completed": 5}, "turns_paired": 4, "tokens_per_s": 1.0, "mean_score": None,
        "unreadable_share": None, "failed_share": None, "samples": 1, "activations": 0, "pause_ms_max": None,
        "steps_rejected": 0,
    }  # fmt: skip
    minute = part | {"refusals": {"truncated": 1}, "refreshed": {}}
    hour = part | {"refusals": {"truncated": 3, "off_distribution": 2}, "refreshed": {"looping": 6, "sampled": 7}}
    told = {"rebuilt": True, "hour": hour, "minutes": [minute, minute]}
    found = Status(log=None, monitor=told, problems=())
    page = io.StringIO()
    console = Console(width=80, file=page)
    for block in blocks(tmp_path, None, (), found, now_ms=0):
        console.print(block)
    rows = [line.replace("│", " ").split() for line in page.getvalue().splitlines()]
    for row in (
        ["samples", "refused", "1", "5"],
        ["off_distribution", "0", "2"],
        ["truncated", "1", "3"],
        ["looping", "0", "6"],
    ):
        assert row in rows


def test_a_status_needs_neither_faust_nor_torch() -> None:
    imports = "import sys, clawstream.cli.status, clawstream.monitoring.status, clawstream.local.running"
    command = [sys.executable, "-c", f"{imports}; print('faust' in sys.modules, 'torch' in sys.modules)"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False False\n"
