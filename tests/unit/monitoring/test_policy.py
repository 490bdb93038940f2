"""Samples that wait: those in no plan, whichever of the two topics is read first."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from clawstream.events import NOBODY, Event
from clawstream.monitoring.policy import PolicyBoard
from clawstream.stream.stage import Record
from clawstream.stream.topics import POLICY, SAMPLES
from tests.unit.monitoring.said import activated, plan, published, sample


def at(offset: int, event: Event, topic: str = SAMPLES, partition: int = 0) -> Record:
    return Record(
        topic=topic, partition=partition, offset=offset, timestamp_ms=offset * 1000, key=event.key, event=event
    )


def board(*records: Record) -> PolicyBoard:
    told = PolicyBoard("policy")
    for one in records:
        told.learn(one)
    return told


S = [sample(str(number)) for number in range(12)]


@given(
    batches=st.lists(st.integers(1, 4), max_size=4),
    num_samples=st.integers(0, 12),
    order=st.randoms(use_true_random=False),
)
def test_what_waits_is_what_no_plan_names_whichever_topic_is_read_first(
    batches: list[int], num_samples: int, order: object
) -> None:
    samples = [at(offset, S[offset]) for offset in range(num_samples)]
    plans, used = [], 0
    for version, size in enumerate(batches, 1):
        chosen = tuple(S[used : min(used + size, num_samples)])
        used += len(chosen)
        plans.append(at(version, plan(version, chosen, {0: used}), POLICY))
    told = PolicyBoard("policy")
    while samples or plans:
        one = samples or plans if not (samples and plans) else (samples, plans)[order.randint(0, 1)]  # type: ignore[attr-defined]
        told.learn(one.pop(0))
    assert told.num_waiting == num_samples - used
    assert told.oldest_ms == (None if used == num_samples else used * 1000)


def test_a_sample_beyond_the_used_up_offsets_waits_only_if_no_plan_names_it() -> None:
    told = board(at(0, plan(1, (S[5],), {0: 3}), POLICY), *(at(offset, S[offset]) for offset in range(7)))
    assert told.num_waiting == 3
    assert told.used_up == {(SAMPLES, 0): 3}


def test_a_sample_that_was_written_twice_waits_once() -> None:
    assert board(at(0, S[0]), at(1, S[0])).num_waiting == 1
    assert board(at(0, plan(1, (S[0],), {}), POLICY), at(0, S[0]), at(1, S[0])).num_waiting == 0


def test_of_a_turns_revisions_one_waits_since_the_first_came_and_none_once_one_is_planned() -> None:
    again = sample("0", num_feedback=1)
    told = board(at(0, S[0]), at(1, again))
    assert (told.num_waiting, told.oldest_ms) == (1, 0)
    told.learn(at(0, plan(1, (again,), {0: 2}), POLICY))
    told.learn(at(2, sample("0", num_feedback=2)))
    assert told.num_waiting == 0


def test_a_sample_of_feedback_alone_is_of_the_turn_whoever_judges_it() -> None:
    alone, judged = (
        replace(sample("0", num_feedback=1), judge=NOBODY, prompt_version=NOBODY),
        sample("0", num_feedback=1),
    )
    for first, second in ((alone, judged), (judged, alone)):
        assert board(at(0, first), at(1, second)).num_waiting == 1
        told = board(at(0, first), at(0, plan(1, (first,), {0: 1}), POLICY), at(1, second))
        assert told.num_waiting == 0
        late = board(at(0, S[1]), at(1, second), at(0, plan(1, (first,), {0: 0}), POLICY))
        assert late.num_waiting == 1


def test_of_two_plans_for_a_version_the_first_counts() -> None:
    told = board(
        at(0, S[0]), at(1, S[1]), at(0, plan(1, (S[0],), {0: 1}), POLICY), at(1, plan(1, (S[1],), {0: 2}), POLICY)
    )
    assert told.num_waiting == 1


def test_samples_and_versions_of_another_policy_are_not_ours() -> None:
    told = board(at(0, sample("t", policy_id="another")))
    assert (told.num_waiting, told.oldest_ms, told.published_version) == (0, None, None)


def test_each_engine_serves_what_it_took_over_last() -> None:
    told = board(
        at(0, published(0), POLICY),
        at(1, activated(0, "a"), POLICY),
        at(2, published(1), POLICY),
        at(3, activated(1, "a"), POLICY),
        at(4, activated(0, "b"), POLICY),
    )
    assert told.published_version == 1
    assert told.active_versions == {"a": 1, "b": 0}
