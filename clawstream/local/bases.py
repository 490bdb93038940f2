"""Writes to the log which base a policy has, before anything is done with it."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from clawstream.config import Settings
from clawstream.events import Event, PolicyEvent
from clawstream.inference.models.bases import base_in, refuse_other, to_name
from clawstream.stream.log import Arrived, Start
from clawstream.stream.stage import Record

log = logging.getLogger(__name__)

POLICY_TOPIC = "clawstream.policy.v1"


class BaseLog(Protocol):
    """The part of a log that the policy topic needs."""

    async def append(self, events: Sequence[Event]) -> None: ...
    def follow(
        self, topics: Sequence[str], start: Start, *, until_end: bool = False
    ) -> AsyncIterator[Sequence[Arrived]]: ...


async def name_base(policy_log: BaseLog, settings: Settings) -> None:
    """Write the base of the settings' policy to the log, if the log names none yet.

    Raises OtherBase where the policy began with another one, ConfigError where the folder can't be read.
    """
    policy_id = settings.policy.id
    base = await asyncio.to_thread(base_in, settings.engine.base_policy, settings.cache_dir)
    named = to_name(
        policy_id,
        base,
        await _of_policy(policy_log, policy_id),
        checkpoints_dir=settings.checkpoints_dir,
        now_ms=time.time_ns() // 1_000_000,
    )
    if named is None:
        return
    await policy_log.append([named])
    refuse_other(policy_id, base, await _of_policy(policy_log, policy_id))  # another part may have been quicker
    log.info("base_named policy=%s path=%s model=%s", policy_id, base.path, (base.model_sha256 or "unseen")[:12])


async def _of_policy(policy_log: BaseLog, policy_id: str) -> list[PolicyEvent]:
    found = [
        record.event
        async for records in policy_log.follow([POLICY_TOPIC], "earliest", until_end=True)
        for record in records
        if isinstance(record, Record)
    ]
    return [event for event in found if isinstance(event, PolicyEvent) and event.policy_id == policy_id]
