"""Creates and alters topics until they are as topics/*.yaml describe them, and sets where a group begins to read.

Nothing here deletes a topic, repartitions it or shortens its retention. A group's positions are set only while the
group has no member.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import GroupIdNotFound, KafkaError, for_code
from aiokafka.structs import OffsetAndMetadata

from clawstream.config import KafkaSettings
from clawstream.errors import PartUnavailable, TopicMismatch
from clawstream.stream.kafka.client import Broker, describe, kafka_errors, started, until_shown
from clawstream.stream.log import Commit, PartitionId
from clawstream.stream.topics import (
    Altered,
    Change,
    Created,
    ExistingTopic,
    RefusedChange,
    Topic,
    all_topics,
    count_of,
    diff,
)

_SET_ON_TOPIC = 1  # what DescribeConfigs reports as the source of a setting that the topic itself has
_EXISTS = 36
_ASK_AGAIN_S = 0.5


async def plan(
    bootstrap: str, prefix: str = "", *, security: KafkaSettings | None = None, partitions: int | None = None
) -> list[Change]:
    """Return the changes that `apply` would make or refuse; `partitions` is for small installations, see `diff`."""
    async with _admin(bootstrap, security) as admin:
        return await _changes(admin, prefix, partitions)


async def apply(
    bootstrap: str, prefix: str = "", *, security: KafkaSettings | None = None, partitions: int | None = None
) -> list[Change]:
    """Create and alter topics; return the changes. Raises TopicMismatch for a refused change, before any is made."""
    async with _admin(bootstrap, security) as admin:

        async def as_wanted() -> bool:
            return not await _changes(admin, prefix, partitions)

        changes = await _changes(admin, prefix, partitions)
        _raise_for([change for change in changes if isinstance(change, RefusedChange)], prefix)
        created = [change.topic for change in changes if isinstance(change, Created)]
        await _create(admin, prefix, created, partitions)
        await _alter(admin, prefix, [change for change in changes if isinstance(change, Altered)])
        if changes:
            await until_shown(
                as_wanted,
                "Kafka agreed to create and alter topics and does not show them yet; run `clawstream topics verify` "
                "in a while",
            )
        return changes


async def verify(
    bootstrap: str, prefix: str = "", *, security: KafkaSettings | None = None, partitions: int | None = None
) -> None:
    """Raise TopicMismatch where a topic is missing, or differs in partitions or a setting that readers rely on."""
    async with _admin(bootstrap, security) as admin:
        changes = await _changes(admin, prefix, partitions)
        _raise_for([change for change in changes if not isinstance(change, Altered) or change.is_promise], prefix)


async def create(
    bootstrap: str, prefix: str, topics: Sequence[Topic], *, security: KafkaSettings | None = None
) -> None:
    """Create those of `topics` that are missing. Raises TopicMismatch where one can't be created."""
    async with _admin(bootstrap, security) as admin:

        async def missing() -> list[Topic]:
            there = await _found(admin, prefix, [topic.name for topic in topics])
            return [topic for topic in topics if topic.name not in there]

        async def all_there() -> bool:
            return not await missing()

        await _create(admin, prefix, await missing(), None)
        await until_shown(all_there, "Kafka agreed to create topics and does not show them yet; try again in a while")


@asynccontextmanager
async def _admin(bootstrap: str, security: KafkaSettings | None) -> AsyncIterator[AIOKafkaAdminClient]:
    broker = Broker(bootstrap=bootstrap, client_id="clawstream-topics", security=security)
    async with broker.admin() as admin:
        with kafka_errors("manage topics"):
            yield admin


async def _changes(admin: AIOKafkaAdminClient, prefix: str, partitions: int | None) -> list[Change]:
    wanted = all_topics()
    return diff(wanted, await _found(admin, prefix, [topic.name for topic in wanted]), partitions=partitions)


async def _found(admin: AIOKafkaAdminClient, prefix: str, names: Iterable[str]) -> dict[str, ExistingTopic]:
    there = set(await admin.list_topics())
    names = [name for name in names if prefix + name in there]
    if not names:
        return {}
    described = await admin.describe_topics([prefix + name for name in names])
    counts = {topic["topic"].removeprefix(prefix): len(topic["partitions"]) for topic in described}
    settings = await _settings(admin, [prefix + name for name in names])
    return {
        name: ExistingTopic(
            partitions=counts[name],
            config={setting: value for setting, (value, _) in settings[prefix + name].items()},
            overrides={setting: value for setting, (value, own) in settings[prefix + name].items() if own},
        )
        for name in names
    }


async def _settings(admin: AIOKafkaAdminClient, names: Sequence[str]) -> dict[str, dict[str, tuple[str, bool]]]:
    """Return each topic's settings in force, and whether the topic itself sets them."""
    asked = [ConfigResource(ConfigResourceType.TOPIC, name) for name in names]
    settings: dict[str, dict[str, tuple[str, bool]]] = {}
    for response in await admin.describe_configs(asked):
        for code, message, _kind, name, entries in response.resources:
            if code:
                raise for_code(code)(message)
            settings[name] = {entry[0]: (entry[1], _is_own(entry)) for entry in entries}
    return settings


def _is_own(entry: Sequence[Any]) -> bool:
    # Version 0 of the reply says whether the value is a default, version 1 says where it comes from.
    return not entry[3] if isinstance(entry[3], bool) else entry[3] == _SET_ON_TOPIC


async def _create(admin: AIOKafkaAdminClient, prefix: str, topics: Sequence[Topic], partitions: int | None) -> None:
    new = [
        NewTopic(prefix + topic.name, count_of(topic, partitions), topic.replicas, topic_configs=dict(topic.config))
        for topic in topics
    ]
    if not new:
        return
    response = await admin.create_topics(new)
    for name, code, *message in response.topic_errors:
        if code not in (0, _EXISTS):
            raise TopicMismatch(f"{name} could not be created: {for_code(code).__name__} {' '.join(map(str, message))}")


async def _alter(admin: AIOKafkaAdminClient, prefix: str, changes: Sequence[Altered]) -> None:
    by_topic: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for change in changes:
        by_topic[change.topic.name][change.setting] = change.wanted
    if not by_topic:
        return
    found = await _found(admin, prefix, list(by_topic))
    # The request replaces all of a topic's settings, so those that somebody else set are sent along.
    resources = [
        ConfigResource(ConfigResourceType.TOPIC, prefix + name, configs=dict(found[name].overrides) | settings)
        for name, settings in by_topic.items()
    ]
    for response in await admin.alter_configs(resources):
        for code, message, _kind, name in response.resources:
            if code:
                raise TopicMismatch(f"{name} could not be altered: {for_code(code).__name__} {message}")


def _raise_for(changes: Sequence[Change], prefix: str) -> None:
    if not changes:
        return
    lines = "\n".join(f"  {_problem(change)}" for change in changes)
    raise TopicMismatch(
        f"{len(changes)} differences between the broker's topics and topics/*.yaml"
        f"{f' (names after the prefix {prefix!r})' if prefix else ''}; nothing was changed:\n{lines}"
    )


def _problem(change: Change) -> str:
    match change:
        case Created():
            return f"{change.topic.name}: not there; run `clawstream topics apply`"
        case Altered():
            return (
                f"{change.topic.name}: {change.setting} is {change.found}, expected {change.wanted}; "
                "run `clawstream topics apply`"
            )
        case RefusedChange():
            return f"{change.topic.name}: {change.what} is {change.found}, expected {change.wanted}; {change.remedy}"


async def set_group(
    broker: Broker, group: str, commits: Mapping[PartitionId, Commit], *, within_s: float = 15.0
) -> None:
    """Let `group` begin at `commits`. A killed member is waited for, until the broker drops it from the group.

    Raises PartUnavailable where the group still has a member after `within_s`.
    """
    name = broker.prefix + group
    deadline = time.monotonic() + within_s
    async with broker.admin() as admin:
        while (reason := await _taken(admin, name)) is not None:
            if time.monotonic() > deadline:
                raise PartUnavailable(f"group {name}: its positions were not set within {within_s:g} s: {reason}")
            await asyncio.sleep(_ASK_AGAIN_S)
    offsets = {broker.at(place): OffsetAndMetadata(*commit) for place, commit in commits.items()}
    async with started(broker.consumer(group_id=name), "ask for positions") as consumer:
        consumer.assign(list(offsets))
        with kafka_errors(f"set where {name} begins"):
            await consumer.commit(offsets)


async def _taken(admin: AIOKafkaAdminClient, name: str) -> str | None:
    """Return why the group's positions can't be set now; None: they can."""
    try:
        [response] = await admin.describe_consumer_groups([name])
    except KafkaError as error:
        # A new broker has no group coordinator at first.
        return describe(error)
    [(code, _name, _state, _type, _protocol, members, *_)] = response.groups
    if code and for_code(code) is not GroupIdNotFound:
        return str(for_code(code).__name__)
    return f"it has {len(members)} members already; stop the other process" if members else None
