"""Changes of single members in the text of a JSON5 object; every other character stays, comments too. Pure."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import json5

PIECE = re.compile(
    r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[{}\[\]:,]|\s+|[^\s{}\[\]:,"'/]+|.""", re.DOTALL
)


@dataclass(slots=True, kw_only=True)
class _Value:
    start: int
    end: int
    members: "list[_Member] | None" = None  # None: it is no object
    inner_end: int = 0  # of an object: where the last thing in it ends, a comment too


@dataclass(slots=True, kw_only=True)
class _Member:
    name: str
    before_end: int  # where what stands before it ends, a comment too
    start: int
    value: _Value
    comma_end: int | None = None  # None: no comma follows


def read(text: str) -> Any:
    """Return what `text` says, JSON5; raises ValueError or RecursionError."""
    try:
        return json.loads(text)  # a thousand times as fast
    except ValueError:
        return json5.loads(text)


def value_text(text: str, keys: Sequence[str]) -> str | None:
    """Return the value at `keys` as it is written; None where there is none."""
    found = _at(_root(text), keys)
    return None if found is None else text[found.start : found.end]


def put(text: str, keys: Sequence[str], value: Any) -> str:
    """Return `text`, which holds an object, with `value` at `keys`; objects on the way that are missing are made."""
    node = _root(text)
    for depth, key in enumerate(keys):
        member = _member(node, key)
        if member is None:
            for missing in reversed(keys[depth + 1 :]):
                value = {missing: value}
            return _inserted(text, node, key, value)
        node = member.value
    return text[: node.start] + _written(value, _indent(text, node.start)) + text[node.end :]


def put_text(text: str, keys: Sequence[str], value: str) -> str:
    """Return `text` with a value, as it is written, in place of the one at `keys`."""
    node = _at(_root(text), keys)
    assert node is not None
    return text[: node.start] + value + text[node.end :]


def taken_out(text: str, keys: Sequence[str]) -> str:
    """Return `text` without the member at `keys`, however often it stands there."""
    while True:
        above = _at(_root(text), keys[:-1])
        member = None if above is None else _member(above, keys[-1])
        if above is None or above.members is None or member is None:
            return text
        text = _without(text, above, above.members, member)


def is_empty_object(text: str, keys: Sequence[str]) -> bool:
    """Whether an object without members, comments or else stands at `keys`."""
    return re.fullmatch(r"\{\s*\}", value_text(text, keys) or "") is not None


def _without(text: str, above: _Value, members: list[_Member], member: _Member) -> str:
    end = member.comma_end or member.value.end
    if len(members) == 1 and above.inner_end == end and member.before_end == above.start + 1:
        return f"{text[: above.start]}{{}}{text[above.end :]}"
    lead = text[member.before_end : member.start]
    trail = re.match(r"\s*", text[end:])
    assert trail is not None
    # Where only the space before it ends a line, a comment there would swallow what comes after.
    start = member.start if "\n" in lead and "\n" not in trail[0] else member.before_end
    number = members.index(member)
    if member.comma_end is not None or number == 0:
        return text[:start] + text[end:]
    comma_end = members[number - 1].comma_end  # it was there for this member
    assert comma_end is not None
    return text[: comma_end - 1] + text[comma_end:start] + text[end:]


def _inserted(text: str, node: _Value, key: str, value: Any) -> str:
    members = node.members or []
    inner = text[node.start + 1 : node.end - 1]
    closing = _indent(text, node.start)
    if not members:
        indent = f"{closing}  "
        body = f"{json.dumps(key, ensure_ascii=False)}: {_written(value, indent)}"
        return f"{text[: node.inner_end]}\n{indent}{body}\n{closing}{text[node.end - 1 :]}"
    last = members[-1]
    on_lines = "\n" in inner
    indent = _indent(text, last.start) if on_lines else closing
    body = f"{json.dumps(key, ensure_ascii=False)}: {_written(value, indent)}"
    comma, after = (",", "") if last.comma_end is None else ("", ",")
    between = text[last.value.end : node.inner_end]
    space = f"\n{indent}" if on_lines else " "
    return f"{text[: last.value.end]}{comma}{between}{space}{body}{after}{text[node.inner_end :]}"


def _written(value: Any, indent: str) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False).replace("\n", f"\n{indent}")


def _indent(text: str, at: int) -> str:
    """The space that the line begins with on which `at` stands."""
    found = re.match(r"[^\S\n]*", text[text.rfind("\n", 0, at) + 1 : at])
    assert found is not None
    return found[0]


def _member(node: _Value, key: str) -> _Member | None:
    """The one that counts: the last of that name."""
    return next((one for one in reversed(node.members or []) if one.name == key), None)


def _at(node: _Value, keys: Sequence[str]) -> _Value | None:
    for key in keys:
        member = _member(node, key)
        if member is None:
            return None
        node = member.value
    return node


@dataclass(slots=True)
class _Json5Reader:
    """Over the pieces of a text that json5 has read without an error."""

    pieces: list[tuple[str, int, int]]
    next: int = 0
    before_end: int = field(default=0)  # where the last piece that is no space ended

    def skip(self) -> None:
        while self.next < len(self.pieces):
            piece, _, end = self.pieces[self.next]
            if not piece.isspace():
                if not piece.startswith(("//", "/*")):
                    return
                self.before_end = end
            self.next += 1

    def peek(self) -> str:
        self.skip()
        return self.pieces[self.next][0]

    def take(self) -> tuple[str, int, int]:
        self.skip()
        found = self.pieces[self.next]
        self.next += 1
        self.before_end = found[2]
        return found

    def value(self) -> _Value:
        piece, start, end = self.take()
        if piece == "{":
            return self.object(start)
        if piece == "[":
            while self.peek() != "]":
                if self.peek() == ",":
                    self.take()
                else:
                    self.value()
            end = self.take()[2]
        return _Value(start=start, end=end)

    def object(self, start: int) -> _Value:
        members: list[_Member] = []
        while self.peek() != "}":
            before_end = self.before_end
            key, key_start, _ = self.take()
            self.take()  # the colon
            member = _Member(name=_name(key), before_end=before_end, start=key_start, value=self.value())
            if self.peek() == ",":
                member.comma_end = self.take()[2]
            members.append(member)
        inner_end = self.before_end
        return _Value(start=start, end=self.take()[2], members=members, inner_end=inner_end)


def _root(text: str) -> _Value:
    return _Json5Reader([(match[0], match.start(), match.end()) for match in PIECE.finditer(text)]).value()


def _name(key: str) -> str:
    """What a key says, quoted or not."""
    [name] = [key] if key.isidentifier() else read(f"{{{key}: 0}}")
    return str(name)
