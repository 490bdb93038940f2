"""A projector that was stopped and wakes up when its partitions have another owner writes nothing."""

import os
import signal
import subprocess
import sys

import pytest
from sqlalchemy import Engine

from tests.parts.projections import one_session
from tests.parts.projections.reading import contents, empty, write_all
from tests.unit.projections import logs

pytestmark = pytest.mark.slow

PLACED = logs.records(one_session.ONE_SESSION)


@pytest.mark.parametrize("fenced", [False, True])
def test_a_projector_woken_after_its_successor_has_written_writes_nothing(
    emptied: Engine, migrated_url: str, fenced: bool
) -> None:
    command = [sys.executable, "-m", "tests.parts.projections.write.rival", migrated_url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as older:
        assert older.stdout is not None
        try:
            assert older.stdout.readline() == "claimed\n"
            _, status = os.waitpid(older.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
            if fenced:
                write_all(emptied, PLACED)  # claims, and writes the same log
            before = contents(emptied)
            os.kill(older.pid, signal.SIGCONT)
            said = older.stdout.readline()
        finally:
            older.kill()
    if fenced:
        assert said == f"lost {len(PLACED)} of {len(PLACED)}\n"
        assert contents(emptied) == before
    else:
        assert said == "wrote\n"
    found = contents(emptied)
    empty(emptied)
    write_all(emptied, PLACED)
    assert found == contents(emptied)
