"""Which attempt at which task a request belongs to: on its exchange as the headers say it, or a 400 that names one."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from clawstream.events import ExchangeCompleted
from clawstream.gateway.access.key_file import add_key
from clawstream.gateway.access.keys import Allowance
from tests.parts.gateway.running_gateway import RunningGateway, running_gateway


@pytest.fixture(scope="module")
async def gateway(tokenizer_folder: Path) -> AsyncIterator[RunningGateway]:
    async with running_gateway(tokenizer_folder) as found:
        yield found


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ({}, (None, None, None)),
        ({"X-Group-Id": "", "X-Group-Size": "", "X-Step-Index": ""}, (None, None, None)),
        ({"X-Group-Id": "task-7"}, ("task-7", None, None)),
        ({"X-Group-Id": "task-7", "X-Group-Size": "4", "X-Step-Index": "0"}, ("task-7", 4, 0)),
    ],
)
async def test_what_the_headers_say_of_a_group_is_on_the_exchange(
    gateway: RunningGateway, headers: dict[str, str], said: tuple[str | None, int | None, int | None]
) -> None:
    answered = await gateway.chat(headers=headers)
    exchange = {e.exchange_id: e for e in await gateway.recorded(ExchangeCompleted)}[
        answered.body["id"].removeprefix("chatcmpl-")
    ]
    assert (exchange.group_id, exchange.group_size, exchange.step_index) == said


@pytest.mark.parametrize(
    ("headers", "param", "words"),
    [
        ({"X-Group-Id": "two words"}, "X-Group-Id", "'two words'; expected 1 to 200 printable"),
        ({"X-Group-Id": "g" * 201}, "X-Group-Id", "expected 1 to 200"),
        ({"X-Group-Id": "g", "X-Group-Size": "0"}, "X-Group-Size", "'0'; expected a whole number from 1 to 4096"),
        ({"X-Group-Id": "g", "X-Group-Size": "4097"}, "X-Group-Size", "'4097'"),
        ({"X-Group-Id": "g", "X-Group-Size": "many"}, "X-Group-Size", "'many'"),
        ({"X-Group-Id": "g", "X-Step-Index": "-1"}, "X-Step-Index", "'-1'; expected a whole number from 0 to"),
        ({"X-Group-Id": "g", "X-Step-Index": "1e3"}, "X-Step-Index", "'1e3'"),
        ({"X-Group-Size": "4"}, "X-Group-Size", "is 4, without X-Group-Id"),
        ({"X-Step-Index": "0"}, "X-Step-Index", "is 0, without X-Group-Id"),
    ],
)
async def test_a_header_that_can_not_be_used_is_named(
    gateway: RunningGateway, headers: dict[str, str], param: str, words: str
) -> None:
    error = (await gateway.chat(headers=headers)).body["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert words in error["message"]


async def test_a_group_belongs_to_its_key(tokenizer_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    keys = {name: add_key(path, name, Allowance()) for name in ("anna", "ben")}
    async with running_gateway(tokenizer_folder, keys_file=path) as found:
        for name, group in (("anna", "task-7"), ("ben", "task-7"), ("ben", "anna/task-7")):
            headers = {"Authorization": f"Bearer {keys[name]}", "X-Group-Id": group, "X-Group-Size": "2"}
            assert (await found.chat(headers=headers)).status == 200
        groups = [exchange.group_id for exchange in await found.recorded(ExchangeCompleted, at_least=3)]
    assert sorted(map(str, groups)) == ["anna/task-7", "ben/anna/task-7", "ben/task-7"]
