"""What every command shares: its settings, its log lines, the servers it looks at, and stopping on a signal."""

import asyncio
import gc
import logging
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import uvloop
from rich.markup import escape

from clawstream.config import KafkaSettings, Settings, load, quiet_transformers
from clawstream.errors import PartUnavailable

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


@contextmanager
def database(settings: Settings) -> Iterator[str]:
    """Yield the database's URL; an installation that is stopped has its own Postgres started for so long."""
    if settings.postgres.url is not None:
        yield settings.postgres.url.get_secret_value()
        return
    from clawstream.local.servers.accounts import address_in
    from clawstream.local.servers.postgres import EmbeddedPostgres

    folder = settings.data_dir / "postgres"
    _existing(folder, "database", "CLAWSTREAM_POSTGRES")
    running = address_in(folder)
    if running is not None:
        yield running
        return
    with EmbeddedPostgres(folder) as postgres:
        yield postgres.url


def database_address(settings: Settings) -> str:
    """Return the URL of the database, configured or running; raises PartUnavailable where neither is."""
    if settings.postgres.url is not None:
        return settings.postgres.url.get_secret_value()
    from clawstream.local.servers.accounts import address_in

    folder = settings.data_dir / "postgres"
    _existing(folder, "database", "CLAWSTREAM_POSTGRES")
    running = address_in(folder)
    if running is None:
        raise PartUnavailable(
            f"the database in {folder} does not run, so it has no address. Start `clawstream up`: its address "
            "is the one that it had last, as long as nobody else took the port"
        )
    return running


@contextmanager
def broker(settings: Settings) -> Iterator[KafkaSettings]:
    """Yield where the broker is; an installation that is stopped has its own Kafka started for so long."""
    if settings.kafka.bootstrap is not None:
        yield settings.kafka
        return
    from clawstream.local.servers.accounts import address_in
    from clawstream.local.servers.kafka import EmbeddedKafka, access_to

    folder = settings.data_dir / "kafka"
    _existing(folder, "log", "CLAWSTREAM_KAFKA")
    running = address_in(folder)
    if running is not None:
        yield settings.kafka.model_copy(update=access_to(folder, running))
        return
    with EmbeddedKafka(folder, cache_dir=settings.cache_dir) as kafka:
        yield settings.kafka.model_copy(update=kafka.access)


def _existing(folder: Path, what: str, variable: str) -> None:
    if not folder.exists():
        raise PartUnavailable(
            f"there is no {what} in {folder}: nothing was ever run there. Start `clawstream up`, name the "
            f"settings file of the run you mean with --config, or set {variable} to a server's address"
        )
