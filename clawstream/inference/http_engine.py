"""What all clients of engines share: HTTP over one pooled session that somebody else owns, and streamed answers.

A refusal of the request (4xx) raises EngineRefused. All else raises TryLater: a lost connection, a server error, a
silence, a wrong key or address (they say nothing about the request), an answer that is too long or impossible.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import groupby, takewhile
from operator import attrgetter
from typing import Any, ClassVar, TypeAlias

import aiohttp
import orjson

from clawstream.errors import TryLater
from clawstream.inference.engine import (
    MOST_NAME_CHARACTERS,
    MOST_TOKEN_IDS,
    Chunk,
    EngineRefused,
    GenerateRequest,
    Plausible,
    ServerInfo,
    check_logprob,
)
from clawstream.inference.http_borders import ASKING, PLAIN, parsed, read_body, read_error, shown

_CONTROL_BYTES = 4 * 2**20  # /tokenize answers for thousands of tokens
_REFUSAL_BODY_S = 2.0
LOADS_WITHIN_S = 1800.0  # for hundreds of GB; an engine that takes longer to load a version or to start is given up
_FRAME_BYTES = 64 * 2**10
_EVENT_BYTES_PER_TOKEN = 256  # its id, log-prob and text
_STREAM_BYTES_PER_TOKEN = 4096  # if each token comes in an event of its own
_NOT_OURS = (401, 403, 404, 405)  # no key, no right, no such route: not the request's fault


Scored: TypeAlias = Sequence[tuple[int, float | None]]  # tokens with their log-probs


class HttpEngine(ABC):
    """One engine at `url`. `silence_s` bounds the wait between two tokens, so it must exceed the longest pause.

    `load_s` bounds calls about weights and adapters, which wait for files to be read or requests to end. An answer with
    a token id of `num_token_ids` or above is refused as impossible.
    """

    adapter_routes: ClassVar[str] = ""  # what precedes the routes that load and unload adapters

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        *,
        silence_s: float = 600.0,
        control_s: float = 120.0,
        load_s: float = LOADS_WITHIN_S,
        num_token_ids: int | None = None,
    ) -> None:
        self._session = session
        self._silence_s = silence_s
        self._num_token_ids = MOST_TOKEN_IDS if num_token_ids is None else num_token_ids
        self._url = url.rstrip("/")
        self._stream_timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=silence_s)
        self._load_timeout = aiohttp.ClientTimeout(total=load_s, sock_connect=10.0)
        self._control_timeout = aiohttp.ClientTimeout(total=control_s, sock_connect=10.0)

    @property
    def url(self) -> str:
        """Its address, which names it on the log."""
        return self._url

    @abstractmethod
    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Chunks as they arrive, the last one with a finish; closing the iterator closes the connection."""

    @abstractmethod
    async def score(
        self, input_ids: Sequence[int], start: int, *, extra_key: str | None = None, lora_name: str | None = None
    ) -> tuple[float, ...]:
        """Log-probs (temperature 1) of input_ids[start:]."""

    @abstractmethod
    async def pause(self, *, retract: bool = False) -> None:
        """Sample no token until `resume`; with `retract` running requests lose their KV cache."""

    @abstractmethod
    async def resume(self) -> None:
        """Go on sampling where `pause` stopped."""

    @abstractmethod
    async def update_weights(self, path: str, version: str, *, flush_cache: bool = False) -> None:
        """Serve the weights at `path` as `version`. Pause first."""

    @abstractmethod
    async def server_info(self) -> ServerInfo:
        """What it serves at this moment."""

    @abstractmethod
    async def weight_version(self) -> str | None:
        """The name of the weights that it serves; None where it gives none."""

    async def quantization(self) -> str | None:
        """How it stores the weights that it was given, such as fp8; None: as they are, or it doesn't say."""
        return None

    async def name_weights(self, version: str) -> None:
        """Have it call the weights that it serves by this name; raises EngineRefused where it can't."""
        raise EngineRefused(501, f"its weights can't be called {version} unless they are loaded")

    async def load_lora_adapter(self, name: str, path: str) -> None:
        """Load the adapter, which requests may name from now on."""
        body = {"lora_name": name, "lora_path": path}
        await self._post(f"{self.adapter_routes}/load_lora_adapter", body, self._load_timeout)

    async def unload_lora_adapter(self, name: str) -> None:
        """Unload the adapter: no new request may name it, and what runs under it ends under it."""
        await self._post(f"{self.adapter_routes}/unload_lora_adapter", {"lora_name": name}, self._load_timeout)

    async def lora_adapters(self) -> tuple[str, ...]:
        """The names of the adapters that are loaded."""
        found = [card for card in await self._cards() if card.get("parent") is not None]
        return tuple(str(card.get("id"))[:MOST_NAME_CHARACTERS] for card in found)

    async def token_ids(self, text: str) -> tuple[int, ...] | None:
        """The engine's token ids of a text, nothing added; None where the engine has no such route."""
        body = {"prompt": text, "add_special_tokens": False}
        async with self._asking("POST", "/tokenize", body, self._control_timeout) as response:
            if response.status in (404, 405):
                return None
            tokens = (await self._content(response, "/tokenize")).get("tokens")
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise TryLater(f"engine {self._url}: /tokenize gives no tokens; expected a list of ids")
        return tuple(tokens)

    async def _cards(self) -> list[Mapping[str, Any]]:
        """The model and the adapters as /v1/models lists them."""
        cards = (await self._get("/v1/models")).get("data")
        if not isinstance(cards, list):
            raise TryLater(f"engine {self._url}: /v1/models lists nothing; expected its model and adapters")
        return [card for card in cards if isinstance(card, Mapping)]

    def _info(self, path: object, longest: object, version: str | None) -> ServerInfo:
        if not isinstance(path, str) or type(longest) is not int or not 0 < longest < MOST_TOKEN_IDS:
            raise TryLater(
                f"engine {self._url}: model_path is {shown(repr(path))} and max_model_len {shown(repr(longest))}; "
                "expected a text and a number of tokens"
            )
        return ServerInfo(model_path=path, context_length_tokens=longest, weight_version=version)

    async def _sampled(
        self,
        request: GenerateRequest,
        path: str,
        body: Mapping[str, object],
        read: Callable[[bytes], Chunk | None],
    ) -> AsyncGenerator[Chunk, None]:
        """The chunks of the streamed answer to `body`, as `read` makes them of its events."""
        answer, clock = Plausible(request, self._num_token_ids), asyncio.get_running_loop().time
        sampled_at_s = clock()
        async with self._asking("POST", path, body, self._stream_timeout) as response:
            await self._check(response, path)
            async for events in self._events(response, request.sampling.max_new_tokens):
                for chunk in joined(chunk for event in events if (chunk := read(event)) is not None):
                    self._refuse_odd(answer, chunk)
                    if chunk.token_ids:
                        sampled_at_s = clock()
                    yield chunk
                    if chunk.finish is not None:
                        # Only [DONE] follows; reading it returns the connection to the pool, still open.
                        with suppress(TimeoutError, aiohttp.ClientError):
                            await read_body(response, most_bytes=_FRAME_BYTES, until=clock() + _REFUSAL_BODY_S)
                        return
                if clock() - sampled_at_s > self._silence_s:
                    raise TryLater(f"engine {self._url}: no token within {self._silence_s:g} s; ask again")
        raise TryLater(f"engine {self._url}: the stream ended without a finish; ask again")

    async def _scored(
        self,
        path: str,
        body: Mapping[str, object],
        read: Callable[[Mapping[str, Any]], Scored],
        *,
        num_tokens: int,
        field: str,
    ) -> Scored:
        """The log-probs that the answer to `body` holds in its `field`, as `read` finds them, with their tokens."""
        async with self._asking("POST", path, body, self._control_timeout) as response:
            answer = await self._content(response, path, _FRAME_BYTES + _EVENT_BYTES_PER_TOKEN * num_tokens)
        try:
            found = read(answer)
            for _, value in found:
                if value is not None:
                    check_logprob(value)
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise TryLater(f"engine {self._url}: a score without {field}, {error!r}; it is not used") from error
        return found

    def _refuse_start(self, input_ids: Sequence[int], start: int) -> None:
        if not 1 <= start <= len(input_ids):
            raise ValueError(f"start is {start}, expected 1 to {len(input_ids)}: the first token has no log-prob")

    def _right(self, found: Scored, expected: Sequence[int], start: int) -> tuple[float, ...]:
        """The log-probs in `found`, which have to be of the `expected` tokens."""
        pairs = list(zip(found, expected, strict=False))
        wrong = next((entry for entry, token in pairs if entry[0] != token or entry[1] is None), None)
        if wrong is not None or len(found) != len(expected):
            raise TryLater(
                f"engine {self._url}: scores for {len(found)} tokens, the first wrong one being {shown(str(wrong))}; "
                f"expected a value for each of the {len(expected)} tokens from position {start}; they are not used"
            )
        return tuple(value for _, value in found if value is not None)

    async def _post(
        self, path: str, body: Mapping[str, object], patience: aiohttp.ClientTimeout | None = None
    ) -> Mapping[str, Any]:
        async with self._asking("POST", path, body, patience or self._control_timeout) as response:
            return await self._content(response, path)

    async def _get(self, path: str) -> Mapping[str, Any]:
        async with self._asking("GET", path, None, self._control_timeout) as response:
            return await self._content(response, path)

    @asynccontextmanager
    async def _asking(
        self, method: str, path: str, body: Mapping[str, object] | None, patience: aiohttp.ClientTimeout
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        data = None if body is None else orjson.dumps(body)
        ask = partial(self._session.request, method, self._url + path, data=data, headers=PLAIN, timeout=patience)
        try:
            try:
                response = await ask(**ASKING)
            except aiohttp.ClientConnectorError:  # nobody listens
                raise
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                # Mostly a connection that was idle, which the engine closed just then; else the answer is asked twice.
                response = await ask(**ASKING)
            async with response:
                yield response
        except (TimeoutError, aiohttp.ClientError, ConnectionError) as error:
            why = shown(str(error)) or type(error).__name__
            raise TryLater(f"engine {self._url}{path}: no answer ({why}); ask again") from error

    async def _check(self, response: aiohttp.ClientResponse, path: str) -> None:
        if response.status == 200:
            return
        raw = await read_error(response)
        content = object_of(raw)
        status = 400 if self._is_refusal(response.status, content) else response.status
        raise self._failure(status, path, message_of(content, raw))

    def _is_refusal(self, status: int, content: Mapping[str, Any]) -> bool:
        """Whether a status that seems to be about the server is about the request, as the body says."""
        del status, content
        return False

    async def _content(
        self, response: aiohttp.ClientResponse, path: str, most_bytes: int = _CONTROL_BYTES
    ) -> Mapping[str, Any]:
        await self._check(response, path)
        raw, wrong = await read_body(response, most_bytes=most_bytes)
        if wrong is not None:
            raise TryLater(f"engine {self._url}{path}: its answer is not read, {wrong}; ask again")
        return object_of(raw)

    async def _events(self, response: aiohttp.ClientResponse, most_tokens: int) -> AsyncIterator[list[bytes]]:
        """The data of server-sent events, as soon as an event is complete; stops at [DONE]."""
        most_bytes = _FRAME_BYTES + _STREAM_BYTES_PER_TOKEN * most_tokens
        most_event_bytes = _FRAME_BYTES + _EVENT_BYTES_PER_TOKEN * most_tokens
        rest, num_bytes = b"", 0
        async for piece in response.content.iter_any():
            num_bytes += len(piece)
            *events, rest = (rest + piece).split(b"\n\n")
            told = [event for event in events if not event.startswith(b":")]  # a comment keeps the connection open
            found = [data for event in told if (data := event.removeprefix(b"data:").strip())]
            news = list(takewhile(lambda data: data != b"[DONE]", found))
            if news:
                yield news
            if len(news) < len(found):
                return
            if num_bytes > most_bytes or len(rest) > most_event_bytes:
                raise TryLater(
                    f"engine {self._url}: an answer of at most {most_tokens} tokens has {num_bytes} bytes, {len(rest)} "
                    f"of them in one event; expected at most {most_bytes}, and {most_event_bytes} in an event"
                )

    def _refuse_odd(self, answer: Plausible, chunk: Chunk) -> None:
        try:
            answer.take(chunk)
        except ValueError as error:
            raise TryLater(f"engine {self._url}: an answer that no engine gives: {error}; it is not used") from error
        if chunk.num_sampled is not None and answer.num_tokens > chunk.num_sampled:
            raise TryLater(
                f"engine {self._url}: it sent {answer.num_tokens} tokens and sampled {chunk.num_sampled}, so each "
                "chunk repeats the answer; start it with --incremental-streaming-output"
            )

    def _element(self, event: bytes, path: str) -> Mapping[str, Any]:
        """The object that an event of a stream holds; raises what an error in its place says."""
        element = object_of(event)
        if "error" in element:
            error = element["error"]
            code = error.get("code", 400) if isinstance(error, Mapping) else 400
            raise self._failure(code if type(code) is int else 500, path, message_of(element, event))
        return element

    def _failure(self, status: int, path: str, message: str) -> EngineRefused | TryLater:
        if 400 <= status < 500 and status not in (*_NOT_OURS, 408, 429):
            return EngineRefused(status, message)
        what = f"engine {self._url}{path}: status {status}, {message}"
        if status in _NOT_OURS:
            return TryLater(f"{what}; it is asked again with the same settings: check engine.urls and engine.api_key")
        return TryLater(f"{what}; ask again")


def object_of(raw: bytes) -> Mapping[str, Any]:
    """The object of a body; an empty one where it is none."""
    content = parsed(raw)
    return content if isinstance(content, dict) else {}


def message_of(content: Mapping[str, Any], raw: bytes) -> str:
    """What a refusal says."""
    error = content.get("error")
    if isinstance(error, Mapping):
        error = error.get("message")
    found = error or content.get("message") or content.get("error_message") or raw.decode(errors="replace")
    return shown(str(found)) or "no message"


def joined(chunks: Iterable[Chunk]) -> list[Chunk]:
    """Join chunks that arrived together; return one chunk for each weight version among them."""
    found = list(chunks)
    if len(found) == 1:
        return found
    grouped = groupby(found, key=attrgetter("weight_version"))
    return [chunk if not rest else _joined(chunk, rest) for _, (chunk, *rest) in grouped]


def _joined(first: Chunk, rest: Sequence[Chunk]) -> Chunk:
    return rest[-1]._replace(
        token_ids=tuple([token for chunk in (first, *rest) for token in chunk.token_ids]),
        logprobs_nats=tuple([value for chunk in (first, *rest) for value in chunk.logprobs_nats]),
        top_logprobs=tuple([top for chunk in (first, *rest) for top in chunk.top_logprobs]),
    )
