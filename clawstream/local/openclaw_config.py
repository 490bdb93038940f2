"""What connecting OpenClaw changes in the text of its configuration, and what undoing it changes back. Pure.

Two keys change: the provider's entry, and the primary model of all agents. Each is undone as a whole, and only while it
still says what we wrote; a value that a person has changed since stays. The rest of the text stays as it is written,
comments included.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import unified_diff
from typing import Any

import json5

from clawstream.errors import ConfigError

PIECE = re.compile(
    r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[{}\[\]:,]|\s+|[^\s{}\[\]:,"'/]+|.""", re.DOTALL
)
_MAX_ANSWER_TOKENS = 8192
_ABSENT = object()
_FEWEST_CONTEXT_TOKENS = 32_768
_SECRET = re.compile(r"(?:key|token|password|passphrase|secret|authorization|credential|cookie)s?$", re.IGNORECASE)
_MARK = re.compile(r"\0[0-9a-f]{64}\0")


@dataclass(slots=True, kw_only=True)
class _Value:
    start: int
    end: int
    members: "list[_Member] | None" = None  # None: it is no object
    inner_end: int = 0  # of an object: where the last thing in it ends, be it a comment


@dataclass(slots=True, kw_only=True)
class _Member:
    name: str
    before_end: int  # where the text before it ends, be it a comment
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
    """Return `text`, which holds an object, with `value` at `keys`; missing objects on the way are made."""
    node = _root(text)
    for depth, key in enumerate(keys):
        member = _member(node, key)
        if member is None:
            for missing in reversed(keys[depth + 1 :]):
                value = {missing: value}
            return _inserted(text, node, key, value)
        node = member.value
    return text[: node.start] + _written(value, _indent(text, node.start)) + text[node.end :]


def taken_out(text: str, keys: Sequence[str]) -> str:
    """Return `text` without the member at `keys`, however often it stands there."""
    while (above := _at(_root(text), keys[:-1])) is not None and (member := _member(above, keys[-1])) is not None:
        text = _without(text, above, member)
    return text


def _without(text: str, above: _Value, member: _Member) -> str:
    members = above.members or []
    end = member.comma_end or member.value.end
    if len(members) == 1 and above.inner_end == end and member.before_end == above.start + 1:
        return f"{text[: above.start]}{{}}{text[above.end :]}"
    lead = text[member.before_end : member.start]
    trail = re.match(r"\s*", text[end:])
    assert trail is not None
    # A line end that stands only before the member stays: else a comment there would swallow what comes after.
    start = member.start if "\n" in lead and "\n" not in trail[0] else member.before_end
    number = members.index(member)
    if member.comma_end is not None or number == 0:
        return text[:start] + text[end:]
    comma_end = members[number - 1].comma_end  # the comma that set this member apart
    assert comma_end is not None
    return text[: comma_end - 1] + text[comma_end:start] + text[end:]


def _inserted(text: str, node: _Value, key: str, value: Any) -> str:
    closing = _indent(text, node.start)
    if not node.members:
        indent = f"{closing}  "
        return f"{text[: node.inner_end]}\n{indent}{_entry(key, value, indent)}\n{closing}{text[node.end - 1 :]}"
    last = node.members[-1]
    on_lines = "\n" in text[node.start + 1 : node.end - 1]
    indent = _indent(text, last.start) if on_lines else closing
    body = _entry(key, value, indent)
    comma, after = (",", "") if last.comma_end is None else ("", ",")
    between = text[last.value.end : node.inner_end]
    space = f"\n{indent}" if on_lines else " "
    return f"{text[: last.value.end]}{comma}{between}{space}{body}{after}{text[node.inner_end :]}"


def _entry(key: str, value: Any, indent: str) -> str:
    return f"{json.dumps(key, ensure_ascii=False)}: {_written(value, indent)}"


def _written(value: Any, indent: str) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False).replace("\n", f"\n{indent}")


def _indent(text: str, at: int) -> str:
    """The indentation of the line on which `at` stands."""
    before = text[text.rfind("\n", 0, at) + 1 : at]
    return before[: len(before) - len(before.lstrip())]


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
    """Reads the pieces of a text, which json5 has read without an error."""

    pieces: list[tuple[str, int, int]]
    next: int = 0
    before_end: int = 0  # where the last piece that is no space ended

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


Config = dict[str, Any]
Keys = tuple[str, ...]

_PROVIDERS: Keys = ("models", "providers")
_MODEL: Keys = ("agents", "defaults", "model")


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """The gateway as OpenClaw is told of it."""

    name: str
    base_url: str  # ends in /v1
    api_key: str
    model: str
    context_tokens: int
    thinks: bool = False  # its answers begin with what it thought

    def entry(self) -> Config:
        """The provider's entry in openclaw.json."""
        model = {
            "id": self.model,
            "name": self.model,
            "reasoning": self.thinks,
            "input": ["text"],
            "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
            "contextWindow": self.context_tokens,
            "maxTokens": min(_MAX_ANSWER_TOKENS, max(1, self.context_tokens // 4)),
        }
        return {"baseUrl": self.base_url, "apiKey": self.api_key, "api": "openai-completions", "models": [model]}


def parse(text: str, where: str) -> Config:
    """Return the configuration in `text`, JSON5. Raises ConfigError naming `where`."""
    try:
        found = read(text) if _has_content(text) else {}
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON5 ({error}). Nothing was changed. Mend it first") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{where}: {type(found).__name__}, not an object. Nothing was changed. Mend it first")
    return found


def connect(text: str, provider: Provider) -> str:
    """Return the file with the provider in it, and its model as the primary one of all agents.

    An existing entry keeps the keys that ours does not have. Raises ConfigError where a key on the way is no object.
    """
    config = parse(text, "openclaw.json")
    text = text if _has_content(text) else f"{text}{{}}\n"
    entry = _get(config, (*_PROVIDERS, provider.name))
    plain = isinstance(_get(config, _MODEL), str)
    for keys, value in (
        ((*_PROVIDERS, provider.name), (entry if isinstance(entry, dict) else {}) | provider.entry()),
        (_MODEL if plain else (*_MODEL, "primary"), f"{provider.name}/{provider.model}"),
    ):
        _refuse_blocked(config, keys)
        if not _same(_get(config, keys), value):
            text = put(text, keys, value)
    return text


def disconnect(before: str, written: str, now: str) -> str:
    """Return the file `now` without what connecting changed from `before` to `written`, where that still stands."""
    first, ours = parse(before, "before"), parse(written, "written")
    for keys in _changed(first, ours):
        if not _same(_get(parse(now, "openclaw.json"), keys), _get(ours, keys)):
            continue
        was = value_text(before, keys) if _get(first, keys) is not _ABSENT else None
        node = _at(_root(now), keys)
        if was is not None and node is not None:
            now = now[: node.start] + was + now[node.end :]
            continue
        now = taken_out(now, keys)
        for above in (keys[:depth] for depth in range(len(keys) - 1, 0, -1)):
            if _get(first, above) is _ABSENT and re.fullmatch(r"\{\s*\}", value_text(now, above) or ""):
                now = taken_out(now, above)
    return now


def kept_by_person(before: str, written: str, now: str) -> tuple[str, ...]:
    """Return the keys, with dots, that connecting changed and that a person has changed since."""
    first, ours, found = (parse(text, "openclaw.json") for text in (before, written, now))
    return tuple(
        ".".join(keys)
        for keys in _changed(first, ours)
        if _get(found, keys) is not _ABSENT and not _same(_get(found, keys), _get(ours, keys))
    )


def agents_with_own_model(config: Config) -> tuple[str, ...]:
    """Return the agents that name a model of their own, which the primary one does not replace."""
    entries = _get(config, ("agents", "entries"))
    if not isinstance(entries, dict):
        return ()
    return tuple(name for name, entry in entries.items() if isinstance(entry, dict) and entry.get("model"))


def diff(before: str, after: str, name: str) -> str:
    """Return the change from one JSON5 text to another as a unified diff, secrets hidden on both sides."""
    lines = unified_diff(
        _hidden(before).splitlines(keepends=True), _hidden(after).splitlines(keepends=True), name, name
    )
    shown = "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)
    return _MARK.sub('"***"', shown)


def too_few(context_tokens: int) -> str | None:
    """Return why OpenClaw can't work with so short a context; None: it can."""
    if context_tokens >= _FEWEST_CONTEXT_TOKENS:
        return None
    return (
        f"{context_tokens:,} tokens of context are too few for OpenClaw, whose first turn alone is 54 KB: "
        f"it will be refused or compact all the time. Serve a model with {_FEWEST_CONTEXT_TOKENS:,} or more"
    )


def _hidden(text: str) -> str:
    """Return the JSON5 in `text` with each string under a secret's key replaced by a mark: equal ones by equal marks.

    What comments say is replaced too, as it may be an old key.
    """
    out: list[str] = []
    around: list[tuple[str, bool]] = []  # each bracket that is open, and whether it stands under a secret's key
    key, secret, is_value = "", False, False
    for piece in (match[0] for match in PIECE.finditer(text)):
        if piece.startswith(("//", "/*")):
            out.append(piece[:2] + _mark(piece))
            continue
        if piece in ("{", "["):
            around.append((piece, secret))
            is_value = piece == "["
        elif piece in ("}", "]"):
            around = around[:-1]
        elif piece == ":":
            secret, is_value = secret or _SECRET.search(key) is not None, True
        elif piece == ",":
            bracket, secret = around[-1] if around else ("{", False)
            is_value = bracket == "["
        elif not is_value and not piece.isspace():
            key = piece.strip("\"'")
        out.append(_mark(piece[1:-1]) if secret and is_value and piece[0] in "\"'" else piece)
    return "".join(out)


def _mark(secret: str) -> str:
    return f"\0{hashlib.sha256(secret.encode(errors='surrogatepass')).hexdigest()}\0"


def _changed(before: Config, written: Config) -> list[Keys]:
    """The keys whose values connecting changed."""
    providers = _get(written, _PROVIDERS)
    named = [(*_PROVIDERS, name) for name in providers] if isinstance(providers, dict) else []
    model = _MODEL if isinstance(_get(written, _MODEL), str) else (*_MODEL, "primary")
    return [keys for keys in (*named, model) if not _same(_get(before, keys), _get(written, keys))]


def _get(config: object, keys: Keys) -> Any:
    for key in keys:
        if not isinstance(config, dict) or key not in config:
            return _ABSENT
        config = config[key]
    return config


def _refuse_blocked(config: Config, keys: Keys) -> None:
    for depth in range(1, len(keys)):
        inner = _get(config, keys[:depth])
        if inner is not _ABSENT and not isinstance(inner, dict):
            raise ConfigError(
                f"openclaw.json: {'.'.join(keys[:depth])} is {type(inner).__name__}, not an object. Nothing was "
                "changed. Mend it first"
            )


def _has_content(text: str) -> bool:
    pieces = (match[0] for match in PIECE.finditer(text))
    return any(not piece.isspace() and not piece.startswith(("//", "/*")) for piece in pieces)


def _same(one: object, other: object) -> bool:
    """Whether both are absent, or the same JSON: in Python alone, 1 and true are equal."""
    if one is _ABSENT or other is _ABSENT:
        return one is other
    return json.dumps(one) == json.dumps(other)
