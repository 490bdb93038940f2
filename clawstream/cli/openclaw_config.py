"""What connecting OpenClaw changes in its configuration, and what undoing it changes back. Pure.

Two keys change: the provider's entry, and the primary model of all agents. Each is undone as a whole, and only while it
still says what we wrote: what a person has changed since is theirs, and stays.

OpenClaw reads JSON5 and writes plain JSON, without comments; so do we.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import unified_diff
from typing import Any

import json5

from clawstream.errors import ConfigError

Config = dict[str, Any]
Keys = tuple[str, ...]

_PROVIDERS: Keys = ("models", "providers")
_MODEL: Keys = ("agents", "defaults", "model")
_MAX_ANSWER_TOKENS = 8192
_ABSENT = object()
_FEWEST_CONTEXT_TOKENS = 32_768
_SECRETS = r"(?:key|token|password|passphrase|secret|authorization|credential|cookie)s?"
_SECRET = re.compile(rf"{_SECRETS}$", re.IGNORECASE)
_IN_COMMENT = re.compile(rf"({_SECRETS}[\"']?\s*[:=]\s*)([^\n]+)", re.IGNORECASE)
_PIECE = re.compile(
    r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[{}\[\]:,]|\s+|[^\s{}\[\]:,"'/]+|.""", re.DOTALL
)
_MARK = re.compile(r"\0[0-9a-f]{64}\0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """The gateway as OpenClaw is told of it."""

    name: str
    base_url: str  # ends in /v1
    api_key: str
    model: str
    context_tokens: int

    def entry(self) -> Config:
        """The provider's entry in openclaw.json."""
        model = {
            "id": self.model,
            "name": self.model,
            "reasoning": False,
            "input": ["text"],
            "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
            "contextWindow": self.context_tokens,
            "maxTokens": min(_MAX_ANSWER_TOKENS, max(1, self.context_tokens // 4)),
        }
        return {"baseUrl": self.base_url, "apiKey": self.api_key, "api": "openai-completions", "models": [model]}


def parse(text: str, where: str) -> Config:
    """Return the configuration in `text`, JSON5. Raises ConfigError naming `where`."""
    try:
        found = json5.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON5 ({error}). Nothing was changed. Mend it first") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{where}: {type(found).__name__}, not an object. Nothing was changed. Mend it first")
    return found


def render(config: Config) -> str:
    """Return the file that says `config`, in plain JSON, keys in their order."""
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"


def is_plain_json(text: str) -> bool:
    """Whether nothing but layout is lost when `text` is rendered anew: no comments, nothing that only JSON5 has."""
    try:
        json.loads(text)
    except ValueError:
        return not text.strip()
    return True


def connect(config: Config, provider: Provider) -> Config:
    """Return `config` with the provider in it, and its model as the primary one of all agents.

    Keys that an entry of that name has and ours has not are kept. Raises ConfigError where the way is blocked.
    """
    entry = _get(config, (*_PROVIDERS, provider.name))
    kept = entry if isinstance(entry, dict) else {}
    config = _put(config, (*_PROVIDERS, provider.name), kept | provider.entry())
    plain = isinstance(_get(config, _MODEL), str)
    return _put(config, _MODEL if plain else (*_MODEL, "primary"), f"{provider.name}/{provider.model}")


def disconnect(before: Config, written: Config, now: Config) -> Config:
    """Return `now` without what connecting changed from `before` to `written`, where it still stands as written."""
    for keys in _changed(before, written):
        if _same(_get(now, keys), _get(written, keys)):
            now = _restore(now, keys, before)
    return now


def kept_by_person(before: Config, written: Config, now: Config) -> tuple[str, ...]:
    """Return the keys that connecting changed and a person has changed since, dotted."""
    return tuple(
        ".".join(keys)
        for keys in _changed(before, written)
        if _get(now, keys) is not _ABSENT and not _same(_get(now, keys), _get(written, keys))
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

    Of a comment that names one, the rest of the line is hidden: it may be an old key.
    """
    out: list[str] = []
    around: list[tuple[str, bool]] = []  # each bracket that is open, and whether it stands under a secret's key
    key, secret, is_value = "", False, False
    for piece in (match[0] for match in _PIECE.finditer(text)):
        if piece.startswith(("//", "/*")):
            out.append(_IN_COMMENT.sub(lambda found: found[1] + _mark(found[2]), piece))
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


def _put(config: Mapping[str, Any], keys: Keys, value: object, above: Keys = ()) -> Config:
    key, *rest = keys
    if not rest:
        return {**config, key: value}
    inner = config.get(key, {})
    if not isinstance(inner, dict):
        raise ConfigError(
            f"openclaw.json: {'.'.join((*above, key))} is {type(inner).__name__}, not an object. Nothing was changed. "
            "Mend it first"
        )
    return {**config, key: _put(inner, tuple(rest), value, (*above, key))}


def _restore(config: Config, keys: Keys, before: object) -> Config:
    """Return `config` with `keys` as in `before`; objects that are then empty and were not there go too."""
    key, *rest = keys
    earlier = before.get(key, _ABSENT) if isinstance(before, dict) else _ABSENT
    if not rest:
        value = earlier
    else:
        value = _restore(config[key], tuple(rest), earlier)
        if not value and earlier is _ABSENT:
            value = _ABSENT
    if value is _ABSENT:
        return {name: item for name, item in config.items() if name != key}
    return {**config, key: value}


def _same(one: object, other: object) -> bool:
    """Whether both are absent, or the same JSON: in Python alone, 1 and true are equal."""
    if one is _ABSENT or other is _ABSENT:
        return one is other
    return json.dumps(one) == json.dumps(other)
