"""People who number their turns, ask again while they may, and remember what they saw acknowledged."""

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiokafka.partitioner import DefaultPartitioner

from tests.chaos.oracle import Seen
from tests.chaos.parts import Part

_TURNS = 6
PARTITIONS = 12  # of each topic about sessions
_AGAIN_AFTER_S = 0.3
_ANSWER_WITHIN_S = 90.0  # longer than any part is stopped for
_SLACK_S = 1.0  # between a signal and what a client notices of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """A gateway as clients know it."""

    url: str
    part: Part


@dataclass(slots=True)
class Tally:
    """What all clients saw."""

    seen: list[Seen] = field(default_factory=list)
    cut: int = 0  # as the gateway was killed or restarted
    unavailable: int = 0  # a stated 503
    refused_for_want_of_room: int = 0
    failed: list[str] = field(default_factory=list)  # while the gateway was up: each is a fault of ours


class _NoAnswer(Exception):
    """The answer did not come to its end."""

    def __init__(self, why: str, *, status: int | None = None, began: bool = False) -> None:
        super().__init__(why)
        self.status = status
        self.began = began


@dataclass(slots=True, kw_only=True)
class Clients:
    """Everybody who talks to the gateways."""

    doors: Sequence[Door]
    http: aiohttp.ClientSession
    has_room: Callable[[float, float], bool]  # whether the spools had room all the time between
    partition: int | None = None  # where all sessions are; None: anywhere
    tally: Tally = field(default_factory=Tally)
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def talk(self, number: int) -> None:
        """Hold one session after the other until told to stop; a turn that was begun is brought to its end."""
        door = self.doors[number % len(self.doors)]
        for session in self._names(number):
            messages: list[dict[str, Any]] = []
            for turn in range(_TURNS):
                if self.stop.is_set():
                    return
                messages.append({"role": "user", "content": f"Turn {turn} of {session}?"})
                said = await self._until_answered(door, session, turn, messages)
                if said is None:
                    return
                messages.append({"role": "assistant", "content": said})

    def _names(self, number: int) -> Iterator[str]:
        for session in itertools.count():
            name = f"c{number}-{session}"
            if self.partition in (None, _partition_of(name)):
                yield name

    async def _until_answered(
        self, door: Door, session: str, turn: int, messages: Sequence[dict[str, Any]]
    ) -> str | None:
        body = {"model": "policy", "messages": messages, "max_tokens": 64, "stream": turn % 4 != 3}
        headers = {"X-Session-Id": session}
        if turn == _TURNS - 1:
            headers["X-Session-Done"] = "true"
        while True:
            began_s = time.monotonic()
            try:
                exchange_id, said = await self._ask(door, body, headers)
            except _NoAnswer as error:
                self._count(door, error, began_s, f"{session} turn {turn}")
                if self.stop.is_set():
                    return None
                await asyncio.sleep(_AGAIN_AFTER_S)
            else:
                self.tally.seen.append(Seen(session_id=session, turn=turn, exchange_id=exchange_id, text=said))
                return said

    def _count(self, door: Door, error: _NoAnswer, began_s: float, what: str) -> None:
        now_s = time.monotonic()
        since_s = began_s - _SLACK_S
        if error.status == 503:
            self.tally.unavailable += 1
        elif not self.has_room(began_s, now_s):
            self.tally.refused_for_want_of_room += 1
        elif door.part.cut(since_s, now_s) or (not error.began and door.part.was_away(since_s, now_s)):
            self.tally.cut += 1
        else:
            self.tally.failed.append(f"{what} on {door.url}: {error} (after {now_s - began_s:.2f} s)")

    async def _ask(self, door: Door, body: dict[str, Any], headers: dict[str, str]) -> tuple[str, str]:
        """Return the exchange's id and the answer, once its finish was seen; raises _NoAnswer."""
        began = False
        url = f"{door.url}/v1/chat/completions"
        try:
            async with (
                asyncio.timeout(_ANSWER_WITHIN_S),
                self.http.post(url, json=body, headers=headers) as answer,
            ):
                began = True
                door.part.answers()
                if answer.status != 200:
                    raise _NoAnswer((await answer.text())[:300], status=answer.status)
                if not body["stream"]:
                    return _whole(await answer.json())
                return await _streamed(answer)
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            raise _NoAnswer(repr(error), began=began) from error


def _partition_of(session: str) -> int:
    place: int = DefaultPartitioner()(session.encode(), range(PARTITIONS), ())
    return place


def _whole(body: dict[str, Any]) -> tuple[str, str]:
    return body["id"].removeprefix("chatcmpl-"), body["choices"][0]["message"]["content"]


async def _streamed(answer: aiohttp.ClientResponse) -> tuple[str, str]:
    """What was seen up to the finish counts, whatever becomes of the connection after it."""
    said: list[str] = []
    async for line in answer.content:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        chunk = json.loads(line.removeprefix(b"data: "))
        if "error" in chunk:
            # The status was sent before anything was wrong, so here a 503 is stated by its code.
            status = 503 if chunk["error"]["code"] == "service_unavailable" else None
            raise _NoAnswer(str(chunk["error"])[:300], status=status, began=True)
        for choice in chunk["choices"]:
            said.append(choice["delta"].get("content") or "")
            if choice["finish_reason"] is not None:
                return chunk["id"].removeprefix("chatcmpl-"), "".join(said)
    raise _NoAnswer("the stream ended without a finish", began=True)
