"""What every command shares: its settings, its log lines, the servers it looks at, and stopping on a signal."""

import asyncio
import gc
import logging
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
import uvloop
from rich.markup import escape

from clawstream.config import Settings, load, quiet_transformers
from clawstream.errors import PartUnavailable

if TYPE_CHECKING:
    from clawstream.stream.kafka.kafka_log import KafkaLog

T = TypeVar("T")
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]
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

    @classmethod
    def of(cls, command: typer.Context) -> "Context":
        """Return it as the command line's first function kept it."""
        assert isinstance(command.obj, cls)
        return command.obj

    def settings(self) -> Settings:
        """Read the settings: the file, then the environment."""
        return load(self.config)

    def settings_of_what_ran(self) -> Settings:
        """Read the settings; where they name neither a policy nor a model, it is the one that was last up here."""
        from clawstream.local.running import policy_of

        settings = self.settings()
        if settings.policy.is_named or settings.engine.model_path is not None:
            return settings
        last = policy_of(settings.data_dir) or settings.policy.id
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


async def unless_stopped(work: Coroutine[None, None, T], stop: asyncio.Event) -> T:
    """Return what `work` returns; where `stop` is set first, cancel it and raise CancelledError once it has ended."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not working.done():
        working.cancel()
    return await working


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
    url = _known_database(settings)
    if url is not None:
        yield url
        return
    from clawstream.local.servers.postgres import EmbeddedPostgres

    with EmbeddedPostgres(settings.data_dir / "postgres") as postgres:
        yield postgres.url


def database_address(settings: Settings) -> str:
    """Return the URL of the database, configured or running; raises PartUnavailable where neither is."""
    url = _known_database(settings)
    if url is None:
        raise PartUnavailable(
            f"the database in {settings.data_dir / 'postgres'} does not run, so it has no address. Start `clawstream "
            "up`: its address is the one that it had last, as long as nobody else took the port"
        )
    return url


def _known_database(settings: Settings) -> str | None:
    if settings.postgres.url is not None:
        return settings.postgres.url.get_secret_value()
    return _running(settings.data_dir / "postgres", "database", "CLAWSTREAM_POSTGRES")


@contextmanager
def broker(settings: Settings) -> Iterator[Settings]:
    """Yield the settings with the broker's address; a stopped installation has its own Kafka started for so long."""
    if settings.kafka.bootstrap is not None:
        yield settings
        return
    from clawstream.local.servers.kafka import EmbeddedKafka, access_to

    def reaching(access: dict[str, object]) -> Settings:
        return settings.model_copy(update={"kafka": settings.kafka.model_copy(update=access)})

    folder = settings.data_dir / "kafka"
    running = _running(folder, "log", "CLAWSTREAM_KAFKA")
    if running is not None:
        yield reaching(access_to(folder, running))
        return
    with EmbeddedKafka(folder, cache_dir=settings.cache_dir) as kafka:
        yield reaching(kafka.access)


def ask_log(settings: Settings, client_id: str, main: "Callable[[KafkaLog], Awaitable[T]]") -> T:
    """Return what `main` returns of the installation's log."""
    from clawstream.stream.kafka.connect import connected

    async def connected_main(settings: Settings) -> T:
        async with connected(settings.kafka, client_id=client_id) as log:
            return await main(log)

    with broker(settings) as found:
        return asyncio.run(connected_main(found))


def _running(folder: Path, what: str, variable: str) -> str | None:
    """Return the address of our own server on `folder`; None: it does not run."""
    from clawstream.local.servers.accounts import address_in

    if not folder.exists():
        raise PartUnavailable(
            f"there is no {what} in {folder}: nothing was ever run there. Start `clawstream up`, name the "
            f"settings file of the run you mean with --config, or set {variable} to a server's address"
        )
    return address_in(folder)
