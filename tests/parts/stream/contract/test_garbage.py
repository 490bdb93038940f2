"""Records that somebody else's producer wrote, on a topic and on its dead-letter queue: none of them stops a stage."""

import pytest

from clawstream.stream import quarantine
from clawstream.stream.avro import codec
from tests.parts.stream.contract.conftest import AnyLog
from tests.parts.stream.raw import append_bytes
from tests.unit.stream import queues, toys

pytestmark = pytest.mark.slow

QUEUE = f"{toys.EXCHANGES}.dlq"
WHOLE = codec().encode(toys.done("a", 1))
GROUP = ("dlq.group", b"chain")
Headers = list[tuple[str, bytes | None]]


@pytest.mark.parametrize(
    ("topic", "key", "value", "headers", "num_letters"),
    [
        pytest.param(toys.EXCHANGES, b"a", WHOLE, [("traceparent", None)], 0, id="no trace"),
        pytest.param(toys.EXCHANGES, b"a", WHOLE, [("x", None)], 0, id="a header without a value"),
        pytest.param(toys.EXCHANGES, b"a", b"junk", [("x", None)], 1, id="junk with a header without a value"),
        pytest.param(toys.EXCHANGES, b"\xff\xfe", b"junk", [], 1, id="a key that is no text"),
        pytest.param(toys.EXCHANGES, None, b"junk", [], 1, id="no key"),
        pytest.param(QUEUE, b"a", b"junk", [], 0, id="a letter without headers"),
        pytest.param(QUEUE, b"a", b"junk", [GROUP], 0, id="a letter that says only whose it is"),
        pytest.param(QUEUE, b"a", b"junk", [("dlq.group", b"\xff")], 0, id="a letter of nobody's"),
        pytest.param(QUEUE, b"a", b"junk", [("dlq.group", None)], 0, id="a letter of null"),
        pytest.param(
            QUEUE, b"a", None,
            [GROUP, ("dlq.topic", b"t"), ("dlq.partition", b"x"), ("dlq.offset", b"1"), ("dlq.fate", b"discard")], 0,
            id="a mark with a number that is none",
        ),
        pytest.param(
            QUEUE, b"a", None,
            [GROUP, ("dlq.topic", b"t"), ("dlq.partition", b"0"), ("dlq.offset", b"1"), ("dlq.fate", b"burn")], 0,
            id="a mark with a fate that is none",
        ),
    ],
)  # fmt: skip
async def test_what_others_write_stops_nothing(
    log: AnyLog, topic: str, key: bytes | None, value: bytes | None, headers: Headers, num_letters: int
) -> None:
    await log.append([toys.done("a", 0)])
    await append_bytes(log, topic, key, value, headers)
    await log.append([toys.done("b", 0), toys.done("b", 1)])
    async with toys.running(queues.chain(), log):
        await toys.settled(log, "chain")
    assert (await queues.chained(log))["b"] == [0]
    found = await quarantine.dead_letters(log)
    assert len(found) == num_letters
    for dead_letter in found:
        shown = await quarantine.shown(log, "/".join(map(str, dead_letter.id)))
        assert shown["value_hex"] == b"junk".hex()
