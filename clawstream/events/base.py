"""The base of every event: an immutable fact whose id is derived from what happened.

`event_id` is a uuid5 over the event's type and the fields named in IDENTITY, so a fact that is written twice has the
same id both times. Of two records with the same id, the first in the partition counts. Fields are plain values: token
ids and log-probs are tuples here, and packed little-endian bytes on the log (`Packed`).
"""

import uuid
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from hashlib import sha1
from typing import Annotated, ClassVar

_NAMESPACE = uuid.UUID("9d1f6c1e-6f0e-5c58-9a53-0d7b3c1f4a10").bytes


class Packed(Enum):
    """How a tuple of numbers is written: by this array type code, little-endian, without a length in front."""

    INT32 = "i"
    FLOAT32 = "f"  # an absent value (None) is written as NaN and read back as None
    INT8 = "b"


TokenIds = Annotated[tuple[int, ...], Packed.INT32]
LogProbs = Annotated[tuple[float | None, ...], Packed.FLOAT32]  # nats; None: the engine reported no value
Mask = Annotated[tuple[int, ...], Packed.INT8]  # 1: the token is trained on, 0: it is not


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A fact. A subclass says what happened; its IDENTITY names the fields that identify the fact."""

    IDENTITY: ClassVar[tuple[str, ...]] = ()

    @property
    def event_id(self) -> str:
        """The uuid5 of type and IDENTITY fields: two events share it exactly when they state the same fact."""
        return derived_id(type(self).__name__, *(getattr(self, name) for name in self.IDENTITY))

    @property
    def key(self) -> str:
        """The key of the event's record: events with the same key keep their order."""
        raise AttributeError(f"{type(self).__name__} has no key: derive it from SessionEvent or PolicyEvent")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEvent(Event):
    """A fact about one session."""

    session_id: str

    @property
    def key(self) -> str:
        """The session."""
        return self.session_id


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyEvent(Event):
    """A fact about one policy, the model that is trained. Its versions are 0 (the base), 1, 2, .."""

    policy_id: str

    @property
    def key(self) -> str:
        """The policy."""
        return self.policy_id


def derived_id(kind: str, *parts: object) -> str:
    """Return a uuid5 of `kind` and `parts`; None and "" give different ids."""
    name = "\x1f".join([kind, *map(repr, parts)]).encode()
    # The same id as uuid.uuid5 gives, in a third of the time: an id is computed for every record that is read.
    number = bytearray(sha1(_NAMESPACE + name, usedforsecurity=False).digest()[:16])
    number[6] = number[6] & 0x0F | 0x50
    number[8] = number[8] & 0x3F | 0x80
    made = number.hex()
    return f"{made[:8]}-{made[8:12]}-{made[12:16]}-{made[16:20]}-{made[20:]}"


def float32(values: Iterable[float | None]) -> tuple[float | None, ...]:
    """Round to float32, so that an event equals its own decoded record."""
    return tuple(None if value is None else array("f", (value,))[0] for value in values)
