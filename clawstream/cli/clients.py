"""`clawstream keys`: who may ask the gateway. A key is shown once; the file keeps its hash.

`clawstream feedback`: what a person says of past answers, given by their ids through the gateway's own endpoint.
`clawstream pictures`: what clients showed, which lies beside the log, and how it is erased.
"""

import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from rich.console import Console
from rich.table import Table

from clawstream import layout
from clawstream.cli.process import AsJson, Context, gateway_url
from clawstream.errors import ConfigError, PartUnavailable

keys = typer.Typer(
    name="keys", help="The keys by which clients ask the gateway, each with a name.", no_args_is_help=True
)
pictures = typer.Typer(name="pictures", help="The pictures of conversations: what is kept.", no_args_is_help=True)
_ANSWERS_WITHIN_S = 30.0
_DAY_S = 86_400
_YES = Annotated[bool, typer.Option("--yes", help="Don't ask on a terminal.")]


@keys.command()
def add(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Whose key it is; it stands in the audit trail.")],
    max_concurrent: Annotated[int | None, typer.Option(min=1, help="Requests in flight.")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1)] = None,
    yes: _YES = False,
    as_json: AsJson = False,
) -> None:
    """Make a key and print it, this once; a running gateway knows it within 2 s.

    From the first key on, requests without a key are refused.
    """
    from clawstream.gateway.access.key_file import add_key, read_keys
    from clawstream.gateway.access.keys import Allowance

    path = _file(context)
    if not read_keys(path).in_force and not _has_default(context):
        _say_before(
            "this is the first key: from now on a request without a key gets a 401, on this machine too (the way back: "
            "clawstream keys revoke, then clawstream keys open)",
            yes=yes,
        )
    allowance = Allowance(max_concurrent=max_concurrent, requests_per_minute=requests_per_minute)
    shown = add_key(path, name, allowance)
    typer.echo(json.dumps({"name": name, "key": shown}) if as_json else shown)
    Console(stderr=True).print(
        f"the key of {name} is kept nowhere else: copy it now ({path} has its hash)", soft_wrap=True
    )


@keys.command("list")
def list_keys(context: typer.Context, as_json: AsJson = False) -> None:
    """Show all keys, the revoked ones included."""
    from clawstream.gateway.access.key_file import read_keys

    rows = [
        {
            "name": key.name,
            "created_at": key.created_at,
            "revoked_at": key.revoked_at,
            "max_concurrent": key.allowance.max_concurrent,
            "requests_per_minute": key.allowance.requests_per_minute,
        }
        for key in read_keys(_file(context)).keys
    ]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    table = Table("name", "created", "revoked", "at once", "a minute")
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    layout.show(Console(), table)


@keys.command()
def revoke(
    context: typer.Context, name: Annotated[str, typer.Argument()], yes: _YES = False, as_json: AsJson = False
) -> None:
    """Refuse a key from now on; a running gateway knows it within 2 s."""
    from clawstream.gateway.access.key_file import read_keys, revoke_key

    path = _file(context)
    if [key.name for key in read_keys(path).in_force] == [name] and not _has_default(context):
        _say_before(
            "this is the last key: from now on everybody gets a 401, with a key or without (clawstream keys add NAME "
            "lets somebody in, clawstream keys open all programs of this machine)",
            yes=yes,
        )
    revoke_key(path, name)
    if as_json:
        typer.echo(json.dumps({"name": name, "revoked": True}))
    Console(stderr=True).print(f"the key of {name} is revoked")


@keys.command("open")
def open_to_this_machine(context: typer.Context) -> None:
    """Let programs of this machine in without a key again, once all keys are revoked; a running gateway knows in 2 s.

    The next key that is added ends this. A gateway that listens to the network asks for keys all the same.
    """
    from clawstream.gateway.access.key_file import open_door

    open_door(_file(context))
    shut = " (but not while gateway.api_key is set)" if _has_default(context) else ""
    Console(stderr=True).print(f"programs of this machine need no key any more{shut}", soft_wrap=True)


def _say_before(words: str, *, yes: bool) -> None:
    """Say what will follow; on a terminal, go on only with a yes."""
    Console(stderr=True).print(words, soft_wrap=True)
    if not yes and sys.stdin.isatty():
        typer.confirm("go on?", abort=True, err=True)


def _has_default(context: typer.Context) -> bool:
    return Context.of(context).settings().gateway.api_key is not None


def _file(context: typer.Context) -> Path:
    return Context.of(context).settings().keys_file


class _Said(BaseModel):
    """What a person says of one answer."""

    model_config = ConfigDict(extra="forbid", strict=True)

    turn: str = Field(min_length=1)
    score: float | None = Field(None, ge=-1, le=1)
    hint: str | None = None
    session: str | None = None

    @model_validator(mode="after")
    def _is_something(self) -> "_Said":
        if self.score is None and self.hint is None:
            raise ValueError("nothing is said of the answer: give a score, a hint, or both")
        return self

    @property
    def body(self) -> dict[str, object]:
        """The request to the gateway."""
        named = {"response_id": self.turn, "score": self.score, "text": self.hint, "session_id": self.session}
        return {name: value for name, value in named.items() if value is not None}


def feedback(
    context: typer.Context,
    turn: Annotated[
        str | None, typer.Argument(help="The answer: a turn_id, or the id that its client got.", show_default=False)
    ] = None,
    score: Annotated[float | None, typer.Option(min=-1, max=1, help="How good it was.")] = None,
    hint: Annotated[str | None, typer.Option(help="How it should have been, in your words.", metavar="WORDS")] = None,
    session: Annotated[str | None, typer.Option(help="Its session; needed where it is older than a day.")] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            help='In place of these: a line of JSON an answer, {"turn", "score", "hint", "session"}.', metavar="JSONL",
            exists=True, dir_okay=False,
        ),
    ] = None,
    url: Annotated[str | None, typer.Option(help="Of the gateway; none: the one that runs here.")] = None,
    key: Annotated[str | None, typer.Option(help="Of `clawstream keys add`; none: as in the settings.")] = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Say how good past answers were, how they should have been, or both; it is learned from as all feedback is."""
    said = _said(turn, score, hint, session, file)
    settings = Context.of(context).settings()
    base_url = gateway_url(settings, url)
    own_key = settings.gateway.api_key
    shown_key = own_key.get_secret_value() if key is None and own_key is not None else key
    for number, one in enumerate(said, 1):
        try:
            given = _given(base_url, shown_key, one.body)
        except (ConfigError, PartUnavailable) as error:
            if file is None:
                raise
            raise type(error)(
                f"{file}: the first {number - 1} of {len(said)} answers are recorded, the rest is not. Of {one.turn}: "
                f"{error}. Mend that and give the file again: what is said twice counts once"
            ) from error
        if as_json:
            typer.echo(json.dumps(given))
            continue
        what = "the words on" if one.score is None else "the score and the words on" if one.hint else "the score of"
        typer.echo(f"recorded: {what} {one.turn}")
        if one.hint is not None and not given["hint"]:
            Console(stderr=True).print(
                "the words are recorded, and teach nothing: a hint has more than ten characters, and no score above 0",
                soft_wrap=True,
            )


def _said(
    turn: str | None, score: float | None, hint: str | None, session: str | None, file: Path | None
) -> list[_Said]:
    """Return what the command line says, or the file, whose every line is read before any is sent."""
    if (turn is None) == (file is None) or (file is not None and (score, hint, session) != (None, None, None)):
        raise ConfigError(
            "expected one answer's TURN with --score or --hint, or --file with a line an answer. Nothing was recorded"
        )
    if turn is not None:
        return [_read(lambda: _Said(turn=turn, score=score, hint=hint, session=session), "")]
    assert file is not None
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: {error}, expected JSON lines in UTF-8. Nothing was recorded") from error
    lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise ConfigError(f"{file}: no line in it, expected one an answer. Nothing was recorded")
    return [_read(partial(_Said.model_validate_json, line), f"{file}, line {n}: ") for n, line in lines]


def _read(parse: Callable[[], _Said], where: str) -> _Said:
    try:
        return parse()
    except ValidationError as error:
        found = (": ".join([*map(str, one["loc"]), one["msg"]]) for one in error.errors())
        why = "; ".join(found).removeprefix("Value error, ")
        raise ConfigError(f"{where}{why}. Nothing was recorded") from error


def _given(base_url: str, key: str | None, body: Mapping[str, object]) -> dict[str, object]:
    """Return what the gateway answers. Raises ConfigError where it refuses, PartUnavailable where it is away."""
    headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    request = urllib.request.Request(f"{base_url}/feedback", json.dumps(body).encode(), headers)  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=_ANSWERS_WITHIN_S) as response:  # noqa: S310
            found = json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            said = error.read(4096).decode(errors="replace")
        raise _refusal(base_url, error.code, said) from error
    except (OSError, ValueError) as error:
        raise PartUnavailable(
            f"no gateway answers at {base_url} ({error}): nothing is known to be recorded. Start `clawstream up`, or "
            "name the gateway with --url"
        ) from error
    assert isinstance(found, dict)
    return found


def _refusal(base_url: str, status: int, said: str) -> ConfigError | PartUnavailable:
    try:
        why = str(json.loads(said)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        why = said
    if status in (401, 403):
        return ConfigError(f"{base_url}: {why} Nothing was recorded. Name a key in force with --key")
    if status == 404:
        return ConfigError(
            f"{base_url}: {why} Name the session with --session; the column session_id of the table exchanges has it"
        )
    if status >= 500:
        return PartUnavailable(f"{base_url}: {why}")
    return ConfigError(f"{base_url}: {why}")


@pictures.command("list")
def list_pictures(context: typer.Context, as_json: AsJson = False) -> None:
    """Show each picture's hash, size, and when a client last sent it; the log names pictures by these hashes."""
    from clawstream.gateway.picture_store import PictureStore

    kept = list(PictureStore(Context.of(context).settings().pictures_dir).kept())
    if as_json:
        typer.echo(json.dumps([{"sha256": one, "bytes": size, "sent_at_s": at} for one, size, at in kept]))
        return
    table = Table("sha256", "bytes", "last sent")
    for one, size, at in kept:
        table.add_row(one, f"{size:,}", datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds"))
    layout.show(Console(), table)


@pictures.command()
def erase(
    context: typer.Context,
    sha256: Annotated[list[str] | None, typer.Argument(metavar="SHA256...", help="As `list` prints them.")] = None,
    older_than: Annotated[
        float | None, typer.Option(min=0, metavar="DAYS", help="All that nobody sent for so long.")
    ] = None,
) -> None:
    """Erase pictures for good. A conversation that still shows one is refused until its client sends it again."""
    from clawstream.gateway.picture_store import PictureStore

    if bool(sha256) == (older_than is not None):
        raise ConfigError("expected hashes or --older-than, and not both. Nothing was erased")
    store = PictureStore(Context.of(context).settings().pictures_dir)
    if not store.folder.is_dir():
        raise ConfigError(f"{store.folder} is not there. Nothing was erased; ask where the gateway runs")
    kept = {one: at for one, _, at in store.kept()}
    if unknown := [one for one in sha256 or () if one not in kept]:
        raise ConfigError(f"{unknown[0]} is not kept in {store.folder}. Nothing was erased; `list` shows what is")
    until_s = time.time() - (older_than or 0) * _DAY_S
    wanted = sha256 or [one for one, at in kept.items() if at < until_s]
    sent_before_s = None if older_than is None else until_s
    num_erased = sum(store.erase(one, sent_before_s=sent_before_s) for one in wanted)
    typer.echo(f"{num_erased} of {len(kept)} pictures were erased from {store.folder}", err=True)
