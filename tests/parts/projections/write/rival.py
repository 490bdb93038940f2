"""A projector's writer in a process of its own: claims, stops as by SIGSTOP, writes once woken, tells what it lost.

`python -m tests.parts.projections.write.rival URL`
"""

import os
import signal
import sys

from clawstream.projections import database
from clawstream.projections.write.writer import TableWriter
from tests.parts.projections import one_session
from tests.parts.projections.reading import partition_rows
from tests.unit.projections import logs


def main(url: str) -> None:
    """Do it."""
    engine = database.connect(url)
    placed = logs.records(one_session.ONE_SESSION)
    writer = TableWriter(engine)
    claims = writer.claim(placed)
    parts = [partition_rows(place, claims[place], placed[place]) for place in placed]
    print("claimed", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    lost = writer.write(parts)
    print("wrote" if not lost else f"lost {len(lost)} of {len(parts)}", flush=True)
    engine.dispose()


if __name__ == "__main__":
    main(sys.argv[1])
