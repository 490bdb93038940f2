"""The prompt with the hint in it: what was asked, as it was asked, and the hint."""

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given

from clawstream.events import (
    Event,
    ExchangeCompleted,
    Question,
    RefusalReason,
    SampleAssembled,
    SampleRefused,
    TurnType,
)
from tests import recorded
from tests.flow import Flow, Oracle
from tests.sessions import Json, Letters, Session, assistant, user
from tests.unit.samples.test_flow import MOVES, SEEDS, conversation
from tests.unit.samples.test_parts import HINT, TAIL

ALWAYS = Oracle({Question.SCORE: ["\\boxed{1}"], Question.HINT: [f"\\boxed{{1}} [HINT_START]{HINT}[HINT_END]"]})
PIECE = json.dumps(TAIL)[1:-1].encode()


def samples_of(events: Sequence[Event]) -> list[SampleAssembled]:
    """Every turn's sample; each has a hint."""
    log = Flow(ALWAYS).run(events)
    assert RefusalReason.HINT_UNRENDERABLE not in [refused.reason for refused in log.of(SampleRefused)]
    return log.of(SampleAssembled)


def without_hint(sample: SampleAssembled) -> tuple[int, ...]:
    assert sample.hinted_prompt_ids is not None
    hinted = bytes(sample.hinted_prompt_ids)
    assert hinted.count(PIECE) == 1
    return tuple(hinted.replace(PIECE, b""))


@given(MOVES, SEEDS)
def test_a_hinted_prompt_is_the_prompt_and_the_hint_whatever_happened_before(moves: list[str], seed: int) -> None:
    log = Flow(ALWAYS).run(conversation(moves), random.Random(seed), restarts=0.1)
    assert RefusalReason.HINT_UNRENDERABLE not in [refused.reason for refused in log.of(SampleRefused)]
    for sample in log.of(SampleAssembled):
        assert without_hint(sample) == sample.prompt_ids


def test_answers_stand_in_a_hinted_prompt_as_they_were_sampled_those_of_side_turns_too() -> None:
    session = Session()
    greeting: Json = {"role": "assistant", "content": "one", "reasoning_content": "never echoed"}
    session.ask([user("a")], greeting)
    session.ask([user("a"), assistant("one"), user("beat")], "two", turn_type=TurnType.SIDE)
    chat = [user("a"), assistant("one"), user("beat"), assistant("two"), user("b")]
    third = session.ask(chat, "three")
    session.ask([*chat, assistant("three"), user("c")], "four")
    assert third.num_spliced == 2
    _, sample = samples_of(session.written)
    assert (sample.turn_id, without_hint(sample)) == (third.exchange_id, sample.prompt_ids)


def test_openclaw_s_block_that_is_gone_from_the_history_is_in_no_hinted_prompt_either() -> None:
    session = Session("s9")
    for asked, answer in (
        (recorded.TOOL_REQUEST, recorded.LOOKING),
        (recorded.TOOL_RESULTS, recorded.FINISHED),
        (recorded.USER_CORRECTS_AFTER_TOOLS, {"role": "assistant", "content": "sorry"}),
    ):
        session.ask(asked, answer)
    spliced = [event.num_spliced for event in session.written if isinstance(event, ExchangeCompleted)]
    assert spliced == [0, 1, 2]
    samples = samples_of(session.written)
    assert [without_hint(sample) for sample in samples] == [sample.prompt_ids for sample in samples]


def test_a_prompt_of_a_gateway_that_had_forgotten_an_answer_gets_its_hint_too() -> None:
    session = Session()
    session.ask([user("a")], "one")
    session.ask([user("a"), assistant("one"), user("b")], "two")
    del session.answers[:1]
    chat = [user("a"), assistant("one"), user("b"), assistant("two"), user("c")]
    third = session.ask(chat, "three")
    session.ask([*chat, assistant("three"), user("d")], "four")
    assert third.num_spliced == 1
    samples = samples_of(session.written)
    assert [without_hint(sample) for sample in samples] == [sample.prompt_ids for sample in samples]


@pytest.mark.parametrize("score", [-1, 0])
def test_a_prompt_that_the_same_code_does_not_give_again_gets_no_hint(score: int) -> None:
    class Changed(Letters):
        """A template that has changed since the prompt was asked."""

        def prompt_ids(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> tuple[int, ...]:
            return (0, *super().prompt_ids(messages, options))

    session = Session()
    session.ask([user("a")], "one")
    session.ask([user("a"), assistant("one"), user("b")], "two")
    judge = Oracle({**ALWAYS.replies, Question.SCORE: [f"\\boxed{{{score}}}"]})
    log = Flow(judge, renderer=Changed()).run(session.written)
    refused = [one.reason for one in log.of(SampleRefused)]
    if score:
        assert not refused
        [sample] = log.of(SampleAssembled)
        assert (sample.reward, sample.hint, sample.hinted_prompt_ids) == (score, None, None)
    else:
        assert refused == [RefusalReason.HINT_UNRENDERABLE]


def test_an_exchange_of_which_nothing_was_spliced_was_rendered() -> None:
    session = Session(splices=False)
    session.ask([user("a")], "one")
    chat = [user("a"), assistant("one"), user("b")]
    session.ask(chat, "two")
    session.ask([*chat, assistant("two"), user("c")], "three")
    samples = samples_of(session.written)
    assert len(samples) == 2
    assert [without_hint(sample) for sample in samples] == [sample.prompt_ids for sample in samples]
