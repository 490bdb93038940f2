"""Which version is due: the newest, once, unless this engine refused it."""

from collections import Counter
from dataclasses import replace
from functools import reduce

from hypothesis import example, given
from hypothesis import strategies as st

from clawstream.events import Event, PolicyActivated, PolicyEvent, PolicyPublished, PolicyRejected
from clawstream.weights.rollout import Rollout, Rollouts, Serving, due, forgettable, learn, learn_of_all, waiting
from tests import strategies
from tests.examples import examples
from tests.unit.monitoring.said import activated, published

ENGINES = st.sampled_from(["http://a", "http://b"])
VERSIONS = st.integers(0, 4)
TOLD = st.builds(activated, VERSIONS, ENGINES) | st.builds(
    lambda version, engine: rejected(version, engine), VERSIONS, ENGINES
)
FULL = VERSIONS.map(published) | TOLD
SAID = VERSIONS.map(lambda version: adapter(version) if version % 2 else published(version)) | TOLD  # never both


def rejected(version: int, engine: str) -> PolicyRejected:
    return PolicyRejected(
        policy_id="policy", policy_version=version, engine=engine, reason="no config.json", rejected_at_ms=0
    )


def adapter(version: int) -> PolicyPublished:
    return replace(published(version), adapter=f"policy-v{version}")


def after(*events: Event) -> Rollout:
    return reduce(learn, events, Rollout(policy_id="policy"))


@given(st.lists(FULL), ENGINES, st.none() | VERSIONS.map(str))
def test_what_is_due_is_the_newest_version_and_this_engine_has_not_rejected_it_since(
    events: list[Event], engine: str, serving: str | None
) -> None:
    version = due(after(*events), engine=engine, serving=Serving(version=serving))
    if version is not None:
        assert version.policy_version == max(e.policy_version for e in events if type(e) is type(version))
        since = len(events) - 1 - events[::-1].index(version)
        assert rejected(version.policy_version, engine) not in events[since:]


@given(st.lists(FULL), ENGINES)
def test_nothing_is_due_once_the_engine_says_and_the_log_says_that_it_serves_the_newest(
    events: list[Event], engine: str
) -> None:
    state = after(*events)
    version = due(state, engine=engine, serving=Serving(version="base"))
    if version is not None:
        done = learn(state, activated(version.policy_version, engine))
        assert due(done, engine=engine, serving=Serving(version=str(version.policy_version))) is None
        assert (
            due(learn(state, rejected(version.policy_version, engine)), engine=engine, serving=Serving(version="base"))
            is None
        )


@given(st.lists(SAID), st.integers(0, 20))
@example([rejected(2, "http://a"), published(2), adapter(3)], 0)
def test_reading_the_log_again_from_anywhere_changes_nothing_but_who_took_over_last(
    events: list[Event], start: int
) -> None:
    once, again = after(*events), after(*events, *events[start:])
    assert replace(once, active={}, adapted={}) == replace(again, active={}, adapted={})


@given(strategies.events().filter(lambda event: getattr(event, "policy_id", None) != "policy"))
def test_events_of_other_policies_change_nothing(event: Event) -> None:
    assert learn(after(published(1)), event) == after(published(1))


def test_an_engine_that_came_back_with_old_weights_is_brought_up_to_date() -> None:
    state = after(published(0), published(1), activated(1, "http://a"))
    assert due(state, engine="http://a", serving=Serving(version="default")) == published(1)


def test_a_version_that_is_served_and_not_on_the_log_is_due_so_that_it_gets_there() -> None:
    assert due(after(published(1)), engine="http://a", serving=Serving(version="1")) == published(1)


def test_an_engine_that_names_no_version_serves_what_the_log_says() -> None:
    assert due(after(published(1), activated(1, "http://a")), engine="http://a", serving=Serving(version=None)) is None
    assert due(after(published(1)), engine="http://a", serving=Serving(version=None)) == published(1)


def test_a_newer_version_is_offered_to_an_engine_that_refused_the_last_one() -> None:
    state = after(published(1), rejected(1, "http://a"), published(2))
    assert due(state, engine="http://a", serving=Serving(version="0")) == published(2)
    assert due(
        after(published(1), rejected(1, "http://a")), engine="http://b", serving=Serving(version="0")
    ) == published(1)


def test_a_rejected_version_is_offered_again_once_it_is_published_again() -> None:
    first = PolicyPublished(
        policy_id="p",
        policy_version=1,
        parent_version=0,
        path="v1",
        adapter=None,
        manifest_sha256="a",
        num_bytes=1,
        published_at_ms=1,
    )
    refused = PolicyRejected(policy_id="p", policy_version=1, engine="e", reason="cut short", rejected_at_ms=2)
    state = learn(learn(Rollout(policy_id="p"), first), refused)
    assert due(state, engine="e", serving=Serving(version="0")) is None

    mended = replace(first, manifest_sha256="b", published_at_ms=3)

    assert due(learn(state, mended), engine="e", serving=Serving(version="0")) == mended


def adapted(version: int, engine: str) -> Event:
    return replace(activated(version, engine), adapter=f"policy-v{version}")


def serving(version: str | None, *adapters: int) -> Serving:
    return Serving(version=version, adapters=frozenset(f"policy-v{number}" for number in adapters))


def test_an_adapter_is_due_after_the_weights_below_it() -> None:
    state = after(published(1), adapter(2))
    assert due(state, engine="e", serving=serving("0")) == published(1)
    state = learn(state, activated(1, "e"))
    assert due(state, engine="e", serving=serving("1")) == adapter(2)
    assert due(learn(state, adapted(2, "e")), engine="e", serving=serving("1", 2)) is None


def test_full_weights_published_later_end_what_adapters_were_due() -> None:
    state = after(published(1), adapter(2), published(3))
    assert due(learn(state, activated(3, "e")), engine="e", serving=serving("3")) is None


def test_a_rejected_adapter_leaves_the_weights_as_they_are() -> None:
    state = after(published(1), activated(1, "e"), adapter(2), rejected(2, "e"))
    assert due(state, engine="e", serving=serving("1")) is None


@given(st.sets(st.integers(1, 9)), st.integers(1, 9))
def test_the_two_newest_adapters_are_kept_and_nothing_is_forgotten_before_the_newest_is_there(
    loaded: set[int], newest: int
) -> None:
    loaded = {number for number in loaded if number <= newest}
    names = [f"policy-v{number}" for number in loaded] + ["another-v1"]
    state = after(published(0), adapter(newest))
    assert forgettable(state, engine="e", loaded=names) == []
    state = learn(state, adapted(newest, "e"))
    kept = set(names) - set(forgettable(state, engine="e", loaded=names))
    assert kept >= {f"policy-v{number}" for number in sorted(loaded)[-2:]} | {"another-v1"}
    assert len(kept) <= 3


def test_after_newer_full_weights_all_adapters_are_forgotten() -> None:
    state = after(published(0), adapter(1), published(2), activated(2, "e"))
    assert forgettable(state, engine="e", loaded=["policy-v1"]) == ["policy-v1"]


def test_an_adapter_that_was_refused_does_not_keep_old_ones_where_it_had_no_room() -> None:
    state = after(published(0), *(event for v in range(1, 4) for event in (adapter(v), adapted(v, "e"))), adapter(4))
    state = learn(state, rejected(4, "e"))
    names = ["policy-v1", "policy-v2", "policy-v3"]
    assert forgettable(state, engine="e", loaded=names) == ["policy-v1"]


def test_an_adapter_that_is_loaded_and_not_yet_on_the_log_counts_for_nothing() -> None:
    state = after(published(0), *(event for v in (1, 2) for event in (adapter(v), adapted(v, "e"))), adapter(3))
    assert forgettable(state, engine="e", loaded=["policy-v1", "policy-v2", "policy-v3"]) == []


KEYS = ("a", "b", "c")


def of_key(key: str, version: int) -> PolicyPublished:
    policy_id = f"policy+{key}"
    return replace(published(version), policy_id=policy_id, adapter=f"{policy_id}-v{version}")


def taken(version: PolicyPublished, engine: str = "e") -> PolicyActivated:
    return replace(activated(version.policy_version, engine), policy_id=version.policy_id, adapter=version.adapter)


def all_after(*events: PolicyEvent) -> Rollouts:
    states: Rollouts = {"policy": Rollout(policy_id="policy")}
    return reduce(learn_of_all, events, states)


def test_each_keys_newest_adapter_is_due_beside_what_all_share_and_the_shared_one_comes_first() -> None:
    states = all_after(of_key("b", 1), of_key("a", 1), published(0), of_key("a", 2))
    assert waiting(states, engine="e", serving=serving("9")) == ["policy", "policy+b", "policy+a"]
    assert due(states["policy+a"], engine="e", serving=serving("0")) == of_key("a", 2)


def test_of_a_keys_policy_nothing_but_an_adapter_is_taken_over() -> None:
    base = replace(published(0, "/base"), policy_id="policy+a")
    assert list(all_after(published(0), base)) == ["policy"]
    states = all_after(published(0), of_key("a", 1), replace(base, policy_version=2))
    assert due(states["policy+a"], engine="e", serving=serving("0")) == of_key("a", 1)


def test_a_keys_adapter_is_due_again_where_the_engine_lists_it_no_more() -> None:
    states = all_after(published(0), of_key("a", 1), taken(of_key("a", 1)))
    assert (
        due(states["policy+a"], engine="e", serving=Serving(version="0", adapters=frozenset({"policy+a-v1"}))) is None
    )
    assert due(states["policy+a"], engine="e", serving=serving("0")) == of_key("a", 1)


def test_one_adapter_of_a_key_is_kept_and_no_other_keys_is_forgotten() -> None:
    states = all_after(of_key("a", 1), taken(of_key("a", 1)), of_key("a", 2))
    loaded = ["policy-v1", "policy+a-v1", "policy+a-v2", "policy+a-v1-v1", "policy+b-v1"]
    assert forgettable(states["policy+a"], engine="e", loaded=loaded) == []
    states = all_after(of_key("a", 1), of_key("a", 2), taken(of_key("a", 2)))
    assert forgettable(states["policy+a"], engine="e", loaded=loaded) == ["policy+a-v1"]


@examples(3)
@given(st.lists(st.tuples(st.sampled_from([*KEYS, None]), st.booleans()), max_size=40))
def test_however_often_others_publish_a_key_waits_for_each_of_them_once_at_most(
    moves: list[tuple[str | None, bool]],
) -> None:
    """A move publishes for a key, or (None) gives the turn to who is first; after a turn one may publish again."""
    states, order, numbers, waits = all_after(), list[str](), Counter[str](), Counter[str]()
    for key, again in moves:
        if key is not None:
            numbers[key] += 1
            states = learn_of_all(states, of_key(key, numbers[key]))
        order = waiting(
            states, engine="e", serving=Serving(version="0", adapters=frozenset(names(states))), before=order
        )
        if key is None and order:
            now = order.pop(0)
            waits.update(order)
            del waits[now]
            wanted = states[now].adapter
            assert wanted is not None
            states = learn_of_all(states, taken(wanted))
            if again:
                numbers[now.removeprefix("policy+")] += 1
                states = learn_of_all(states, of_key(now.removeprefix("policy+"), wanted.policy_version + 1))
        assert all(turns < len(KEYS) for turns in waits.values())


def names(states: Rollouts) -> list[str]:
    return [version.adapter for state in states.values() for version in state.offered if version.adapter is not None]
