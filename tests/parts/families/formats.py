"""How each family writes an answer: what a model of it would sample after the prompt."""

# ruff: noqa: RUF001 - DeepSeek's marks

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.parts.families.standins import DEEPSEEK_MARKS

Call = tuple[str, Mapping[str, Any]]
PARIS: Call = ("get_weather", {"city": "Paris", "days": 2})
TOKYO: Call = ("get_weather", {"city": '東京 "x"\n😀', "days": 3})
SEARCH: Call = ("search", {})
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Tells the weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Looks it up.",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One family's way to write; `write` takes reasoning, content and calls, and `end` closes the answer."""

    renderer: str = "auto"
    folder: str  # of tests.parts.families.standins
    write: Callable[[str, str, Sequence[Call]], str]
    end: str
    thinks: bool = True
    thinks_first: bool = False  # the prompt has opened the thinking already
    parallel: bool = True
    marks: tuple[str, ...]  # for answers of nothing but marks and text
    closes: bool = True  # a call is known to be over before the answer is
    ids: tuple[str, ...] = ()  # that the model itself gives to three calls


def _json(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _qwen3(reasoning: str, content: str, calls: Sequence[Call]) -> str:
    blocks = [
        f'<tool_call>\n{{"name": "{name}", "arguments": {_json(arguments)}}}\n</tool_call>' for name, arguments in calls
    ]
    thought = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
    return thought + "\n".join([content] * bool(content) + blocks)


def _qwen35(reasoning: str, content: str, calls: Sequence[Call]) -> str:
    blocks = []
    for name, arguments in calls:
        written = "".join(
            f"<parameter={key}>\n{value if isinstance(value, str) else _json(value)}\n</parameter>\n"
            for key, value in arguments.items()
        )
        blocks.append(f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>")
    return f"{reasoning}\n</think>\n\n{content}" + "\n\n" * bool(content and blocks) + "\n".join(blocks)


def _glm(reasoning: str, content: str, calls: Sequence[Call]) -> str:
    blocks = []
    for name, arguments in calls:
        written = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{value if isinstance(value, str) else _json(value)}</arg_value>\n"
            for key, value in arguments.items()
        )
        blocks.append(f"\n<tool_call>{name}\n{written}</tool_call>")
    return f"\n<think>{reasoning}</think>" + f"\n{content}" * bool(content) + "".join(blocks)


def _deepseek(reasoning: str, content: str, calls: Sequence[Call]) -> str:
    blocks = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    section = f"<｜tool▁calls▁begin｜>{''.join(blocks)}<｜tool▁calls▁end｜>" if blocks else ""
    return (f"<think>\n{reasoning}\n</think>\n\n" if reasoning else "") + content + section


def _deepseek_r1(reasoning: str, content: str, calls: Sequence[Call]) -> str:
    return f"{reasoning}\n</think>\n\n" + _deepseek("", content, calls)


def _kimi(reasoning: str, content: str, calls: Sequence[Call]) -> str:
    blocks = [
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{_json(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    ]
    section = f"<|tool_calls_section_begin|>{''.join(blocks)}<|tool_calls_section_end|>" if blocks else ""
    return (f"<think>{reasoning}</think>" if reasoning else "") + content + section


def _llama(reasoning: str, content: str, calls: Sequence[Call]) -> str:
    assert not reasoning
    return content or "".join(f'{{"name": "{name}", "parameters": {_json(arguments)}}}' for name, arguments in calls)


def _mistral(reasoning: str, content: str, calls: Sequence[Call]) -> str:
    assert not reasoning
    blocks = [
        json.dumps({"name": name, "arguments": arguments, "id": f"abcdefgh{index}"}, ensure_ascii=False)
        for index, (name, arguments) in enumerate(calls)
    ]
    return content + (f"[TOOL_CALLS][{', '.join(blocks)}]" if blocks else "")


def _mistral_spaced(reasoning: str, content: str, calls: Sequence[Call]) -> str:
    return _mistral(reasoning, content, calls).replace("[TOOL_CALLS][", "[TOOL_CALLS] [")


def _mistral_named(reasoning: str, content: str, calls: Sequence[Call]) -> str:
    assert not reasoning
    return content + "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(arguments)}" for name, arguments in calls)


def _gpt_oss(reasoning: str, content: str, calls: Sequence[Call]) -> str:
    blocks = [f"{reasoning}<|end|>"]
    if content:
        blocks.append(f"<|start|>assistant<|channel|>{'commentary' if calls else 'final'}<|message|>{content}")
        blocks.append("<|end|>" * bool(calls))
    for name, arguments in calls:
        header = f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        blocks.append(header + _json(arguments))
    return "".join(blocks)


_THINK = ("<think>", "</think>")
_CALL = ("<tool_call>", "</tool_call>")
FORMATS: Mapping[str, Format] = {
    "qwen3": Format(folder="qwen3", write=_qwen3, end="<|im_end|>", marks=(*_THINK, *_CALL, '{"name": "search"}')),
    "qwen3.5": Format(
        folder="qwen3.5",
        write=_qwen35,
        end="<|im_end|>",
        thinks_first=True,
        marks=(*_THINK, *_CALL, "<function=search>", "<parameter=q>\n1\n</parameter>", "</function>"),
    ),
    "llama-3": Format(
        folder="llama-3",
        write=_llama,
        end="<|eot_id|>",
        thinks=False,
        parallel=False,
        closes=False,
        marks=(
            "<|python_tag|>",
            "<|start_header_id|>",
            '{"name": "search", "parameters": {}}',
            "{",
            "}",
            "<|end_header_id|>",
        ),
    ),
    "deepseek-v3": Format(
        folder="deepseek-v3", write=_deepseek, end=DEEPSEEK_MARKS[0], marks=(*_THINK, *DEEPSEEK_MARKS[1:])
    ),
    "deepseek-r1": Format(
        renderer="deepseek-r1",
        folder="deepseek-r1",
        write=_deepseek_r1,
        end=DEEPSEEK_MARKS[0],
        thinks_first=True,
        marks=(*_THINK, *DEEPSEEK_MARKS[1:]),
    ),
    "glm-4.5": Format(
        folder="glm-4.5",
        write=_glm,
        end="<|user|>",
        marks=(*_THINK, *_CALL, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "search"),
    ),
    "kimi-k2": Format(
        folder="kimi-k2",
        write=_kimi,
        end="<|im_end|>",
        ids=("functions.get_weather:0", "functions.get_weather:1", "functions.search:2"),
        marks=(
            *_THINK,
            *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.search:0", "{}"),
            *("<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>"),
        ),
    ),
    "mistral": Format(
        folder="mistral",
        write=_mistral,
        end="</s>",
        thinks=False,
        ids=("abcdefgh0", "abcdefgh1", "abcdefgh2"),
        marks=("[TOOL_CALLS]", "[", '{"name": "search", "arguments": {}}', ", ", "]", *_THINK),
    ),
    # As a SentencePiece tokenizer of the family decodes it.
    "mistral, spaced": Format(
        folder="mistral",
        write=_mistral_spaced,
        end="</s>",
        thinks=False,
        ids=("abcdefgh0", "abcdefgh1", "abcdefgh2"),
        marks=("[TOOL_CALLS]", " [", '{"name": "search", "arguments": {}}', ", ", "]", *_THINK),
    ),
    "mistral, calls by name": Format(
        folder="mistral",
        write=_mistral_named,
        end="</s>",
        thinks=False,
        marks=("[TOOL_CALLS]", "search", "[ARGS]", "{}", *_THINK),
    ),
    "gpt-oss": Format(
        folder="gpt-oss",
        write=_gpt_oss,
        end="<|call|>",
        thinks_first=True,
        parallel=False,
        marks=(
            *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "assistant", "analysis", "final", "commentary"),
            *(" to=functions.search", "{}"),
        ),
    ),
}
