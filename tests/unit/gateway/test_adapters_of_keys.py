"""With an adapter for each key, no request is answered by another key's, whatever happens in whatever order.

The engines are sets of loaded names, behind two `ServedEngine`s that hear late of what was loaded, and not at all of
what was unloaded until they ask. An engine that is asked under an adapter which it has no more refuses, as a real one.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from clawstream.events import PolicyActivated, key_of_policy
from clawstream.gateway.engines import EngineAttempt, Engines, ServedEngine
from clawstream.inference.engine import adapter_of, adapters_of
from tests.examples import examples
from tests.unit.gateway.test_engines import activated, served

# Names that look like versions, like each other or like the policy are names as well.
KEYS = ("a", "a-v1", "a-v1-v2", "b@x", "b@x.y", "policy", "policy-v1", "0", "a+a", "a+b@x", "b@x+a-v1")
POLICIES = ("policy", *(f"policy+{key}" for key in KEYS))


@dataclass
class World:
    """Two engines, one gateway, and what is on its way to the gateway."""

    engines: tuple[ServedEngine, ...] = field(default_factory=lambda: (served("http://0"), served("http://1")))
    loaded: tuple[set[str], ...] = field(default_factory=lambda: (set(), set()))
    newest: Counter[str] = field(default_factory=Counter)
    events: list[PolicyActivated] = field(default_factory=list)
    sampled_under: dict[str, str | None] = field(default_factory=dict)  # cache key -> the adapter
    answers: int = 0

    def __post_init__(self) -> None:
        self.gateway = Engines("policy", self.engines)

    def publish(self, policy_id: str, _n: int) -> None:
        self.newest[policy_id] += 1

    def take_over(self, policy_id: str, n: int) -> None:
        """The engine loads the newest adapter, or a first one; the gateway hears of it later."""
        version = self.newest[policy_id] = self.newest[policy_id] or 1
        name = f"{policy_id}-v{version}"
        self.loaded[n].add(name)
        self.events.append(activated(version, f"http://{n}", name, policy_id))

    def unload(self, policy_id: str, n: int) -> None:
        mine = sorted(name for name in self.loaded[n] if (adapter_of(name) or "")[0] == policy_id)
        self.loaded[n].difference_update(mine[:1])

    def restart(self, _policy_id: str, n: int) -> None:
        self.loaded[n].clear()

    def learn(self, _policy_id: str, _n: int) -> None:
        if self.events:
            self.gateway.learn(self.events.pop(0))

    def ask(self, _policy_id: str, n: int) -> None:
        """What `ServedEngine.ask` does with the names that the engine lists."""
        self.engines[n].adapters = adapters_of(self.loaded[n])

    def request(self, policy_id: str, n: int) -> None:
        """Place and ask until the engine takes the request, as the gateway does."""
        for _ in range(1 + len(self.engines)):
            place = self.gateway.place(str(n), policy_id=policy_id)
            assert place is not None
            self._check(place, policy_id)
            number = self.engines.index(place.engine)
            if place.adapter is None or place.adapter in self.loaded[number]:
                self.answers += 1
                return
            self.ask(policy_id, number)
            assert not place.engine.has(place.adapter)
        raise AssertionError("a refusal by each engine, and still no answer")

    def _check(self, place: EngineAttempt, policy_id: str) -> None:
        assert place.extra_key.startswith(policy_id + ":")
        if key_of_policy(policy_id) is not None:
            assert self.sampled_under.setdefault(place.extra_key, place.adapter) == place.adapter
        offered = [engine for engine, ok in self.gateway.offered().items() if ok]
        own = [max(engine.adapters.get(policy_id, {}), default=-1) for engine in offered]
        expected = policy_id if max(own) > -1 else "policy"
        if place.adapter is None:
            assert (expected, place.version) == ("policy", 0)
        else:
            assert adapter_of(place.adapter) == (expected, place.version)
        if policy_id != "policy" and max(own) > -1:
            assert place.version == max(own)


ACTIONS = ("publish", "take_over", "take_over", "unload", "restart", "learn", "learn", "ask", "request", "request")
ALL_ASK = [("request", policy_id, 0) for policy_id in POLICIES]
STEPS = st.lists(st.tuples(st.sampled_from(ACTIONS), st.sampled_from(POLICIES), st.integers(0, 1)), max_size=80)


@examples(20)
@given(STEPS)
@example(  # unloaded between the gateway's last look and the request
    [
        (name, "policy+a", 0)
        for name in ("publish", "take_over", "learn", "request", "unload", "request", "take_over", "learn", "request")
    ]
)
@example([("take_over", "policy+a", 0), ("take_over", "policy+a", 1), ("learn", "", 0), ("learn", "", 0), *ALL_ASK])
def test_no_request_is_answered_by_another_keys_adapter(steps: list[tuple[str, str, int]]) -> None:
    world = World()
    for name, policy_id, number in steps:
        act: Callable[[str, int], None] = getattr(world, name)
        act(policy_id, number)
    assert world.answers == sum(name == "request" for name, _, _ in steps)


async def test_a_key_is_answered_by_its_own_adapter_and_every_other_by_what_all_share() -> None:
    engine = served(adapters=("policy-v7", "policy+ben-v3", "policy+ben-v2", "policy+anna-v9"))
    await engine.ask()
    places = [engine.place(policy_id=policy_id) for policy_id in ("policy+ben", "policy+cid", "policy", None)]
    assert [(place.adapter, place.adapter_version) for place in places] == [
        ("policy+ben-v3", 3),
        ("policy-v7", 7),
        ("policy-v7", 7),
        ("policy-v7", 7),
    ]
    assert [place.extra_key for place in places] == [
        "policy+ben:policy+ben-v3:0", "policy+cid:policy-v7:0", "policy:0", "policy:0",
    ]  # fmt: skip


async def test_an_adapter_of_a_key_that_the_engine_lists_no_more_is_forgotten() -> None:
    engine = served()
    Engines("policy", [engine]).learn(activated(3, adapter="policy+ben-v3", policy_id="policy+ben"))
    assert engine.place(policy_id="policy+ben").adapter == "policy+ben-v3"
    await engine.ask()
    assert engine.place(policy_id="policy+ben").adapter is None


@pytest.mark.parametrize("adapter", ["policy+ben-v9", None])
async def test_what_a_keys_policy_took_over_makes_no_engine_newer_or_behind(adapter: str | None) -> None:
    now = 0.0
    one, other = served("http://a"), served("http://b")
    engines = Engines("policy", [one, other], clock=lambda: now)
    engines.learn(activated(9, "http://a", adapter, "policy+ben"))
    assert engines.offered() == {one: True, other: True}
    now = 60.0
    assert engines.offered() == {one: True, other: True}
    assert (one.version, one.newest_had, one.place().extra_key) == (0, 0, "policy:0")
    one.adapters = {}
    assert engines.offered() == {one: True, other: True}


async def test_engines_with_the_keys_newest_adapter_go_before_the_sessions_home() -> None:
    engines = Engines("policy", [served(f"http://{name}") for name in "abc"])
    for version, url in ((1, "a"), (1, "b"), (2, "c")):
        engines.learn(activated(version, f"http://{url}", f"policy+ben-v{version}", "policy+ben"))
    assert _urls(engines, "policy+ben") == {"http://c"}
    engines.learn(activated(2, "http://b", "policy+ben-v2", "policy+ben"))
    assert _urls(engines, "policy+ben") == {"http://b", "http://c"}
    assert _urls(engines, "policy+anna") == _urls(engines, None) == {"http://a", "http://b", "http://c"}
    engines.all[1].problem = engines.all[2].problem = "away"
    assert _urls(engines, "policy+ben") == {"http://a"}


def _urls(engines: Engines, policy_id: str | None) -> set[str]:
    places = [engines.place(str(n), policy_id=policy_id) for n in range(50)]
    return {place.engine.url for place in places if place is not None}
