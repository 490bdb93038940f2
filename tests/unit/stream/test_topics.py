"""The topics as files, and what a broker would need to have them so."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream import resources
from clawstream.events import EVENTS
from clawstream.stream import topics
from clawstream.stream.kafka.client import MAX_RECORD_BYTES
from clawstream.stream.topics import (
    Altered,
    Created,
    ExistingTopic,
    RefusedChange,
    Topic,
    all_topics,
    count_of,
    dead_letter_topic,
    diff,
    event_topics,
    load,
    mermaid,
    topic_of,
)

[EXCHANGES] = [topic for topic in all_topics() if topic.name == topics.EXCHANGES]
RETENTIONS = st.sampled_from(["-1", "1000", "604800000", "7776000000"])


def found_as(topic: Topic, **changes: str) -> ExistingTopic:
    return ExistingTopic(partitions=topic.partitions, config=dict(topic.config) | changes, overrides={})


def test_every_event_has_one_topic_of_its_own_key() -> None:
    for kind in EVENTS:
        [home] = [topic for topic in all_topics() if kind in topic.events]
        assert topic_of(kind) == home.name
        assert home.key in {"session_id", "group_id", "policy_id", "subject"}


def test_each_topic_has_a_constant() -> None:
    constants = {
        value for name, value in vars(topics).items() if name.isupper() and str(value).startswith("clawstream.")
    }
    assert constants == {*event_topics(), topics.SCHEMAS}
    assert topics.SCHEMAS in {topic.name for topic in all_topics()}


def test_topics_about_sessions_have_one_partition_count() -> None:
    assert {topic.partitions for topic in all_topics() if topic.key == "session_id" and topic.events} == {12}


def test_all_topics_take_what_our_clients_send() -> None:
    assert {topic.config["max.message.bytes"] for topic in all_topics()} == {str(MAX_RECORD_BYTES)}


def test_facts_are_kept_for_ever_and_samples_for_90_days() -> None:
    kept = {topic.name: topic.config["retention.ms"] for topic in all_topics() if topic.events}
    assert kept.pop(topics.SAMPLES) == str(90 * 86_400_000)
    assert set(kept.values()) == {"-1"}


def test_what_stages_read_has_a_dead_letter_queue() -> None:
    for name in ("exchanges", "turns", "votes", "verdicts", "hints"):
        assert dead_letter_topic(f"clawstream.{name}.v1") == f"clawstream.{name}.v1.dlq"
    assert dead_letter_topic(topics.POLICY) is None


def test_schemas_and_dead_letters_hold_no_events() -> None:
    assert topics.SCHEMAS not in event_topics()
    assert not any(name.endswith(".dlq") for name in event_topics())


def test_a_broker_that_has_everything_needs_nothing() -> None:
    assert diff(all_topics(), {topic.name: found_as(topic) for topic in all_topics()}) == []


def test_an_empty_broker_needs_everything() -> None:
    assert [change.topic for change in diff(all_topics(), {}) if isinstance(change, Created)] == list(all_topics())


def test_a_different_partition_count_is_refused() -> None:
    [change] = diff([EXCHANGES], {EXCHANGES.name: replace(found_as(EXCHANGES), partitions=6)})
    assert isinstance(change, RefusedChange)
    assert (change.what, change.found, change.wanted) == ("number of partitions", "6", "12")


def test_a_small_installation_has_fewer_partitions_but_where_one_is_needed() -> None:
    assert count_of(EXCHANGES, 3) == 3
    assert count_of(replace(EXCHANGES, partitions=1), 3) == 1
    assert diff([EXCHANGES], {EXCHANGES.name: replace(found_as(EXCHANGES), partitions=3)}, partitions=3) == []


@given(RETENTIONS, RETENTIONS)
def test_nothing_is_ever_kept_for_a_shorter_time(wanted: str, current: str) -> None:
    topic = replace(EXCHANGES, config=dict(EXCHANGES.config) | {"retention.ms": wanted})
    changes = diff([topic], {topic.name: found_as(EXCHANGES, **{"retention.ms": current})})

    def span(retention: str) -> float:
        return float("inf") if retention == "-1" else float(retention)

    altered = [change for change in changes if isinstance(change, Altered)]
    assert [change.wanted for change in altered] == ([wanted] if span(wanted) > span(current) else [])
    assert len(changes) - len(altered) == (span(wanted) < span(current))


def test_a_compacted_log_is_not_mended_on_the_quiet() -> None:
    [change] = diff([EXCHANGES], {EXCHANGES.name: found_as(EXCHANGES, **{"cleanup.policy": "compact"})})
    assert isinstance(change, RefusedChange)


@pytest.mark.parametrize(("setting", "is_promise"), [("message.timestamp.type", True), ("compression.type", False)])
def test_a_setting_that_readers_rely_on_is_told_from_tuning(setting: str, is_promise: bool) -> None:
    [change] = diff([EXCHANGES], {EXCHANGES.name: found_as(EXCHANGES, **{setting: "other"})})
    assert isinstance(change, Altered)
    assert change.is_promise == is_promise


def test_the_graph_shows_who_writes_and_who_reads() -> None:
    graph = mermaid(all_topics())
    assert graph.startswith("flowchart LR\n")
    assert "gateway([gateway]) --> clawstream_exchanges_v1\n" in graph
    assert "clawstream_samples_v1 --> training([training])\n" in graph
    assert ".dlq" not in graph


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("partitions: 12", "partitions: 6", "one count"),
        ("SessionIdle]", "SessionIdle, VoteCast]", "an event has one topic"),
        ("ExchangeFailed, ", "", "no topic holds ExchangeFailed"),
        ("ExchangeFailed, ", "ExchangeLost, ", "ExchangeLost"),
        ("  key: session_id\n", "", "'key'"),
        ("exchanges.v1\n", "exchange.v1\n", r"clawstream\.exchange\.v1\.yaml"),
    ],
)
def test_a_file_that_contradicts_itself_or_another_is_refused(tmp_path: Path, old: str, new: str, says: str) -> None:
    for path in resources.folder("topics").glob("*.yaml"):
        (tmp_path / path.name).write_text(path.read_text())
    path = tmp_path / "clawstream.exchanges.v1.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=says):
        load(tmp_path)
