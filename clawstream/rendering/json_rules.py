"""A JSON schema as rules of a grammar, in the EBNF that SGLang reads. Pure.

What a schema says of types, fields, their order, enums, unions and references is kept; of strings' patterns, numbers'
limits and the like nothing is, so that what follows the rules may still be wrong by the schema, as a model's JSON may
always be. JSON is written as Python writes it; the spaces after `,` and `:` may be left out.
"""

import json
from collections.abc import Mapping
from typing import Any

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
    """Return what matches this text and no other."""
    return f'"{"".join(_ESCAPES.get(letter, letter) for letter in said)}"'


class JsonRules:
    """Rules that grow as schemas are asked for; a `root` is what references point into, and outlives the rules."""

    def __init__(self) -> None:
        self._rules = dict(_BASE)
        self._names: dict[tuple[str, int], str] = {}  # by schema, and the root that its references point into

    def __str__(self) -> str:
        return "\n".join(f"{name} ::= {expression}" for name, expression in self._rules.items())

    def value(self, schema: object, root: Mapping[str, Any]) -> str:
        """Return the name of what matches JSON of this schema."""
        if not isinstance(schema, Mapping) or not schema:
            return _ANY
        known = json.dumps(schema), id(root)
        if known not in self._names:
            # Named before it is made: a schema may hold itself.
            self._names[known] = name = f"v{len(self._names)}"
            self._rules[name] = self._made(schema, root, name)
        return self._names[known]

    def add(self, name: str, expression: str) -> str:
        """Return the name, under which the expression stands from now on."""
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
        # From the last to the first: what may follow at the beginning, and behind another field.
        first, later = '""', '""'
        for number, (key, part, required) in reversed([*enumerate(fields)]):
            pair = f"{literal(json.dumps(key, ensure_ascii=False))} {_COLON} {self.value(part, root)}"
            behind = self.add(f"{name}b{number}", later)
            first = f"{pair} {behind}" + ("" if required else f" | {self.add(f'{name}a{number}', first)}")
            later = f"{_COMMA} {pair} {behind}" + ("" if required else f" | {behind}")
        return f'"{{" ({first}) "}}"'


def fields_of(schema: Mapping[str, Any]) -> list[tuple[str, Any, bool]] | None:
    """Return the fields of an object: name, schema, and whether it is required; None: any may stand there."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping) or (not properties and schema.get("additionalProperties")):
        return None
    needed = required if isinstance(required, list) else []
    return [(key, part, key in needed) for key, part in properties.items()]


def resolved(schema: object, root: Mapping[str, Any]) -> object:
    """Return what a schema's reference points at, the schema itself where it has none; {} where nothing is there."""
    for _ in range(16):
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            return schema
        found: Any = root
        for step in str(schema["$ref"]).removeprefix("#").split("/")[1:]:
            found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        schema = {} if found is None else found
    return {}
