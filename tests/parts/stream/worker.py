"""A worker to kill or freeze: `python -m tests.parts.stream.worker BOOTSTRAP PREFIX SLOT STAGE`.

SLOT is its instance id, `-` for none; STAGE is `pairs` or `asks`. It says `asked ID` for each call that it begins, and
`refused` for each commit that the broker did not take.
"""

import asyncio
import sys
from collections.abc import Mapping
from typing import Any

from clawstream.events import Event, SessionDone
from clawstream.stream.kafka.kafka_log import KafkaLog
from clawstream.stream.kafka.member import GroupPatience, KafkaMember
from clawstream.stream.log import Commit, PartitionId
from clawstream.stream.runner.hosting import run
from clawstream.stream.stage import Stage
from tests.unit.stream import toys

CALL_S = 0.5
CALLS_AT_ONCE = 2
SHORT = GroupPatience(session_timeout_s=6.0, heartbeat_s=0.2)  # the shortest that a broker allows by default


async def main(bootstrap: str, prefix: str, slot: str, stage: str) -> None:
    _tell_refusals()
    chosen: Stage[Any, Any] = (
        toys.asks(_answer_slowly, calls_at_once=CALLS_AT_ONCE) if stage == "asks" else toys.pairs()
    )
    async with KafkaLog.connect(bootstrap, prefix=prefix, client_id="victim", patience=SHORT) as log:
        await run(chosen, log, stop=asyncio.Event(), instance_id=None if slot == "-" else slot, pace=toys.HASTE)


async def _answer_slowly(call: SessionDone) -> list[Event]:
    print(f"asked {call.event_id}", flush=True)
    await asyncio.sleep(CALL_S)
    return await toys.answered(call)


def _tell_refusals() -> None:
    own = KafkaMember.commit

    async def commit(self: KafkaMember, commits: Mapping[PartitionId, Commit]) -> bool:
        taken = await own(self, commits)
        if not taken:
            print("refused", flush=True)
        return taken

    KafkaMember.commit = commit  # type: ignore[method-assign]


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
