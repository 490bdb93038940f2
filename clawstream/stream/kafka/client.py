"""How Kafka's clients are made: credentials, how much is fetched or sent at once, what their errors mean here.

A `Broker` puts the installation's prefix before the names of topics and groups, and takes it off again.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import KafkaError
from aiokafka.helpers import create_ssl_context

from clawstream.config import KafkaSettings
from clawstream.errors import PartUnavailable, TryLater
from clawstream.stream.log import Commit, PartitionId

MAX_RECORD_BYTES = 9 * 2**20  # 8 MiB for the value, and room for key and headers; topics/*.yaml say the same
BATCH_BYTES = 2**18  # of one partition, in one request; compressing more at once would delay the gateway's answers
LINGER_MS = 2
CONNECT_WITHIN_S = 15.0
ASK_TIMES = 20
ASK_AGAIN_S = 0.3
LOOK_TIMES = 200
LOOK_AGAIN_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Broker:
    """The broker's address, how to log in, and the installation's prefix. It makes clients, not yet connected."""

    bootstrap: str
    client_id: str
    security: KafkaSettings | None = None  # says how to log in; None: anybody may
    prefix: str = ""
    batch_bytes: int = BATCH_BYTES
    linger_ms: int = LINGER_MS

    def producer(self) -> AIOKafkaProducer:
        """A producer that neither loses nor repeats a record while it lives."""
        return AIOKafkaProducer(
            **self._common(), acks="all", enable_idempotence=True, compression_type="zstd", linger_ms=self.linger_ms,
            max_request_size=MAX_RECORD_BYTES, max_batch_size=self.batch_bytes,
        )  # fmt: skip

    def consumer(self, **more: Any) -> AIOKafkaConsumer:
        """A consumer that never commits or changes its position of its own accord."""
        options: dict[str, Any] = {"enable_auto_commit": False, "auto_offset_reset": "none", "check_crcs": True}
        return _Consumer(**self._common(), **(options | more))

    @asynccontextmanager
    async def admin(self) -> AsyncIterator[AIOKafkaAdminClient]:
        """Yield a connected admin client; raises PartUnavailable where no broker answers."""
        admin = AIOKafkaAdminClient(**self._common())
        try:
            with self.connecting():
                await admin.start()
            yield admin
        finally:
            await admin.close()

    def asker(self) -> AIOKafkaClient:
        """A client for requests for which the other clients have no method."""
        return AIOKafkaClient(**self._common())

    def at(self, place: tuple[str, int]) -> TopicPartition:
        """Return the partition as the broker names it."""
        return TopicPartition(self.prefix + place[0], place[1])

    def place(self, at: TopicPartition) -> PartitionId:
        """Return the partition without the prefix."""
        return PartitionId(at.topic.removeprefix(self.prefix), at.partition)

    async def committed(
        self, admin: AIOKafkaAdminClient, group: str, at: list[TopicPartition] | None = None
    ) -> dict[PartitionId, Commit]:
        """Return the group's commits; a partition of which it has read nothing is missing."""
        name = self.prefix + group
        for attempt in range(ASK_TIMES):
            try:
                found = await admin.list_consumer_group_offsets(name, partitions=at)
            except KafkaError as error:
                # Before its first group, a broker has to create its topic for the groups' offsets.
                if attempt == ASK_TIMES - 1 or not error.retriable:
                    raise TryLater(f"Kafka does not say how far {name} has come: {describe(error)}") from error
                await asyncio.sleep(ASK_AGAIN_S)
            else:
                break
        return {
            self.place(one): Commit(there.offset, there.metadata) for one, there in found.items() if there.offset >= 0
        }

    @contextmanager
    def connecting(self) -> Iterator[None]:
        """Raise PartUnavailable, which names the broker, where the block can't reach it."""
        try:
            yield
        except (KafkaError, OSError, TimeoutError) as error:
            raise PartUnavailable(
                f"no Kafka broker answers at {self.bootstrap} ({describe(error)}). Nothing was written. Start it, or "
                "set kafka.bootstrap (CLAWSTREAM_KAFKA) to the host:port of another one"
            ) from error

    def _common(self) -> dict[str, Any]:
        security = self.security or KafkaSettings()
        options: dict[str, Any] = {
            "bootstrap_servers": self.bootstrap,
            "client_id": self.client_id,
            "security_protocol": security.security_protocol,
        }
        if security.security_protocol.endswith("SSL"):
            cafile = None if security.ca_file is None else str(security.ca_file)
            options["ssl_context"] = create_ssl_context(cafile=cafile)
        if security.sasl_mechanism is not None:
            options |= {
                "sasl_mechanism": security.sasl_mechanism,
                "sasl_plain_username": security.sasl_username,
                "sasl_plain_password": security.password,
            }
        return options


class _Consumer(AIOKafkaConsumer):  # type: ignore[misc]
    """A consumer that can be stopped at any time.

    aiokafka's own `stop` awaits tasks that it has cancelled. While the broker is away such a task ends as cancelled,
    which would cancel our caller too and leave connections open (aiokafka issue 647).
    """

    async def stop(self) -> None:
        """End every task and connection, even where the caller is cancelled meanwhile."""
        if self._closed:
            return
        self._closed: bool = True
        await to_its_end(self._close_parts())

    async def _close_parts(self) -> None:
        for part in (self._coordinator, self._fetcher, self._client):
            if part is not None:
                await to_its_end(part.close())


_ENDING: set[asyncio.Task[None]] = set()  # the event loop alone would not keep the tasks alive


async def to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Do all of `work`, even if the caller is cancelled meanwhile; raise its error, except for its own cancellation."""
    task = asyncio.create_task(work)
    _ENDING.add(task)
    task.add_done_callback(_ENDING.discard)
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()


async def until_shown(is_shown: Callable[[], Awaitable[bool]], late: str) -> None:
    """Return once `is_shown` is true: a broker may show a change after agreeing to it. Raises TryLater(`late`)."""
    for _ in range(LOOK_TIMES):
        if await is_shown():
            return
        await asyncio.sleep(LOOK_AGAIN_S)
    raise TryLater(late)


@asynccontextmanager
async def started(consumer: AIOKafkaConsumer, doing: str) -> AsyncIterator[AIOKafkaConsumer]:
    """Yield the consumer, connected until the block ends; `doing` says in errors what it is for."""
    try:
        with kafka_errors(doing):
            await consumer.start()
        yield consumer
    finally:
        await consumer.stop()


@contextmanager
def kafka_errors(doing: str) -> Iterator[None]:
    """Turn what Kafka's client raises inside the block into TryLater."""
    try:
        yield
    except KafkaError as error:
        raise TryLater(f"Kafka did not let us {doing}: {describe(error)}") from error


def describe(error: BaseException) -> str:
    """Return the error's text with its type, since many of Kafka's errors have no text."""
    name, words = type(error).__name__, str(error)
    return words if name in words else f"{name}: {words}" if words else name
