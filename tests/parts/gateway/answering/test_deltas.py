"""What a client sees of an answer: the same however the tokens came, and nothing taken back."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.conversation.floor import num_thinking
from clawstream.gateway.answering.deltas import AnswerStream, ReplyDelta
from clawstream.rendering.renderer import PromptRenderer

TOOLS = {"tools": [{"type": "function", "function": {"name": "exec", "parameters": {}}}]}
CALL = '<tool_call>\n{"name": "exec", "arguments": {"command": "ls"}}\n</tool_call>'
PIECES = st.sampled_from(
    [
        "a",
        "b c",
        " ",
        "\n\n",
        "é",
        "😀",
        "<think>",
        "</think>",
        "x < y",
        CALL,
        "<tool_call>",
        "</tool_call>",
        "{oops}",
        "ab",
    ]
)
CUTS = st.lists(st.integers(1, 7), min_size=1, max_size=60)


def stream(
    renderer: PromptRenderer,
    text: str,
    cuts: list[int],
    *,
    stop: tuple[str, ...] = (),
    options: dict[str, Any] | None = None,
) -> tuple[AnswerStream, list[ReplyDelta]]:
    """Feed `text`, up to a stop string as an engine does, in chunks of `cuts` tokens, over and over."""
    ends = [text.index(one) + len(one) for one in stop if one in text]
    return feed(renderer, renderer.encode(text[: min(ends, default=len(text))]), cuts, stop=stop, options=options)


def feed(
    renderer: PromptRenderer,
    ids: Sequence[int],
    cuts: list[int],
    *,
    stop: tuple[str, ...] = (),
    options: dict[str, Any] | None = None,
) -> tuple[AnswerStream, list[ReplyDelta]]:
    """Feed tokens in chunks of `cuts`, over and over."""
    answer = AnswerStream(
        renderer=renderer,
        prompt_ids=renderer.prompt_ids([{"role": "user", "content": "q"}], {}),
        options=TOOLS if options is None else options,
        exchange_id="11111111-2222-3333-4444-555555555555",
        stop=stop,
    )
    deltas, at, turn = [], 0, 0
    while at < len(ids):
        size = cuts[turn % len(cuts)]
        deltas.append(answer.feed(ids[at : at + size]))
        at, turn = at + size, turn + 1
    deltas.append(answer.finish())
    return answer, [delta for delta in deltas if delta is not None]


@given(
    pieces=st.lists(PIECES, max_size=12), cuts=CUTS, stop=st.sampled_from([(), ("b",), ("\n\n", "bc"), ("ab", "b c")])
)
def test_any_chunking_gives_the_same_message(
    renderer: PromptRenderer, pieces: list[str], cuts: list[int], stop: tuple[str, ...]
) -> None:
    text = "".join(pieces)
    whole, _ = stream(renderer, text, [10_000], stop=stop)
    cut, _ = stream(renderer, text, cuts, stop=stop)
    assert cut.message() == whole.message()


@given(pieces=st.lists(PIECES, max_size=12), cuts=CUTS, stop=st.sampled_from([(), ("b",), ("b c", "a")]))
def test_the_stream_adds_up_to_the_recorded_message(
    renderer: PromptRenderer, pieces: list[str], cuts: list[int], stop: tuple[str, ...]
) -> None:
    answer, deltas = stream(renderer, "".join(pieces), cuts, stop=stop)
    message = answer.message()
    assert "".join(delta.content for delta in deltas) == (message["content"] or "")
    assert "".join(delta.reasoning for delta in deltas) == message.get("reasoning_content", "")
    calls = [call.as_dict() for delta in deltas for call in delta.tool_calls]
    assert calls == message.get("tool_calls", [])


@given(pieces=st.lists(PIECES, max_size=12), cuts=CUTS, stop=st.sampled_from(["b", "b c", "\n\n", "😀"]))
def test_no_part_of_a_stop_string_is_shown(
    renderer: PromptRenderer, pieces: list[str], cuts: list[int], stop: str
) -> None:
    answer, _ = stream(renderer, "".join(pieces), cuts, stop=(stop,))
    assert stop not in (answer.message()["content"] or "")


def test_a_token_is_shown_as_soon_as_it_is_sampled(renderer: PromptRenderer) -> None:
    _, deltas = stream(renderer, "Hello", [1])
    assert [delta.content for delta in deltas] == ["H", "e", "l", "l", "o"]


def test_reasoning_goes_before_content_without_its_markup(renderer: PromptRenderer) -> None:
    answer, deltas = stream(renderer, "<think>\nhm\n</think>\n\nok", [1])
    assert [delta.as_dict() for delta in deltas] == [
        {"reasoning_content": "h"},
        {"reasoning_content": "m"},
        {"content": "o"},
        {"content": "k"},
    ]
    assert answer.message() == {"role": "assistant", "content": "ok", "reasoning_content": "hm"}


def test_parallel_tool_calls_have_an_index_each(renderer: PromptRenderer) -> None:
    answer, deltas = stream(renderer, f"Look: {CALL}\n{CALL}", [3])
    calls = [call for delta in deltas for call in delta.as_dict().get("tool_calls", [])]
    assert [call["index"] for call in calls] == [0, 1]
    assert [call["id"] for call in calls] == ["call1111111122223333444400", "call1111111122223333444401"]
    assert calls[0]["function"] == {"name": "exec", "arguments": '{"command": "ls"}'}
    assert answer.message()["content"] == "Look:"


def test_a_call_is_streamed_when_it_is_closed(renderer: PromptRenderer) -> None:
    _, deltas = stream(renderer, f"{CALL}\n{CALL}", [1])
    assert [len(delta.tool_calls) for delta in deltas] == [1, 1]
    assert [call.index for delta in deltas for call in delta.tool_calls] == [0, 1]
    _, cut = stream(renderer, f"{CALL}\n{CALL}"[:-20], [1])
    assert cut[0] == deltas[0]


def test_a_call_that_was_only_thought_of_is_not_streamed(renderer: PromptRenderer) -> None:
    answer, deltas = stream(renderer, f"<think>\nMaybe {CALL}? No.\n</think>\n\nHi", [1])
    assert [delta for delta in deltas if delta.tool_calls] == []
    assert answer.message()["content"] == "Hi"


def test_a_call_that_ends_the_thinking_is_streamed_at_the_end(renderer: PromptRenderer) -> None:
    answer, deltas = stream(renderer, f"<think>\nI call it. {CALL}", [1])
    assert [call.name for call in deltas[-1].tool_calls] == ["exec"]
    assert answer.message()["reasoning_content"] == "I call it."


def test_content_is_streamed_as_soon_as_thinking_ends_however_long_it_was(renderer: PromptRenderer) -> None:
    _, deltas = stream(renderer, "<think>\n" + "hm " * 2000 + "\n</think>\n\nHello there", [1])
    contents = [delta.content for delta in deltas if delta.content]
    assert contents[0] in ("H", "He")
    assert max(map(len, contents)) <= 2


def test_a_tool_call_that_is_cut_short_is_content(renderer: PromptRenderer) -> None:
    answer, _ = stream(renderer, 'Hm <tool_call>\n{"name": "ex', [1])
    assert answer.message() == {"role": "assistant", "content": 'Hm\n<tool_call>\n{"name": "ex'}


def test_without_tools_a_tool_call_is_content(renderer: PromptRenderer) -> None:
    answer, _ = stream(renderer, CALL, [1], options=TOOLS | {"tool_choice": "none"})
    assert answer.message() == {"role": "assistant", "content": CALL}


def test_half_a_character_waits_for_the_other_half(renderer: PromptRenderer) -> None:
    _, deltas = stream(renderer, "a😀b", [1])
    assert [delta.content for delta in deltas] == ["a", "😀", "b"]


def test_characters_that_every_chunk_cuts_in_half_are_whole_in_the_end(renderer: PromptRenderer) -> None:
    text = "aaa" + "😀" * 5 + "a"
    answer, _ = stream(renderer, text, [2])
    assert answer.message()["content"] == text


def test_the_stop_string_that_is_whole_first_ends_the_answer(renderer: PromptRenderer) -> None:
    answer, deltas = stream(renderer, "1, 2, 3 STOP 4", [1], stop=("STOP", "3 STOP 4"))
    assert answer.message()["content"] == "1, 2, 3 "
    assert "".join(delta.content for delta in deltas) == "1, 2, 3 "
    at_once, _ = feed(renderer, renderer.encode("1, 2, 3 STOP 4"), [100], stop=("STOP", "3 STOP 4"))
    assert at_once.message() == answer.message()


@pytest.mark.parametrize("stop", ["\nUser", "\n\n#"])
def test_a_stop_string_that_begins_unseen_is_still_cut(renderer: PromptRenderer, stop: str) -> None:
    answer = AnswerStream(renderer=renderer, prompt_ids=(), options={}, exchange_id="e", stop=(stop,))
    for token in renderer.encode(stop):
        answer.feed([token])
    answer.finish(stop)
    assert answer.message()["content"] == ""


@pytest.mark.parametrize("cuts", [[1], [3], [1000]])
@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("It is 4. \nEND of it", "END", "It is 4. \n"),
        ("It is 4. \nMore", "\n", "It is 4. "),
        ("It is  4.", " 4", "It is "),
        ("It is\n\n\nUser: 4", "\nUser", "It is\n\n"),
        ("It is 4.END", "END", "It is 4."),
    ],
)
def test_a_stop_string_trims_no_white_space(
    renderer: PromptRenderer, text: str, stop: str, shown: str, cuts: list[int]
) -> None:
    ids = renderer.encode(text[: text.index(stop) + len(stop)])
    answer = AnswerStream(renderer=renderer, prompt_ids=(), options={}, exchange_id="e", stop=(stop,))
    deltas = [answer.feed(ids[at : at + cuts[0]]) for at in range(0, len(ids), cuts[0])]
    deltas.append(answer.finish(stop))
    assert answer.message()["content"] == shown
    assert "".join(delta.content for delta in deltas if delta is not None) == shown


def test_an_empty_answer_is_an_empty_string(renderer: PromptRenderer) -> None:
    answer, deltas = stream(renderer, "<|im_end|>", [1])
    assert (deltas, answer.message()) == ([], {"role": "assistant", "content": ""})


def test_bytes_that_are_no_text_are_not_read_again_for_ever(
    renderer: PromptRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, decode = [0], renderer.decode

    def counted(token_ids: Sequence[int]) -> str:
        read.append(len(token_ids))
        return decode(token_ids)

    monkeypatch.setattr(renderer, "decode", counted)
    half = renderer.encode("é")[0]
    feed(renderer, [*renderer.encode("so"), *[half] * 500], [1])
    assert max(read) < 100


@given(picks=st.lists(st.integers(0, 9), max_size=30), cuts=CUTS)
def test_bytes_that_are_no_text_are_shown_alike_however_they_came(
    renderer: PromptRenderer, picks: list[int], cuts: list[int]
) -> None:
    parts = renderer.encode("aéш😀")  # one byte, two, two and four: in any order they are seldom text
    ids = [*renderer.encode("so"), *(parts[pick % len(parts)] for pick in picks)]
    whole, _ = feed(renderer, ids, [10_000])
    cut, deltas = feed(renderer, ids, cuts)
    assert cut.message() == whole.message()
    assert "".join(delta.content for delta in deltas) == (cut.message()["content"] or "")


@given(thought=st.lists(PIECES.filter(lambda piece: "<" not in piece), max_size=6), cuts=CUTS, ends=st.booleans())
def test_thought_tokens_are_those_between_the_marks_however_they_came(
    renderer: PromptRenderer, thought: list[str], cuts: list[int], ends: bool
) -> None:
    said = "".join(thought)
    answer, _ = stream(renderer, f"<think>{said}" + ("</think>\n\nIt is 4." if ends else ""), cuts)
    expected = len(renderer.encode(said)) if said.strip() else 0
    assert answer.num_thought_tokens() == expected
    shown = answer.message().get("reasoning_content", "")
    num = num_thinking(answer.message(), tuple(answer.ids), renderer)
    assert shown in renderer.decode(answer.ids[:num])
    assert (num > 0) == bool(shown)
    assert not num or shown not in renderer.decode(answer.ids[: num - 1])


@given(pieces=st.lists(PIECES.filter(lambda piece: "<" not in piece), min_size=1, max_size=6), cuts=CUTS)
def test_tokens_of_the_content_are_those_behind_the_thought_and_before_the_calls(
    renderer: PromptRenderer, pieces: list[str], cuts: list[int]
) -> None:
    said = "".join(pieces)
    before, text = renderer.encode("<think>\nhm\n</think>"), renderer.encode(said)
    answer, _ = feed(renderer, [*before, *text, *renderer.encode(CALL)], cuts)
    found = [answer.ids[number] for number in sorted(answer.content_numbers)]
    assert renderer.decode(found).strip() == said.strip()
    assert answer.content_numbers <= set(range(len(before), len(before) + len(text)))
