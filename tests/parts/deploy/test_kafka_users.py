"""Kafka's users: one for each stage, who can do what its stage does and nothing else, by manifests and broker."""

import asyncio
import stat
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from clawstream import cli
from clawstream.config import KafkaSettings
from clawstream.errors import ConfigError, OperatorError, TryLater
from clawstream.events import RewardWeights
from clawstream.groups.stage import groups_stages
from clawstream.judging import stage as judging_stage
from clawstream.local.servers.kafka import EmbeddedKafka
from clawstream.monitoring import status
from clawstream.projections import tables
from clawstream.projections.write import rows
from clawstream.refresh import stage as refresh_stage
from clawstream.samples import stage as samples_stage
from clawstream.stream.kafka import access as granting
from clawstream.stream.kafka import admin
from clawstream.stream.kafka.access import OPERATOR, USERS, Grant, grants, resources_of_users
from clawstream.stream.kafka.connect import connected
from clawstream.stream.kafka.kafka_log import KafkaLog
from clawstream.stream.log import Commit, PartitionId, Sealed
from clawstream.stream.runner.hosting import run
from clawstream.stream.topics import POLICY, SAMPLES, TURNS, VOTES, all_topics
from clawstream.turns.stage import turns_stage
from tests.parts.deploy.test_deploy import DEPLOY, STAGES, compose
from tests.sessions import Session, assistant, user
from tests.unit.stream.toys import until

GROUPS = groups_stages(RewardWeights(), wait_s=1.0)
READS = {  # by group, as the code has it
    "turns": turns_stage().reads,
    "judging": judging_stage.READS,
    "heuristics": judging_stage.HEURISTICS_READ,
    "samples": samples_stage.READS,
    "refresh": refresh_stage.READS,
    **{stage.name: stage.reads for stage in GROUPS},
    rows.GROUP: tables.TOPICS,
    status.GROUP: status.TOPICS,
}


def test_each_stage_has_a_user_that_may_join_the_stages_groups_and_read_what_they_read() -> None:
    assert {one.name for one in USERS} == set(STAGES)
    told = {(one.kind, one.name, one.operation, one.user) for one in grants()}
    of_group = {group: one.name for one in USERS for group in one.groups}
    assert of_group.keys() == READS.keys()
    for group, topics in READS.items():
        assert ("group", group, "Read", of_group[group]) in told
        assert {("topic", topic, "Read", of_group[group]) for topic in topics} <= told
    writers = {
        topic.name: {who for _, name, what, who in told if (name, what) == (topic.name, "Write")}
        for topic in all_topics()
    }
    assert writers[SAMPLES] == {"samples", "refresh"}
    assert writers[POLICY] == {"gateway", "train", "weights"}
    assert writers[f"{SAMPLES}.dlq"] == {"refresh", "groups", "train", "project"}


def test_the_users_of_kubernetes_are_those_of_the_topic_files() -> None:
    assert (DEPLOY / "kubernetes" / "users.yaml").read_text() == resources_of_users(cluster="clawstream"), (
        "run `clawstream topics users > deploy/kubernetes/users.yaml`"
    )


def test_compose_gives_each_part_its_own_password_and_no_other_parts(tmp_path: Path) -> None:
    services = compose(KAFKA_SECRETS=str(tmp_path))
    given = {name: found["env_file"] for name, found in services.items() if "env_file" in found}
    assert given == {
        **{stage: [f"{tmp_path}/{stage}.env"] for stage in STAGES},
        "kafka": [f"{tmp_path}/kafka.env"],
        "prepare": [f"{tmp_path}/{OPERATOR}.env"],
    }
    assert "clawstream topics apply && clawstream topics grant" in services["prepare"]["command"][0]
    assert "${KAFKA_SECRETS:?" in (DEPLOY / "compose.yaml").read_text()


def test_passwords_are_made_once_and_for_this_users_eyes(tmp_path: Path) -> None:
    folder = tmp_path / "kafka"
    assert CliRunner().invoke(cli.app, ["topics", "passwords", str(folder)]).exit_code == 0
    assert {path.stem for path in folder.iterdir()} == {"kafka", OPERATOR, *STAGES}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())} == {0o700, 0o600}
    found = variables(folder)
    assert len({found[name]["CLAWSTREAM_KAFKA__SASL_PASSWORD"] for name in (OPERATOR, *STAGES)}) == len(STAGES) + 1
    again = CliRunner().invoke(cli.app, ["topics", "passwords", str(folder)])
    assert isinstance(again.exception, OperatorError)
    assert variables(folder) == found


def variables(folder: Path) -> dict[str, dict[str, str]]:
    """What each file says."""
    return {path.stem: dict(line.split("=", 1) for line in path.read_text().splitlines()) for path in folder.iterdir()}


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("secrets")
    assert CliRunner().invoke(cli.app, ["topics", "passwords", str(folder)]).exit_code == 0
    return folder


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory, secrets: Path) -> Iterator[EmbeddedKafka]:
    """A broker with the settings that Compose gives its image, but for folder and ports."""
    found = compose(KAFKA_SECRETS=str(secrets))["kafka"]
    own = {name: value for name, value in found["environment"].items() if name != "KAFKA_LOG_DIRS"}

    def settings(port: int, controller_port: int, _: str | None) -> str:
        told = {
            name.removeprefix("KAFKA_").lower().replace("_", "."): str(value)
            for name, value in (own | variables(secrets)["kafka"]).items()
        }
        told["listeners"] = f"STAGES://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}"
        told["advertised.listeners"] = f"STAGES://127.0.0.1:{port}"
        told["controller.quorum.voters"] = f"1@127.0.0.1:{controller_port}"
        return "".join(f"{name}={value}\n" for name, value in told.items())

    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("clawstream.local.servers.kafka.listeners", settings)
            there = stack.enter_context(EmbeddedKafka(tmp_path_factory.mktemp("broker") / "data"))
        yield there


def access(broker: EmbeddedKafka, secrets: Path, name: str) -> KafkaSettings:
    """A part's settings, by its file of variables."""
    own = {key.removeprefix("CLAWSTREAM_KAFKA__").lower(): value for key, value in variables(secrets)[name].items()}
    told = compose()["turns"]["environment"]
    return KafkaSettings(
        bootstrap=broker.bootstrap,
        security_protocol=told["CLAWSTREAM_KAFKA__SECURITY_PROTOCOL"],
        sasl_mechanism=told["CLAWSTREAM_KAFKA__SASL_MECHANISM"],
        **own,
    )


async def is_let(work: Awaitable[Any]) -> bool:
    try:
        await work
    except TryLater as error:
        if "Authorization" not in str(error):
            raise
        return False
    return True


async def read(log: KafkaLog, topic: str) -> None:
    async for _ in log.follow_raw((topic,), until_end=True):
        pass


async def rights(log: KafkaLog, topics: Iterable[str]) -> set[tuple[str, str]]:
    """What the broker lets this user do with each of the topics, and with each group."""
    found: set[tuple[str, str]] = set()
    for topic in topics:
        if await is_let(log.put([Sealed(topic, b"key", b"value", ())], 0)):
            found.add(("Write", topic))
        if await is_let(read(log, topic)):
            found.add(("Read", topic))
    for group in READS:
        if await is_let(log.committed(group)):
            found.add(("Read", group))
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_broker_lets_each_stage_do_its_own_and_nothing_else(broker: EmbeddedKafka, secrets: Path) -> None:
    operator = access(broker, secrets, OPERATOR)
    security = operator
    await admin.apply(broker.bootstrap, security=security, partitions=1)
    given, taken = await granting.grant(broker.bootstrap, security=security)
    assert (set(given), taken) == (set(grants()), [])
    assert await granting.grant(broker.bootstrap, security=security) == ([], [])

    @asynccontextmanager
    async def as_user(name: str) -> AsyncIterator[KafkaLog]:
        async with connected(access(broker, secrets, name), client_id=name, partitions=1) as log:
            yield log

    session, stop = Session("s"), asyncio.Event()
    first = session.ask([user("What is 2+2?")], "Four.")
    second = session.ask([user("What is 2+2?"), assistant("Four."), user("Wrong.")], "Five.")
    async with as_user("gateway") as gateway, as_user("turns") as turns, as_user(OPERATOR) as all_of_it:
        await gateway.append([first, second])
        running = asyncio.create_task(run(turns_stage(), turns, stop=stop))

        async def paired() -> bool:
            return any((await all_of_it.end_offsets([TURNS])).values())

        await until(paired)
        stop.set()
        await running
        assert await turns.lag("turns") == 0
        for topic in all_topics():
            await all_of_it.put([Sealed(topic.name, b"key", b"value", ())], 0)
    every_topic = {topic.name for topic in all_topics()}
    for one in USERS:
        own = [right for right in grants() if right.user == one.name and right.pattern == "literal"]
        tried = every_topic if one.name == "turns" else {right.name for right in own} & every_topic | {SAMPLES, VOTES}
        async with as_user(one.name) as log:
            assert await rights(log, tried) == {(right.operation, right.name) for right in own}, one.name
    async with as_user("train") as trainer, as_user("samples") as other:
        await trainer.put_back("train-policy", {PartitionId(SAMPLES, 0): Commit(1)})
        assert (await trainer.committed("train-policy"))[PartitionId(SAMPLES, 0)].offset == 1
        assert not await is_let(other.committed("train-policy"))


@pytest.mark.slow
async def test_what_is_no_stages_any_more_is_taken_from_it(
    broker: EmbeddedKafka, secrets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    security = access(broker, secrets, OPERATOR)
    more = Grant("turns", "topic", SAMPLES, "literal", "Write")
    await granting.grant(broker.bootstrap, security=security)
    with monkeypatch.context() as patched:
        patched.setattr(granting, "grants", lambda prefix: (*grants(prefix), more))
        assert await granting.grant(broker.bootstrap, security=security) == ([more], [])
    assert await granting.grant(broker.bootstrap, security=security) == ([], [more])


async def test_a_broker_that_lets_everybody_in_can_not_be_told_who_may_what(kafka_bootstrap: str) -> None:
    with pytest.raises(ConfigError, match=r"authorizer\.class\.name"):
        await granting.grant(kafka_bootstrap)
