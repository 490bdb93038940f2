"""One member of a consumer group on Kafka.

Reading of a partition begins once the listener has said where, and ends when the partition is revoked. Records that the
client fetches before or after that are dropped. Offsets are committed in the generation of the group in which the
partitions were given to this member, or not at all.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, ConsumerRecord, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.coordinator.assignors.range import RangePartitionAssignor
from aiokafka.errors import (
    CommitFailedError,
    IllegalStateError,
    KafkaError,
    NoOffsetForPartitionError,
    RebalanceInProgressError,
    UnknownMemberIdError,
)
from aiokafka.structs import OffsetAndMetadata

from clawstream.errors import TryLater
from clawstream.stream.kafka.client import Broker, describe
from clawstream.stream.log import Arrived, Commit, Listener, PartitionId

_NOT_OURS = (CommitFailedError, IllegalStateError, RebalanceInProgressError, UnknownMemberIdError)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPatience:
    """How long the group waits for a member before it counts the member as dead."""

    session_timeout_s: float = 10.0  # after this time a killed member's partitions go to others
    heartbeat_s: float = 1.0
    max_poll_interval_s: float = 300.0
    rebalance_timeout_s: float = 60.0  # how long a member may take to give up its partitions

    def arguments(self) -> dict[str, Any]:
        """Return the consumer's arguments."""
        return {
            "session_timeout_ms": int(self.session_timeout_s * 1000),
            "heartbeat_interval_ms": int(self.heartbeat_s * 1000),
            "max_poll_interval_ms": int(self.max_poll_interval_s * 1000),
            "rebalance_timeout_ms": int(self.rebalance_timeout_s * 1000),
            # With the default assignor a member could get different partition numbers of topics that share a key.
            "partition_assignment_strategy": (RangePartitionAssignor,),
        }


class KafkaMember(ConsumerRebalanceListener):  # type: ignore[misc]  # the client has no types
    """A member of a group; `KafkaLog.join` makes it and ends it."""

    def __init__(
        self,
        consumer: AIOKafkaConsumer,
        listener: Listener,
        broker: Broker,
        admin: AIOKafkaAdminClient,
        group: str,
        arrived: "Callable[[ConsumerRecord[Any, Any]], Arrived]",
    ) -> None:
        self._consumer = consumer
        self._listener = listener
        self._broker = broker
        self._admin = admin
        self._group = group
        self._arrived = arrived
        self._reading: frozenset[TopicPartition] = frozenset()
        self._paused: set[TopicPartition] = set()
        self._failure: BaseException | None = None
        self._given_in: int | None = None  # the generation of the group in which the partitions were given

    async def poll(self, *, max_records: int, timeout_s: float) -> Mapping[PartitionId, Sequence[Arrived]]:
        """Return what arrived, waiting for the first record at most `timeout_s`; must not be cancelled.

        Raises the listener's error, and TryLater where the broker refuses this member.
        """
        self._raise_failure()
        try:
            found = await self._consumer.getmany(timeout_ms=int(timeout_s * 1000), max_records=max_records)
        except KafkaError as error:
            # The client counts a fetch that raised as still running, and so would stay a member of the group for ever.
            self._consumer._subscription._fetch_count = 0  # noqa: SLF001  # no public one
            if isinstance(error, NoOffsetForPartitionError):
                return {}  # raised once, where the client looked for a position before `assigned` had set one
            raise TryLater(f"Kafka does not let {self._broker.prefix}{self._group} read: {describe(error)}") from error
        self._raise_failure()
        return {
            self._broker.place(at): [self._arrived(record) for record in records]
            for at, records in found.items()
            if at in self._reading
        }

    async def commit(self, commits: Mapping[PartitionId, Commit]) -> bool:
        """Commit the offsets; return False, committing none, where a partition is not this member's any more."""
        if self._generation() != self._given_in:
            # The client would commit as no member, which the broker accepts while the group is empty.
            return False
        offsets = {self._broker.at(place): OffsetAndMetadata(*commit) for place, commit in commits.items()}
        try:
            await self._consumer.commit(offsets)
        except _NOT_OURS:
            return False
        except KafkaError as error:
            raise TryLater(
                f"Kafka did not take a commit of {self._broker.prefix}{self._group}: {describe(error)}"
            ) from error
        return True

    def pause(self, places: Iterable[PartitionId]) -> None:
        """Fetch no more from these partitions until `resume`."""
        wanted = set(map(self._broker.at, places))
        self._paused |= wanted
        self._consumer.pause(*(wanted & self._assigned()))

    def resume(self, places: Iterable[PartitionId]) -> None:
        """Fetch from these partitions again."""
        wanted = set(map(self._broker.at, places))
        self._paused -= wanted
        self._consumer.resume(*(wanted & self._assigned() & self._reading))

    def caught_up(self, place: PartitionId) -> bool:
        """Return whether every record that the partition had at the last fetch has been polled."""
        at = self._broker.at(place)
        if at not in self._reading or at in self._paused or at not in self._assigned():
            return False
        state = self._consumer._subscription.subscription.assignment.state_value(at)  # noqa: SLF001  # no public one
        end = self._consumer.highwater(at)
        return end is not None and state.has_valid_position and state.position >= end

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        """Ask the listener where to begin, and begin there."""
        given = frozenset(assigned)
        self._given_in = self._generation()
        self._consumer.pause(*given)
        try:
            commits = await self._broker.committed(self._admin, self._group, list(given))
            places = map(self._broker.place, given)
            starts = await self._listener.assigned({place: commits.get(place) for place in places})
        except Exception as error:  # noqa: BLE001  # the client logs what is raised here and goes on; `poll` raises it
            self._failure = error
            return
        if not given <= self._assigned():
            return
        for place, offset in starts.items():
            self._consumer.seek(self._broker.at(place), offset)
        self._reading = given
        self._consumer.resume(*(given - self._paused))

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        """Stop reading and let the listener finish."""
        gone, self._reading = self._reading, frozenset()
        self._paused.clear()
        assigned = self._assigned()
        self._consumer.pause(*(at for at in revoked if at in assigned))
        try:
            await self._listener.revoked(frozenset(map(self._broker.place, gone)))
        except Exception as error:  # noqa: BLE001  # see `on_partitions_assigned`
            self._failure = error

    def _generation(self) -> int:
        number: int = self._consumer._coordinator.generation  # noqa: SLF001  # no public one
        return number

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _assigned(self) -> frozenset[TopicPartition]:
        return frozenset(self._consumer.assignment())
