"""A server of our own that ends takes the installation down with words, since no part can do without it."""

import asyncio
from pathlib import Path

from clawstream.local.installation import _watch
from clawstream.local.kafka import EmbeddedKafka
from clawstream.local.supervisor import Supervisor


class _Ended(EmbeddedKafka):
    """A broker that was killed."""

    def exit_status(self) -> int | None:
        return 137


async def test_a_broker_that_was_killed_is_named_with_its_status_and_its_log(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, environment={}, say=lambda _: None)
    broker = _Ended(tmp_path)

    async with asyncio.timeout(5):
        await _watch([broker], supervisor)

    assert supervisor.failed.is_set()
    assert "137" in supervisor.failure()
    assert str(broker.log) in supervisor.failure()
