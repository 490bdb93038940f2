"""Which version an engine should take over next, and which adapters it may forget. Pure.

An engine should serve the newest published full weights and, if an adapter was published since, the newest adapter; and
where each key has an adapter of its own, the newest of each key's policy. The engine says what it serves; the log says
what it took over last.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from clawstream.events import Event, PolicyActivated, PolicyEvent, PolicyPublished, PolicyRejected, key_of_policy
from clawstream.inference.engine import adapter_name, adapter_version

ADAPTERS_KEPT = 2  # the newest, and the one before it, under which requests may still run
KEYS_ADAPTERS_KEPT = 1  # of each key's policy: with many keys, room for a second one of each is too much


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """What the policy topic has said so far about one policy.

    newest    the newest full weights that lie whole on disk
    adapter   the newest adapter that was published after them
    active    engine -> the full weights that it took over last
    adapted   engine -> the adapter's version that it took over last
    rejected  (engine, version): the engine refused this version. The engine is offered it again only if it is published
              again, since its files are then written again
    """

    policy_id: str
    newest: PolicyPublished | None = None
    adapter: PolicyPublished | None = None
    active: Mapping[str, int] = field(default_factory=dict)
    adapted: Mapping[str, int] = field(default_factory=dict)
    rejected: frozenset[tuple[str, int]] = frozenset()

    @property
    def offered(self) -> list[PolicyPublished]:
        """The versions that engines should serve."""
        return [version for version in (self.newest, self.adapter) if version is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What an engine says it serves; `version` is None where it names none."""

    version: str | None
    adapters: frozenset[str] = frozenset()


def learn(state: Rollout, event: Event) -> Rollout:
    """Return `state` after `event`.

    Events of other policies change nothing. A published version changes nothing if it is older than those offered,
    unless it is the newest full weights again. Full weights change nothing for a key's policy, which has only adapters.
    """
    match event:
        case PolicyPublished(policy_id=state.policy_id, adapter=None) if key_of_policy(state.policy_id) is not None:
            return state
        case PolicyPublished(policy_id=state.policy_id):
            return _published(state, event)
        case PolicyActivated(policy_id=state.policy_id, adapter=None):
            return replace(state, active={**state.active, event.engine: event.policy_version})
        case PolicyActivated(policy_id=state.policy_id):
            return replace(state, adapted={**state.adapted, event.engine: event.policy_version})
        case PolicyRejected(policy_id=state.policy_id) if event.policy_version in _offered(state):
            return replace(state, rejected=state.rejected | {(event.engine, event.policy_version)})
        case _:
            return state


def _published(state: Rollout, event: PolicyPublished) -> Rollout:
    full = event.adapter is None
    if any(event.policy_version < version for version in _offered(state)):
        if not full or state.newest is None or event.policy_version != state.newest.policy_version:
            return state
        # The full weights below a newer adapter were published again.
        others = frozenset(pair for pair in state.rejected if pair[1] != event.policy_version)
        return replace(state, newest=event, rejected=others)
    after = replace(state, newest=event, adapter=None) if full else replace(state, adapter=event)
    current = _offered(after) - {event.policy_version}
    return replace(after, rejected=frozenset(pair for pair in state.rejected if pair[1] in current))


def _offered(state: Rollout) -> set[int]:
    return {version.policy_version for version in state.offered}


def due(state: Rollout, *, engine: str, serving: Serving) -> PolicyPublished | None:
    """Return the version that `engine` should take over next; None where there is nothing to do.

    A version that the engine already serves is due until the log says so too: the process that ordered the takeover may
    have died before it wrote the outcome.
    """
    for wanted, on_log in ((state.newest, state.active), (state.adapter, state.adapted)):
        if wanted is None or (engine, wanted.policy_version) in state.rejected:
            continue
        if not serves(serving, wanted) or on_log.get(engine) != wanted.policy_version:
            return wanted
    return None


def serves(serving: Serving, version: PolicyPublished) -> bool:
    """Whether the engine says that it serves the version; of full weights, also where it names none."""
    if version.adapter is not None:
        return version.adapter in serving.adapters
    return serving.version in (None, str(version.policy_version))


def misnamed(version: PolicyPublished) -> str | None:
    """Return what is wrong with the adapter's name; None: nothing."""
    expected = adapter_name(version.policy_id, version.policy_version)
    return None if version.adapter == expected else f"the adapter is named {version.adapter!r}, expected {expected!r}"


def forgettable(state: Rollout, *, engine: str, loaded: Collection[str]) -> list[str]:
    """Return, oldest first, the loaded adapters that the engine no longer needs, as it has taken over newer versions.

    They are returned even where the engine refused a still newer adapter: it may have had no room for that adapter.
    """
    if state.adapter is not None:
        served = state.adapted.get(engine)
        kept = ADAPTERS_KEPT if key_of_policy(state.policy_id) is None else KEYS_ADAPTERS_KEPT
    else:
        newest = None if state.newest is None else state.newest.policy_version
        served, kept = newest if state.active.get(engine) == newest else None, 0
    if served is None:
        return []
    versions = {adapter_version(state.policy_id, name): name for name in loaded}
    ours = sorted(version for version in versions if version is not None and version <= served)
    return [versions[version] for version in ours[: max(len(ours) - kept, 0)]]


Rollouts = Mapping[str, Rollout]  # by policy: first the one that all share, then those of keys


def learn_of_all(states: Rollouts, event: PolicyEvent) -> Rollouts:
    """Return `states` after an event of any of their policies, or of one that is new."""
    before = states.get(event.policy_id, Rollout(policy_id=event.policy_id))
    after = learn(before, event)
    return states if after is before else {**states, event.policy_id: after}


def waiting(states: Rollouts, *, engine: str, serving: Serving, before: Sequence[str] = ()) -> list[str]:
    """Return the policies of which a version is due, in their order: the shared one, then the one that waits longest.

    `before` is what was returned last, without the policy whose turn it was since.
    """
    found = [policy_id for policy_id, state in states.items() if due(state, engine=engine, serving=serving) is not None]
    shared = [policy_id for policy_id in found if key_of_policy(policy_id) is None]
    still = [policy_id for policy_id in before if policy_id in found]
    return list(dict.fromkeys((*shared, *still, *found)))
