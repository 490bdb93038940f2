"""Which version names a request's cache: the newest that the log or the engine itself has told."""

from collections.abc import Callable

from clawstream.gateway.engines import ServedEngine
from clawstream.inference.engine import ServerInfo
from clawstream.inference.sglang import SglangEngine


class _Told(SglangEngine):
    """An engine that serves `version`; `meanwhile` happens while it answers."""

    def __init__(self, version: str, meanwhile: Callable[[], None] = lambda: None) -> None:
        self._version, self._meanwhile = version, meanwhile

    async def server_info(self) -> ServerInfo:
        self._meanwhile()
        return ServerInfo(model_path="m", context_length_tokens=64, weight_version=self._version)


async def _asked(engine: ServedEngine, times: int = 1) -> int:
    for _ in range(times):
        await engine.ask()
    return engine.known_version()


async def test_a_version_whose_event_was_missed_is_heard_from_the_engine() -> None:
    engine = ServedEngine(url="http://e", client=_Told("3"), version=2, problem=None)

    assert await _asked(engine) == 3


async def test_an_event_that_comes_while_the_engine_is_asked_outweighs_its_older_answer() -> None:
    engine = ServedEngine(url="http://e", client=_Told("3"), version=3, problem=None)

    def activated() -> None:
        engine.version = 4

    engine.client = _Told("3", activated)

    assert await _asked(engine) == 4


async def test_an_engine_that_came_back_with_old_weights_is_known_by_them() -> None:
    engine = ServedEngine(url="http://e", client=_Told("1"), version=5, problem="away")

    assert await _asked(engine) == 1
