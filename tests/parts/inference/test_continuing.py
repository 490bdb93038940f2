"""Prompts that go on from what was sampled: which answers stand in them, where, and what is rendered instead."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.conversation.continuing import (
    Continued,
    PromptOrigin,
    Request,
    ShownAnswer,
    answered,
    continue_prompt,
    find_echoes,
    num_new_bytes,
)
from clawstream.errors import UnrenderableRequest
from clawstream.events import TokenIds
from clawstream.rendering.renderer import PromptRenderer
from tests import recorded
from tests.examples import examples
from tests.parts.families.standins import FAMILIES, make_folder
from tests.renderers import load_renderer
from tests.sessions import Json, assistant, user

TOOLS = {"tools": [{"type": "function", "function": {"name": "exec", "parameters": {}}}]}
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
END = "<|im_end|>"
RESULT: Json = {"role": "tool", "content": "done", "tool_call_id": "call1"}


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> PromptRenderer:
    """Qwen3's template over byte pairs, so that one text has several tokenisations."""
    return load_renderer(make_folder(tmp_path_factory.mktemp("qwen3"), FAMILIES["qwen3"]))


def request(messages: Sequence[Json], options: Mapping[str, Any]) -> Request:
    return Request(messages=messages, raw=[json.dumps(one).encode() for one in messages], options=options)


@dataclass
class Gateway:
    """One session: what was answered, and the prompts last made; each prompt is also made from nothing."""

    renderer: PromptRenderer
    answers: list[ShownAnswer] = field(default_factory=list)
    known: tuple[Continued, ...] = ()

    def ask(
        self, messages: Sequence[Json], options: Mapping[str, Any] | None = None, *, context: int | None = None
    ) -> Continued:
        options = {} if options is None else options
        echoes = find_echoes(messages, self.answers)
        asked = request(messages, options)
        made = continue_prompt(self.renderer, asked, echoes, self.known, context_length_tokens=context)
        assert made == continue_prompt(self.renderer, asked, echoes, context_length_tokens=context)
        self.known = (*self.known, made)[-2:]
        return made

    def answer(
        self,
        messages: Sequence[Json],
        text: str | TokenIds,
        options: Mapping[str, Any] | None = None,
        *,
        shown: Json | None = None,
    ) -> TokenIds:
        """The session is answered `text`; it is shown without its end and its thoughts, or as `shown`."""
        ids = self.renderer.encode(text) if isinstance(text, str) else text
        said = self.renderer.decode(ids).removesuffix(END).rpartition("</think>")[-1].strip()
        message = assistant(said) if shown is None else shown
        self.answers.append(answered(reversed(messages), options or {}, message, ids))
        return ids

    def letters(self, text: str) -> TokenIds:
        """The text as nobody encodes it: letter by letter."""
        return tuple(token for letter in text for token in self.renderer.encode(letter))

    def text(self, made: Continued) -> str:
        return self.renderer.decode(made.token_ids)


@pytest.fixture
def gateway(renderer: PromptRenderer) -> Gateway:
    return Gateway(renderer)


def test_a_prompt_is_the_one_before_and_what_was_sampled_and_what_is_new(gateway: Gateway) -> None:
    first = gateway.ask([user("Hi")])
    said = gateway.answer([user("Hi")], f"<think>\nhm\n</think>\n\nHello.{END}")
    second = gateway.ask([user("Hi"), assistant("Hello. "), user("Bye")])
    new = f"\n<|im_start|>user\nBye{END}\n<|im_start|>assistant\n"
    assert second.token_ids == first.token_ids + said + gateway.renderer.encode(new)
    assert (first.made, second.made, second.num_spliced) == (PromptOrigin.RENDERED, PromptOrigin.CONTINUED, 1)


def test_the_ids_are_those_sampled_even_where_the_tokenizer_has_others_for_the_text(gateway: Gateway) -> None:
    said = (*gateway.letters("Hello there."), *gateway.renderer.encode(END))
    assert said != gateway.renderer.encode(f"Hello there.{END}")
    prompt = gateway.ask([user("Hi")])
    gateway.answer([user("Hi")], said)
    second = gateway.ask([user("Hi"), assistant("Hello there."), user("Bye")])
    assert second.token_ids[: len(prompt.token_ids) + len(said)] == prompt.token_ids + said


def test_equal_answers_stand_in_the_order_in_which_they_were_given(gateway: Gateway) -> None:
    end = gateway.renderer.encode(END)
    chat = [user("go"), assistant("the same"), user("go"), assistant("the same"), user("go")]
    one = gateway.answer(chat[:1], (*gateway.letters("the same"), *end))
    two = gateway.answer(chat[:3], f"the same{END}")
    prompt = gateway.ask(chat)
    assert prompt.num_spliced == 2
    assert at(prompt, one) < at(prompt, two)


def test_an_answer_counts_once(gateway: Gateway) -> None:
    gateway.answer([user("go")], f"the same{END}")
    prompt = gateway.ask([user("go"), assistant("the same"), user("go"), assistant("the same"), user("go")])
    assert (prompt.made, prompt.num_spliced) == (PromptOrigin.SPLICED, 1)


def test_of_two_answers_to_the_same_request_the_newer_counts(gateway: Gateway) -> None:
    gateway.answer([user("go")], f"<think>\nfirst\n</think>\n\nok{END}")
    gateway.answer([user("go")], f"<think>\nretried\n</think>\n\nok{END}")
    text = gateway.text(gateway.ask([user("go"), assistant("ok"), user("on")]))
    assert ("retried" in text, "first" in text) == (True, False)
    text = gateway.text(gateway.ask([user("go, then"), assistant("ok"), user("on")]))
    assert ("retried" in text, "first" in text) == (True, False)


@pytest.mark.parametrize("block", [[], [recorded.BLOCK]])
def test_the_same_words_said_beside_the_conversation_do_not_count(gateway: Gateway, block: list[Json]) -> None:
    gateway.answer([user("go"), *block], f"<think>\nmain\n</think>\n\nok{END}")
    gateway.answer([user("title?"), *block], f"<think>\nside\n</think>\n\nok{END}")
    text = gateway.text(gateway.ask([user("go"), assistant("ok"), user("on")]))
    assert ("main" in text, "side" in text) == (True, False)


def test_up_to_an_answer_that_is_not_ours_all_is_rendered(gateway: Gateway) -> None:
    gateway.answer([user("a")], f"<think>\nhm\n</think>\n\none{END}")
    chat = [user("a"), assistant("one"), user("b"), assistant("edited"), user("c")]
    assert gateway.ask(chat).made is PromptOrigin.FALLBACK
    gateway.answer(chat, f"<think>\nhm again\n</think>\n\nthree{END}")
    later = gateway.ask([*chat, assistant("three"), user("d")])
    assert (later.made, later.num_spliced) == (PromptOrigin.SPLICED, 1)
    assert [echo.at for echo in find_echoes([*chat, assistant("three"), user("d")], gateway.answers).found] == [5]
    assert later.token_ids[: len(gateway.renderer.prompt_ids(chat, {}))] == gateway.renderer.prompt_ids(chat, {})
    assert ("hm again" in gateway.text(later), "hm\n" in gateway.text(later)) == (True, False)


def test_a_history_of_somebody_else_s_is_rendered(gateway: Gateway) -> None:
    chat = [user("a"), assistant("not ours"), user("b")]
    prompt = gateway.ask(chat)
    assert (prompt.made, prompt.token_ids) == (PromptOrigin.RENDERED, gateway.renderer.prompt_ids(chat, {}))
    gateway.answer(chat, f"one{END}")
    assert gateway.ask([user("a")]).made is PromptOrigin.RENDERED
    assert gateway.ask(chat).made is PromptOrigin.FALLBACK


@pytest.mark.parametrize(
    "chat",
    [
        [user("a"), assistant("one")],
        [user("a"), assistant("one"), assistant("and")],
        [assistant("one"), user("b")],
    ],
)
def test_an_answer_with_nothing_before_it_or_no_message_after_it_is_rendered(
    gateway: Gateway, chat: list[Json]
) -> None:
    gateway.answer([user("a")], f"one{END}")
    prompt = gateway.ask(chat)
    assert (prompt.made, prompt.token_ids) == (PromptOrigin.FALLBACK, gateway.renderer.prompt_ids(chat, {}))


def test_an_answer_stands_as_sampled_only_between_other_messages(gateway: Gateway) -> None:
    gateway.answer([user("a")], f"one{END}")
    gateway.answer([user("a"), assistant("one")], f"two{END}")
    chat = [assistant("one"), assistant("two"), user("b")]
    assert [echo.at for echo in find_echoes([user("a"), *chat], gateway.answers).found] == [2]
    assert find_echoes([user("a"), *chat[:2]], gateway.answers).found == ()
    assert find_echoes(chat[1:], gateway.answers).found == ()


def test_an_answer_that_was_cut_is_closed(gateway: Gateway) -> None:
    gateway.answer([user("a")], "It is a long", shown=assistant("It is a long"))
    text = gateway.text(gateway.ask([user("a"), assistant("It is a long"), user("Go on.")]))
    assert f"It is a long{END}\n<|im_start|>user\nGo on." in text


def test_what_a_stop_string_cut_from_the_answer_was_sampled_all_the_same(gateway: Gateway) -> None:
    said = gateway.answer([user("a")], "Yes.STOP", shown=assistant("Yes."))
    prompt = gateway.ask([user("a"), assistant("Yes."), user("b")])
    assert at(prompt, said) > 0
    assert f"Yes.STOP{END}\n" in gateway.text(prompt)


def test_an_answer_that_ended_in_the_middle_of_its_thoughts_is_rendered_and_the_next_go_on(gateway: Gateway) -> None:
    gateway.answer([user("a")], f"<think>\nhm{END}", shown=assistant(""))
    chat = [user("a"), assistant(""), user("b")]
    assert gateway.ask(chat).made is PromptOrigin.FALLBACK
    gateway.answer(chat, f"two{END}")
    later = gateway.ask([*chat, assistant("two"), user("c")])
    assert (later.made, later.num_spliced) == (PromptOrigin.SPLICED, 1)


def test_results_of_parallel_calls_follow_the_calls_as_sampled(gateway: Gateway) -> None:
    called = "".join(f'<tool_call>\n{{"name": "exec", "arguments": {{"n": {n}}}}}\n</tool_call>' for n in (1, 2))
    calls = [recorded.call("call_1", '{"n":1}'), recorded.call("call_2", '{"n":2}')]
    said = gateway.answer(
        [user("a")], f"{called}{END}", TOOLS, shown={"role": "assistant", "content": None, "tool_calls": calls}
    )
    renamed = [recorded.call("call1", '{"n": 1}'), recorded.call("call2", '{"n": 2}')]
    chat = [
        user("a"),
        {"role": "assistant", "content": "", "tool_calls": renamed},
        RESULT,
        {**RESULT, "tool_call_id": "call2", "content": "two"},
    ]
    prompt = gateway.ask(chat, TOOLS)
    assert prompt.num_spliced == 1
    assert at(prompt, said) > 0
    assert gateway.text(prompt).endswith(
        f"{END}\n<|im_start|>user\n<tool_response>\ndone\n</tool_response>\n<tool_response>\ntwo\n</tool_response>"
        f"{END}\n<|im_start|>assistant\n"
    )


def test_a_client_s_block_that_is_gone_leaves_what_was_sampled_after_it(gateway: Gateway) -> None:
    first = gateway.ask(recorded.FIRST_TURN)
    said = gateway.answer(recorded.FIRST_TURN, f"<think>\nhm\n</think>\n\nHello from stub.{END}")
    second = gateway.ask(recorded.USER_CORRECTS)
    before = gateway.renderer.prompt_ids(recorded.FIRST_TURN[:-1], {})
    assert (second.made, second.num_spliced) == (PromptOrigin.CONTINUED, 1)
    assert second.token_ids[: len(before) + len(said)] == before + said
    assert first.token_ids != before
    gateway.answer(recorded.USER_CORRECTS, f"4{END}")
    third = gateway.ask([*recorded.USER_CORRECTS[:-1], assistant("4"), user("Thanks."), recorded.BLOCK])
    shared = len(before) + len(said) + len(gateway.renderer.encode("\n<|im_start|>user\n"))
    assert third.token_ids[:shared] == second.token_ids[:shared]


def test_each_answer_stands_behind_what_asked_for_it(gateway: Gateway) -> None:
    first = gateway.ask([user("a")], NO_THINKING)
    said = gateway.answer([user("a")], f"one{END}", NO_THINKING)
    chat = [user("a"), assistant("one"), user("b")]
    second = gateway.ask(chat)
    assert second.token_ids[: len(first.token_ids) + len(said)] == first.token_ids + said
    assert gateway.text(second).endswith("<|im_start|>assistant\n")
    more = gateway.answer(chat, f"two{END}")
    third = gateway.ask([*chat, assistant("two"), user("c")], NO_THINKING)
    assert third.token_ids[: len(second.token_ids) + len(more)] == second.token_ids + more
    assert gateway.text(third).endswith("<think>\n\n</think>\n\n")


def test_other_tools_and_another_template_are_other_prompts(gateway: Gateway) -> None:
    asked = gateway.text(gateway.ask([user("a")]))
    assert gateway.text(gateway.ask([user("a")], NO_THINKING)) == f"{asked}<think>\n\n</think>\n\n"
    gateway.ask([user("a")])
    gateway.answer([user("a")], f"one{END}")
    chat = [user("a"), assistant("one"), user("b")]
    assert "# Tools" not in gateway.text(gateway.ask(chat))
    assert "# Tools" in gateway.text(gateway.ask(chat, TOOLS))


def test_a_prompt_that_leaves_no_room_is_rendered_if_that_is_shorter(gateway: Gateway) -> None:
    gateway.answer([user("a")], f"<think>\n{'long ' * 50}\n</think>\n\none{END}")
    chat = [user("a"), assistant("one"), user("b")]
    fits = gateway.ask(chat)
    context = len(fits.token_ids)
    assert gateway.ask(chat, context=context + 1) == fits
    plain = gateway.ask(chat, context=context)
    assert (plain.made, plain.token_ids) == (PromptOrigin.FALLBACK, gateway.renderer.prompt_ids(chat, {}))


def test_what_the_template_can_not_express_is_refused(gateway: Gateway) -> None:
    gateway.answer([user("a")], f"one{END}")
    with pytest.raises(UnrenderableRequest):
        gateway.ask([user("a"), assistant("one"), user("b")], {"chat_template_kwargs": {"no_such": 1}})


def test_only_what_is_new_has_to_be_rendered(gateway: Gateway) -> None:
    chat = [user("a" * 1000)]
    gateway.ask(chat)
    gateway.answer(chat, f"one{END}")
    chat += [assistant("one"), user("new")]
    asked, echoes = request(chat, {}), find_echoes(chat, gateway.answers)
    assert num_new_bytes(asked, echoes, gateway.known) == len(asked.raw[2])
    assert num_new_bytes(asked, echoes, ()) > 1000
    gateway.ask(chat)
    assert num_new_bytes(asked, echoes, gateway.known) == 0
    other = request([user("b" * 500), *chat[1:]], {})
    assert num_new_bytes(other, echoes, gateway.known) > 500


def at(prompt: Continued, ids: TokenIds) -> int:
    """Where the ids stand in the prompt."""
    found = [n for n in range(len(prompt.token_ids)) if prompt.token_ids[n : n + len(ids)] == ids]
    assert len(found) == 1
    return found[0]


TEXTS = st.sampled_from(["the same", "another", ""])
MOVES = st.lists(
    st.tuples(
        st.sampled_from(["say", "say", "say", "retry", "side", "edit", "cut", "tools", "forget", "toggle"]),
        TEXTS,
        st.booleans(),
    ),
    max_size=10,
)


@examples(1.5)
@given(MOVES)
def test_whatever_a_client_does_what_stands_after_its_last_change_is_what_was_sampled(
    renderer: PromptRenderer, moves: list[tuple[str, str, bool]]
) -> None:
    gateway, chat, options = Gateway(renderer), [user("start")], dict[str, Any]()
    sampled: list[TokenIds | None] = []  # of the chat's answers; None: the client changed it, or we forgot it
    grown: TokenIds = ()  # what the next prompt begins with
    for number, (move, text, odd) in enumerate(moves):
        if move == "edit" and sampled:
            chat[1] = assistant(f"edited {number}")
            sampled[0], grown = None, ()
        elif move == "forget":
            gateway.answers.clear()
            sampled, grown = [None] * len(sampled), ()
        elif move == "toggle":
            options = {} if options else dict(NO_THINKING)
        prompt = gateway.ask(chat, options)
        trail = sampled[
            len(sampled) - next((n for n, ids in enumerate(reversed(sampled)) if ids is None), len(sampled)) :
        ]
        assert prompt.num_spliced == len(trail)
        assert contains_in_order(prompt.token_ids, [ids for ids in trail if ids is not None])
        assert prompt.token_ids[: len(grown)] == grown
        ids = (*(gateway.letters(text) if odd else renderer.encode(text)), *renderer.encode(END * (move != "cut")))
        if not ids:
            continue
        if move == "side":
            gateway.answer([user("beside")], ids, shown=assistant(text))
        else:
            gateway.answer(chat, ids, options, shown=assistant(text))
        if move in ("side", "retry"):
            continue
        sampled.append(ids)
        grown = prompt.token_ids + ids
        results = [{**RESULT, "tool_call_id": call_id, "content": f"done {number}"} for call_id in ("call1", "call2")]
        new = results if move == "tools" else [user(f"next {number}")]
        chat = [*chat, assistant(f" {text}\n"), *new]


def contains_in_order(whole: TokenIds, parts: Sequence[TokenIds]) -> bool:
    start = 0
    for part in parts:
        found = next((n for n in range(start, len(whole)) if whole[n : n + len(part)] == part), None)
        if found is None:
            return False
        start = found + len(part)
    return True
