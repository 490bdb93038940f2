"""Which events go through the spool, and which straight to the log. Pure.

The one rule: while anything of a session waits in the spool, all that follows in that session goes through it too, so
the first copies on the log stand in the order in which the gateway answered. Other sessions go straight, but not
between the moment that the log failed one and the moment that it took something out of the spool again.
"""

from collections import Counter
from collections.abc import Iterable


class SpooledSessions:
    """What waits in the spool, by key."""

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
        """The log did not take what went straight to it."""
        self._failed = True

    def enter(self, keys: Iterable[bytes]) -> None:
        """A record of each key is about to be in the spool."""
        self._waiting.update(keys)

    def leave(self, keys: Iterable[bytes]) -> None:
        """The records came to nothing: the spool did not take them."""
        for key in keys:
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key]

    def taken(self, keys: Iterable[bytes]) -> None:
        """The log has the records now."""
        self.leave(keys)
        self._failed = False
