"""What somebody says of an answer outside the conversation."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from clawstream.cli import app
from clawstream.errors import OperatorError
from clawstream.events import FeedbackGiven, FeedbackSource
from clawstream.gateway.access.key_file import add_key
from clawstream.gateway.access.keys import Allowance
from clawstream.gateway.http.connection import Bounds
from clawstream.gateway.requests.feedback import MAX_TEXT
from clawstream.stream.stage import Record
from clawstream.stream.topics import FEEDBACK
from tests.fakes.memory_log import MemoryLog
from tests.parts.gateway.outbox.test_promises import GatedLog
from tests.parts.gateway.running_gateway import Response, RunningGateway, full_disk, read, running_gateway

UNKNOWN = "00000000-0000-4000-8000-000000000000"


@pytest.fixture
async def gateway(tokenizer_folder: Path) -> AsyncIterator[RunningGateway]:
    async with running_gateway(tokenizer_folder) as found:
        yield found


async def give(gateway: RunningGateway, *, key: str | None = None, **body: Any) -> Response:
    """POST /v1/feedback."""
    headers = {} if key is None else {"x-api-key": key}
    raw = json.dumps(body).encode()
    async with gateway.client.post(f"{gateway.url}/v1/feedback", data=raw, headers=headers) as answer:
        return await read(answer)


async def given(gateway: RunningGateway) -> list[FeedbackGiven]:
    """All feedback on the log, in order; of two records with one id the first counts."""
    found: dict[str, FeedbackGiven] = {}
    async for records in gateway.log.follow((FEEDBACK,), until_end=True):
        for record in records:
            if isinstance(record, Record) and isinstance(record.event, FeedbackGiven):
                found.setdefault(record.event.event_id, record.event)
    return list(found.values())


async def test_a_thumb_is_recorded_with_its_turn_and_session(gateway: RunningGateway) -> None:
    answer = await gateway.chat(headers={"X-Session-Id": "s1"})
    response = await give(gateway, response_id=answer.body["id"], thumb="down", text="Wrong.")
    (feedback,) = await given(gateway)
    exchange = await gateway.exchange()
    assert response.status == 201
    assert response.body["feedback_id"] == feedback.feedback_id
    assert response.body["created"] == feedback.given_at_ms // 1000
    assert (feedback.session_id, feedback.turn_id) == ("s1", exchange.exchange_id)
    assert (feedback.source, feedback.score, feedback.text) == (FeedbackSource.PERSON, -1.0, "Wrong.")


@pytest.mark.parametrize("prefix", ["", "chatcmpl-", "msg_"])
async def test_a_response_is_known_by_its_id_in_any_dialect(gateway: RunningGateway, prefix: str) -> None:
    await gateway.chat()
    exchange = await gateway.exchange()
    response = await give(gateway, response_id=prefix + exchange.exchange_id, score=0.5, source="environment")
    (feedback,) = await given(gateway)
    assert (response.status, feedback.session_id, feedback.score) == (201, exchange.session_id, 0.5)
    assert feedback.source is FeedbackSource.ENVIRONMENT


async def test_words_alone_are_no_score(gateway: RunningGateway) -> None:
    answer = await gateway.chat()
    for words in ("a\ud800b\x00c", "x" * MAX_TEXT):
        await give(gateway, response_id=answer.body["id"], text=words)
    short, long = await given(gateway)
    assert (short.score, short.text, long.text) == (None, "a\ud800b\x00c", "x" * MAX_TEXT)


async def test_the_gateway_says_whether_words_are_a_hint(gateway: RunningGateway) -> None:
    answer = await gateway.chat()
    said: list[dict[str, Any]] = [
        {"text": "Show the steps."},
        {"thumb": "up", "text": "Show the steps."},
        {"thumb": "up"},
    ]
    given_back = [await give(gateway, response_id=answer.body["id"], **one) for one in said]
    assert [response.body["hint"] for response in given_back] == [True, False, False]


async def test_a_past_answer_is_annotated_from_a_shell(gateway: RunningGateway, tmp_path: Path) -> None:
    turn_id = (await gateway.chat()).body["id"].removeprefix("chatcmpl-")
    settings = tmp_path / "clawstream.toml"
    settings.write_text(f'data_dir = "{tmp_path}"\n')

    async def said(*options: str, url: str = gateway.url) -> Result:
        argv = ["-c", str(settings), "feedback", *options, "--url", url]
        return await asyncio.to_thread(CliRunner().invoke, app, argv)

    done = await said(turn_id, "--score", "-0.5", "--hint", "Show the steps.")
    assert (done.exit_code, done.stdout) == (0, f"recorded: the score and the words on {turn_id}\n")
    plain = await said(turn_id, "--hint", "Show the steps.", "--json")
    assert json.loads(plain.stdout)["hint"] is True
    assert [(one.turn_id, one.score, one.text) for one in await given(gateway)] == [
        (turn_id, -0.5, "Show the steps."),
        (turn_id, None, "Show the steps."),
    ]
    praised = await said(turn_id, "--score", "1", "--hint", "Show the steps.")
    assert "the words are recorded, and teach nothing" in praised.stderr
    older = await said(UNKNOWN, "--score", "1", "--session", "s7")
    assert older.exit_code == 0
    for refused, words in (
        (await said(turn_id), "nothing is said of the answer"),
        (await said(UNKNOWN, "--score", "1"), "Name the session with --session"),
        (await said(turn_id, "--score", "1", url="http://127.0.0.1:9"), "no gateway answers at http://127.0.0.1:9/v1"),
    ):
        assert isinstance(refused.exception, OperatorError)
        assert words in str(refused.exception)
    assert len(await given(gateway)) == 4


async def test_a_whole_conversation_is_annotated_by_a_file_or_nothing_of_it(
    gateway: RunningGateway, tmp_path: Path
) -> None:
    turns = [(await gateway.chat()).body["id"].removeprefix("chatcmpl-") for _ in range(2)]
    settings, notes = tmp_path / "clawstream.toml", tmp_path / "notes.jsonl"
    settings.write_text(f'data_dir = "{tmp_path}"\n')

    async def said(*lines: str, options: Sequence[str] = ()) -> Result:
        notes.write_text("\n".join(lines))
        argv = ["-c", str(settings), "feedback", "--file", str(notes), "--url", gateway.url, *options]
        return await asyncio.to_thread(CliRunner().invoke, app, argv)

    first = json.dumps({"turn": turns[0], "score": -1, "hint": "Show the steps."})
    second = json.dumps({"turn": turns[1], "score": 0.5})
    for wrong, words in (
        (await said(first, '{"turn": "x", "score": 2}'), "line 2: score: Input should be less than or equal to 1"),
        (await said(first, '{"turn": "x", "score": 1, "note": "?"}'), "line 2: note: Extra inputs are not permitted"),
        (await said(first, json.dumps({"turn": turns[1]})), "line 2: nothing is said of the answer"),
        (await said(first, options=["--score", "1"]), "expected one answer's TURN"),
    ):
        assert isinstance(wrong.exception, OperatorError)
        assert words in str(wrong.exception)
        assert "Nothing was recorded" in str(wrong.exception)
    assert await given(gateway) == []
    done = await said(first, second)
    assert done.stdout == f"recorded: the score and the words on {turns[0]}\nrecorded: the score of {turns[1]}\n"
    recorded = {(one.turn_id, one.score, one.text) for one in await given(gateway)}
    assert recorded == {(turns[0], -1.0, "Show the steps."), (turns[1], 0.5, None)}
    half = await said(second, json.dumps({"turn": UNKNOWN, "score": 1}))
    assert f"the first 1 of 2 answers are recorded, the rest is not. Of {UNKNOWN}" in str(half.exception)
    from_an_editor = await said("\ufeff" + first, "", "\u2028".join(['{"turn": "' + turns[1], '", "score": 1}']), "")
    assert "Name the session with --session" in str(from_an_editor.exception)  # every line was read
    for content, words in ((b"\n \n", "no line in it"), (b'{"turn": "\xff"}', "expected JSON lines in UTF-8")):
        notes.write_bytes(content)
        unread = await asyncio.to_thread(
            CliRunner().invoke, app, ["-c", str(settings), "feedback", "--file", str(notes), "--url", gateway.url]
        )
        assert words in str(unread.exception)


async def test_a_shell_shows_its_key(tokenizer_folder: Path, tmp_path: Path) -> None:
    settings, keys_file = tmp_path / "clawstream.toml", tmp_path / "keys.json"
    settings.write_text(f'data_dir = "{tmp_path}"\n')
    anna = add_key(keys_file, "anna", Allowance())
    async with running_gateway(tokenizer_folder, keys_file=keys_file) as gateway:
        answer = await gateway.chat(headers={"Authorization": f"Bearer {anna}"})
        argv = ["-c", str(settings), "feedback", answer.body["id"], "--score", "1", "--url", gateway.url]
        without = await asyncio.to_thread(CliRunner().invoke, app, argv)
        assert "Name a key in force with --key" in str(without.exception)
        shown = await asyncio.to_thread(CliRunner().invoke, app, [*argv, "--key", anna])
        assert shown.exit_code == 0
        assert [one.key_name for one in await given(gateway)] == ["anna"]


async def test_up_down_up_ends_with_up(gateway: RunningGateway) -> None:
    answer = await gateway.chat()
    for thumb in ("up", "down", "up"):
        await give(gateway, response_id=answer.body["id"], thumb=thumb)
    assert [feedback.score for feedback in await given(gateway)] == [1.0, -1.0, 1.0]


async def test_the_same_under_one_feedback_id_is_one_event_and_something_else_is_another(
    gateway: RunningGateway,
) -> None:
    answer = await gateway.chat()
    up = {"thumb": "up"}
    for said in (up, up, {"thumb": "down"}, up | {"text": "Yes."}, up | {"source": "heuristic"}):
        await give(gateway, response_id=answer.body["id"], feedback_id="click-1", **said)
    assert [(feedback.score, feedback.text, feedback.source.value) for feedback in await given(gateway)] == [
        (1.0, None, "person"),
        (-1.0, None, "person"),
        (1.0, "Yes.", "person"),
        (1.0, None, "heuristic"),
    ]


async def test_a_feedback_id_is_its_response_s_own(gateway: RunningGateway) -> None:
    first, second = await gateway.chat(), await gateway.chat()
    for answer in (first, second):
        await give(gateway, response_id=answer.body["id"], thumb="up", feedback_id="1")
    assert len(await given(gateway)) == 2


async def test_an_unknown_response_is_a_404_that_says_what_to_send(gateway: RunningGateway) -> None:
    response = await give(gateway, response_id=UNKNOWN, thumb="up")
    assert response.status == 404
    known = (await gateway.chat()).body["id"]
    assert (await give(gateway, response_id=f"{known} or so", thumb="up")).status == 404
    assert "session_id" in response.body["error"]["message"]
    assert await given(gateway) == []


async def test_an_older_response_is_taken_with_its_session(gateway: RunningGateway) -> None:
    response = await give(gateway, response_id=f"chatcmpl-{UNKNOWN}", thumb="up", session_id="s7")
    (feedback,) = await given(gateway)
    assert (response.status, feedback.session_id, feedback.turn_id) == (201, "s7", UNKNOWN)


async def test_a_response_of_another_session_is_refused(gateway: RunningGateway) -> None:
    answer = await gateway.chat(headers={"X-Session-Id": "s1"})
    response = await give(gateway, response_id=answer.body["id"], thumb="up", session_id="s2")
    assert (response.status, await given(gateway)) == (400, [])


async def test_responses_are_known_after_a_restart(tokenizer_folder: Path) -> None:
    log = MemoryLog()
    async with running_gateway(tokenizer_folder, log=log) as gateway:
        answer = await gateway.chat()
    async with running_gateway(tokenizer_folder, log=log) as gateway:
        assert (await give(gateway, response_id=answer.body["id"], thumb="up")).status == 201


@pytest.mark.slow
async def test_without_kafka_and_disk_feedback_is_a_503_and_not_recorded(tokenizer_folder: Path) -> None:
    log = GatedLog()
    async with running_gateway(
        tokenizer_folder, log=log, fsync=full_disk, bounds=Bounds(ack_timeout_s=0.05)
    ) as gateway:
        answer = await gateway.chat()
        log.gate.clear()
        response = await give(gateway, response_id=answer.body["id"], thumb="up")
        log.gate.set()
        assert (response.status, response.headers["retry-after"]) == (503, "2")
        assert await given(gateway) == []


async def test_feedback_needs_the_key(tokenizer_folder: Path) -> None:
    async with running_gateway(tokenizer_folder, api_key="secret") as gateway:
        answer = await gateway.chat(headers={"Authorization": "Bearer secret"})
        assert (await give(gateway, response_id=answer.body["id"], thumb="up")).status == 401
        assert (await give(gateway, key="secret", response_id=answer.body["id"], thumb="up")).status == 201


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nothing said": ({}, "send thumb, score or text"),
    "words of no length": ({"text": ""}, "send thumb, score or text"),
    "thumb and score": ({"thumb": "up", "score": 1}, "send one of them"),
    "another thumb": ({"thumb": "sideways"}, "expected up or down"),
    "a score beyond 1": ({"score": 1.5}, "score is 1.5"),
    "a score that is true": ({"score": True}, "score is true"),
    "another source": ({"thumb": "up", "source": "ghost"}, "person, environment, heuristic"),
    "a long text": ({"text": "x" * 32_769}, "at most 32768"),
    "an unknown field": ({"thumb": "up", "comment": "no"}, "comment is not a field"),
    "a bad feedback id": ({"thumb": "up", "feedback_id": "a b"}, "feedback_id is 'a b'"),
    "a bad session": ({"thumb": "up", "session_id": "a b"}, "session_id is 'a b'"),
    "no response": ({"thumb": "up", "response_id": None}, "response_id is missing"),
    "no id of ours": ({"thumb": "up", "response_id": "resp_1"}, "none that this gateway remembers"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("body", "message"), REFUSED.values(), ids=list(REFUSED))
async def test_feedback_that_says_nothing_usable_is_refused(
    gateway: RunningGateway, body: dict[str, Any], message: str
) -> None:
    response = await give(gateway, **({"response_id": UNKNOWN} | body))
    assert response.status in (400, 404)
    assert message in response.body["error"]["message"]


async def test_only_post_is_offered(gateway: RunningGateway) -> None:
    status, text = await gateway.get("/v1/feedback")
    assert (status, "use POST" in text) == (405, True)


async def test_the_response_of_another_key_is_unknown(tokenizer_folder: Path, tmp_path: Path) -> None:
    keys = {name: add_key(tmp_path / "keys.json", name, Allowance()) for name in ("alice", "bob")}
    async with running_gateway(tokenizer_folder, keys_file=tmp_path / "keys.json") as gateway:
        answer = await gateway.chat(headers={"x-api-key": keys["alice"]})
        asked = {"response_id": answer.body["id"], "thumb": "up"}
        assert (await give(gateway, key=keys["bob"], **asked)).status == 404
        named = asked | {"session_id": answer.body["session_id"]}
        assert (await give(gateway, key=keys["bob"], **named)).status == 404
        assert (await give(gateway, key=keys["alice"], **asked)).status == 201
        assert [feedback.key_name for feedback in await given(gateway)] == ["alice"]
