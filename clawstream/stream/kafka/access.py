"""Who may do what at the broker: a user for each stage, as topics/*.yaml says who writes and who reads.

The one rule: a stage may read and write only its own topics; topics and groups of other stages are closed to it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import yaml

from clawstream.stream.topics import SCHEMAS_TOPIC, Topic, all_topics, dead_letter_topic

Kind = Literal["topic", "group"]
Pattern = Literal["literal", "prefix"]
Operation = Literal["Read", "Write", "Describe", "DescribeConfigs"]

OPERATOR = "operator"  # this user may do everything: make topics, grant, replay, look
BOOKMARKS = "train-"  # how the group name of each policy's trainer begins
OURS, _REPLAYS = "clawstream.", "clawstream.replay."


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """A stage's account at the broker, named as the stage's command."""

    name: str
    part: str  # as the topics' files name the stage
    groups: tuple[str, ...] = ()  # the groups that it joins
    sets_aside: bool = True  # puts records that it can't use into their topic's dead-letter queue
    trains: bool = False  # reads what a replay wrote, and notes how far each policy's samples are used


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
        beginning = " that begin so" if self.pattern == "prefix" else ""
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
    yield "topic", SCHEMAS_TOPIC, "literal", "Write"
    for topic in all_topics():
        if topic.events:
            yield from _rights_to(user, topic)
    for group in user.groups:
        yield "group", group, "literal", "Read"  # which lets it look, too
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
    """Return environment files by name: one for each user's stage, and `kafka.env` for the broker's image.

    `passwords` has one of OPERATOR and of each of USERS, of letters and digits.
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
