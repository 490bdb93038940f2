"""Functions that all commands share: settings, log lines, access to the database and the broker, stop signals."""

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

from clawstream.config import RewardsSettings, Settings, TrainingSettings, load, quiet_transformers
from clawstream.errors import PartUnavailable
from clawstream.events import policy_of_key

if TYPE_CHECKING:
    from clawstream.events import LearnsFrom
    from clawstream.stream.kafka.kafka_log import KafkaLog

T = TypeVar("T")
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Key = Annotated[
    str | None,
    typer.Option(help="Whose adapter is meant, as `clawstream policy keys` lists them; none: what all share."),
]
EVERY_S = 10.0
_MOST_KNOWN = 1000  # different log lines; lines of one template count as one


@dataclass(slots=True)
class _LinesSaid:
    at_s: float
    num_left_out: int = 0


class Seldom(logging.Filter):
    """Lets each log line through once in `every_s` and counts the others, for one logger and those below it.

    While a broker is away, aiokafka logs each attempt of each client: hundreds of equal lines a second.
    """

    def __init__(self, name: str, *, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(name)
        self._every_s = every_s
        self._clock = clock
        self._said: dict[tuple[str, str], _LinesSaid] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the line is logged."""
        if not super().filter(record):  # of another logger
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
    """Return foreign text so that rich prints it as it is: its markup and terminal codes have no effect."""
    from clawstream.projections.look.summaries import printable

    return escape(printable(text, kept=kept))


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The options that stand before the command."""

    config: Path | None

    @classmethod
    def of(cls, command: typer.Context) -> "Context":
        """Return the options, which the callback in cli/__init__.py stored in `command`."""
        assert isinstance(command.obj, cls)
        return command.obj

    def settings(self) -> Settings:
        """Read the settings: the file, then the environment."""
        return load(self.config)

    def settings_of_what_ran(self) -> Settings:
        """Read the settings; where they name neither policy nor model, take the policy that last ran here."""
        from clawstream.local.running import policy_of

        settings = self.settings()
        if settings.policy.is_named or settings.engine.model_path is not None:
            return settings
        return settings.of_policy(policy_of(settings.data_dir) or settings.policy.id)

    def settings_of_key(self, key: str | None) -> Settings:
        """Read the settings as `settings_of_what_ran` does, for the adapter of this key; None: what all share."""
        settings = self.settings_of_what_ran()
        return settings.of_policy(policy_of_key(settings.policy.id, key))


@asynccontextmanager
async def pulse(file: Path, every_s: float = 10.0) -> AsyncIterator[None]:
    """Touch `file` every `every_s` during the block, as a sign that the event loop runs; OSError ends it silently."""

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
    logging.getLogger("aiokafka.producer").setLevel(logging.ERROR)  # it warns of each retry; failures are raised


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
    """Return what `work` returns; where `stop` is set first, cancel it and raise CancelledError once it has ended.

    What the cancelled work raises is ignored: a broker that goes away while it stops is no error.
    """
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not working.done():
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        raise asyncio.CancelledError
    return await working


async def leave_what_is_loaded(_url: str) -> None:
    """Exempt the objects loaded so far, half a million, from garbage collection, and make it less frequent."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # requests leave almost no cycles, and the search for them costs time


def hide_torch() -> None:
    """Make transformers load its tokenizers without torch, which a process that only renders prompts never needs.

    Where torch is installed, this saves some 600 MB and several seconds of start-up.
    """
    quiet_transformers()
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]  # makes `import torch` fail


def gateway_url(settings: Settings, url: str | None) -> str:
    """Return the gateway's address, ending in /v1: `url`, else that of the installation that runs on the data folder.

    If none runs there, what the settings say, as seen from this machine.
    """
    from clawstream.local.running import addresses_of

    running = addresses_of(settings.data_dir) if url is None else None
    known = settings.gateway.local_url if running is None else running.gateway
    found = (url or known).rstrip("/")
    return found if found.endswith("/v1") else f"{found}/v1"


@contextmanager
def database(settings: Settings) -> Iterator[str]:
    """Yield the database's URL; where the installation is stopped, its own Postgres runs during the block."""
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
    """Yield the settings with the broker's address; a stopped installation's own Kafka runs during the block."""
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
    """Return what `main` returns, given the installation's log."""
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


def learns_from(training: TrainingSettings, rewards: RewardsSettings) -> "LearnsFrom":
    """Return what the trainer can use under these settings."""
    from clawstream.events import LearnsFrom

    w_binary, w_opd = training.weights
    return LearnsFrom(
        verdicts=w_binary > 0 and rewards.judge > 0,
        hints=w_opd > 0,
        hints_off_distribution=training.method == "topk",
        other_hints=training.chooses_hints,
    )
