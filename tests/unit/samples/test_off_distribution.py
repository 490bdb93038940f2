"""Answers whose tokens were not drawn with the probabilities on record: none is weighed by those."""

from dataclasses import replace
from typing import Any

import pytest

from clawstream.events import (
    EVERYTHING,
    Event,
    ExchangeCompleted,
    LearnsFrom,
    Question,
    RefusalReason,
    SampleAssembled,
    SampleRefused,
)
from clawstream.events.exchanges import Sampling, Shaping
from tests.flow import HOWEVER_DRAWN, Flow, Log, Oracle
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


def sampled(changes: dict[str, Any], *, hinted: bool, learns: LearnsFrom = EVERYTHING) -> Log:
    """What comes of one turn whose answer was sampled so, with a good verdict."""
    session = Session("s")
    session.ask([user("hello")], "an answer")
    session.ask([user("hello"), assistant("an answer"), user("thanks")], "another")
    events: list[Event] = [
        replace(event, sampling=replace(WHOLE, **changes)) if isinstance(event, ExchangeCompleted) else event
        for event in session.written
    ]
    replies = {Question.SCORE: [GOOD], Question.HINT: [hint("a longer hint") if hinted else "\\boxed{-1}"]}
    return Flow(Oracle(replies), learns=learns).run(events)


@pytest.mark.parametrize(
    ("changes", "whole"),
    [({}, True), ({"top_k": 0}, True), ({"top_k": -1}, True), *((changes, False) for changes in ODD)],
    ids=str,
)
def test_what_leaves_tokens_out_is_not_the_policy_s_own_distribution(changes: dict[str, Any], whole: bool) -> None:
    assert replace(WHOLE, **changes).of_the_policy == whole


@pytest.mark.parametrize("hinted", [True, False])
@pytest.mark.parametrize("changes", ODD, ids=str)
def test_it_gives_no_sample_and_the_reason_is_on_record(changes: dict[str, Any], hinted: bool) -> None:
    log = sampled(changes, hinted=hinted)
    assert log.of(SampleAssembled) == []
    assert [refused.reason for refused in log.of(SampleRefused)] == [RefusalReason.OFF_DISTRIBUTION]


@pytest.mark.parametrize("changes", ODD, ids=str)
def test_its_hint_counts_without_the_reward_where_whole_distributions_are_learned_from(changes: dict[str, Any]) -> None:
    [sample] = sampled(changes, hinted=True, learns=HOWEVER_DRAWN).of(SampleAssembled)
    assert (sample.reward, sample.hint is not None, sample.hinted_prompt_ids is not None) == (None, True, True)
    [refused] = sampled(changes, hinted=False, learns=HOWEVER_DRAWN).of(SampleRefused)
    assert refused.reason is RefusalReason.OFF_DISTRIBUTION


@pytest.mark.parametrize("learns", [EVERYTHING, HOWEVER_DRAWN])
def test_an_answer_of_the_whole_distribution_keeps_its_reward_by_every_rule(learns: LearnsFrom) -> None:
    [sample] = sampled({}, hinted=True, learns=learns).of(SampleAssembled)
    assert (sample.reward, sample.hint is not None) == (1, True)
