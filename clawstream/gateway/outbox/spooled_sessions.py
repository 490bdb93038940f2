"""Which events go through the spool, and which straight to the log. Pure.

The one rule: while a record of a session waits in the spool, the session's further records go through the spool too, so
that the first copies on the log are in the order of the gateway's answers. Other sessions go straight, except from the
moment that the log failed one until it has taken a record out of the spool.
"""

from collections import Counter
from collections.abc import Iterable


class SpooledSessions:
    """The numbers of records that wait in the spool, by key."""

    def __init__(self) -> None:
        self._waiting: Counter[bytes] = Counter()
        self._failed = False

    @property
    def num_records(self) -> int:
        """How many records wait."""
        return self._waiting.total()

    @property
    def failing(self) -> bool:
        """Whether the log failed, and has taken nothing out of the spool since."""
        return self._failed and bool(self._waiting)

    def straight(self, key: bytes, *, healthy: bool) -> bool:
        """Return whether the key's next records may go straight to a log that is `healthy` as far as is known."""
        return healthy and key not in self._waiting and not self.failing

    def failed(self) -> None:
        """Note that the log did not take records that went straight to it."""
        self._failed = True

    def enter(self, keys: Iterable[bytes]) -> None:
        """Note that a record of each key is about to be in the spool."""
        self._waiting.update(keys)

    def leave(self, keys: Iterable[bytes]) -> None:
        """Note that the spool did not take the records."""
        for key in keys:
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key]

    def taken(self, keys: Iterable[bytes]) -> None:
        """Note that the log has the records now."""
        self.leave(keys)
        self._failed = False
