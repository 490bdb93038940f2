"""Calls and JSON that a client has made: whatever the model would say, what follows the grammar is found as them."""

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from clawstream.errors import UnrenderableRequest
from clawstream.events import Shaping
from clawstream.inference.dialect import RequestRefused
from clawstream.local.engine.sampling import Grammars, Matcher
from clawstream.rendering.renderer import PromptRenderer
from tests.parts.families.answering import QUESTION, called, kept, names, stream
from tests.parts.families.conftest import Folders
from tests.parts.families.formats import FORMATS, PARIS, SEARCH, Call

Json = dict[str, Any]
WITH_GRAMMAR = ("qwen3", "qwen3.5", "glm-4.5", "deepseek-v3", "deepseek-r1", "llama-3")
WITHOUT = ("kimi-k2", "mistral")
UNITS = ["metric", 'im"perial']
PLACE: Json = {"type": "object", "properties": {"name": {"enum": ["Paris", "東京"]}}, "required": ["name"]}
TOOLS: list[Json] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "enum": ["Paris", "Oslo <b>"]},
                    "days": {"type": "integer"},
                    "units": {"type": "string", "enum": UNITS},
                    "places": {"type": "array", "items": {"$ref": "#/$defs/place"}, "minItems": 1},
                    "exact": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
                },
                "required": ["city", "places"],
                "$defs": {"place": PLACE},
            },
        },
    },
    {"type": "function", "function": {"name": "search"}},
]
ANY_CALL: Json = {"tools": TOOLS, "tool_choice": "required"}
SEARCHING: Json = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "search"}}}
BY_SCHEMA: Json = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}}
EITHER: Json = {"tools": TOOLS, "response_format": BY_SCHEMA}


@pytest.fixture(scope="module")
def vocabularies() -> dict[str, Grammars]:
    """Each made when it is asked for."""
    return {}


def vocabulary(folders: Folders, found: dict[str, Grammars], name: str, end: int) -> Grammars:
    if name not in found:
        found[name] = Grammars(folders[FORMATS[name].folder] / "tokenizer.json", end)
    return found[name]


def matcher(
    renderer: PromptRenderer, folders: Folders, found: dict[str, Grammars], name: str, options: Mapping[str, Any]
) -> Matcher:
    ebnf = renderer.grammar(options, renderer.prompt_ids(QUESTION, options))
    assert ebnf is not None
    ends = frozenset(renderer.stop_token_ids)
    return vocabulary(folders, found, name, min(ends)).matcher(Shaping(ebnf=ebnf), ends)


def drawn(follows: Matcher, renderer: PromptRenderer, chance: random.Random) -> list[int]:
    """An answer of which each token was drawn from all that may come next, up to its end."""
    ids: list[int] = []
    size = max(renderer.marker_ids) + 1
    while not ids or ids[-1] not in renderer.stop_token_ids:
        logits = torch.zeros(size)
        follows.mask(logits)
        allowed = [token for token, value in enumerate(logits.tolist()) if value == 0]
        ending = [token for token in allowed if token in renderer.stop_token_ids or len(ids) > 400]
        ids.append(chance.choice(ending or allowed))
        follows.take(ids[-1])
        assert len(ids) < 3000
    return ids


def accepted(follows: Matcher, ids: Sequence[int], size: int) -> bool:
    for token in ids:
        logits = torch.zeros(size)
        follows.mask(logits)
        if logits[token] != 0:
            return False
        follows.take(token)
    return True


def is_as_its_schema_says(call: Call) -> bool:
    name, arguments = call
    if name == "search":
        return arguments == {}
    return (
        arguments["city"] in ("Paris", "Oslo <b>")
        and all(place["name"] in ("Paris", "東京") and len(place) == 1 for place in arguments["places"])
        and len(arguments["places"]) > 0
        and isinstance(arguments.get("days", 1), int)
        and arguments.get("units", "metric") in UNITS
        and arguments.get("exact") in (True, False, None)
        and arguments.keys() <= {"city", "places", "days", "units", "exact"}
    )


@names(WITH_GRAMMAR)
@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_drawn_under_the_grammar_is_calls_of_the_tools_by_their_schemas(
    renderers: dict[str, PromptRenderer], folders: Folders, vocabularies: dict[str, Grammars], name: str, seed: int
) -> None:
    renderer = renderers[name]
    follows = matcher(renderer, folders, vocabularies, name, ANY_CALL)
    ids = drawn(follows, renderer, random.Random(seed))
    message = kept(renderer, ids, (1, 3), ANY_CALL)
    assert message["content"] is None, renderer.decode(ids)
    assert len(called(message)) >= 1
    assert all(map(is_as_its_schema_says, called(message)))


@names(WITH_GRAMMAR)
def test_what_the_family_s_own_models_write_follows_the_grammar(
    renderers: dict[str, PromptRenderer], folders: Folders, vocabularies: dict[str, Grammars], name: str
) -> None:
    renderer, form = renderers[name], FORMATS[name]
    calls: list[Call] = [("get_weather", {"city": "Paris", "days": 3, "places": [{"name": "東京"}]}), SEARCH]
    thought = "1 < 2" if form.thinks_first else ""
    ids = renderer.encode(form.write(thought, "", calls if form.parallel else calls[:1]) + form.end)
    if name == "glm-4.5":  # its models close a thought that was never opened
        ids = renderer.encode(form.write("", "", calls).removeprefix("\n<think></think>") + form.end)
    assert accepted(matcher(renderer, folders, vocabularies, name, ANY_CALL), ids, max(renderer.marker_ids) + 1)


@names(WITH_GRAMMAR)
@pytest.mark.parametrize("said", ["<b>1 < 2</b>\n</div>", "</parameterx", "</tool_cal", "<</p</a <"])
def test_marks_of_other_kinds_may_stand_in_an_argument_and_in_a_thought(
    renderers: dict[str, PromptRenderer], folders: Folders, vocabularies: dict[str, Grammars], name: str, said: str
) -> None:
    renderer, form = renderers[name], FORMATS[name]
    parameters = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    tools = [{"type": "function", "function": {"name": "write", "parameters": parameters}}]
    options = {"tools": tools, "tool_choice": "required"}
    thought = said if form.thinks_first and name != "glm-4.5" else ""
    written = form.write(thought, "", [("write", {"text": said})]).removeprefix("\n<think></think>")
    ids = renderer.encode(written + form.end)
    assert accepted(matcher(renderer, folders, vocabularies, name, options), ids, max(renderer.marker_ids) + 1)
    assert called(kept(renderer, list(ids), (2,), options)) == [("write", {"text": said})]


@names(WITH_GRAMMAR)
def test_a_function_that_is_named_is_called_once(
    renderers: dict[str, PromptRenderer], folders: Folders, vocabularies: dict[str, Grammars], name: str
) -> None:
    renderer = renderers[name]
    for options in (SEARCHING, {**ANY_CALL, "parallel_tool_calls": False}):
        for seed in range(3):
            follows = matcher(renderer, folders, vocabularies, name, options)
            found = called(kept(renderer, drawn(follows, renderer, random.Random(seed)), (2,), options))
            assert len(found) == 1
            assert options is not SEARCHING or found == [SEARCH]


@names(WITH_GRAMMAR)
def test_beside_a_schema_tools_may_be_called_and_what_is_answered_is_json_by_it(
    renderers: dict[str, PromptRenderer], folders: Folders, vocabularies: dict[str, Grammars], name: str
) -> None:
    renderer, form = renderers[name], FORMATS[name]
    thought = "1 < 2" if form.thinks_first else ""
    opened = f"{thought}\n</think>\n\n" * form.thinks_first
    said = '{"name": "Paris"}'
    written = {
        "json": renderer.encode(opened + said + form.end),
        "a call": renderer.encode(form.write(thought, "", [SEARCH]).removeprefix("\n<think></think>") + form.end),
        "words": renderer.encode(opened + "Paris." + form.end),
    }
    size = max(renderer.marker_ids) + 1
    assert {
        kind: accepted(matcher(renderer, folders, vocabularies, name, EITHER), ids, size)
        for kind, ids in written.items()
    } == {"json": True, "a call": True, "words": False}
    answered = kept(renderer, list(written["json"]), (1, 3), EITHER)
    assert (answered["content"], called(answered)) == (said, [])
    assert answered.get("reasoning_content", "") == thought
    calling = kept(renderer, list(written["a call"]), (1, 3), EITHER)
    assert (calling["content"], called(calling)) == (None, [SEARCH])


@names(WITH_GRAMMAR)
@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_drawn_beside_a_schema_is_calls_or_json_by_it(
    renderers: dict[str, PromptRenderer], folders: Folders, vocabularies: dict[str, Grammars], name: str, seed: int
) -> None:
    renderer = renderers[name]
    for options in (EITHER, {**EITHER, "parallel_tool_calls": False}, {**EITHER, "tool_choice": "auto"}):
        follows = matcher(renderer, folders, vocabularies, name, options)
        ids = drawn(follows, renderer, random.Random(seed))
        message = kept(renderer, ids, (2,), options)
        if called(message):
            assert message["content"] is None, renderer.decode(ids)
            assert all(map(is_as_its_schema_says, called(message)))
            assert len(called(message)) == 1 or "parallel_tool_calls" not in options
        else:
            assert json.loads(message["content"])["name"] in ("Paris", "東京"), renderer.decode(ids)


@names(WITH_GRAMMAR)
@pytest.mark.parametrize(
    "text", ["</think>", "<tool_call>search\n</tool_call>", '<tool_call>\n{"name": "search"}\n</tool_call>']
)
def test_marks_within_json_are_text(renderers: dict[str, PromptRenderer], name: str, text: str) -> None:
    renderer, form = renderers[name], FORMATS[name]
    said = json.dumps({"name": "search", "text": text})
    ids = renderer.encode("hm</think>\n" * form.thinks_first + said + form.end)
    options = {"tools": TOOLS, "response_format": {"type": "json_object"}}
    message = kept(renderer, ids, (1,), options)
    assert (message["content"], called(message)) == (said, [])


@names(["qwen3.5", "deepseek-r1", "qwen3"])
def test_json_comes_behind_a_thought_that_the_prompt_opened(
    renderers: dict[str, PromptRenderer], folders: Folders, vocabularies: dict[str, Grammars], name: str
) -> None:
    renderer, form = renderers[name], FORMATS[name]
    for options in ({"response_format": BY_SCHEMA}, {**EITHER, "tool_choice": "none"}, {"json_schema": PLACE}):
        if not form.thinks_first:
            assert renderer.grammar(options, renderer.prompt_ids(QUESTION, options)) is None
            continue
        ids = renderer.encode('It is <b>.\n</think>\n\n{"name": "Paris"}' + form.end)
        follows = matcher(renderer, folders, vocabularies, name, options)
        assert accepted(follows, ids, max(renderer.marker_ids) + 1)
        message = kept(renderer, ids, (2,), options)
        assert (message["content"], message["reasoning_content"]) == ('{"name": "Paris"}', "It is <b>.")
        answer, _ = stream(renderer, ids, (2,), options)
        assert renderer.decode([ids[at] for at in sorted(answer.content_numbers)]).strip() == '{"name": "Paris"}'


@names(["qwen3"])
def test_a_mark_that_the_model_spelled_in_letters_is_a_mark_all_the_same(
    renderers: dict[str, PromptRenderer], name: str
) -> None:
    renderer = renderers[name]
    text = '<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>'
    spelled = [token for letter in text for token in renderer.encode(letter)]
    assert renderer.marker_ids.isdisjoint(spelled)
    ids = [*spelled, *renderer.stop_token_ids[:1]]
    assert called(kept(renderer, ids, (1,), SEARCHING)) == [SEARCH]
    assert [delta.content for delta in stream(renderer, ids, (1,), SEARCHING)[1]] == [""]


@names(WITHOUT)
def test_a_family_whose_calls_no_grammar_writes_says_so(renderers: dict[str, PromptRenderer], name: str) -> None:
    with pytest.raises(UnrenderableRequest, match="leave tool_choice at auto"):
        renderers[name].grammar(ANY_CALL, (1,))


@names(WITHOUT)
def test_a_family_whose_calls_no_grammar_writes_offers_no_tools_beside_a_schema(
    renderers: dict[str, PromptRenderer], name: str
) -> None:
    with pytest.raises(UnrenderableRequest, match="leave the schema out, or send tool_choice none"):
        renderers[name].grammar(EITHER, (1,))
    assert renderers[name].grammar({**EITHER, "tool_choice": "none"}, (1,)) is None


@names(["qwen3", "qwen3.5", "glm-4.5", "deepseek-v3"])
def test_an_answer_of_one_call_at_most_ends_with_it(renderers: dict[str, PromptRenderer], name: str) -> None:
    renderer, form = renderers[name], FORMATS[name]
    options: Json = {"tools": TOOLS, "parallel_tool_calls": False}
    assert renderer.stop_ids({"tools": TOOLS}) == renderer.stop_ids({"parallel_tool_calls": False})
    [end] = set(renderer.stop_ids(options)) - set(renderer.stop_token_ids)
    ids = renderer.encode(form.write("I look." if form.thinks else "", "", [SEARCH, PARIS]) + form.end)
    cut = ids[: ids.index(end) + 1]
    message = kept(renderer, cut, (1,), options)
    assert called(message) == [SEARCH]
    later = [{"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "Rain."}]
    prompt = renderer.prompt_ids(QUESTION, options)
    following = renderer.bridge_ids(prompt, message, cut, later, options)
    assert following is not None
    assert following[: len(cut)] == cut


def test_a_schema_that_holds_itself_and_one_that_is_nested_too_deeply(renderers: dict[str, PromptRenderer]) -> None:
    node: Json = {"type": "object", "properties": {"next": {"$ref": "#"}, "b": {"$ref": "#/nowhere"}}}
    deep: Json = {}
    for _ in range(900):
        deep = {"type": "array", "items": deep}

    def grammar(parameters: Json) -> str | None:
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
        return renderers["qwen3"].grammar({"tools": tools, "tool_choice": "required"}, (1,))

    assert grammar(node) is not None
    with pytest.raises(UnrenderableRequest, match="nested too deeply"):
        grammar({"type": "object", "properties": {"a": deep}})
    with pytest.raises(UnrenderableRequest, match="half a character"):
        grammar({"type": "object", "properties": {json.loads('"\\ud800"'): {}}})


@pytest.mark.parametrize("kind", [{"a": 1}, [{}], [["string"]], 5, None])
def test_a_type_that_is_none_asks_for_nothing(renderers: dict[str, PromptRenderer], kind: object) -> None:
    field = {"type": "object", "properties": {"a": {"type": kind}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": field}}]
    grammar = renderers["qwen3"].grammar({"tools": tools, "tool_choice": "required"}, (1,))
    assert grammar is not None


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 2000003},
        {"type": "integer", "allOf": [{"multipleOf": 997}, {"multipleOf": 991}]},
        {"type": "number", "allOf": [{"multipleOf": 1}, {"multipleOf": 1e-9}]},
    ],
)
def test_a_step_that_would_take_the_engine_a_minute_is_refused_in_words(
    folders: Folders, vocabularies: dict[str, Grammars], schema: Json
) -> None:
    with pytest.raises(RequestRefused, match="multipleOf is over 10000"):
        vocabulary(folders, vocabularies, "qwen3", 1).matcher(Shaping(json_schema=json.dumps(schema)), frozenset([1]))


@pytest.mark.parametrize("step", [5, 0.01, 1000, 10])
def test_a_step_that_people_ask_for_is_followed(
    folders: Folders, vocabularies: dict[str, Grammars], step: float
) -> None:
    shaping = Shaping(json_schema=json.dumps({"type": "number", "multipleOf": step}))
    assert vocabulary(folders, vocabularies, "qwen3", 1).matcher(shaping, frozenset([1]))
