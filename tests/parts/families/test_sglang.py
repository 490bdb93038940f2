"""Our reading of an answer against that of SGLang's own parsers, on the same tokens."""

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from clawstream.rendering.renderer import PromptRenderer
from tests.parts.families.answering import called, stream
from tests.parts.families.formats import FORMATS, PARIS, SEARCH, TOKYO, TOOLS, Call
from tests.parts.sglang.installation import sglang_installation

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]
WAYS = ("at_once", "in_pieces")
# What SGLang calls its parsers of reasoning and of tool calls.
PARSERS: Mapping[str, tuple[str | None, str]] = {
    "qwen3": ("qwen3", "qwen25"),
    "qwen3.5": ("qwen3", "qwen3_coder"),
    "llama-3": (None, "llama3"),
    "deepseek-v3": ("deepseek-v3", "deepseekv3"),
    "deepseek-r1": ("deepseek-r1", "deepseekv3"),
    "glm-4.5": ("glm45", "glm45"),
    "kimi-k2": ("kimi_k2", "kimi_k2"),
    "mistral": (None, "mistral"),
    "mistral, spaced": (None, "mistral"),
    "mistral, calls by name": (None, "mistral"),
    "gpt-oss": ("gpt-oss", "gpt-oss"),
}
ANSWERS: Mapping[str, tuple[str, str, Sequence[Call]]] = {
    "plain": ("", "Sunny, 21 degrees.", ()),
    "thinking": ("Let me think.", "Yes.", ()),
    "a call": ("", "", (TOKYO,)),
    "a call after thought": ("I look.", "Let me look.", (PARIS,)),
    "parallel calls": ("", "Let me look.", (PARIS, TOKYO, SEARCH)),
    "half a mark": ("", "x < y, [x] and <tool", ()),
}
# Where SGLang says something else, and why we don't.
OTHERWISE: Mapping[tuple[str, str, str], str] = {
    ("qwen3", "half a mark", "in_pieces"): "it loses what may have become a mark",
    ("qwen3.5", "half a mark", "in_pieces"): "it loses what may have become a mark",
    ("glm-4.5", "half a mark", "in_pieces"): "it loses what may have become a mark",
    **{
        ("glm-4.5", answer, "at_once"): "its reasoning keeps <think>, as the family's answers begin with a newline"
        for answer in ANSWERS
    },
    **{
        ("mistral", answer, way): "it wants a space after [TOOL_CALLS], which a byte-level tokenizer does not write"
        for answer in ("a call", "parallel calls")
        for way in WAYS
    },
    ("mistral, spaced", "parallel calls", "in_pieces"): "calls after the first are content",
    ("gpt-oss", "a call after thought", "in_pieces"): "it says the text before a call twice",
    **{
        (name, "half a mark", "in_pieces"): "it drops every ] of an answer"
        for name in ("mistral", "mistral, spaced", "mistral, calls by name")
    },
}

_BY_MISTRAL = """
import json, pathlib, sys, mistral_common
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
data = pathlib.Path(mistral_common.__file__).parent / "data" / "tekken_240718.json"
request = ChatCompletionRequest(**json.load(sys.stdin))
print(json.dumps(MistralTokenizer.from_file(str(data)).encode_chat_completion(request).text))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One answer, as we and as SGLang read it."""

    name: str
    answer: str
    ours: Mapping[str, Any]
    theirs: Mapping[str, Mapping[str, Any]]


@pytest.fixture(scope="module")
def compared(renderers: dict[str, PromptRenderer]) -> list[Compared]:
    """Every answer in every format that has it."""
    asked = [
        (name, answer, renderers[name].encode(FORMATS[name].write(*written) + _closing(name, written[2])))
        for name in FORMATS
        for answer, written in ANSWERS.items()
        if _has(name, *written)
    ]
    said = _asked([_question(renderers[name], name, ids) for name, _, ids in asked])
    return [
        Compared(name=name, answer=answer, ours=_ours(renderers[name], ids), theirs=theirs)
        for (name, answer, ids), theirs in zip(asked, said, strict=True)
    ]


def test_sglang_reads_the_same_answers(compared: list[Compared]) -> None:
    assert {one.name for one in compared} == set(FORMATS)
    differing = {
        (one.name, one.answer, way): f"ours {one.ours}, theirs {_normal(one.theirs[way])}"
        for one in compared
        for way in WAYS
        if _normal(one.theirs[way]) != one.ours
    }
    assert differing.keys() == OTHERWISE.keys(), "\n".join(f"{key}: {both}" for key, both in differing.items())


def test_mistral_s_template_writes_what_its_makers_package_writes(renderers: dict[str, PromptRenderer]) -> None:
    call = {"id": "abcdefgh0", "type": "function", "function": {"name": "search", "arguments": '{"a": 1}'}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Paris?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "Sunny.", "tool_call_id": "abcdefgh0", "name": "search"},
        {"role": "assistant", "content": "Sunny it is."},
        {"role": "user", "content": "And Tokyo?"},
    ]
    asked = json.dumps({"model": "m", "messages": messages, "tools": TOOLS})
    command = [str(sglang_installation().python), "-c", _BY_MISTRAL]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, check=True, timeout=120)
    renderer = renderers["mistral"]
    assert renderer.decode(renderer.prompt_ids(messages, {"tools": TOOLS})) == json.loads(done.stdout)


def _has(name: str, reasoning: str, _content: str, calls: Sequence[Call]) -> bool:
    form = FORMATS[name]
    return (form.thinks or not reasoning) and (form.parallel or len(calls) < 2)


def _closing(name: str, calls: Sequence[Call]) -> str:
    """SGLang cuts the token that an answer ends with, save that of GPT-OSS's calls."""
    return "<|call|>" if name == "gpt-oss" and calls else ""


def _question(renderer: PromptRenderer, name: str, ids: Sequence[int]) -> dict[str, Any]:
    reasoning_parser, tool_parser = PARSERS[name]
    return {
        "reasoning_parser": reasoning_parser,
        "opened": FORMATS[name].thinks_first,
        "tool_parser": tool_parser,
        # Its prompt for GPT-OSS leaves the channel to the model, ours opens it.
        "pieces": ["<|channel|>analysis<|message|>"] * (name == "gpt-oss") + list(_pieces(renderer, ids)),
        "tools": TOOLS,
    }


def _pieces(renderer: PromptRenderer, ids: Sequence[int]) -> Iterator[str]:
    """The text that each token adds, whole characters only, as an engine streams it."""
    said = ""
    for end in range(1, len(ids) + 1):
        text = renderer.decode(ids[:end])
        if not text.endswith("\ufffd") and text != said:
            yield text[len(said) :]
            said = text


def _asked(questions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What SGLang says to each."""
    command = [str(sglang_installation().python), str(Path(__file__).with_name("sglang_parsers.py"))]
    lines = "".join(json.dumps(question) + "\n" for question in questions)
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def _ours(renderer: PromptRenderer, ids: Sequence[int]) -> dict[str, Any]:
    message = stream(renderer, ids)[0].message()
    reasoning = message.get("reasoning_content", "")
    return {"content": message["content"] or "", "reasoning": reasoning, "calls": called(message)}


def _normal(said: Mapping[str, Any]) -> dict[str, Any]:
    """Without the outer white space, and with arguments read."""
    if "error" in said:
        return dict(said)
    calls = [(name, json.loads(arguments)) for name, arguments in said["calls"]]
    return {"content": said["content"].strip(), "reasoning": said["reasoning"].strip(), "calls": calls}
