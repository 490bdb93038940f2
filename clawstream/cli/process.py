"""What every command shares: its settings, its log lines, and stopping on a signal."""

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import uvloop
from rich.markup import escape

from clawstream.cli.log_lines import Seldom
from clawstream.config import Settings, load, quiet_transformers


def harmless(text: str, *, kept: str = "") -> str:
    """Return what others wrote as rich is to print it: no markup of theirs counts, and no terminal obeys them."""
    from clawstream.projections.look.summaries import printable

    return escape(printable(text, kept=kept))


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What the options before the command say."""

    config: Path | None

    def settings(self) -> Settings:
        """Read the settings: the file, then the environment."""
        return load(self.config)

    def settings_of_what_ran(self) -> Settings:
        """Read the settings; where they name neither a policy nor a model, it is the one that was last up here."""
        from clawstream.local.running import policy_of

        settings = self.settings()
        if settings.policy.is_named or settings.engine.model_path is not None:
            return settings
        last = policy_of(settings.data_dir)
        if last is None:
            return settings
        return settings.model_copy(update={"policy": settings.policy.model_copy(update={"id": last})})


@asynccontextmanager
async def pulse(file: Path, every_s: float = 10.0) -> AsyncIterator[None]:
    """Within, the file's time is no older than that while the event loop turns; without a folder there is none."""

    async def beat() -> None:
        with suppress(OSError):
            while True:
                _touch(file)
                await asyncio.sleep(every_s)

    beating = asyncio.create_task(beat())
    try:
        yield
    finally:
        beating.cancel()


def _touch(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()


def log_to_stderr(stage: str, *, level: int = logging.INFO) -> None:
    """Let log lines of this process go to stderr as `time level stage key=value ...`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {stage} %(message)s", "%Y-%m-%dT%H:%M:%S"))
    handler.addFilter(Seldom("aiokafka"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for chatty in ("aiokafka", "faust", "httpx", "httpx2", "uvicorn.error", "alembic"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    logging.getLogger("aiokafka.producer").setLevel(logging.ERROR)  # it warns of each retry; what fails is raised


def run_until_stopped(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Run `main(stop)`; the first SIGINT or SIGTERM sets `stop`, the second ends the process at once."""

    async def supervised() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def on_signal() -> None:
            if stop.is_set():
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                signal.raise_signal(signal.SIGTERM)
            stop.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)
        await main(stop)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(supervised())


async def leave_what_is_loaded(_url: str) -> None:
    """The garbage collector no longer looks at what is there, half a million objects, and looks less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # next to nothing of a request is a cycle; a look at its objects cost 4 %


def hide_torch() -> None:
    """Let transformers bring its tokenizers without torch, which a process that only renders prompts never needs.

    Where torch is installed that saves some 600 MB and several seconds of start-up.
    """
    quiet_transformers()
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]  # how Python marks a module as not to be had
