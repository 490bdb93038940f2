"""A client's messages and options as a family's template takes them. Pure.

Messages that a template can't take are rewritten, never refused; equal histories get equal ids of calls. What a
template takes is found by trying it, as checkpoints of one family differ. A request may set only variables that the
model's own template names: `apply_chat_template` has other arguments, which replace the template or pad the prompt.
"""

import hashlib
import inspect
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from clawstream.conversation.messages import Message, role_of, text_of
from clawstream.conversation.pictures import END
from clawstream.errors import UnrenderableRequest

_NINE = re.compile(r"[a-zA-Z0-9]{9}")
_NUMBERED = re.compile(r"functions\.[^:]+:\d+")
UNPRINTABLE = {0: "\ufffd"} | dict.fromkeys(range(0xD800, 0xE000), "\ufffd")
_UNMARKED = UNPRINTABLE | {ord(END): "\ufffd"}  # where no picture can be shown, nothing may become one
_MAY_SHOW = ("user", "tool")
_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
THINKING = "enable_thinking"
_FIELD = "chat_template_kwargs"
_FUNCTIONS = frozenset({"raise_exception", "strftime_now"})  # transformers' own
_MAX_OPTIONS = 16
_MAX_CHARACTERS = 4096
_MAX_NUMBER = 2**20


def fitted(messages: Sequence[Mapping[str, Any]], family: str) -> list[Mapping[str, Any]]:
    """Return `messages` with the ids of calls and the names of results in the family's form; most families take any."""
    form = _FORMS.get(family)
    if form is None:
        return list(messages)
    known: dict[str, tuple[str, str]] = {}  # by given id: the fitting id, and the tool's name
    found: list[Mapping[str, Any]] = []
    for message in messages:
        if message.get("tool_calls"):
            calls = [_fitted_call(call, form, known) for call in message["tool_calls"]]
            found.append({**message, "tool_calls": calls})
        elif message["role"] == "tool":
            given = str(message.get("tool_call_id") or "")
            fitting, name = known.get(given) or (form(given, "tool", len(known)), "tool")
            named = {"name": message.get("name") or name} if family == "gpt-oss" else {}
            found.append({**message, **named, "tool_call_id": fitting})
        else:
            found.append(message)
    return found


def _fitted_call(call: Mapping[str, Any], form: "_Form", known: dict[str, tuple[str, str]]) -> dict[str, Any]:
    given, name = str(call.get("id") or ""), str(call["function"]["name"])
    fitting = form(given, name, len(known))
    known[given] = (fitting, name)
    return {**call, "id": fitting}


def _nine_letters(given: str, name: str, index: int) -> str:
    if _NINE.fullmatch(given):
        return given
    return hashlib.sha256((given or f"{name}:{index}").encode()).hexdigest()[:9]


def _numbered(given: str, name: str, index: int) -> str:
    return given if _NUMBERED.fullmatch(given) else f"functions.{name}:{index}"


_Form = Callable[[str, str, int], str]
_FORMS: Mapping[str, _Form] = {
    "mistral": _nine_letters,
    "kimi-k2": _numbered,
    "kimi-k2.5": _numbered,
    "gpt-oss": lambda given, _name, _index: given,  # a result names its call by the tool's name alone
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateCapabilities:
    """Which sequences of plain text messages a template takes."""

    later_system: bool  # a system message behind other messages
    joined: frozenset[str]  # roles whose messages have to be joined where two follow one another


def probed(text_of_prompt: Callable[[Sequence[Message], Sequence[Any] | None], str | None]) -> TemplateCapabilities:
    """Return what a template takes; `text_of_prompt` renders messages and tools, and gives None where it refuses.

    A template takes a message if its prompt shows the message, in its place.
    """

    def takes(*roles: str, tools: Sequence[Any] | None = None) -> bool:
        texts = [f"said{number}" for number in range(len(roles))]
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
        prompt = text_of_prompt(messages, tools)
        starts = [prompt.find(text) for text in texts] if prompt is not None else [-1]
        return -1 not in starts and starts == sorted(starts)

    rows = {
        "system": takes("system", "system", "user") and takes("system", "system", "user", tools=[_TOOL]),
        "user": takes("user", "user"),
    }
    return TemplateCapabilities(
        later_system=takes("user", "assistant", "system", "user"),
        joined=frozenset(role for role, taken in rows.items() if not taken),
    )


def placed(messages: Sequence[Message], takes: TemplateCapabilities) -> list[Message]:
    """Return the messages, joined where they must be; a system message that may not stand there becomes a user's."""
    found: list[Message] = []
    for message in messages:
        before = found[-1]["role"] if found else "system"
        role = message["role"]
        if role == "system" and before != "system" and not takes.later_system:
            role = "user"
        if found and role == before and role in takes.joined:
            found[-1] = {**found[-1], "content": f"{found[-1]['content']}\n\n{message['content']}"}
        else:
            found.append({**message, "role": role})
    return found


def shown(message: Message) -> Message:
    """The message as templates expect it: text content, system for developer, no unprintable characters.

    Marks of pictures stay in the texts of people and tools alone.
    """
    role = role_of(message)
    printed = UNPRINTABLE if role in _MAY_SHOW else _UNMARKED
    found: dict[str, Any] = {"role": role, "content": text_of(message).translate(printed)}
    for key in ("reasoning_content", "name", "tool_call_id"):
        if isinstance(message.get(key), str):
            found[key] = message[key].translate(_UNMARKED)
    if message.get("tool_calls"):
        found["tool_calls"] = [_shown_call(call) for call in message["tool_calls"]]
    return found


def _shown_call(call: Mapping[str, Any]) -> dict[str, Any]:
    printable = unmarked(call)
    arguments = printable["function"].get("arguments") or "{}"
    if isinstance(arguments, str):
        arguments = _printable_json(arguments)
    return {**printable, "function": {**printable["function"], "arguments": arguments}}


def _printable_json(text: str) -> str:
    """Return the JSON text, changed only if it escapes unprintable characters."""
    if "\\u" not in text:
        return text
    with suppress(ValueError, RecursionError):
        value = json.loads(text)
        if (printable := unmarked(value)) != value:
            return json.dumps(printable, ensure_ascii=False)
    return text


def unmarked(value: Any) -> Any:
    """Return a JSON value without unprintable characters and without marks of pictures."""
    if isinstance(value, str):
        return value.translate(_UNMARKED)
    if isinstance(value, Mapping):
        return {unmarked(key): unmarked(item) for key, item in value.items()}
    return [unmarked(item) for item in value] if isinstance(value, list) else value


class _Generation(Extension):
    """Transformers' block that marks an assistant's text; it renders as its body."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Return the statements up to the block's end."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def template_variables(
    template: str | Mapping[str, str] | None, special_tokens: Iterable[str], apply: Callable[..., Any]
) -> frozenset[str]:
    """Return the names that a request may set: those that the template looks up and its renderer does not provide.

    `apply` renders the template; its arguments and the tokenizer's special tokens are not for a client to set. A
    template that can't be read has no variables.
    """
    environment = ImmutableSandboxedEnvironment(extensions=[_Generation, "jinja2.ext.loopcontrols"])
    texts = template.values() if isinstance(template, Mapping) else [template or ""]
    found: set[str] = set()
    for text in texts:
        with suppress(TemplateError):
            found |= find_undeclared_variables(environment.parse(text))
    return frozenset(found - _FUNCTIONS - {"messages", *special_tokens, *inspect.signature(apply).parameters})


def template_options(asked: object, variables: frozenset[str] | None) -> Mapping[str, Any]:
    """Return the part of `asked` for a template that has these `variables`; None: the family itself checks names.

    A switch for thinking is dropped where the template has none, since clients send it to every model. Raises
    UnrenderableRequest for any other unknown name, and for values that are not plain or too large.
    """
    if asked is None:
        return {}
    if not isinstance(asked, Mapping):
        raise UnrenderableRequest(f"{_FIELD} is not an object; send one, or leave it out")
    if not isinstance(asked.get(THINKING, True), bool):
        raise UnrenderableRequest(f"{_FIELD}.{THINKING} is not a boolean; send true or false")
    if len(asked) > _MAX_OPTIONS:
        raise UnrenderableRequest(f"{_FIELD} has {len(asked)} names; expected at most {_MAX_OPTIONS}")
    unknown = sorted(asked.keys() - variables - {THINKING}) if variables is not None else []
    if unknown and variables is not None:
        names = ", ".join(sorted(variables)) or "none"
        raise UnrenderableRequest(
            f"{_FIELD}.{unknown[0][:50]} is no variable of the model's own template, which has: {names}"
        )
    for name, value in asked.items():
        problem = _problem(value)
        if problem is not None:
            raise UnrenderableRequest(f"{_FIELD}.{name[:50]} is {problem}")
    return {name: value for name, value in asked.items() if variables is None or name in variables}


def _problem(value: object) -> str | None:
    """Return why a template may not get the value; None: it may."""
    match value:
        case None | bool():
            return None
        case int() | float():
            fits = math.isfinite(value) and abs(value) <= _MAX_NUMBER
            return None if fits else f"a number beyond {_MAX_NUMBER}; expected one from -{_MAX_NUMBER} to {_MAX_NUMBER}"
        case str():
            if len(value) > _MAX_CHARACTERS:
                return f"{len(value)} characters long; expected at most {_MAX_CHARACTERS}"
            if value != value.translate(UNPRINTABLE):
                return "text with NUL or half a character (a lone surrogate), which no prompt can contain"
            return None
    return "neither text, a number, true, false nor null"
