"""Which version an engine should take over next. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from clawstream.events import Event, PolicyActivated, PolicyPublished, PolicyRejected


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """What the policy topic says so far of one policy.

    newest    the newest version that lies whole on disk
    active    engine -> the version that it took over last
    rejected  engines that refused the newest version since it was last published; it is not offered to them again.
              Published again, it is: then its files were written anew
    """

    policy_id: str
    newest: PolicyPublished | None = None
    active: Mapping[str, int] = field(default_factory=dict)
    rejected: frozenset[str] = frozenset()


def learn(state: Rollout, event: Event) -> Rollout:
    """Return `state` after `event`; events of other policies, and older versions, change nothing."""
    match event:
        case PolicyPublished(policy_id=state.policy_id):
            if state.newest is not None and event.policy_version < state.newest.policy_version:
                return state
            return replace(state, newest=event, rejected=frozenset())
        case PolicyActivated(policy_id=state.policy_id):
            return replace(state, active={**state.active, event.engine: event.policy_version})
        case PolicyRejected(policy_id=state.policy_id):
            if state.newest is None or event.policy_version != state.newest.policy_version:
                return state
            return replace(state, rejected=state.rejected | {event.engine})
        case _:
            return state


def due(state: Rollout, *, engine: str, serving: str | None) -> PolicyPublished | None:
    """Return the version that `engine` should take over; None where there is nothing to do.

    `serving` is what the engine says of itself, None where it says nothing. A version that it serves already is due
    until the log says so too: whoever asked the engine may have died before writing it down.
    """
    newest = state.newest
    if newest is None or engine in state.rejected:
        return None
    serves_it = serving is None or serving == str(newest.policy_version)
    return None if serves_it and state.active.get(engine) == newest.policy_version else newest
