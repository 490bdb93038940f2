"""A service that trains and samples adapters elsewhere, asked by the Tinker API's own SDK (`pip install tinker`).

Calls of the SDK return futures; `value` and `awaited` wait for one, for a bounded time, and turn the SDK's errors into
ours: what may pass by itself is ServiceAway, what a person has to change is an OperatorError. Samplers are snapshots:
the weights that one has never change, so its name tells which version sampled a token.
"""

import asyncio
import inspect
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from threading import Lock, Thread
from typing import Any

from clawstream.config import Settings
from clawstream.errors import (
    ClawstreamError,
    ConfigError,
    PartUnavailable,
    ServiceAway,
    ServiceRefused,
    UnusableCheckpoint,
)
from clawstream.inference.model_folder import ADAPTER_CONFIG

SNAPSHOT, STATE = "sampler_path", "state_path"  # where the service has a version, in its adapter_config.json
PRESENT_WITHIN_S = 15.0
ANSWERS_WITHIN_S = 600.0  # an answer, or a request's place in the service's queue
LOADS_WITHIN_S = 1800.0  # a model that nobody used for a while
_WORDS = ("config.json", "generation_config.json", "tokenizer*", "*.jinja", "vocab.json", "merges.txt", "*.model")
_GONE = 404
_ANY_KEY = "tml-none"  # the SDK asks for a key, a service of one's own may not


class TinkerService:
    """One session at a service for one base model; it lasts as long as the process."""

    def __init__(self, settings: Settings) -> None:
        """Raises what `key_for` raises. Nothing is asked yet."""
        self._key, own = key_for(settings), settings.tinker
        self.url = own.url or "(the hosted one)"
        self._address = own.url
        self.base_model = own.model or str(settings.engine.base_policy)
        self._client: Future[Any] | None = None
        self._asked: Future[Any] | None = None  # for a sign of life
        self._making = Lock()

    def trainer(self, *, rank: int, seed: int, state: str | None) -> Any:
        """Return a training client, in the saved `state` or as the base is.

        Raises ServiceAway, or UnusableCheckpoint where the service does not have the state any more.
        """
        if state is not None:
            return self._made(state, lambda session: session.create_training_client_from_state_with_optimizer(state))
        own = {"base_model": self.base_model, "rank": rank, "seed": seed}
        return self._made(self.base_model, lambda session: session.create_lora_training_client(**own))

    def sampler(self, snapshot: str | None) -> Any:
        """Return a client that samples by a saved adapter; None: by the base."""
        own = {"base_model": self.base_model} if snapshot is None else {"model_path": snapshot}
        return self._made(snapshot or self.base_model, lambda session: session.create_sampling_client(**own))

    def value(self, future: Any, what: str, *, within_s: float = LOADS_WITHIN_S) -> Any:
        """Return the result of a future of the SDK."""
        with self._errors(what):
            return future.result(timeout=within_s)

    async def awaited(self, ask: Callable[[], Any], what: str, *, within_s: float = ANSWERS_WITHIN_S) -> Any:
        """Return the result of the SDK's future that `ask` returns, without blocking the event loop."""
        with self._errors(what):
            async with asyncio.timeout(within_s):
                future = ask()
                return await (asyncio.wrap_future(future) if isinstance(future, Future) else future)

    async def present(self) -> None:
        """Return if the service answers soon; else raise ServiceAway.

        The SDK tries for minutes, and blocks whoever waits: one thread at a time asks.
        """
        with self._making:
            if self._asked is None or self._asked.done():
                self._asked = Future()
                Thread(target=_settle, args=(self._asked, self._sign_of_life), daemon=True).start()
            asked = self._asked
        with self._errors("a sign of life"):
            async with asyncio.timeout(PRESENT_WITHIN_S):
                await asyncio.shield(asyncio.wrap_future(asked))

    def _sign_of_life(self) -> None:
        self._session().get_server_capabilities()

    def scored(self, sampler: Any, token_ids: Sequence[int], num_last: int) -> Any:
        """Return a future with the log-probs (temperature 1) of tokens, of which the last `num_last` are needed."""
        prompt = model_input(token_ids)
        if "prompt_logprobs_last_n" in inspect.signature(sampler.compute_logprobs).parameters:
            return sampler.compute_logprobs(prompt, prompt_logprobs_last_n=num_last)
        return sampler.compute_logprobs(prompt)

    def _made(self, what: str, make: Callable[[Any], Any]) -> Any:
        """Return the client that `make` makes; what is not found is looked for once more, in a new session.

        A service that was started again may not know the session, and newer SDKs return a future of the client.
        """
        for is_last in (False, True):
            session = self._session()
            try:
                with self._errors(what, makes=True):
                    client = make(session)
                    return client.result(timeout=LOADS_WITHIN_S) if hasattr(client, "result") else client
            except (UnusableCheckpoint, PartUnavailable):
                if is_last or self._client is not None:
                    raise
        raise AssertionError

    def _session(self, within_s: float = LOADS_WITHIN_S) -> Any:
        """Return the session, which one thread at a time tries to open: the SDK tries for minutes."""
        with self._making:
            if self._client is None or (self._client.done() and self._client.exception() is not None):
                self._client = Future()
                Thread(target=_settle, args=(self._client, self._open), daemon=True).start()
            opening = self._client
        with self._errors("a session", makes=True):
            return opening.result(timeout=within_s)

    def _open(self) -> Any:
        import tinker

        return tinker.ServiceClient(base_url=self._address, api_key=self._key)

    @contextmanager
    def _errors(self, what: str, *, makes: bool = False) -> Iterator[None]:
        """Turn the SDK's errors into ours; `makes`: the call makes a session or a client, by what settings name."""
        import httpx
        import tinker

        try:
            yield
        except (TimeoutError, tinker.APIConnectionError, httpx.HTTPError) as error:
            raise ServiceAway(
                f"Tinker service {self.url}: no answer for {what} ({_words(error)}); asked again"
            ) from error
        except tinker.APIStatusError as error:
            if error.status_code == _GONE:
                self._client = None
            raise self._refused(what, error.status_code, error, makes=makes) from error
        except (tinker.TinkerError, RuntimeError) as error:  # the SDK's own RuntimeError: an earlier request failed
            if str(getattr(error, "category", "")).lower().endswith("user"):
                raise self._refused(what, 400, error, makes=makes) from error
            raise ServiceAway(f"Tinker service {self.url}: {what} failed ({_words(error)}); asked again") from error

    def _refused(self, what: str, status: int, error: Exception, *, makes: bool) -> ClawstreamError:
        found = f"Tinker service {self.url}: {what} was answered with {status} ({_words(error)})"
        if status in (401, 403):
            return ConfigError(f"{found}. Nothing is trained or sampled. Set tinker.api_key to a key in force")
        if status == 402:
            return ServiceAway(f"{found}: the account's limit of spending is reached. Nothing is lost; raise the limit")
        if status == 404 and what.startswith("tinker://"):
            return UnusableCheckpoint(
                f"{found}: the service does not have it any more. Nothing is trained. Go back to a version that it has "
                "(clawstream policy rollback), or give the new policy an id of its own"
            )
        if status in (400, 404, 422) and makes:
            return PartUnavailable(f"{found}. Nothing is trained. See tinker.model and tinker.url")
        if status in (400, 413, 422):
            return ServiceRefused(found)
        return ServiceAway(f"{found}; asked again")


def _settle(future: "Future[Any]", work: Callable[[], Any]) -> None:
    try:
        future.set_result(work())
    except Exception as error:  # noqa: BLE001  # nothing is swallowed: the future raises it to whoever waits
        future.set_exception(error)


def key_for(settings: Settings) -> str:
    """Return the key to show the service; raises ConfigError where the SDK or a key is missing."""
    if find_spec("tinker") is None:
        raise ConfigError(
            'training.trainer = "tinker" needs the SDK, which is not installed. Nothing was started. Install it: '
            "`uv sync --extra tinker`, or `pip install tinker`"
        )
    own = settings.tinker
    key = own.api_key.get_secret_value() if own.api_key is not None else os.environ.get("TINKER_API_KEY")
    if key is None and own.url is None:
        raise ConfigError(
            "tinker.api_key is not set, and the hosted service asks for one. Nothing was started. Set it, or the "
            "variable TINKER_API_KEY; or name a service of your own in tinker.url"
        )
    return key or _ANY_KEY


def snapshot_in(folder: Path) -> str:
    """Return the service's name of the version in the folder; raises ValueError where it names none."""
    try:
        found = json.loads((folder / ADAPTER_CONFIG).read_bytes())[SNAPSHOT]
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"{folder / ADAPTER_CONFIG} names no {SNAPSHOT} ({error!r}), expected a version that a Tinker service "
            "trained. It is not loaded, and what is served stays"
        ) from error
    return str(found)


def model_input(token_ids: Sequence[int]) -> Any:
    """Return tokens as the SDK takes them."""
    from tinker import types

    return types.ModelInput.from_ints(list(token_ids))


def last_logprobs(values: Sequence[float | None], num_tokens: int, num_last: int, *, url: str) -> list[float]:
    """Return the log-probs of the last `num_last` of `num_tokens` tokens.

    Raises ServiceAway where there are more or fewer values than tokens, the first of which may have none, or no value.
    """
    found = list(values)[-num_last:]
    if len(values) not in (num_tokens, num_tokens - 1) or None in found:
        missing = sum(value is None for value in found)
        raise ServiceAway(
            f"Tinker service {url}: {len(values)} log-probs for {num_tokens} tokens, {missing} of the last {num_last} "
            "missing; expected one for each. They are not used"
        )
    return [float(value) for value in found if value is not None]


def with_base(settings: Settings, model: str | None) -> tuple[Path, Settings]:
    """Return the folder with the base's configuration and tokenizer, and the settings that name the base.

    `model` is a folder, or the service's name for the base, under which Hugging Face has both; None: as the settings
    say. Raises ConfigError where no base is named, PartUnavailable where its words can't be fetched.
    """
    folder = settings.engine.model_path
    named = model or (None if folder is None else str(folder)) or settings.tinker.model
    if named is None:
        raise ConfigError(
            "no base is named. Nothing was started. Give --model the service's name for it, as Qwen/Qwen3-8B, or a "
            "folder with its configuration and tokenizer"
        )
    if settings.engine.urls:
        raise ConfigError(
            f"engine.urls names {', '.join(settings.engine.urls)}, and a Tinker service samples what it trains. "
            "Nothing was started. Take engine.urls out, or name another trainer"
        )
    if Path(named).is_dir():
        if settings.tinker.url is None and settings.tinker.model is None:
            raise ConfigError(
                f"{named} is a folder, and the hosted service knows none. Nothing was started. Say in tinker.model "
                "what it calls this base, as Qwen/Qwen3-8B"
            )
        return words_of_base(Path(named)), settings
    tinker = settings.tinker.model_copy(update={"model": named})
    return words_of_base(_fetched(named, settings.cache_dir)), settings.model_copy(update={"tinker": tinker})


def _fetched(name: str, cache_dir: Path) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, cache_dir=cache_dir / "huggingface", allow_patterns=list(_WORDS)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise PartUnavailable(
            f"{name} is no folder here, and its configuration and tokenizer can't be fetched from Hugging Face "
            f"({_words(error)}). Nothing was started. Name a folder that has both, and the service's name for the "
            "base in tinker.model"
        ) from error


def words_of_base(folder: Path) -> Path:
    """Return the folder, which has the base's configuration and tokenizer; its weights are not needed here.

    Raises ConfigError where either is missing.
    """
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"{folder} has no {' and no '.join(missing)}. Nothing was started. Name a folder with the base's "
            "configuration and tokenizer; the service has its weights"
        )
    return folder


def _words(error: Exception) -> str:
    return (str(error) or type(error).__name__)[:300]
