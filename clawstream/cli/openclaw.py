"""`clawstream openclaw`: let OpenClaw on this machine talk to the gateway, and let it go again.

While OpenClaw is connected, two files lie beside openclaw.json: `openclaw.json.before-clawstream` is the file as it was
(absent where there was none), and `openclaw.json.clawstream` is the file as we wrote it.
"""

import json
import os
import shlex
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from clawstream.cli.process import Context, gateway_url
from clawstream.config import GatewaySettings, Settings
from clawstream.errors import ConfigError

if TYPE_CHECKING:
    from clawstream.local.openclaw_config import Provider

openclaw = typer.Typer(name="openclaw", help="Let OpenClaw on this machine talk to the gateway.", no_args_is_help=True)
_ANSWERS_WITHIN_S = 5.0
_DEFAULT_CONTEXT_TOKENS = 32_768  # where the gateway does not answer; a later connect corrects it
_NO_KEY = "none"  # OpenClaw wants a key, and a gateway without keys ignores it


@openclaw.command()
def connect(
    context: typer.Context,
    write: Annotated[bool, typer.Option("--write", help="Make the change.")] = False,
    provider: Annotated[str, typer.Option(help="The name of the provider in openclaw.json.")] = "clawstream",
    url: Annotated[str | None, typer.Option(help="Of the gateway; by default as in the settings.")] = None,
    key: Annotated[str | None, typer.Option(help="From `clawstream keys add`; by default the settings'.")] = None,
) -> None:
    """Show the change to openclaw.json that makes the gateway's model the primary one; with --write, make it."""
    from clawstream.local import openclaw_config as config

    gateway = _provider(Context.of(context).settings(), name=provider, url=url, key=key)
    file = _OpenClawFile.found()
    before = file.connection()
    base = file.text if before is None else config.disconnect(before.first_text or "", before.written_text, file.text)
    text = config.connect(base, gateway)
    if before is not None and config.parse(text, "") == config.parse(file.text, ""):
        _say(f"{file.path} is connected to {gateway.base_url} already; nothing to do")
        return
    typer.echo(config.diff(file.text, text, str(file.path)), nl=False)
    if (warning := config.too_few(gateway.context_tokens)) is not None:
        _say(warning)
    for agent in config.agents_with_own_model(config.parse(text, str(file.path))):
        _say(f"agent {agent} names a model of its own (agents.entries.{agent}.model) and keeps it")
    if not write:
        _say("nothing was changed: add --write")
        return
    file.keep(first=base if before is None or before.was_edited(base) else None, written=text)
    _say(f"{file.path} is connected to {gateway.base_url}; `clawstream openclaw disconnect` undoes it")


@openclaw.command()
def disconnect() -> None:
    """Undo what connect changed; what was edited since stays."""
    from clawstream.local import openclaw_config as config

    file = _OpenClawFile.found()
    before = file.connection()
    if before is None:
        _say(f"{file.path} is not connected; nothing to do")
        return
    untouched = file.text == before.written_text
    first = before.first_text or ""
    text = before.first_text if untouched else config.disconnect(first, before.written_text, file.text)
    typer.echo(config.diff(file.text, text or "", str(file.path)), nl=False)
    for keys in () if untouched else config.kept_by_person(first, before.written_text, file.text):
        _say(f"{keys} was edited since and stays as it is")
    file.let_go(text, keep_backup=not untouched)
    if untouched:
        _say(f"{file.path} is as it was")
        return
    _say(f"{file.path} is as it was, with what was edited since")
    if file.backup.exists():
        _say(f"{file.backup} is the file before it was connected; remove it when you miss nothing")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Before:
    """A connection that was made: the file's text before it (None: there was no file), and the text that we wrote."""

    first_text: str | None
    written_text: str

    def was_edited(self, base: str) -> bool:
        """Whether `base`, the file without the connection, differs from the file before the connection."""
        from clawstream.local.openclaw_config import parse

        return parse(base, "openclaw.json") != parse(self.first_text or "", "its backup")


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenClawFile:
    """openclaw.json, where OpenClaw itself looks for it, and what is kept beside it."""

    path: Path
    text: str

    @classmethod
    def found(cls) -> "_OpenClawFile":
        path = openclaw_json(os.environ).resolve()  # a link stays a link
        return cls(path=path, text=_read(path) or "")

    @property
    def backup(self) -> Path:
        return self.path.with_name(f"{self.path.name}.before-clawstream")

    @property
    def record(self) -> Path:
        return self.path.with_name(f"{self.path.name}.clawstream")

    def connection(self) -> _Before | None:
        """Return the connection there is; raises ConfigError where one of the files can't be read as JSON5."""
        from clawstream.local.openclaw_config import parse

        parse(self.text, str(self.path))
        written, first = _read(self.record), _read(self.backup)
        if written is None:
            return None
        parse(first or "", str(self.backup))
        parse(written, str(self.record))
        return _Before(first_text=first, written_text=written)

    def keep(self, *, first: str | None, written: str) -> None:
        """Write the file, and `first` as its backup; None: the backup stays as it is."""
        mode = self.path.stat().st_mode & 0o777 if self.path.exists() else 0o600
        if first is not None:
            self._put_aside_unless(first)
        if first is not None and (self.path.exists() or first):
            _replace(self.backup, first, mode)
        _replace(self.record, written, mode)
        _replace(self.path, written, mode)

    def let_go(self, text: str | None, *, keep_backup: bool) -> None:
        """Write `text` to the file (None: delete it), and forget the connection."""
        if text is None:
            self.path.unlink(missing_ok=True)
        else:
            _replace(self.path, text, self.path.stat().st_mode & 0o777 if self.path.exists() else 0o600)
        self.record.unlink()
        if not keep_backup:
            self.backup.unlink(missing_ok=True)

    def _put_aside_unless(self, first: str) -> None:
        """Rename the backup of an earlier connection, unless it says the same as `first`."""
        if self.record.exists() or _read(self.backup) in (None, first):
            return
        names = (self.backup.with_name(f"{self.backup.name}.{number}") for number in range(1, 1000))
        self.backup.rename(next(name for name in names if not name.exists()))


def openclaw_json(environment: Mapping[str, str]) -> Path:
    """Return where OpenClaw 2026.9.6 looks for its configuration."""

    def named(variable: str) -> str | None:
        value = environment.get(variable, "").strip()
        return None if value in ("", "undefined", "null") else value

    own_home = Path(named("HOME") or Path.home())

    def expanded(value: str, home: Path) -> Path:
        return home / value[1:].lstrip("/") if value == "~" or value.startswith("~/") else Path(value)

    home = expanded(named("OPENCLAW_HOME") or str(own_home), own_home)
    path = named("OPENCLAW_CONFIG_PATH")
    if path is not None:
        return expanded(path, home)
    profile = named("OPENCLAW_PROFILE")
    suffix = "" if profile is None or profile.lower() == "default" else f"-{profile}"
    state = named("OPENCLAW_STATE_DIR")
    folder = home / f".openclaw{suffix}" if state is None else expanded(state, home)
    return folder / "openclaw.json"


def _provider(settings: Settings, *, name: str, url: str | None, key: str | None) -> "Provider":
    from clawstream.local.openclaw_config import Provider

    gateway = settings.gateway
    base_url = gateway_url(settings, url)
    own = gateway.api_key.get_secret_value() if gateway.api_key is not None else _NO_KEY
    api_key, model = key or own, settings.policy.served_model
    context_tokens, thinks = _served(base_url, api_key, model)
    return Provider(
        name=name, base_url=base_url, api_key=api_key, model=model, context_tokens=context_tokens, thinks=thinks
    )


def _served(base_url: str, api_key: str, model: str) -> tuple[int, bool]:
    """Return the model's context in tokens, and whether it thinks; where the gateway does not answer, a guess."""
    request = urllib.request.Request(f"{base_url}/models", headers={"Authorization": f"Bearer {api_key}"})  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=_ANSWERS_WITHIN_S) as response:  # noqa: S310
            served = {
                one["id"]: (one.get("max_model_len"), one.get("reasoning") is True)
                for one in json.load(response)["data"]
            }
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
            if error.code in (401, 403):
                shown = "the key" if api_key != _NO_KEY else "to answer without a key"
                raise ConfigError(
                    f"{base_url} refuses {shown} (HTTP {error.code}). Nothing was changed. Name a key in force with "
                    "--key (`clawstream keys add NAME` makes one)"
                ) from error
        _say(f"{base_url}/models does not answer ({error}); contextWindow is set to {_DEFAULT_CONTEXT_TOKENS}")
        return _DEFAULT_CONTEXT_TOKENS, False
    if model not in served:
        raise ConfigError(
            f"{base_url} serves {', '.join(map(str, served)) or 'no model'}, not {model!r} (policy.served_model). "
            "Nothing was changed. Name the gateway of these settings with --url, or its settings with --config"
        )
    context_tokens, thinks = served[model]
    return int(context_tokens or _DEFAULT_CONTEXT_TOKENS), thinks


def _read(path: Path) -> str | None:
    try:
        with path.open(encoding="utf-8", newline="") as file:  # as it is, whatever ends its lines
            return file.read()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: can't be read ({error}). Nothing was changed. Mend it first") from error


def _replace(path: Path, text: str, mode: int) -> None:
    """Replace what `path` holds by `text`, atomically. Raises ConfigError."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
            os.fchmod(descriptor, mode)
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        Path(name).replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: can't be written ({error}). It is as it was. Make it writable") from error


def _say(words: str) -> None:
    Console(stderr=True).print(words, highlight=False, soft_wrap=True, markup=False)


def connecting(settings: Settings, url: str, config: Path | None) -> str:
    """Return the command that connects OpenClaw, from any folder, to the gateway at `url` with settings `config`."""
    elsewhere = "" if settings.gateway.port == GatewaySettings().port else f" --url {url}"
    return f"{called(config)} openclaw connect --write{elsewhere}"


def called(config: Path | None) -> str:
    """Return how clawstream is called, from any folder, with the settings of this file; None: with the usual ones."""
    return "clawstream" if config is None else f"clawstream -c {shlex.quote(str(config.absolute()))}"


def wants_key(settings: Settings) -> bool:
    """Whether clients need a key of the gateway's key file (which holds only hashes, so we can't show one)."""
    from clawstream.gateway.access.key_file import read_keys

    ring = read_keys(settings.keys_file)
    return settings.gateway.api_key is None and bool(ring.keys) and not ring.open
