"""What became of each version, from events in the order of the log."""

from dataclasses import replace

from clawstream.events import PolicyRejected
from clawstream.monitoring.policy import VersionState, versions
from tests.unit.monitoring.said import activated, plan, published, rejected, sample

S = sample("s")


def test_each_event_is_said_of_its_own_version_and_the_first_of_two_counts() -> None:
    refused = PolicyRejected(policy_id="policy", policy_version=3, engine="e", reason="too big", rejected_at_ms=0)
    again = replace(plan(1, (), {}), seed=99)

    found = versions(
        [published(0), plan(1, (S,), {}), again, published(1), plan(2, (S,), {}), rejected(2, "it looped"),
         plan(3, (S,), {}), published(3), refused, plan(4, (S,), {})],
        "policy",
    )  # fmt: skip

    assert list(found) == [0, 1, 2, 3, 4]
    assert {number: one.standing for number, one in found.items()} == {
        0: VersionState.PUBLISHED, 1: VersionState.PUBLISHED, 2: VersionState.REJECTED, 3: VersionState.PUBLISHED,
        4: VersionState.PLANNED,
    }  # fmt: skip
    assert found[1].plan == plan(1, (S,), {})
    assert (found[2].why, found[3].why) == ("it looped", "refused by e: too big")


def test_an_engine_serves_what_it_took_over_last_and_a_version_of_another_policy_is_none_of_ours() -> None:
    other = replace(activated(7), policy_id="other")

    found = versions([activated(0), published(0), published(1), activated(1), other], "policy")

    assert list(found) == [0, 1]
    assert (found[0].engines, found[1].engines) == ([], ["http://engine"])
