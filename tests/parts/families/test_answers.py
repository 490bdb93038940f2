"""What a client sees of an answer, in each family's own format: the same however the tokens come."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.rendering.renderer import PromptRenderer
from tests.examples import examples
from tests.parts.families.answering import called, kept, names, stream
from tests.parts.families.formats import FORMATS, PARIS, SEARCH, TOKYO, Call

every_format = names(FORMATS)
parallel = names(name for name, form in FORMATS.items() if form.parallel)
thinking = names(name for name, form in FORMATS.items() if form.thinks)
CUTS = st.lists(st.integers(1, 9), min_size=1, max_size=8)
HARMLESS = (
    "x < y",
    "<",
    "<|",
    "</",
    "<think",
    "</thin",
    "[",
    "{",
    '{"a": 1}',
    "]",
    "<tool",
    "`",
    "é😀",
    "a b",
    "\n\n",
    " ",
)


def sampled(
    renderer: PromptRenderer, name: str, reasoning: str, content: str, calls: Sequence[Call]
) -> tuple[int, ...]:
    """The tokens of an answer, its end included."""
    form = FORMATS[name]
    return renderer.encode(form.write(reasoning if form.thinks else "", content, calls) + form.end)


@every_format
@given(cuts=CUTS)
@examples(0.2)
def test_a_plain_answer_is_its_content(renderers: dict[str, PromptRenderer], name: str, cuts: list[int]) -> None:
    message = kept(renderers[name], sampled(renderers[name], name, "", "Sunny, 21 degrees: 😀.", ()), cuts)
    assert message == {"role": "assistant", "content": "Sunny, 21 degrees: 😀."}


@thinking
@given(cuts=CUTS)
@examples(0.2)
def test_thinking_is_reasoning_and_no_content(renderers: dict[str, PromptRenderer], name: str, cuts: list[int]) -> None:
    message = kept(renderers[name], sampled(renderers[name], name, "Is 1 < 2? Let me see…", "Yes.", ()), cuts)
    assert message == {"role": "assistant", "content": "Yes.", "reasoning_content": "Is 1 < 2? Let me see…"}


@every_format
@given(cuts=CUTS)
@examples(0.2)
def test_a_tool_call_has_a_name_and_arguments(renderers: dict[str, PromptRenderer], name: str, cuts: list[int]) -> None:
    message = kept(renderers[name], sampled(renderers[name], name, "I look.", "", [TOKYO]), cuts)
    assert called(message) == [TOKYO]
    assert message["content"] is None


@parallel
@given(cuts=CUTS)
@examples(0.2)
def test_parallel_calls_keep_their_order(renderers: dict[str, PromptRenderer], name: str, cuts: list[int]) -> None:
    calls = [PARIS, TOKYO, SEARCH]
    message = kept(renderers[name], sampled(renderers[name], name, "I look.", "Let me look.", calls), cuts)
    assert called(message) == calls
    assert message["content"] == "Let me look."
    ids = tuple(call["id"] for call in message["tool_calls"])
    assert FORMATS[name].ids in ((), ids)


@names(["mistral"])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("[TOOL_CALLS]search[AVAILABLE_TOOLS]{}", "[TOOL_CALLS]search[AVAILABLE_TOOLS]{}", []),
        ("[TOOL_CALLS]search[ARGS]{oops", "[TOOL_CALLS]search[ARGS]{oops", []),
        ('[TOOL_CALLS][{"name": "search", "arguments": {}}] or so', "or so", [("search", {})]),
        ('[TOOL_CALLS][{"name": "", "arguments": {}}]', '{"name": "", "arguments": {}}', []),
    ],
)
def test_what_is_no_call_does_not_vanish(
    renderers: dict[str, PromptRenderer], name: str, text: str, content: str, calls: list[Call]
) -> None:
    message = kept(renderers[name], renderers[name].encode(text + FORMATS[name].end), (1,))
    assert (message["content"], called(message)) == (content, calls)


@names(["kimi-k2"])
def test_calls_to_which_the_model_gave_one_id_have_an_id_each(renderers: dict[str, PromptRenderer], name: str) -> None:
    twice = FORMATS[name].write("", "", [PARIS, TOKYO]).replace("weather:1", "weather:0")
    message = kept(renderers[name], renderers[name].encode(twice + FORMATS[name].end), (1,))
    assert called(message) == [PARIS, TOKYO]
    assert message["tool_calls"][0]["id"] == FORMATS[name].ids[0]


@names(["qwen3.5", "glm-4.5"])
def test_a_bare_value_of_which_no_type_is_known_is_text(renderers: dict[str, PromptRenderer], name: str) -> None:
    call: Call = ("search", {"query": "Paris", "number": 2})
    assert called(kept(renderers[name], sampled(renderers[name], name, "", "", [call]), (1,))) == [call]


@parallel
def test_a_call_is_streamed_before_the_next_is_sampled(renderers: dict[str, PromptRenderer], name: str) -> None:
    ids = sampled(renderers[name], name, "I look.", "", [PARIS, TOKYO])
    _, deltas = stream(renderers[name], ids[:-8])  # the second is not closed yet
    first = next(delta for delta in deltas if delta.tool_calls)
    assert [call.index for call in first.tool_calls] == [0]
    assert first is not deltas[-1]


@every_format
@given(data=st.data(), cuts=CUTS)
@examples(0.5)
def test_an_answer_that_is_cut_short_is_whole_as_far_as_it_goes(
    renderers: dict[str, PromptRenderer], name: str, data: st.DataObject, cuts: list[int]
) -> None:
    calls = [PARIS, SEARCH] if FORMATS[name].parallel else [PARIS]
    ids = sampled(renderers[name], name, "I look.", "Let me look." if FORMATS[name].parallel else "", calls)
    message = kept(renderers[name], ids[: data.draw(st.integers(0, len(ids)), label="tokens")], cuts)
    assert called(message) == calls[: len(called(message))]


@thinking
def test_an_answer_that_ends_while_thinking_has_no_content(renderers: dict[str, PromptRenderer], name: str) -> None:
    form, renderer = FORMATS[name], renderers[name]
    ids = renderer.encode(form.write("I look at it.", "", ()).partition(" at it.")[0])
    assert kept(renderer, ids, (1,)) == {"role": "assistant", "content": "", "reasoning_content": "I look"}


@every_format
@given(pieces=st.lists(st.sampled_from(HARMLESS), max_size=8), cuts=CUTS)
@examples(0.4)
def test_text_that_looks_like_markup_is_content(
    renderers: dict[str, PromptRenderer], name: str, pieces: list[str], cuts: list[int]
) -> None:
    text = "".join(pieces)
    message = kept(renderers[name], sampled(renderers[name], name, "", text, ()), cuts)
    assert message == {"role": "assistant", "content": text.strip()}


@every_format
@given(data=st.data(), cuts=CUTS)
@examples(1)
def test_any_mixture_of_marks_and_text_is_one_message(
    renderers: dict[str, PromptRenderer], name: str, data: st.DataObject, cuts: list[int]
) -> None:
    form = FORMATS[name]
    pieces = st.sampled_from([*form.marks, *form.marks, form.end, form.write("", "", [PARIS]), *HARMLESS])
    kept(renderers[name], renderers[name].encode("".join(data.draw(st.lists(pieces, max_size=14), label="text"))), cuts)


def test_a_character_in_two_chunks_is_whole_in_thoughts_that_come_after_content(
    renderers: dict[str, PromptRenderer],
) -> None:
    ids = renderers["glm-4.5"].encode("<think></think></tool_call><think>é😀")
    message = kept(renderers["glm-4.5"], ids, (2,))
    assert message == {"role": "assistant", "content": "</tool_call>", "reasoning_content": "é😀"}


@every_format
def test_nothing_after_the_end_of_an_answer_is_shown(renderers: dict[str, PromptRenderer], name: str) -> None:
    renderer, form = renderers[name], FORMATS[name]
    end = renderer.encode(form.end)
    assert set(end) <= set(renderer.stop_token_ids)
    ids = (*sampled(renderer, name, "", "Sunny.", ()), *renderer.encode("Rain."))
    assert kept(renderer, ids, (2,)) == {"role": "assistant", "content": "Sunny."}
