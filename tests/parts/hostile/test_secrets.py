"""A key is nowhere but in the request that shows it, and what people say is in no log line, error or metric."""

import json
import logging
from pathlib import Path

import pytest

from clawstream.gateway.access.key_file import add_key
from clawstream.gateway.access.keys import Allowance
from tests.fakes.scripted_engine import Fault
from tests.parts.gateway.access.test_limits import leave
from tests.parts.gateway.running_gateway import RunningGateway, everything, running_gateway
from tests.parts.hostile.raw import wire

SAID = "MARKED-CONVERSATION"
ANSWER = "MARKED-ANSWER"


def body(**more: object) -> bytes:
    return json.dumps({"model": "policy", "messages": [{"role": "user", "content": SAID}]} | more).encode()


FAILURES: dict[str, tuple[bytes, Fault | None, int]] = {
    "answered": (body(), None, 200),
    "streamed": (body(stream=True), None, 200),
    "no JSON": (body()[:-1], None, 400),
    "a wrong field": (body(temperature=9), None, 400),
    "another model": (body(model="x"), None, 404),
    "a prompt too long": (body(messages=[{"role": "user", "content": SAID * 1000}]), None, 400),
    "a prompt much too long": (body(messages=[{"role": "user", "content": SAID * 20_000}]), None, 400),
    "a role that is none": (body(messages=[{"role": "x", "content": SAID}]), None, 400),
    "content that is none": (body(messages=[{"role": "user", "content": {"text": SAID}}]), None, 400),
    "refused by the engine": (body(), Fault(status=400), 400),
    "the engine fails": (body(), Fault(status=500), 503),
    "the engine is cut": (body(), Fault(cut_after_tokens=2), 503),
    "cut within a stream": (body(stream=True), Fault(cut_after_tokens=2), 200),
}


async def test_neither_keys_nor_conversations_are_where_they_do_not_belong(
    tokenizer_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.json"
    key, stranger = add_key(path, "anna", Allowance()), "cs-MARKED-STRANGER"
    shown: list[str] = []
    with caplog.at_level(logging.INFO):
        async with running_gateway(tokenizer_folder, say=ANSWER, keys_file=path, api_key="MARKED-DEFAULT") as gateway:
            for sent, fault, status in FAILURES.values():
                shown += await _ask(gateway, sent, key, fault, status)
            for wrong in (stranger, key[:-1], key.upper()):
                shown += await _ask(gateway, body(), wrong, None, 401)
            shown.append(await _rubbish(gateway, key))
            await leave(gateway, body(), key)
            shown += [(await gateway.get(page))[1] for page in ("/metrics", "/readyz", "/v1/models", "/openapi.json")]
            events = " ".join(map(repr, await everything(gateway.log)))
    logged = "\n".join(record.getMessage() for record in caplog.records)
    assert "state=engine_failed" in logged
    assert SAID in events  # the log is where conversations belong
    for secret in (key, stranger, "MARKED-DEFAULT", json.loads(path.read_text())["keys"][0]["sha256"]):
        assert secret not in logged + events + "".join(shown)
    for words in (SAID, ANSWER):
        assert words not in logged + "".join(shown)


async def _ask(gateway: RunningGateway, sent: bytes, key: str, fault: Fault | None, status: int) -> list[str]:
    """What the client is shown, less the answer that it asked for."""
    if fault is not None:
        gateway.engine.faults.extend([fault] * 2)  # one more for a second try
    answer = await gateway.post(sent, headers={"Authorization": f"Bearer {key}"})
    gateway.engine.faults.clear()
    assert answer.status == status
    errors = [event["error"] for event in answer.events if "error" in event]
    return [json.dumps(answer.headers), json.dumps(errors), "" if status == 200 else json.dumps(answer.body)]


async def _rubbish(gateway: RunningGateway, key: str) -> str:
    async with wire(gateway.url) as connection:
        headers = f"authorization: Bearer {key}\r\nx y: {SAID}\r\n\r\n"
        await connection.write(f"GET /healthz HTTP/1.1\r\n{headers}".encode())
        return (await connection.said()).raw.decode()
