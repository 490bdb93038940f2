"""What connecting OpenClaw changes in its configuration, and what undoing it changes back. Pure.

Two keys change: the provider's entry, and the primary model of all agents. Each is undone as a whole, and only while it
still says what we wrote: what a person has changed since is theirs, and stays. The rest of the text stays as it is
written, comments and all.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from difflib import unified_diff
from typing import Any

from clawstream.cli.openclaw import json5_text
from clawstream.errors import ConfigError

Config = dict[str, Any]
Keys = tuple[str, ...]

_PROVIDERS: Keys = ("models", "providers")
_MODEL: Keys = ("agents", "defaults", "model")
_MAX_ANSWER_TOKENS = 8192
_ABSENT = object()
_FEWEST_CONTEXT_TOKENS = 32_768
_SECRET = re.compile(r"(?:key|token|password|passphrase|secret|authorization|credential|cookie)s?$", re.IGNORECASE)
_MARK = re.compile(r"\0[0-9a-f]{64}\0")


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
        found = json5_text.read(text) if _pieces_beside_comments(text) else {}
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON5 ({error}). Nothing was changed. Mend it first") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{where}: {type(found).__name__}, not an object. Nothing was changed. Mend it first")
    return found


def connect(text: str, provider: Provider) -> str:
    """Return the file with the provider in it, and its model as the primary one of all agents.

    Keys that an entry of that name has and ours has not are kept. Raises ConfigError where the way is blocked.
    """
    config = parse(text, "openclaw.json")
    text = text if _pieces_beside_comments(text) else f"{text}{{}}\n"
    entry = _get(config, (*_PROVIDERS, provider.name))
    plain = isinstance(_get(config, _MODEL), str)
    for keys, value in (
        ((*_PROVIDERS, provider.name), (entry if isinstance(entry, dict) else {}) | provider.entry()),
        (_MODEL if plain else (*_MODEL, "primary"), f"{provider.name}/{provider.model}"),
    ):
        _refuse_blocked(config, keys)
        if not _same(_get(config, keys), value):
            text = json5_text.put(text, keys, value)
    return text


def disconnect(before: str, written: str, now: str) -> str:
    """Return the file `now` without what connecting changed from `before` to `written`, where that still stands."""
    first, ours = parse(before, "before"), parse(written, "written")
    for keys in _changed(first, ours):
        if not _same(_get(parse(now, "openclaw.json"), keys), _get(ours, keys)):
            continue
        was = json5_text.value_text(before, keys) if _get(first, keys) is not _ABSENT else None
        if was is not None:
            now = json5_text.put_text(now, keys, was)
            continue
        now = json5_text.taken_out(now, keys)
        for above in (keys[:depth] for depth in range(len(keys) - 1, 0, -1)):
            if _get(first, above) is _ABSENT and json5_text.is_empty_object(now, above):
                now = json5_text.taken_out(now, above)
    return now


def kept_by_person(before: str, written: str, now: str) -> tuple[str, ...]:
    """Return the keys that connecting changed and a person has changed since, dotted."""
    first, ours, found = (parse(text, "openclaw.json") for text in (before, written, now))
    return tuple(
        ".".join(keys)
        for keys in _changed(first, ours)
        if _get(found, keys) is not _ABSENT and not _same(_get(found, keys), _get(ours, keys))
    )


def agents_of_their_own_mind(config: Config) -> tuple[str, ...]:
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

    So is what a comment says: it may be an old key.
    """
    out: list[str] = []
    around: list[tuple[str, bool]] = []  # each bracket that is open, and whether it stands under a secret's key
    key, secret, is_value = "", False, False
    for piece in (match[0] for match in json5_text.PIECE.finditer(text)):
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


def _pieces_beside_comments(text: str) -> bool:
    pieces = (match[0] for match in json5_text.PIECE.finditer(text))
    return any(not piece.isspace() and not piece.startswith(("//", "/*")) for piece in pieces)


def _same(one: object, other: object) -> bool:
    """Whether both are absent, or the same JSON: in Python alone, 1 and true are equal."""
    if one is _ABSENT or other is _ABSENT:
        return one is other
    return json.dumps(one) == json.dumps(other)
