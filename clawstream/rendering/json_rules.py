"""A JSON schema as rules of a grammar, in the EBNF that SGLang reads. Pure.

The rules keep a schema's types, fields, their order, enums, unions and references. They drop strings' patterns,
numbers' limits and the like, so JSON that follows the rules may still violate the schema. JSON is written as Python
writes it; the spaces after `,` and `:` may be left out.
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
        # From the last field to the first: the rest as the first field, and as one behind another field.
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
    """Return the target of a schema's reference, or the schema itself without one; {} where the target is missing."""
    for _ in range(16):
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            return schema
        found: Any = root
        for step in str(schema["$ref"]).removeprefix("#").split("/")[1:]:
            found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        schema = {} if found is None else found
    return {}
