"""What the judging stage tells `clawstream status` about the judge, in its data folder: judge.json.

A judge that is away gives no vote until the deadline, so the log says nothing of it yet. The file is replaced as a
whole whenever the judge begins or stops answering, or fails with another error, and otherwise once in NOTED_EVERY_MS.
"""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from clawstream.local.servers.folders import write_private
from clawstream.monitoring.judge import JudgeReachability, after

NOTED_EVERY_MS = 10_000
_FILE = "judge.json"


class JudgeNotes:
    """Notes the outcome of each request to a judge."""

    def __init__(
        self, data_dir: Path, judge: str, *, now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
    ) -> None:
        self._data_dir = data_dir
        self._judge = judge
        self._now_ms = now_ms
        self._noted = judge_of(data_dir)

    def heard(self, error: str | None) -> None:
        """Note the outcome of a request: an error, or None for a reply. A note that can't be written is skipped."""
        before, now = self._noted, after(self._noted, self._judge, error, self._now_ms())
        if before is not None and now.heard_ms - before.heard_ms < NOTED_EVERY_MS and _alike(before, now):
            return
        self._noted = now
        with suppress(OSError):
            self._data_dir.mkdir(parents=True, exist_ok=True)
            write_private(self._data_dir / _FILE, json.dumps(asdict(now), indent=1))


def judge_of(data_dir: Path) -> JudgeReachability | None:
    """Return the last note; None: no readable one, as when another version wrote it or power failed."""
    try:
        return JudgeReachability(**json.loads((data_dir / _FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _alike(one: JudgeReachability, other: JudgeReachability) -> bool:
    return (one.judge, one.error, one.since_ms) == (other.judge, other.error, other.since_ms)
