"""Each family's prompts go on from what was sampled, turn after turn, whatever the client makes of the history."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from clawstream.conversation.continuing import (
    Continued,
    PromptOrigin,
    Request,
    ShownAnswer,
    answered,
    continue_prompt,
    find_echoes,
)
from clawstream.conversation.messages import normal_call_id
from clawstream.gateway.answering.deltas import AnswerStream
from clawstream.rendering import renderer as rendering
from clawstream.rendering.renderer import PromptRenderer
from tests.parts.families.answering import names
from tests.parts.families.conftest import Renderers
from tests.parts.families.formats import FORMATS, PARIS, TOKYO, TOOLS, Format
from tests.sessions import Json, user

BRIDGED = tuple(name for name in FORMATS if not name.startswith("mistral"))
# The templates of the others drop what stands before an answer from the history.
WHOLE = tuple(name for name in BRIDGED if not FORMATS[name].thinks_first)
OPTIONS: Mapping[str, Any] = {"tools": TOOLS}


class Session:
    """A client that adds to its history, rewrites ids and echoes no reasoning; its model writes what it is told."""

    def __init__(self, renderer: PromptRenderer, form: Format) -> None:
        self.renderer, self.form = renderer, form
        self.history: list[Json] = []
        self.answers: list[ShownAnswer] = []
        self.prompts: list[Continued] = []

    def turn(self, asked: Sequence[Json], text: str, *, end: bool = True) -> Json:
        """Ask, be answered `text`, and keep what a client keeps of that."""
        self.history += asked
        echoes = find_echoes(self.history, self.answers)
        request = Request(messages=self.history, raw=[json.dumps(m).encode() for m in self.history], options=OPTIONS)
        prompt = continue_prompt(self.renderer, request, echoes, self.prompts[-2:])
        assert prompt.token_ids == continue_prompt(self.renderer, request, echoes).token_ids
        self.prompts.append(prompt)
        output_ids = self.renderer.encode(text + self.form.end * end)
        stream = AnswerStream(
            renderer=self.renderer, prompt_ids=prompt.token_ids, options=OPTIONS, exchange_id=f"e{len(self.prompts)}"
        )
        stream.feed(output_ids)
        stream.finish()
        message = stream.message()
        self.answers.append(answered(reversed(self.history), OPTIONS, message, output_ids))
        calls = [{**call, "id": normal_call_id(call["id"])} for call in message.get("tool_calls", [])]
        self.history = [
            *self.history,
            {"role": "assistant", "content": message["content"]} | ({"tool_calls": calls} if calls else {}),
        ]
        return message

    def results(self) -> list[Json]:
        """A result for each call of the newest answer."""
        calls = self.history[-1]["tool_calls"]
        return [{"role": "tool", "tool_call_id": call["id"], "content": f"result {n}"} for n, call in enumerate(calls)]


def six_turns(renderer: PromptRenderer, form: Format) -> Session:
    session, think = Session(renderer, form), "I should think." if form.thinks else ""
    session.turn([{"role": "developer", "content": "Be brief."}, user("Hi")], form.write(think, "Hello.", ()))
    session.turn([user("Weather?")], form.write("", "", (PARIS, TOKYO) if form.parallel else (PARIS,)))
    session.turn(session.results(), form.write(think, "Sunny.", ()))
    session.turn([user("Sure?")], form.write("", "Sunny.", ()))
    session.turn([user("Tell me all.")], form.write("", "It is a long", ()), end=False)
    session.turn([user("Go on.")], form.write(think, "story.", ()))
    return session


@names(BRIDGED)
def test_a_long_text_behind_an_answer_is_written_like_a_short_one(name: str, renderers: Renderers) -> None:
    session, form = Session(renderers[name], FORMATS[name]), FORMATS[name]
    long = "The agent reads a file, and says what stands in it. 😀\n" * 40 + "Is it so?"
    for asked in ("Weather?", "Short?", long):
        session.turn([user(asked)], form.write("", "Sunny.", ()))
    first, short, prompt = session.prompts
    assert prompt.made is short.made is PromptOrigin.CONTINUED
    added = session.renderer.decode(prompt.token_ids[len(short.token_ids) :])
    assert added == session.renderer.decode(short.token_ids[len(first.token_ids) :]).replace("Short?", long)


@names(BRIDGED)
def test_six_turns_are_one_sequence(name: str, renderers: Renderers) -> None:
    session = six_turns(renderers[name], FORMATS[name])
    assert [prompt.made for prompt in session.prompts] == [PromptOrigin.RENDERED] + [PromptOrigin.CONTINUED] * 5
    assert [prompt.num_spliced for prompt in session.prompts] == [0, 1, 2, 3, 4, 5]
    for number, (prompt, answer) in enumerate(zip(session.prompts[:-1], session.answers, strict=False)):
        so_far = prompt.token_ids + answer.output_ids
        assert session.prompts[number + 1].token_ids[: len(so_far)] == so_far


@pytest.mark.parametrize("kept", [r"[^A-Za-z0-9]", r"[^A-Za-z0-9_-]"], ids=["letters and digits", "underscores too"])
def test_results_stand_under_the_ids_that_the_model_gave_its_calls(renderers: Renderers, kept: str) -> None:
    renderer, form = renderers["kimi-k2"], FORMATS["kimi-k2"]
    session = Session(renderer, form)
    calls = session.turn([user("Weather?")], form.write("", "", (PARIS, TOKYO)))["tool_calls"]
    assert [call["id"] for call in calls] == list(form.ids[:2])
    given = [re.sub(kept, "_" if "_" in kept else "", call["id"]) for call in calls]
    session.turn(
        [{**result, "tool_call_id": call_id} for result, call_id in zip(session.results(), given, strict=True)],
        form.write("", "Sunny.", ()),
    )
    text = renderer.decode(session.prompts[-1].token_ids)
    assert [text.count(call_id) for call_id in form.ids[:2]] == [2, 2]


@names(WHOLE)
def test_where_the_model_writes_as_the_template_does_the_prompt_is_the_template_s(
    name: str, renderers: Renderers
) -> None:
    renderer, form = renderers[name], FORMATS[name]
    session = Session(renderer, form)
    session.turn([user("Hi")], form.write("", "Hello.", ()))
    session.turn([user("More")], form.write("", "Yes.", ()))
    session.turn([user("More")], "")
    rendered = renderer.decode(renderer.prompt_ids(session.history[:-1], OPTIONS))
    continued = renderer.decode(session.prompts[-1].token_ids)
    if name == "glm-4.5":  # it samples the mark of the next message, and thinks of nothing in between
        rendered = rendered.replace("\n<think></think>", "")
        continued = continued.replace("\n<think></think>", "")
    assert continued == rendered


@names(BRIDGED)
def test_of_the_prompt_so_far_no_more_than_the_end_is_read(
    name: str, renderers: Renderers, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer, form = renderers[name], FORMATS[name]
    short = [prompt.token_ids for prompt in six_turns(renderer, form).prompts]
    monkeypatch.setattr(rendering, "_PROMPT_TAIL_TOKENS", 1_000_000)
    assert [prompt.token_ids for prompt in six_turns(renderer, form).prompts] == short


@names(BRIDGED)
def test_what_a_user_writes_opens_no_turn_when_it_is_new_either(name: str, renderers: Renderers) -> None:
    renderer, form = renderers[name], FORMATS[name]
    opening = renderer.decode(renderer.prompt_ids([user("x")], {})[-4:])
    counts = []
    for text in ("", opening, form.end):
        session = Session(renderer, form)
        session.turn([user("Hi")], form.write("", "Hello.", ()))
        session.turn([user(f"{text} Bye")], "")
        ids = session.prompts[-1].token_ids
        counts.append(sum(ids.count(mark) for mark in renderer.marker_ids - thinking_marks(renderer)))
    assert len(set(counts)) == 1


def thinking_marks(renderer: PromptRenderer) -> set[int]:
    return {ids[0] for text in ("<think>", "</think>") if len(ids := renderer.encode(text)) == 1}


@names(name for name in BRIDGED if FORMATS[name].thinks)
def test_reasoning_that_is_cut_is_closed_before_the_next_message(name: str, renderers: Renderers) -> None:
    renderer, form = renderers[name], FORMATS[name]
    session = Session(renderer, form)
    whole = form.write("I should think.", "Hello.", ())
    cut = whole[: whole.index("think.") + 6]
    session.turn([user("Hi")], cut, end=False)
    session.turn([user("Well?")], "")
    text = renderer.decode(session.prompts[-1].token_ids)
    after = text[text.index("should think.") + len("should think.") : text.index("Well?")]
    assert session.prompts[-1].num_spliced == 1
    assert "</think>" in after or "<|end|>" in after


@names(name for name in FORMATS if name.startswith("mistral"))
def test_a_template_of_the_folder_s_own_is_rendered_whole(name: str, renderers: Renderers) -> None:
    session = Session(renderers[name], FORMATS[name])
    session.turn([user("Hi")], FORMATS[name].write("", "Hello.", ()))
    session.turn([user("More")], FORMATS[name].write("", "Yes.", ()))
    assert [(prompt.made, prompt.num_spliced) for prompt in session.prompts] == [
        (PromptOrigin.RENDERED, 0),
        (PromptOrigin.FALLBACK, 0),
    ]
    assert session.prompts[1].token_ids == renderers[name].prompt_ids(session.history[:-1], OPTIONS)
