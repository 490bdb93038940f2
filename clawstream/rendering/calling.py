"""The grammars that force an answer to be tool calls in a family's format, JSON by a schema, or either. Pure.

The rules enforce a schema's types, fields, their order, enums, unions and references, but not strings' patterns,
numbers' limits and the like. JSON is written as Python writes it; the spaces after `,` and `:` may be left out. A model
may spell a mark in letters instead of sampling its token, so the text of calls is encoded again before it is read.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from clawstream.rendering.history import UNPRINTABLE

_SCALARS = {"string": "text", "integer": "int", "number": "num", "boolean": "bool", "null": '"null"'}
_ANY = "any"
_COMMA, _COLON = '"," " "?', '":" " "?'
_BASE = {
    "char": r'[^"\\\x00-\x1f] | "\\" ["\\/bfnrt]',
    "text": r'"\"" char* "\""',
    "int": '"-"? ("0" | [1-9] [0-9]{0,15})',
    "num": 'int ("." [0-9]{1,16})?',
    "bool": '"true" | "false"',
    "pair": f"text {_COLON} any",
    "object": f'"{{" (pair ({_COMMA} pair)*)? "}}"',
    "array": f'"[" (any ({_COMMA} any)*)? "]"',
    _ANY: 'object | array | text | num | bool | "null"',
}
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def literal(said: str) -> str:
    """Return the EBNF of exactly this text."""
    return f'"{"".join(_ESCAPES.get(letter, letter) for letter in said)}"'


class JsonRules:
    """Rules that grow with each schema asked for; references point into a `root`, which must outlive the rules."""

    def __init__(self) -> None:
        self._rules = dict(_BASE)
        self._names: dict[tuple[str, int], str] = {}  # by schema, and the root that its references point into

    def __str__(self) -> str:
        return "\n".join(f"{name} ::= {expression}" for name, expression in self._rules.items())

    def value(self, schema: object, root: Mapping[str, Any]) -> str:
        """Return the name of the rule for JSON of this schema."""
        if not isinstance(schema, Mapping) or not schema:
            return _ANY
        known = json.dumps(schema), id(root)
        if known not in self._names:
            # Named before it is made: a schema may hold itself.
            self._names[known] = name = f"v{len(self._names)}"
            self._rules[name] = self._made(schema, root, name)
        return self._names[known]

    def add(self, name: str, expression: str) -> str:
        """Add the rule, and return its name."""
        self._rules[name] = expression
        return name

    def _made(self, schema: Mapping[str, Any], root: Mapping[str, Any], name: str) -> str:
        choices = schema.get("anyOf") or schema.get("oneOf")
        kind = schema.get("type")
        if "$ref" in schema:
            return self.value(resolved(schema, root), root)
        if "const" in schema or isinstance(schema.get("enum"), list):
            said = schema["enum"] if "const" not in schema else [schema["const"]]
            return " | ".join(literal(json.dumps(one, ensure_ascii=False)) for one in said) or _ANY
        if isinstance(choices, list) and choices:
            return " | ".join(self.value(one, root) for one in choices)
        if isinstance(schema.get("allOf"), list):
            parts = [part for part in schema["allOf"] if isinstance(part, Mapping)]
            return self.value({key: value for part in parts for key, value in part.items()}, root)
        if isinstance(kind, list) and kind:
            return " | ".join(self.value({**schema, "type": one}, root) for one in kind)
        if isinstance(kind, str) and kind in _SCALARS:
            return _SCALARS[kind]
        if kind == "array" or "items" in schema:
            return self._array(schema, root)
        return self._object(schema, root, name) if kind == "object" or "properties" in schema else _ANY

    def _array(self, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
        item = self.value(schema.get("items"), root)
        items = f"{item} ({_COMMA} {item})*"
        return f'"[" {items if schema.get("minItems") else f"({items})?"} "]"'

    def _object(self, schema: Mapping[str, Any], root: Mapping[str, Any], name: str) -> str:
        fields = fields_of(schema)
        if fields is None:
            pair = f"text {_COLON} {self.value(schema.get('additionalProperties'), root)}"
            return f'"{{" ({pair} ({_COMMA} {pair})*)? "}}"'
        # The loop goes from the last field to the first. Both rules write this field and those behind it: `first` where
        # no field was written before, `later` where one was.
        first, later = '""', '""'
        for number, (key, part, required) in reversed([*enumerate(fields)]):
            pair = f"{literal(json.dumps(key, ensure_ascii=False))} {_COLON} {self.value(part, root)}"
            behind = self.add(f"{name}b{number}", later)
            first = f"{pair} {behind}" + ("" if required else f" | {self.add(f'{name}a{number}', first)}")
            later = f"{_COMMA} {pair} {behind}" + ("" if required else f" | {behind}")
        return f'"{{" ({first}) "}}"'


def fields_of(schema: Mapping[str, Any]) -> list[tuple[str, Any, bool]] | None:
    """Return the fields of an object: name, schema, and whether it is required; None: it may have any fields."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping) or (not properties and schema.get("additionalProperties")):
        return None
    needed = required if isinstance(required, list) else []
    return [(key, part, key in needed) for key, part in properties.items()]


def resolved(schema: object, root: Mapping[str, Any]) -> object:
    """Return the target of a schema's reference, or the schema itself without one; {} where the target is missing."""
    for _ in range(16):
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            return schema
        found: Any = root
        for step in str(schema["$ref"]).removeprefix("#").split("/")[1:]:
            found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        schema = {} if found is None else found
    return {}


# ruff: noqa: RUF001 - DeepSeek's marks


def _spelled(said: str) -> str:
    """Return the EBNF of this text letter by letter, as llguidance prefers the longest literal that fits."""
    return " ".join(map(literal, said))


def _all_but(*names: str) -> str:
    """Return the EBNF of text without the end marks `</name>` of these names; their first letters differ."""

    def no_mark(letters: str) -> str:
        """Return the EBNF of text that follows a begun mark and does not complete it with `letters`."""
        found = f"[^<{letters[-1]}]"
        for letter in reversed(letters[:-1]):
            found = f"[^<{letter}] | {literal(letter)} ({found})"
        return found

    def broken_off(letters: str) -> str:
        """Return the EBNF of any beginning of `letters`, none of them included."""
        found = f"{literal(letters[-1])}?"
        for letter in reversed(letters[:-1]):
            found = f"({literal(letter)} {found})?"
        return found

    firsts = "".join(name[0] for name in names)
    others = " | ".join(f"{literal(name[0])} ({no_mark(name[1:] + '>')})" for name in names)
    begun = f'"<" ("/" ({" | ".join(map(broken_off, names))}))?'
    return f'([^<] | ({begun})* "<" ([^</] | "/" ([^<{firsts}] | {others})))* ({begun})*'


_THOUGHT = f'{_all_but("think")} {_spelled("</think>")} "\\n"*'  # the rest of a thought that the prompt opened
_BARE = _all_but("parameter", "function", "tool_call", "arg_value")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """How a family writes calls; `ends` is the mark that ends a call, None: the answer ends there by itself.

    `begins` is how a call of the tool `NAME` begins; JSON that is no call never begins like this.
    """

    call: Callable[[JsonRules, Mapping[str, Any]], str]
    before: str = '""'
    between: str | None = None  # None: an answer has one call
    after: str = '""'
    ends: str | None = None
    begins: str = "<"


def offers_tools(options: Mapping[str, Any]) -> bool:
    """Whether the model may call tools under these options."""
    return bool(options.get("tools")) and options.get("tool_choice") != "none"


def functions_to_call(options: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the functions of which one must be called; empty where the model may answer as it likes."""
    choice = options.get("tool_choice")
    if choice in (None, "auto", "none"):
        return ()
    functions = [tool["function"] for tool in options.get("tools") or ()]
    if choice == "required":
        return functions
    return [function for function in functions if function["name"] == choice["function"]["name"]]


def wants_one_call(options: Mapping[str, Any]) -> bool:
    """Whether an answer may have one call at most."""
    return options.get("parallel_tool_calls") is False


def schema_to_follow(options: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the JSON schema of an answer that calls no tool; None: any text will do."""
    shape = options.get("response_format")
    wanted = shape.get("type") if isinstance(shape, Mapping) else None
    if wanted == "json_object":
        return {"type": "object"}
    found = shape["json_schema"].get("schema") if shape and wanted == "json_schema" else options.get("json_schema")
    schema = orjson.loads(found) if isinstance(found, str) else found
    return schema if isinstance(schema, Mapping) else None


def answer_grammar(form: str | None, options: Mapping[str, Any], *, thinks: bool) -> str:
    """Return the EBNF of an answer that makes a call or, where none is required, may be JSON by a schema.

    `thinks` says that the prompt has opened a thought, which comes first. Raises ValueError where no grammar can write
    calls in this `form`.
    """
    family = _FORMS.get(form or "")
    if offers_tools(options) and family is None:
        marked = "its calls are marked by tokens that no grammar can name"
        if functions_to_call(options):
            raise ValueError(f"can't be made to call a tool: {marked}; leave tool_choice at auto")
        raise ValueError(
            f"can't offer tools beside a JSON schema: {marked}; leave the schema out, or send tool_choice none"
        )
    try:
        return _grammar(family, options, thinks=thinks)
    except RecursionError as error:
        raise ValueError("can't be held to a schema that is nested too deeply; make it flatter") from error


def _grammar(family: _Form | None, options: Mapping[str, Any], *, thinks: bool) -> str:
    rules, ways = JsonRules(), []
    if family is not None and offers_tools(options):
        functions = functions_to_call(options) or [tool["function"] for tool in options["tools"]]
        calls = [rules.add(f"f{at}", family.call(rules, function)) for at, function in enumerate(functions)]
        single = isinstance(options.get("tool_choice"), Mapping) or wants_one_call(options) or family.between is None
        more = "" if single else f" ({family.between} call)*"
        ways.append(f"{family.before} {rules.add('call', ' | '.join(calls))}{more} {family.after}")
    schema = None if functions_to_call(options) else schema_to_follow(options)
    if schema is not None:
        ways.append(rules.value(schema, schema))
    found = f"root ::= {_THOUGHT if thinks else ''} ({' | '.join(ways)})\n{rules}"
    if found.translate(UNPRINTABLE) != found:
        raise ValueError("can't write NUL or half a character (a lone surrogate), which a tool or a schema holds")
    return found


def makes_calls(form: str | None, options: Mapping[str, Any], said: str) -> bool:
    """Whether `said`, an answer under the grammar without its thought, makes calls; if it does not, it is JSON."""
    family = _FORMS.get(form or "")
    if family is None or not offers_tools(options):
        return False
    names = (json.dumps(tool["function"]["name"], ensure_ascii=False) for tool in options["tools"])
    return said.lstrip().startswith(tuple(family.begins.replace("NAME", name) for name in names))


def call_ends(form: str | None) -> str | None:
    """Return the mark that ends a call; "" where an answer has one call anyway; None: there is no mark."""
    family = _FORMS.get(form or "")
    if family is None:
        return "" if form == "gpt-oss" else None
    return family.ends or ""


def _as_json(key: str, begin: str = "", end: str = "") -> Callable[[JsonRules, Mapping[str, Any]], str]:
    """Return the writer of a call as one object of name and arguments; `key` holds the arguments."""

    def call(rules: JsonRules, function: Mapping[str, Any]) -> str:
        named = f'{begin}{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "{key}": '
        return f"{literal(named)} {_arguments(rules, function)} {literal('}' + end)}"

    return call


def _deepseek(rules: JsonRules, function: Mapping[str, Any]) -> str:
    begin = literal(f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{function['name']}\n```json\n")
    return " ".join((begin, _arguments(rules, function), literal("\n```<｜tool▁call▁end｜>")))


def _as_fields(
    begin: tuple[str, str], end: str, field: tuple[str, str, str]
) -> Callable[[JsonRules, Mapping[str, Any]], str]:
    """Return the writer of calls with arguments between marks; `field`: before and after a name, and after a value."""

    def call(rules: JsonRules, function: Mapping[str, Any]) -> str:
        schema = _schema(function)
        written = []
        for key, part, required in fields_of(schema) or ():
            value = _bare(rules, resolved(part, schema), schema)
            one = f"{literal(field[0] + key + field[1])} {value} {_spelled(field[2])}"
            written.append(one if required else f"({one})?")
        return " ".join([literal(function["name"].join(begin)), *written, literal(end)])

    return call


def _bare(rules: JsonRules, schema: object, root: Mapping[str, Any]) -> str:
    """Return the EBNF of a value between marks: text without quotes, all else as JSON."""
    if not isinstance(schema, Mapping) or schema.get("type") not in ("string", ["string"]):
        return rules.value(schema, root)
    words = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(words, list) and words:
        return f"({' | '.join(literal(str(word)) for word in words)})"
    return f"({_BARE})"


def _schema(function: Mapping[str, Any]) -> Mapping[str, Any]:
    found = function.get("parameters")
    return found if isinstance(found, Mapping) and found else {"type": "object", "properties": {}}


def _arguments(rules: JsonRules, function: Mapping[str, Any]) -> str:
    schema = _schema(function)
    return rules.value({"type": "object", **schema}, schema)


_HERMES = _Form(
    call=_as_json("arguments", "<tool_call>\n", "\n</tool_call>"), between=literal("\n"), ends="</tool_call>"
)
_QWEN = _Form(
    call=_as_fields(
        ("<tool_call>\n<function=", ">\n"), "</function>\n</tool_call>", ("<parameter=", ">\n", "\n</parameter>\n")
    ),
    between=literal("\n"),
    ends="</tool_call>",
)
_GLM = _Form(
    call=_as_fields(("<tool_call>", "\n"), "</tool_call>", ("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")),
    before='"\\n"?',
    between=literal("\n"),
    ends="</tool_call>",
)
_DEEPSEEK = _Form(
    call=_deepseek,
    before=literal("<｜tool▁calls▁begin｜>"),
    between='"\\n"?',
    after=literal("<｜tool▁calls▁end｜>"),
    ends="<｜tool▁call▁end｜>",
)
_FORMS: Mapping[str, _Form] = {
    "qwen3": _HERMES,
    "qwen3.5": _QWEN,
    "glm-4.5": _GLM,
    "glm-5": _GLM,
    "glm-5.1": _GLM,
    "deepseek-v3": _DEEPSEEK,
    "deepseek-r1": _DEEPSEEK,
    "llama-3": _Form(call=_as_json("parameters"), begins='{"name": NAME, "parameters": '),
}
