"""`clawstream feedback`: what a person says of a past answer, given by its id through the gateway's own endpoint."""

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Annotated

import typer
from rich.console import Console

from clawstream.cli.process import AsJson, Context, gateway_url
from clawstream.errors import ConfigError, PartUnavailable

_ANSWERS_WITHIN_S = 30.0


def feedback(
    context: typer.Context,
    turn: Annotated[str, typer.Argument(help="The answer: a turn_id, or the id that its client got.")],
    score: Annotated[float | None, typer.Option(min=-1, max=1, help="How good it was.")] = None,
    hint: Annotated[str | None, typer.Option(help="How it should have been, in your words.", metavar="WORDS")] = None,
    session: Annotated[str | None, typer.Option(help="Its session; needed where it is older than a day.")] = None,
    url: Annotated[str | None, typer.Option(help="Of the gateway; none: the one that runs here.")] = None,
    key: Annotated[str | None, typer.Option(help="Of `clawstream keys add`; none: as in the settings.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say how good a past answer was, how it should have been, or both: it is learned from like any other feedback."""
    from clawstream.local.running import addresses_of

    if score is None and hint is None:
        raise ConfigError("nothing is said of the answer: give --score, --hint, or both. Nothing was recorded")
    settings = Context.of(context).settings()
    addresses = addresses_of(settings.data_dir) if url is None else None
    base_url = gateway_url(settings, url if addresses is None else addresses.gateway)
    own_key = settings.gateway.api_key
    shown_key = own_key.get_secret_value() if key is None and own_key is not None else key
    said = {"score": score, "text": hint, "session_id": session}
    body = {"response_id": turn} | {name: value for name, value in said.items() if value is not None}
    given = _given(base_url, shown_key, body)
    if as_json:
        typer.echo(json.dumps(given))
        return
    what = "the words on" if score is None else "the score and the words on" if hint else "the score of"
    typer.echo(f"recorded: {what} {turn}")
    if hint is not None and not given["hint"]:
        Console(stderr=True).print(
            "the words are recorded, and teach nothing: a hint has more than ten characters, and no score above 0",
            soft_wrap=True,
        )


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
