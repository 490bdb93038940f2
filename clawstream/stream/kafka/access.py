"""Who may do what at the broker: each stage has a user, and topics/*.yaml say which stages read and write a topic.

A stage may read and write these topics only, and join its own groups only. Only grants about our users, topics and
groups are changed; an operator's other grants stay.
"""

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import yaml
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import SecurityDisabled, for_code
from aiokafka.protocol.admin import CreateAclsRequest_v1, DeleteAclsRequest_v1, DescribeAclsRequest_v1

from clawstream.config import KafkaSettings
from clawstream.errors import ConfigError
from clawstream.stream.kafka.client import Broker, kafka_errors, until_shown
from clawstream.stream.topics import SCHEMAS, Topic, all_topics, dead_letter_topic

Kind = Literal["topic", "group"]
Pattern = Literal["literal", "prefix"]
Operation = Literal["Read", "Write", "Describe", "DescribeConfigs"]

OPERATOR = "operator"  # this user may do everything: create topics, grant, replay, read
BOOKMARKS = "train-"  # each policy's trainer keeps its bookmark in a group whose name begins so
_KINDS: Mapping[Kind, int] = {"topic": 2, "group": 3}
_PATTERNS: Mapping[Pattern, int] = {"literal": 3, "prefix": 4}
_OPERATIONS: Mapping[Operation, int] = {"Read": 3, "Write": 4, "Describe": 8, "DescribeConfigs": 10}


OURS, _REPLAYS = "clawstream.", "clawstream.replay."


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """A stage's account at the broker; it has the name of the command that runs the stage."""

    name: str
    part: str  # the stage's name in the topics' files
    groups: tuple[str, ...] = ()  # the groups that it joins
    sets_aside: bool = True  # whether it copies records that it can't use to their topic's dead-letter queue
    trains: bool = False  # whether it reads what replays wrote, and keeps a bookmark for each policy


@dataclass(frozen=True, slots=True, order=True)
class Grant:
    """What one user may do with one topic or group, or with all whose names begin with `name`."""

    user: str
    kind: Kind
    name: str
    pattern: Pattern
    operation: Operation

    def __str__(self) -> str:
        """One line for people."""
        beginning = " and all that begin so" if self.pattern == "prefix" else ""
        return f"{self.user}: {self.operation} {self.kind} {self.name}{beginning}"


USERS = (
    User(name="gateway", part="gateway", sets_aside=False),
    *(User(name=name, part=name, groups=(name,)) for name in ("turns", "judging", "heuristics", "samples", "refresh")),
    User(name="groups", part="groups", groups=("trajectories", "groups")),
    User(name="weights", part="weights", sets_aside=False),
    User(name="project", part="projections", groups=("project",)),
    User(name="monitor", part="monitoring", groups=("monitor",), sets_aside=False),
    User(name="train", part="training", trains=True),
)


def grants(prefix: str = "") -> tuple[Grant, ...]:
    """Return what each stage's user may do, in a fixed order; `prefix` is the installation's."""
    found = {
        Grant(user.name, kind, prefix + name, pattern, operation)
        for user in USERS
        for kind, name, pattern, operation in _rights(user)
    }
    return tuple(sorted(found))


_Right = tuple[Kind, str, Pattern, Operation]


def _rights(user: User) -> Iterator[_Right]:
    # At its start each stage compares the broker's topics with their files, and writes its events' schemas.
    yield "topic", OURS, "prefix", "Describe"
    yield "topic", OURS, "prefix", "DescribeConfigs"
    yield "topic", SCHEMAS, "literal", "Write"
    for topic in all_topics():
        if topic.events:
            yield from _rights_to(user, topic)
    for group in user.groups:
        yield "group", group, "literal", "Read"  # in Kafka the right to read includes the right to describe
    if user.trains:
        yield "topic", _REPLAYS, "prefix", "Read"
        yield "group", BOOKMARKS, "prefix", "Read"


def _rights_to(user: User, topic: Topic) -> Iterator[_Right]:
    if user.part in topic.producers:
        yield "topic", topic.name, "literal", "Write"
    if user.part in topic.consumers:
        yield "topic", topic.name, "literal", "Read"
        queue = dead_letter_topic(topic.name)
        if queue is not None and user.sets_aside:
            yield "topic", queue, "literal", "Read"
            yield "topic", queue, "literal", "Write"


def resources_of_users(*, cluster: str) -> str:
    """Return the users as Strimzi's KafkaUser resources, in YAML; Strimzi makes their passwords."""
    return yaml.safe_dump_all(
        [
            {
                "apiVersion": "kafka.strimzi.io/v1",
                "kind": "KafkaUser",
                "metadata": {"name": user.name, "labels": {"strimzi.io/cluster": cluster}},
                "spec": {
                    "authentication": {"type": "scram-sha-512"},
                    "authorization": {"type": "simple", "acls": _acls(user.name)},
                },
            }
            for user in USERS
        ],
        sort_keys=False,
        explicit_start=True,
    )


def _acls(user: str) -> list[dict[str, object]]:
    operations: dict[tuple[str, str, str], list[str]] = {}
    for grant in grants():
        if grant.user == user:
            operations.setdefault((grant.kind, grant.name, grant.pattern), []).append(grant.operation)
    return [
        {"resource": {"type": kind, "name": name, "patternType": pattern}, "operations": allowed}
        for (kind, name, pattern), allowed in operations.items()
    ]


def environments(passwords: Mapping[str, str]) -> dict[str, str]:
    """Return environment files by name: one for each user, and `kafka.env` for the broker's image.

    `passwords` has one for OPERATOR and one for each of USERS, made of letters and digits.
    """
    users = " ".join(f'user_{name}="{password}"' for name, password in passwords.items())
    login = (
        "org.apache.kafka.common.security.plain.PlainLoginModule required "
        f'username="{OPERATOR}" password="{passwords[OPERATOR]}" {users};'
    )
    broker = "".join(
        f"KAFKA_LISTENER_NAME_{listener}_PLAIN_SASL_JAAS_CONFIG={login}\n" for listener in ("STAGES", "CONTROLLER")
    )
    return {"kafka.env": broker} | {
        f"{name}.env": f"CLAWSTREAM_KAFKA__SASL_USERNAME={name}\nCLAWSTREAM_KAFKA__SASL_PASSWORD={password}\n"
        for name, password in passwords.items()
    }


_Word = TypeVar("_Word")
_ANY, _ALLOW, _EVERYWHERE = 1, 3, "*"


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A request in the one version that we write. The client, if it chose, would get the third version wrong."""

    request: Any

    def prepare(self, _: Mapping[int, tuple[int, int]]) -> Any:
        """Return the request, whatever versions the broker supports."""
        return self.request


async def grant(
    bootstrap: str, prefix: str = "", *, security: KafkaSettings | None = None
) -> tuple[list[Grant], list[Grant]]:
    """Let users do with our topics and groups what `grants` says and nothing else; return the grants given and taken.

    Raises ConfigError where the broker lets everybody do everything.
    """
    wanted = set(grants(prefix))
    async with _asking(bootstrap, security) as client:
        found = await _found(client, prefix)
        given, taken = sorted(wanted - found), sorted(found - wanted)
        if given:
            [*replies] = (await _ask(client, CreateAclsRequest_v1([_entry(one) for one in given]))).creation_responses
            _raise_for((code, message) for code, message in replies)
        if taken:
            [*replies] = (await _ask(client, DeleteAclsRequest_v1([_entry(one) for one in taken]))).filter_responses
            _raise_for((code, message) for code, message, _ in replies)

        async def applied() -> bool:
            return await _found(client, prefix) == wanted

        await until_shown(
            applied,
            "Kafka agreed to an access list and does not show it yet; run `clawstream topics grant` in a while",
        )
        return given, taken


@asynccontextmanager
async def _asking(bootstrap: str, security: KafkaSettings | None) -> AsyncIterator[AIOKafkaClient]:
    broker = Broker(bootstrap=bootstrap, client_id="clawstream-access", security=security)
    client = broker.asker()
    try:
        with broker.connecting():
            await client.bootstrap()
        with kafka_errors("say who may do what"):
            yield client
    finally:
        await client.close()


async def _ask(client: AIOKafkaClient, request: Any) -> Any:
    return await client.send(client.get_random_node(), _Prepared(request))


async def _found(client: AIOKafkaClient, prefix: str) -> set[Grant]:
    """Return the grants that the broker's access list has about our users, topics and groups."""
    reply = await _ask(client, DescribeAclsRequest_v1(_ANY, None, _ANY, None, None, _ANY, _ANY))
    if reply.error_code == SecurityDisabled.errno:
        raise ConfigError(
            "the broker has no authorizer, so every user may do everything and nothing can be granted. Set its "
            "authorizer.class.name, as deploy/compose.yaml does"
        )
    _raise_for([(reply.error_code, reply.error_message)])
    names = {f"User:{user.name}": user.name for user in USERS}
    groups = {prefix + group for user in USERS for group in (*user.groups, BOOKMARKS)}
    kinds, patterns, operations = _by_code(_KINDS), _by_code(_PATTERNS), _by_code(_OPERATIONS)
    return {
        Grant(names[principal], kinds[kind], name, patterns[pattern], operations[operation])
        for kind, name, pattern, entries in reply.resources
        for principal, host, operation, permission in entries
        if principal in names and host == _EVERYWHERE and permission == _ALLOW
        if kind in kinds and pattern in patterns and operation in operations
        if name in groups or name.startswith(prefix + OURS)
    }


def _by_code(codes: Mapping[_Word, int]) -> dict[int, _Word]:
    return {code: word for word, code in codes.items()}


def _entry(one: Grant) -> tuple[int, str, int, str, str, int, int]:
    """Return the grant in the form that requests to create and to delete it have."""
    operation = _OPERATIONS[one.operation]
    return _KINDS[one.kind], one.name, _PATTERNS[one.pattern], f"User:{one.user}", _EVERYWHERE, operation, _ALLOW


def _raise_for(replies: Iterable[tuple[int, str | None]]) -> None:
    for code, message in replies:
        if code:
            raise for_code(code)(message)
