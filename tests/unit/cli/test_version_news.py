"""Whoever watches `clawstream up` sees each version as it is served, and what it learned from."""

from dataclasses import replace

from clawstream.cli.up import VersionNews
from clawstream.events import Event, PolicyRejected, StepTaken
from tests.unit.monitoring.said import activated, published, rejected
from tests.unit.projections.logs import example

STEP = example(StepTaken, policy_id="policy", policy_version=1, num_samples=16, num_hinted=4, mean_reward=0.25)
REFUSED = example(
    PolicyRejected, policy_id="policy", policy_version=2, engine="http://engine", reason="it does not fit"
)


def lines(*said: Event) -> list[str]:
    told = VersionNews("policy")
    return [line for event in said if (line := told.line(event)) is not None]


def test_a_version_is_told_once_with_what_it_learned_from_and_the_base_is_no_news() -> None:
    assert lines(activated(0), STEP, published(1), activated(1), replace(activated(1), engine="http://another")) == [
        "version 1 is served: it learned from 16 samples with a mean reward of 0.25, 4 of them with a hint"
    ]
    assert lines(activated(7)) == ["version 7 is served"]


def test_why_a_version_is_not_served_is_told() -> None:
    assert lines(rejected(3, "it looped"), REFUSED) == [
        "step 3 was rejected, and the version before it stays: it looped",
        "http://engine did not take version 2 over: it does not fit",
    ]


def test_versions_of_other_policies_are_not_told() -> None:
    assert lines(replace(activated(1), policy_id="another"), replace(REFUSED, policy_id="another")) == []


def test_versions_of_a_key_are_told_under_its_name_and_counted_apart() -> None:
    said = [replace(STEP, policy_id="policy+ann"), replace(activated(1), policy_id="policy+ann")]
    assert lines(activated(3), *said, replace(REFUSED, policy_id="policy+ann")) == [
        "version 3 is served",
        "ann: version 1 is served: it learned from 16 samples with a mean reward of 0.25, 4 of them with a hint",
        "ann: http://engine did not take version 2 over: it does not fit",
    ]
