"""Answers whose tokens were not drawn with the probabilities on record: none is weighed by those."""

from dataclasses import replace
from typing import Any

import pytest

from clawstream.config import SamplesSettings, Settings, TrainingSettings
from clawstream.events import (
    Event,
    ExchangeCompleted,
    OffDistribution,
    Question,
    RefusalReason,
    SampleAssembled,
    SampleRefused,
)
from clawstream.events.exchanges import Sampling, Shaping
from tests.flow import Flow, Log, Oracle
from tests.sessions import Session, assistant, user

GOOD = "\\boxed{1}"
WHOLE = Sampling(temperature=0.7, top_p=1.0, top_k=None, max_tokens=64, seed=None, stop=())
ODD: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1e-8},
    {"top_p": 0.95},
    {"top_k": 50},
    {"shaping": Shaping(frequency_penalty=0.5)},
    {"shaping": Shaping(json_schema="{}")},
]


def hint(text: str) -> str:
    return f"{GOOD} [HINT_START]{text}[HINT_END]"


def sampled(changes: dict[str, Any], *, hinted: bool, rule: OffDistribution) -> Log:
    """What comes of one turn whose answer was sampled so, with a good verdict."""
    session = Session("s")
    session.ask([user("hello")], "an answer")
    session.ask([user("hello"), assistant("an answer"), user("thanks")], "another")
    events: list[Event] = [
        replace(event, sampling=replace(WHOLE, **changes)) if isinstance(event, ExchangeCompleted) else event
        for event in session.written
    ]
    replies = {Question.SCORE: [GOOD], Question.HINT: [hint("a longer hint") if hinted else "\\boxed{-1}"]}
    return Flow(Oracle(replies), off_distribution=rule).run(events)


@pytest.mark.parametrize(
    ("changes", "whole"),
    [({}, True), ({"top_k": 0}, True), ({"top_k": -1}, True), *((changes, False) for changes in ODD)],
    ids=str,
)
def test_what_leaves_tokens_out_is_not_the_policy_s_own_distribution(changes: dict[str, Any], whole: bool) -> None:
    assert replace(WHOLE, **changes).of_the_policy == whole


@pytest.mark.parametrize("rule", [OffDistribution.REFUSE, OffDistribution.GATEWAY_OVERRIDE])
@pytest.mark.parametrize("hinted", [True, False])
@pytest.mark.parametrize("changes", ODD, ids=str)
def test_it_gives_no_sample_and_the_reason_is_on_record(
    changes: dict[str, Any], hinted: bool, rule: OffDistribution
) -> None:
    log = sampled(changes, hinted=hinted, rule=rule)
    assert log.of(SampleAssembled) == []
    assert [refused.reason for refused in log.of(SampleRefused)] == [RefusalReason.OFF_DISTRIBUTION]


@pytest.mark.parametrize("changes", ODD, ids=str)
def test_its_hint_counts_without_the_reward_where_hints_alone_are_wanted(changes: dict[str, Any]) -> None:
    [sample] = sampled(changes, hinted=True, rule=OffDistribution.HINT_ONLY).of(SampleAssembled)
    assert (sample.reward, sample.hint is not None, sample.hinted_prompt_ids is not None) == (None, True, True)
    [refused] = sampled(changes, hinted=False, rule=OffDistribution.HINT_ONLY).of(SampleRefused)
    assert refused.reason is RefusalReason.OFF_DISTRIBUTION


@pytest.mark.parametrize("rule", list(OffDistribution))
def test_an_answer_of_the_whole_distribution_keeps_its_reward_by_every_rule(rule: OffDistribution) -> None:
    [sample] = sampled({}, hinted=True, rule=rule).of(SampleAssembled)
    assert (sample.reward, sample.hint is not None) == (1, True)


@pytest.mark.parametrize(
    "training",
    [
        TrainingSettings(method="binary"),
        TrainingSettings(method="stepwise"),
    ],
    ids=lambda training: training.method,
)
def test_its_hint_alone_is_refused_at_the_start_where_no_hint_is_learned_from(training: TrainingSettings) -> None:
    with pytest.raises(ValueError, match=r"'hint_only' .* no weight under .*: say 'refuse' .*method = 'topk'"):
        Settings(training=training, samples=SamplesSettings(off_distribution="hint_only"))


@pytest.mark.parametrize(
    "training",
    [
        TrainingSettings(),
        TrainingSettings(method="opd"),
        TrainingSettings(w_topk=0.0),
        TrainingSettings(w_topk=1.0),
    ],
    ids=["combined", "opd", "gaps alone", "a divergence beside them"],
)
def test_its_hint_alone_is_refused_at_the_start_where_gaps_of_sampled_tokens_are_learned_from(
    training: TrainingSettings,
) -> None:
    with pytest.raises(ValueError, match=r"'hint_only' .* other probabilities: say 'refuse' .*method = 'topk'"):
        Settings(training=training, samples=SamplesSettings(off_distribution="hint_only"))


def test_its_hint_alone_is_taken_where_whole_distributions_are_held_against_each_other() -> None:
    samples = SamplesSettings(off_distribution="hint_only")
    assert Settings(training=TrainingSettings(method="topk"), samples=samples).samples == samples


@pytest.mark.parametrize("off_distribution", ["refuse", "gateway_override"])
@pytest.mark.parametrize("method", ["combined", "binary", "opd", "topk", "stepwise"])
def test_what_needs_no_hint_alone_goes_with_every_method(method: str, off_distribution: str) -> None:
    samples = SamplesSettings(off_distribution=off_distribution)
    assert Settings(training=TrainingSettings(method=method), samples=samples).samples == samples
