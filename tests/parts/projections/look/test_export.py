"""What was recorded leaves in files that other programs read."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlalchemy import Engine

from clawstream.events import ExchangeCompleted, FeedbackGiven, FeedbackSource, RequestDelta, TurnType
from clawstream.projections.look.export import FileFormat, export
from tests.parts.projections import one_session
from tests.parts.projections.reading import write_all
from tests.unit.projections import logs

NAMES = ("conversations", "judgements", "feedback", "samples", "steps", "versions")


@pytest.fixture
def told(emptied: Engine) -> None:
    """A database with one short story in it."""
    write_all(emptied, logs.records(one_session.ONE_SESSION))


def _jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.usefixtures("told")
def test_a_conversation_is_exported_once_whole_and_ready_to_train_on(migrated_url: str, tmp_path: Path) -> None:
    counts = export(migrated_url, tmp_path, form=FileFormat.JSONL)
    assert (counts["conversations"], counts["judgements"], counts["samples"]) == (1, 1, 1)
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.jsonl" for name in NAMES}
    [conversation] = _jsonl(tmp_path / "conversations.jsonl")
    said = (
        one_session.SYSTEM,
        one_session.QUESTION,
        one_session.ANSWER,
        one_session.COMPLAINT,
        one_session.BLOCK,
        one_session.SECOND_ANSWER,
    )
    assert conversation["messages"] == [json.loads(message) for message in said]
    assert (conversation["session_id"], conversation["tools"]) == (one_session.SESSION, [])


@pytest.mark.usefixtures("told")
def test_a_judgement_has_its_votes_and_a_sample_its_tokens(migrated_url: str, tmp_path: Path) -> None:
    export(migrated_url, tmp_path, form=FileFormat.JSONL)
    [judgement] = _jsonl(tmp_path / "judgements.jsonl")
    assert (judgement["score"], judgement["next_state"]) == (-1, "user: No bold, please.")
    assert [vote["score"] for vote in judgement["votes"]] == [1, -1, 1, -1, None]
    [sample] = _jsonl(tmp_path / "samples.jsonl")
    assert tuple(sample["hinted_prompt_ids"]) == one_session.SAMPLE.hinted_prompt_ids
    assert sample["response_logprobs"] == [-0.5, None]


@pytest.mark.usefixtures("told")
def test_parquet_has_the_same_records_as_jsonl(migrated_url: str, tmp_path: Path) -> None:
    for form in FileFormat:
        export(migrated_url, tmp_path, form=form)
    for name in NAMES:
        rows = pq.read_table(tmp_path / f"{name}.parquet").to_pylist()
        for row, record in zip(rows, _jsonl(tmp_path / f"{name}.jsonl"), strict=True):
            assert row.keys() == record.keys()
            for key, value in record.items():
                found = row[key]
                if key in ("messages", "tools", "votes", "versions", "settings", "activations"):
                    found = None if found is None else json.loads(found)
                assert found == value or key.endswith("_at"), key


def test_thumbs_alone_are_exported_with_the_answer_that_they_are_about(
    emptied: Engine, migrated_url: str, tmp_path: Path
) -> None:
    thumb = FeedbackGiven(
        session_id=one_session.SESSION, feedback_id="f", turn_id=one_session.FIRST, key_name="me",
        source=FeedbackSource.PERSON, score=-1.0, text="too long", given_at_ms=1_763_647_200_000,
    )  # fmt: skip
    write_all(emptied, logs.records([*one_session.EXCHANGES, thumb]))
    assert export(migrated_url, tmp_path, form=FileFormat.JSONL)["judgements"] == 0
    [found] = _jsonl(tmp_path / "feedback.jsonl")
    assert (found["turn_id"], found["source"], found["score"], found["text"]) == (
        one_session.FIRST,
        "person",
        -1,
        "too long",
    )
    assert found["answer"] == json.loads(one_session.ANSWER)["content"]
    assert found["request"] == json.loads(one_session.QUESTION)["content"]
    assert found["given_at"].startswith("2025-11-20")


@pytest.mark.usefixtures("told")
def test_a_step_has_its_samples_and_a_version_its_engines(migrated_url: str, tmp_path: Path) -> None:
    export(migrated_url, tmp_path, form=FileFormat.JSONL)
    [step] = _jsonl(tmp_path / "steps.jsonl")
    [sample] = _jsonl(tmp_path / "samples.jsonl")
    assert step["sample_ids"] == [sample["sample_id"], "elsewhere"]
    assert (step["policy_version"], step["loss_nats"], step["mean_reward"]) == (1, 0.25, -1)
    base, version = _jsonl(tmp_path / "versions.jsonl")
    assert (base["policy_version"], base["activations"]) == (0, None)
    assert (version["policy_version"], version["parent_version"]) == (1, 0)
    assert [taken["pause_ms"] for taken in version["activations"]] == [21]


def test_what_postgres_can_not_hold_is_itself_again_in_jsonl(
    emptied: Engine, migrated_url: str, tmp_path: Path
) -> None:
    messages = (rb'{"role": "user", "content": "a\u0000b\ud800\u241bc\\u0000"}',)
    request = RequestDelta(
        parent_exchange_id=None, kept_messages=0, kept_tokens=0, messages=messages, token_ids=(), options=b"{}"
    )
    odd = logs.example(ExchangeCompleted, turn_type=TurnType.MAIN, session_id="\ud800", request=request)
    write_all(emptied, logs.records([odd]))
    export(migrated_url, tmp_path, form=FileFormat.JSONL)
    [conversation] = _jsonl(tmp_path / "conversations.jsonl")
    assert conversation["session_id"] == "\ud800"
    assert conversation["messages"][0] == json.loads(messages[0])
    export(migrated_url, tmp_path, form=FileFormat.PARQUET)
    assert pq.read_table(tmp_path / "conversations.parquet").num_rows == 1


@pytest.mark.parametrize("form", FileFormat)
def test_nothing_recorded_is_empty_files(emptied: Engine, migrated_url: str, tmp_path: Path, form: FileFormat) -> None:
    assert emptied is not None
    assert export(migrated_url, tmp_path / "new", form=form) == dict.fromkeys(NAMES, 0)
    assert {path.name for path in (tmp_path / "new").iterdir()} == {f"{name}.{form}" for name in NAMES}
    if form is FileFormat.PARQUET:
        assert pq.read_schema(tmp_path / "new" / "samples.parquet").field("prompt_ids").type == pa.list_(pa.int32())
