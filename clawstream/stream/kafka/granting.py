"""Makes the broker's access list say about the stages' users what access.py says.

The one rule: only entries about our users and our topics and groups are changed; other grants of an operator stay.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from aiokafka.client import AIOKafkaClient
from aiokafka.errors import SecurityDisabled, for_code
from aiokafka.protocol.admin import CreateAclsRequest_v1, DeleteAclsRequest_v1, DescribeAclsRequest_v1

from clawstream.errors import ConfigError, TryLater
from clawstream.stream.kafka.access import BOOKMARKS, OURS, USERS, Grant, Kind, Operation, Pattern, grants
from clawstream.stream.kafka.client import Broker, KafkaSecurity, kafka_errors

_Word = TypeVar("_Word")
_ANY, _ALLOW, _EVERYWHERE = 1, 3, "*"
_LOOK_TIMES, _LOOK_AGAIN_S = 200, 0.05
_KINDS: Mapping[Kind, int] = {"topic": 2, "group": 3}
_PATTERNS: Mapping[Pattern, int] = {"literal": 3, "prefix": 4}
_OPERATIONS: Mapping[Operation, int] = {"Read": 3, "Write": 4, "Describe": 8, "DescribeConfigs": 10}


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A request in the one version that we speak; the client's own choice is wrong about the third version."""

    request: Any

    def prepare(self, _: Mapping[int, tuple[int, int]]) -> Any:
        """Return the request, whatever versions the broker supports."""
        return self.request


async def grant(
    bootstrap: str, prefix: str = "", *, security: KafkaSecurity | None = None
) -> tuple[list[Grant], list[Grant]]:
    """Let each stage's user do what `grants` says and nothing else with our things; return grants given and taken.

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
        await _until_there(client, prefix, wanted)
        return given, taken


async def _until_there(client: AIOKafkaClient, prefix: str, wanted: set[Grant]) -> None:
    """Return once the broker applies the grants that its controller has agreed to."""
    for _ in range(_LOOK_TIMES):
        if await _found(client, prefix) == wanted:
            return
        await asyncio.sleep(_LOOK_AGAIN_S)
    raise TryLater("Kafka agreed to an access list and does not show it yet; run `clawstream topics grant` in a while")


@asynccontextmanager
async def _asking(bootstrap: str, security: KafkaSecurity | None) -> AsyncIterator[AIOKafkaClient]:
    broker = Broker(bootstrap=bootstrap, client_id="clawstream-access", security=security or KafkaSecurity())
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
    """Return the entries of the broker's list about our users, topics and groups."""
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
    """Return the grant in the form of creations and of deletion filters."""
    operation = _OPERATIONS[one.operation]
    return _KINDS[one.kind], one.name, _PATTERNS[one.pattern], f"User:{one.user}", _EVERYWHERE, operation, _ALLOW


def _raise_for(replies: Iterable[tuple[int, str | None]]) -> None:
    for code, message in replies:
        if code:
            raise for_code(code)(message)
