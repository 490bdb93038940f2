"""The stages as users run them: a process each, by the command line."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from clawstream.config import inherited_environment

_STOP_WITHIN_S = 30.0


@contextmanager
def stages(config: Path, *names: str) -> Iterator[Callable[[], None]]:
    """The named stages run; yields what asserts that they still do. Each has ended without an error afterwards."""
    with ExitStack() as running:
        checks = [running.enter_context(_stage(config, name)) for name in names]

        def all_run() -> None:
            for check in checks:
                check()

        yield all_run


@contextmanager
def _stage(config: Path, name: str) -> Iterator[Callable[[], None]]:
    log = config.with_name(f"{name}.log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            (sys.executable, "-m", "clawstream", "--config", str(config), name),
            env=inherited_environment(),
            stdout=output,
            stderr=output,
        )

    def runs() -> None:
        code = process.poll()
        assert code is None, f"{name} ended with {code}:\n{log.read_text()[-4000:]}"

    try:
        yield runs
        runs()
    finally:
        process.terminate()
        try:
            code = process.wait(_STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
    assert code == 0, f"{name} ended with {code}:\n{log.read_text()[-4000:]}"


def clawstream(config: Path, environment: Mapping[str, str], *command: str) -> str:
    """Run a command to its end; return what it wrote to stdout."""
    done = subprocess.run(
        (sys.executable, "-m", "clawstream", "--config", str(config), *command),
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=_STOP_WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
