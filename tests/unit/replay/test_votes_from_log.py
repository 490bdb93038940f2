"""Recorded votes are facts: what they come to is the same again, byte for byte, however the log is cut up."""

import asyncio
import random
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from clawstream.config import JudgeSettings
from clawstream.errors import ConfigError
from clawstream.events import (
    Event,
    ExchangeCompleted,
    LearnsFrom,
    RefusalReason,
    ReplayStarted,
    RewardWeights,
    SampleAssembled,
    SampleRefused,
    VoteCast,
)
from clawstream.replay.registry import Registry
from clawstream.replay.running import begin, shares
from clawstream.replay.stages import judge_settings
from clawstream.stream.log import Outgoing
from clawstream.stream.topics import CONTROL, EXCHANGES, SAMPLES, VOTES, event_topics
from tests.examples import examples
from tests.flow import Flow, Oracle
from tests.unit.replay.recorded import OUTPUTS, SETTINGS, own, raw, replayed, run_through, said, wanted, work, written
from tests.unit.samples.test_flow import MOVES, SEEDS, conversation
from tests.unit.samples.test_offers import CHOOSING, WORDY

SESSIONS = st.lists(MOVES, min_size=1, max_size=4)


def people(moves: list[list[str]]) -> list[Event]:
    return [event for number, own in enumerate(moves) for event in conversation(own, f"session-{number}")]


@examples(0.6)
@given(SESSIONS, SEEDS)
@example([["ask", "done", "done", "ask", "forget", "done", "ask", "ask", "ask", "ask"]], 0)  # two ends with one id
def test_votes_from_the_log_give_what_they_gave_live(moves: list[list[str]], seed: int) -> None:
    events = [*people(moves), *conversation(["ask", "ask"], "more")]
    flow = run_through(events, seed)

    async def main() -> None:
        log = await written(flow, 3)
        await replayed(log)
        found = await said(log, [own(topic) for topic in OUTPUTS])
        for topic in OUTPUTS:
            assert found[own(topic)] == flow.log.first_by_id(topic), topic

    asyncio.run(main())


@examples(0.4)
@given(SESSIONS, SEEDS)
def test_partitions_and_workers_make_no_difference_to_a_byte(moves: list[list[str]], seed: int) -> None:
    flow = run_through([*people(moves), *conversation(["ask", "ask"], "more")], seed)

    async def sha256(partitions: int, workers: int) -> str:
        return (await replayed(await written(flow, partitions), workers=workers)).samples_sha256

    assert len({asyncio.run(sha256(*cut)) for cut in [(1, 1), (12, 1), (12, 4)]}) == 1


@examples(0.3)
@given(SESSIONS, SEEDS)
def test_each_judge_that_voted_has_verdicts_and_samples_of_its_own(moves: list[list[str]], seed: int) -> None:
    events = [*people(moves), *conversation(["ask", "ask"], "more")]
    one, other = Oracle(), Oracle()
    other.name = "another@test"
    flows = [run_through(events, seed, one), run_through(events, seed + 1, other)]

    async def main() -> None:
        log = await written(flows[0], 3)
        votes = [Outgoing(record.event) for record in flows[1].log.topics[VOTES]]
        await log.write(votes)
        await replayed(log)
        both = (await said(log, [own(SAMPLES)]))[own(SAMPLES)]
        assert both == flows[0].log.first_by_id(SAMPLES) | flows[1].log.first_by_id(SAMPLES)
        await replayed(log, wanted("half", judge=other.name))
        half = (await said(log, [own(SAMPLES, "half")]))[own(SAMPLES, "half")]
        assert half == flows[1].log.first_by_id(SAMPLES)

    asyncio.run(main())


async def test_ends_are_frozen_while_producers_go_on_and_live_topics_and_groups_stay_as_they_are() -> None:
    flow = run_through(people([["ask"] * 4, ["ask"] * 3]), 1)
    log = await written(flow, 3)
    started, _ = await begin(log, wanted(), SETTINGS.judge, SETTINGS.rewards)
    late = run_through(conversation(["ask"] * 4, "late"), 2)
    await log.write([Outgoing(record.event) for topic in (EXCHANGES, VOTES) for record in late.log.topics[topic]])
    live = log.broker.places(topic for topic in event_topics() if topic != CONTROL)
    before = raw(log, live)

    outcomes = await work(log, started, workers=2)

    samples = (await said(log, [own(SAMPLES)]))[own(SAMPLES)]
    assert {event.key for event in samples.values()} == {"session-0", "session-1"}
    assert sum(len(outcome.digests) for outcome in outcomes) == len(
        [event for event in samples.values() if isinstance(event, SampleAssembled)]
    )
    assert raw(log, live) == before
    assert not log.broker._groups


async def test_a_replay_that_was_killed_is_begun_again_under_its_name_and_says_the_same() -> None:
    flow = run_through(people([["ask"] * 6, ["ask"] * 6, ["ask"] * 3]), 3)
    calm = await replayed(await written(flow, 3))
    log = await written(flow, 3)
    started, _ = await begin(log, wanted(), SETTINGS.judge, SETTINGS.rewards)
    await work(log, replace(started, ranges=tuple(replace(r, end_offset=r.end_offset // 2) for r in started.ranges)))
    await log.write(
        [Outgoing(record.event) for record in run_through(conversation(["ask"] * 3, "late"), 2).log.topics[VOTES]]
    )

    again, ended = await begin(log, wanted(), SETTINGS.judge, SETTINGS.rewards)
    assert (again, ended) == (started, None)
    samples = [await work(log, again) for _ in range(2)]
    assert samples[0] == samples[1]
    found = (await said(log, [own(SAMPLES)]))[own(SAMPLES)]
    assert found == flow.log.first_by_id(SAMPLES)
    assert calm.num_samples == sum(isinstance(event, SampleAssembled) for event in found.values())


@pytest.mark.parametrize(
    ("learns", "refused"),
    [(LearnsFrom(), True), (LearnsFrom(hints_off_distribution=True), False)],
)
async def test_what_becomes_of_greedy_answers_is_as_it_was_when_the_replay_began(
    learns: LearnsFrom, refused: bool
) -> None:
    flow = run_through(people([["ask"] * 6, ["ask"] * 6, ["ask"] * 3]), 3)
    flow.log.topics[EXCHANGES] = [
        record._replace(event=replace(record.event, sampling=replace(record.event.sampling, temperature=0.0)))
        for record in flow.log.topics[EXCHANGES]
        if isinstance(record.event, ExchangeCompleted)
    ]
    log = await written(flow, 3)
    started, _ = await begin(log, wanted(), SETTINGS.judge, SETTINGS.rewards, learns=learns)
    await work(log, started)
    samples = (await said(log, [own(SAMPLES)]))[own(SAMPLES)].values()
    reasons = {event.reason for event in samples if isinstance(event, SampleRefused)}
    assembled = [event for event in samples if isinstance(event, SampleAssembled)]
    assert RefusalReason.OFF_DISTRIBUTION in reasons
    assert (not assembled) == refused
    assert all(sample.reward is None for sample in assembled)


async def test_from_recorded_votes_samples_get_the_other_hints_that_nobody_chose_among_live() -> None:
    flow = Flow(WORDY)
    flow.run(people([["ask"] * 6, ["ask"] * 4]))
    assert not any(sample.other_hints for sample in flow.log.of(SampleAssembled))
    log = await written(flow, 2)
    started, _ = await begin(log, wanted(), SETTINGS.judge, SETTINGS.rewards, learns=CHOOSING)
    await work(log, started)
    found = (await said(log, [own(SAMPLES)]))[own(SAMPLES)].values()
    live = {sample.sample_id: sample for sample in flow.log.of(SampleAssembled)}
    assembled = [event for event in found if isinstance(event, SampleAssembled)]
    assert any(sample.other_hints for sample in assembled)
    assert {sample.sample_id: replace(sample, other_hints=()) for sample in assembled} == live


async def test_a_session_is_replayed_alone() -> None:
    flow = run_through(people([["ask"] * 4, ["ask"] * 4]), 4)
    log = await written(flow, 1)
    ended = await replayed(log, wanted(session="session-1"))
    samples = (await said(log, [own(SAMPLES)]))[own(SAMPLES)]
    assert {event.key for event in samples.values()} == {"session-1"}
    assert ended.num_exchanges == 4


async def test_a_name_is_one_replay_and_its_end_is_on_record() -> None:
    log = await written(run_through(people([["ask"] * 3]), 5), 1)
    ended = await replayed(log)
    assert (await begin(log, wanted(), SETTINGS.judge, SETTINGS.rewards))[1] == ended
    with pytest.raises(ConfigError, match="was begun with judge None, not somebody"):
        await begin(log, wanted(judge="somebody"), SETTINGS.judge, SETTINGS.rewards)
    with pytest.raises(ConfigError, match="can't be named"):
        await begin(log, wanted("../x"), SETTINGS.judge, SETTINGS.rewards)
    assert list((await Registry.read(log)).ended) == ["again"]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.integers(1, 6))
def test_every_partition_is_one_workers(sizes: list[int], workers: int) -> None:
    random.seed(0)
    started = _started(sizes)
    dealt = shares(started, workers)
    assert sorted(number for share in dealt for number in share) == list(range(len(sizes)))
    assert len(dealt) == min(workers, len(dealt))


def _started(sizes: list[int]) -> ReplayStarted:
    from clawstream.events import OffsetRange, VotesFrom

    ranges = tuple(
        OffsetRange(topic=EXCHANGES, partition=number, first_offset=0, end_offset=size)
        for number, size in enumerate(sizes)
    )
    return ReplayStarted(
        replay="r", votes_from=VotesFrom.LOG, judge=None, prompt_version=None, session_id=None, num_votes=3, quorum=2,
        ranges=ranges, started_at_ms=0, reward_weights=RewardWeights(),
        hint_quorum=2,
    )  # fmt: skip


@pytest.mark.parametrize("began_with", [1, 3])
def test_a_replay_counts_hints_by_the_rule_that_it_began_with(began_with: int) -> None:
    started = replace(_started([1]), hint_quorum=began_with)
    assert judge_settings(JudgeSettings(votes=3, hint_quorum=2), started).needed_for_a_hint == began_with


def test_a_vote_repeated_on_the_log_changes_nothing() -> None:
    flow = run_through(people([["ask"] * 5]), 6)

    async def main(repeats: int) -> str:
        log = await written(flow, 3)
        votes = [record.event for record in flow.log.topics[VOTES] if isinstance(record.event, VoteCast)]
        await log.write([Outgoing(vote) for vote in votes[: len(votes) * repeats]])
        return (await replayed(log)).samples_sha256

    assert asyncio.run(main(0)) == asyncio.run(main(1))
