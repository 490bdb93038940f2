"""How often a library may say the same thing on stderr."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

EVERY_S = 10.0
_MOST_KNOWN = 1000  # lines; a template is one, whatever is put into it


@dataclass(slots=True)
class _LinesSaid:
    at_s: float
    num_left_out: int = 0


class Seldom(logging.Filter):
    """Lets each line of a logger and those below it through once in `every_s`, with how many were left out since.

    While a broker is away aiokafka says the same of each attempt of each client: hundreds of lines a second.
    """

    def __init__(self, name: str, *, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(name)
        self._every_s = every_s
        self._clock = clock
        self._said: dict[tuple[str, str], _LinesSaid] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the line is said."""
        if not super().filter(record):  # somebody else's
            return True
        line, now_s = (record.name, str(record.msg)), self._clock()
        known = self._said.get(line)
        if known is not None and now_s - known.at_s < self._every_s:
            known.num_left_out += 1
            return False
        if known is not None and known.num_left_out:
            record.msg = f"{record.msg} (and {known.num_left_out} more since this was said)"
        if len(self._said) >= _MOST_KNOWN:
            self._said.clear()
        self._said[line] = _LinesSaid(now_s)
        return True
