"""A worker as a process of its own, to be killed: `python -m tests.stream.worker BOOTSTRAP PREFIX INSTANCE`."""

import asyncio
import sys

from clawstream.stream.kafka import KafkaLog
from clawstream.stream.runner import run
from tests.stream import toys


async def main(bootstrap: str, prefix: str, instance_id: str) -> None:
    async with KafkaLog.connect(bootstrap, prefix=prefix, client_id="victim") as log:
        await run(toys.pairs(), log, stop=asyncio.Event(), instance_id=instance_id, pace=toys.HASTE)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
