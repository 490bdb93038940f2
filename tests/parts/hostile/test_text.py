"""Text that Unicode or a database has no room for, in every field that a client writes, down to real rows."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text

from clawstream.events import ExchangeCompleted
from clawstream.projections import database
from clawstream.projections.text import original_json
from clawstream.projections.write.stage import project
from tests.fakes.memory_log import MemoryLog
from tests.parts.gateway.running_gateway import QUESTION, running_gateway, until

pytestmark = pytest.mark.slow

NASTY = {
    "NUL": "a\0b",
    "a lone high surrogate": "a\ud800b",
    "a lone low surrogate": "a\udfffb",
    "surrogates in the wrong order": "a\udc00\ud800b",
    "the mark that escapes": "a\u241bu0000b",
    "not a character": "a\uffff\ufdd0b",
    "right to left": "a\u202eb\u2066",
    "a thousand accents": "a" + "\u0301" * 1000,
}


def call(name: str, arguments: str) -> list[dict[str, Any]]:
    function = {"name": name, "arguments": arguments}
    calls = [{"id": "c", "type": "function", "function": function}]
    calling = {"role": "assistant", "content": None, "tool_calls": calls}
    return [*QUESTION, calling, {"role": "tool", "tool_call_id": "c", "content": "4"}]


def bodies(nasty: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """A body for each field that a client writes."""
    tool = {"type": "function", "function": {"name": nasty, "description": nasty, "parameters": {nasty: nasty}}}
    yield "a message", {"messages": [{"role": "user", "content": nasty}]}
    yield "a part", {"messages": [{"role": "user", "content": [{"type": "text", "text": nasty}]}]}
    yield "a system prompt", {"messages": [{"role": "system", "content": nasty}, *QUESTION]}
    result = {"role": "tool", "tool_call_id": nasty, "content": nasty}
    yield "a tool's result", {"messages": [*call("f", "{}")[:-1], result]}
    yield "a call's name", {"messages": call(nasty, "{}")}
    yield "a call's arguments", {"messages": call("f", json.dumps({nasty: nasty}))}
    yield "a call's arguments, no JSON", {"messages": call("f", nasty)}
    yield "tools", {"messages": QUESTION, "tools": [tool]}
    yield "user", {"messages": QUESTION, "user": nasty}
    yield "metadata", {"messages": QUESTION, "metadata": {nasty[:64]: nasty[:512]}}
    yield "a field that nobody knows", {"messages": QUESTION, nasty: {nasty: [nasty]}}
    yield "an unknown field of a message", {"messages": [{**QUESTION[0], "name": nasty, nasty: nasty}]}
    yield "stop", {"messages": QUESTION, "stop": [nasty]}
    yield "a prompt_cache_key", {"messages": QUESTION, "prompt_cache_key": nasty}


@asynccontextmanager
async def projected(url: str, log: MemoryLog) -> AsyncIterator[None]:
    """The tables follow the log for the length of the block."""
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(project(url, log, stop=stop))
        try:
            yield
        finally:
            stop.set()
        await running


@pytest.mark.parametrize("nasty", NASTY.values(), ids=NASTY.keys())
async def test_whatever_a_client_writes_is_answered_and_is_in_the_rows_as_it_was_written(
    tokenizer_folder: Path, fresh_database_url: str, nasty: str
) -> None:
    database.upgrade(fresh_database_url)
    engine, log = database.connect(fresh_database_url), MemoryLog()
    asked = dict(bodies(nasty))
    statuses: dict[str, int] = {}

    async def roomy() -> bool:
        return '"max_model_len":100000' in (await gateway.get("/v1/models"))[1]

    async def there() -> bool:
        return len(rows(engine)) == len(exchanges)

    async with running_gateway(tokenizer_folder, log=log) as gateway:
        gateway.engine.context_length_tokens = 100_000
        await until(roomy)
        for field, body in asked.items():
            named = {"x-session-id": field.replace(" ", "-")}
            statuses[field] = (await gateway.post(json.dumps(body).encode(), headers=named)).status
        answered = sum(status == 200 for status in statuses.values())
        exchanges = await gateway.recorded(ExchangeCompleted, at_least=answered)
        async with projected(fresh_database_url, log):
            await until(there)
            stored = rows(engine)
    engine.dispose()
    refused = {field: status for field, status in statuses.items() if status != 200}
    # No answer can contain half a character, so none is looked for; and no template writes a tool with one.
    halves = any("\ud800" <= letter <= "\udfff" for letter in nasty)
    assert refused == ({"stop": 400, "tools": 400} if halves else {})
    for exchange in exchanges:
        body = asked[next(field for field in asked if field.replace(" ", "-") == exchange.session_id)]
        assert [json.loads(message) for message in exchange.request.messages] == body["messages"]
        messages, options = stored[exchange.session_id]
        assert json.loads(original_json(messages)) == body["messages"]
        assert json.loads(original_json(options)) == {key: body[key] for key in body if key != "messages"}


def rows(engine: Engine) -> dict[str, tuple[str, str]]:
    """Messages and options of each session's exchange, as text."""
    query = "SELECT session_id, messages::text, options::text FROM exchanges"
    with engine.connect() as connection:
        return {session: (messages, options) for session, messages, options in connection.execute(text(query))}
