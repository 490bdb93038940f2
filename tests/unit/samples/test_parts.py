"""The pure parts of a sample: its mask, its hinted prompt, and what it forgets."""

import json
from collections.abc import Sequence
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.conversation.floor import mask
from clawstream.conversation.messages import Message, text_of
from clawstream.events import Event, FinishReason, RefusalReason, SampleAssembled, SampleRefused
from clawstream.samples.hinted import with_hint
from clawstream.samples.joining import SampleRules, observe
from clawstream.samples.session import JoiningState as State
from clawstream.stream.topics import EXCHANGES, HINTS, TURNS, VERDICTS
from tests import recorded
from tests.flow import Flow, Oracle
from tests.sessions import Json, Letters, Session, assistant, tokens, user
from tests.unit.samples.test_flow import GOOD

HINT = "Leave out the headings."
TAIL = f"\n\n[user's hint / instruction]\n{HINT}"
LOGPROBS = st.lists(st.none() | st.floats(-20, 0) | st.just(float("nan")), min_size=1, max_size=12)


@given(LOGPROBS)
def test_exactly_the_tokens_whose_log_prob_is_known_are_trained(logprobs: list[float | None]) -> None:
    answer = Session().ask([user("a")], "x" * len(logprobs), logprobs=logprobs)
    known = tuple(int(value is not None and value == value) for value in logprobs)
    assert mask(answer) == (known if any(known) else RefusalReason.MISALIGNED)


@pytest.mark.parametrize(
    ("answer", "finish_reason", "logprobs", "reason"),
    [
        ("", FinishReason.STOP, None, RefusalReason.EMPTY_ANSWER),
        ("  \n", FinishReason.STOP, None, RefusalReason.EMPTY_ANSWER),
        ("begun and", FinishReason.LENGTH, None, RefusalReason.TRUNCATED),
        ("four", FinishReason.STOP, (-0.5,) * 3, RefusalReason.MISALIGNED),
        ("four", FinishReason.STOP, (None,) * 4, RefusalReason.MISALIGNED),
    ],
)
def test_an_answer_that_can_not_be_trained_on_is_refused_with_its_reason(
    answer: str, finish_reason: FinishReason, logprobs: Sequence[float | None] | None, reason: RefusalReason
) -> None:
    session = Session()
    asked = session.ask([user("a")], answer, finish_reason=finish_reason, logprobs=logprobs)
    session.ask([user("a"), assistant(answer), user("b")], "c")
    log = Flow(Oracle(GOOD)).run(session.written)
    (refused,) = log.of(SampleRefused)
    assert (mask(asked), refused.turn_id, refused.reason) == (reason, asked.exchange_id, reason)


def test_a_sample_says_whether_its_answer_calls_tools() -> None:
    calling: Json = {"role": "assistant", "content": "let me see", "tool_calls": recorded.LOOKING["tool_calls"]}
    session = Session()
    session.ask([user("a")], calling)
    session.ask([user("a"), calling, *recorded.TOOL_RESULTS[3:5]], "b")
    session.ask([user("a"), calling, *recorded.TOOL_RESULTS[3:5], assistant("b"), user("c")], "d")
    samples = Flow(Oracle(GOOD)).run(session.written).of(SampleAssembled)
    assert [sample.calls_tools for sample in samples] == [True, False]


@pytest.mark.parametrize(
    ("said", "thought", "expected"),
    [
        ("<think>hm, so</think>4", "hm, so", "<think>hm, so"),
        ("hm\n</think>\n4", "hm", "hm"),
        ("<think>hm, wait", "hm, wait", "<think>hm, wait"),
        ("äh</think>4", "äh", "äh"),
        ("<think>hm</think>4<think>so</think>", "hmso", ""),
        ("4", None, ""),
        ("4", "", ""),
    ],
)
def test_a_sample_says_how_much_of_its_answer_is_thinking(said: str, thought: str | None, expected: str) -> None:
    shown: Json = {"role": "assistant", "content": "4", "reasoning_content": thought}
    session = Session(sampled=lambda _: tokens(said.encode()))
    session.ask([user("2+2?")], shown)
    session.ask([user("2+2?"), shown, user("thanks")], "welcome")
    [sample] = Flow(Oracle(GOOD)).run(session.written).of(SampleAssembled)
    assert bytes(sample.response_ids[: sample.num_thinking]).decode() == expected


def test_an_answer_of_tool_calls_alone_is_not_empty() -> None:
    calling: Json = {"role": "assistant", "content": None, "tool_calls": recorded.LOOKING["tool_calls"]}
    answer = Session().ask([user("a")], {**calling, "content": "x"})
    assert mask(answer) == (1,)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([user("a")], [user(f"a{TAIL}")]),
        ([user("a"), assistant("b"), user("c")], [user("a"), assistant("b"), user(f"c{TAIL}")]),
        (
            [user("a"), recorded.LOOKING, *recorded.TOOL_RESULTS[3:5]],
            [user(f"a{TAIL}"), recorded.LOOKING, *recorded.TOOL_RESULTS[3:5]],
        ),
        ([user("a"), recorded.BLOCK], [user(f"a{TAIL}"), recorded.BLOCK]),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": TAIL}]}],
        ),
        ([recorded.SYSTEM], [recorded.SYSTEM, user(TAIL.strip())]),
    ],
)
def test_the_hint_stands_at_the_end_of_what_the_user_said_last(before: list[Message], after: list[Message]) -> None:
    assert list(with_hint(before, HINT)) == after


@given(st.lists(st.sampled_from([user("a"), assistant("b"), recorded.BLOCK, recorded.SYSTEM]), max_size=8))
def test_a_hint_changes_one_message_at_most_and_loses_none(messages: list[Message]) -> None:
    hinted = with_hint(messages, HINT)
    assert [text_of(message).replace(TAIL, "") for message in hinted][: len(messages)] == [*map(text_of, messages)]
    assert sum(TAIL.strip() in text_of(message) for message in hinted) == 1


def test_a_retried_request_is_not_an_earlier_turn() -> None:
    session = Session()
    session.ask([user("a")], "lost")
    session.ask([user("a")], "shown")
    session.ask([user("a"), assistant("shown"), user("b")], "next")
    session.ask([user("a"), assistant("shown"), user("b"), assistant("next"), user("c")], "last")
    samples = Flow(Oracle(GOOD)).run(session.written).of(SampleAssembled)
    assert [sample.num_earlier_turns for sample in samples] == [0, 1]


@pytest.mark.parametrize("order", list(permutations((EXCHANGES, TURNS, VERDICTS, HINTS))))
def test_a_prompt_that_rests_on_a_session_that_was_done_is_not_made_up_whatever_is_read_first(
    order: tuple[str, ...],
) -> None:
    session = Session()
    session.ask([user("a")], "first")
    session.done()
    resting = session.ask([user("a"), assistant("first"), user("b")], "second")
    session.forget()
    session.ask([user("a"), assistant("first"), user("b"), assistant("second"), user("c")], "third")
    log = Flow(Oracle(GOOD)).run(session.written)
    state: State | None = None
    refusals: list[Event] = []
    for record in (record for topic in order for record in log.topics[topic]):
        state, events, _ = observe(state, record.event, SampleRules(Letters()))
        refusals += [event for event in events if isinstance(event, SampleRefused) and event.turn_id is not None]
    (refused,) = log.of(SampleRefused)[1:]
    assert refusals == [refused]
    assert (refused.turn_id, refused.reason) == (resting.exchange_id, RefusalReason.PROMPT_UNKNOWN)


def test_options_of_the_request_shape_the_hinted_prompt_too() -> None:
    options = json.dumps({"model": "policy", "tools": [{"type": "function"}]}).encode()
    session = Session()
    session.ask([user("a")], "b", options=options)
    session.ask([user("a"), assistant("b"), user("c")], "d", options=options)
    said = f"\\boxed{{1}}[HINT_START]{HINT}[HINT_END]"
    log = Flow(Oracle({question: [said] for question in GOOD})).run(session.written)
    (sample,) = log.of(SampleAssembled)
    assert sample.hinted_prompt_ids is not None
    assert '"tools": [{"type": "function"}]' in bytes(sample.hinted_prompt_ids).decode()
