"""What all tests share: the servers, and settings that keep runs alike.

A server is started once a run, when the first test asks for it; its code is imported then too, which takes a while.
Tests keep apart by a topic prefix and a database of their own.
"""

import asyncio
import gc
import os
import sys
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path

import pytest

from tests import examples

# Where Python is told to keep no bytecode, as images of it do, every worker would rewrite all tests, and each of the
# hundreds of processes that they start would compile what it imports.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Before anybody imports torch or starts a process that does: two cores are shared by a broker, a database and us.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if "torch" in sys.modules:
    sys.modules["torch"].set_num_threads(1)


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: many tests wait for others, and each worker has servers of its own."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_configure(config: pytest.Config) -> None:
    """A run on a machine with GPUs is the same as on one without, unless it is theirs."""
    if config.getoption("markexpr") != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


examples.register()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """No garbage is looked for among imported objects: neither at collection, which is a fifth faster, nor in tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)  # once the tests that are not to be run are gone
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Side by side, files that may take long go first, and then those with many tests: a worker ends with short ones.

    By the number of tests alone, as pytest-xdist has it, what takes minutes comes last, and the others wait for it.
    """
    if not hasattr(config, "workerinput"):
        return
    num_tests = Counter(item.path for item in items)
    markers = ((item.path, item.get_closest_marker("timeout")) for item in items)
    long = {path for path, marker in markers if marker and marker.args[0] >= _LONG_S}

    def place(item: pytest.Item) -> tuple[int, bool, int]:
        tier, *_ = item.path.relative_to(_TESTS).parts
        return _TIERS.index(tier), item.path not in long, -num_tests[item.path]

    items.sort(key=place)


_TESTS = Path(__file__).parent
_TIERS = ("system", "parts", "unit")
_LONG_S = 300
_FAUSTS = f"{os.sep}mode{os.sep}"  # its services leave tasks that wait for an event, which take no time


@pytest.fixture
def narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is printed goes to a terminal of 80 columns that knows no colours."""
    for name, value in {"COLUMNS": "80", "FORCE_COLOR": "1", "TERM": "dumb"}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(autouse=True)
async def _no_task_is_left_to_later_tests() -> AsyncIterator[None]:
    """All tests have one event loop: a task that one leaves takes time from all that follow."""
    others = asyncio.all_tasks()
    yield
    left = asyncio.all_tasks() - others - {asyncio.current_task()}
    if left:  # what was cancelled, or served a connection that was closed, ends soon
        gc.collect()  # a connection to Kafka that was cut while it opened is closed when nothing holds it any more
        _, left = await asyncio.wait(left, timeout=10)
    for task in left:
        task.cancel()
    ours = [task for task in left if _FAUSTS not in str(task)]
    assert not ours, f"tasks that the test started and never ended: {ours}"


@pytest.fixture(scope="session")
def kafka_bootstrap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """host:port of a real broker."""
    from tests import servers

    with servers.kafka(tmp_path_factory.mktemp("kafka")) as bootstrap:
        yield bootstrap


@pytest.fixture(scope="session")
def postgres_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """SQLAlchemy URL of a real database; use `fresh_database_url` to write."""
    from tests import servers

    with servers.postgres(tmp_path_factory.mktemp("postgres")) as url:
        yield url


@pytest.fixture
def topic_prefix(request: pytest.FixtureRequest) -> Iterator[str]:
    """Goes before the names of topics and groups; no other test has it. The topics go when the test is over."""
    prefix = f"test-{uuid.uuid4().hex[:12]}."
    yield prefix
    if "kafka_bootstrap" in request.fixturenames:
        from tests import servers

        # A broker that stood still for a moment elects a leader for each partition that it holds before it goes on.
        asyncio.run(servers.delete_topics(request.getfixturevalue("kafka_bootstrap"), prefix))


@pytest.fixture
def fresh_database_url(postgres_url: str) -> Iterator[str]:
    """SQLAlchemy URL of an empty database that no other test has."""
    from tests import servers

    with servers.database(postgres_url, f"test_{uuid.uuid4().hex[:12]}") as url:
        yield url
