"""The engine client: SGLang's native HTTP over one pooled session that somebody else owns.

A refusal of the request (4xx) raises EngineRefused. All else raises TryLater: a lost connection, a server error, a
silence, a wrong key or address (they say nothing about the request), an answer that is too long or impossible.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import takewhile
from typing import Any

import aiohttp
import orjson

from clawstream.config import EngineSettings, TeacherSettings
from clawstream.errors import TryLater
from clawstream.inference.dialect import joined, read_chunk, write_request
from clawstream.inference.engine import (
    MOST_NAME_CHARACTERS,
    MOST_TOKEN_IDS,
    Chunk,
    EngineRefused,
    FinishKind,
    GenerateRequest,
    Plausible,
    SamplingParams,
    ServerInfo,
    check_logprob,
    read_version,
)
from clawstream.inference.http_borders import ASKING, PLAIN, bearer, parsed, read_body, read_error, shown

_CONTROL_BYTES = 4 * 2**20  # /tokenize answers for thousands of tokens
_REFUSAL_BODY_S = 2.0
LOADS_WITHIN_S = 1800.0  # for hundreds of GB; an engine that takes longer to load a version or to start is given up
_FRAME_BYTES = 64 * 2**10
_EVENT_BYTES_PER_TOKEN = 256  # its id, log-prob and text
_STREAM_BYTES_PER_TOKEN = 4096  # if each token comes in an event of its own
_NOT_OURS = (401, 403, 404, 405)  # no key, no right, no such route: not the request's fault


def engine_session(settings: EngineSettings | TeacherSettings) -> aiohttp.ClientSession:
    """Return a process's pool of connections to engines: as many as there are requests; each shows the engines' key.

    SGLang closes a connection that was idle for 5 s; the pool closes it sooner, so that no request is lost on it.
    """
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0)
    headers, no_cookies = bearer(settings.api_key), aiohttp.DummyCookieJar()
    return aiohttp.ClientSession(connector=connector, headers=headers, cookie_jar=no_cookies)


class SglangEngine:
    """One engine at `url`. `silence_s` bounds the wait between two tokens, so it must exceed the longest pause.

    `load_s` bounds calls about weights and adapters, which wait for files to be read or requests to end. An answer with
    a token id of `num_token_ids` or above is refused as impossible.
    """

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

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Chunks as they arrive, the last one with a finish; closing the iterator closes the connection."""
        body, answer = write_request(request, stream=True), Plausible(request, self._num_token_ids)
        clock, sampled_at_s = asyncio.get_running_loop().time, asyncio.get_running_loop().time()
        async with self._asking("POST", "/generate", body, self._stream_timeout) as response:
            await self._check(response, "/generate")
            async for events in self._events(response, request.sampling.max_new_tokens):
                for chunk in joined(map(self._read, events)):
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

    async def score(
        self, input_ids: Sequence[int], start: int, *, extra_key: str | None = None, lora_name: str | None = None
    ) -> tuple[float, ...]:
        """Log-probs (temperature 1) of input_ids[start:]; one token more is asked for, as the first one gets none."""
        if not 1 <= start <= len(input_ids):
            raise ValueError(f"start is {start}, expected 1 to {len(input_ids)}: the first token has no log-prob")
        request = GenerateRequest(
            input_ids=input_ids,
            sampling=SamplingParams(max_new_tokens=0, temperature=0.0),
            extra_key=extra_key,
            lora_name=lora_name,
        )
        body = write_request(request, stream=False) | {"logprob_start_len": start - 1}
        most_bytes = _FRAME_BYTES + _EVENT_BYTES_PER_TOKEN * len(input_ids)
        async with self._asking("POST", "/generate", body, self._control_timeout) as response:
            answer = await self._content(response, "/generate", most_bytes)
        try:
            scored = answer["meta_info"]["input_token_logprobs"][1:]
            values, tokens = [entry[0] for entry in scored], [entry[1] for entry in scored]
            for value in values:
                if value is not None:
                    check_logprob(value)
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise TryLater(
                f"engine {self._url}: a score without input_token_logprobs, {error!r}; it is not used"
            ) from error
        expected = list(input_ids[start:])
        # SGLang writes 0 in place of the vocabulary's last id. If the request has that id, it is its largest.
        named = {token: (token,) for token in expected} | {max(input_ids): (max(input_ids), 0)}
        found = list(zip(tokens, values, expected, strict=False))
        wrong = next((entry[:2] for entry in found if entry[0] not in named[entry[2]] or entry[1] is None), None)
        if wrong is not None or len(tokens) != len(expected):
            raise TryLater(
                f"engine {self._url}: scores for {len(values)} tokens, the first wrong one being {shown(str(wrong))}; "
                f"expected a value for each of the {len(expected)} tokens from position {start}; they are not used"
            )
        return tuple(values)

    async def pause(self, *, retract: bool = False) -> None:
        """Sample no token until `resume`; running requests keep their KV cache, or with `retract` lose it."""
        await self._post("/pause_generation", {"mode": "retract" if retract else "in_place"})

    async def resume(self) -> None:
        """Go on sampling where `pause` stopped."""
        await self._post("/continue_generation", {})

    async def update_weights(self, path: str, version: str, *, flush_cache: bool = False) -> None:
        """Serve the weights at `path` as `version`. Pause first, or SGLang waits for every running request.

        `flush_cache` also empties the prefix cache; it needs a pause with `retract`.
        """
        body = {"model_path": path, "weight_version": version, "abort_all_requests": False, "flush_cache": flush_cache}
        await self._post("/update_weights_from_disk", body, self._load_timeout)

    async def load_lora_adapter(self, name: str, path: str) -> None:
        """Load the adapter, which requests may name from now on."""
        await self._post("/load_lora_adapter", {"lora_name": name, "lora_path": path}, self._load_timeout)

    async def unload_lora_adapter(self, name: str) -> None:
        """Unload the adapter: no new request may name it, and it is gone when its running requests have ended."""
        await self._post("/unload_lora_adapter", {"lora_name": name}, self._load_timeout)

    async def lora_adapters(self) -> tuple[str, ...]:
        """The names of the adapters that are loaded."""
        cards = (await self._get("/v1/models")).get("data")
        if not isinstance(cards, list):
            raise TryLater(f"engine {self._url}: /v1/models lists nothing; expected its model and adapters")
        found = [card for card in cards if isinstance(card, Mapping) and card.get("parent") is not None]
        return tuple(str(card.get("id"))[:MOST_NAME_CHARACTERS] for card in found)

    async def server_info(self) -> ServerInfo:
        """Context length from /v1/models; model and weight version from /model_info, which a swap changes."""
        served, model = await self._get("/v1/models"), await self._get("/model_info")
        try:
            path, longest = model["model_path"], served["data"][0]["max_model_len"]
            version = read_version(model.get("weight_version"))
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise TryLater(f"engine {self._url}: /v1/models or /model_info lacks a field: {error!r}") from error
        if not isinstance(path, str) or type(longest) is not int or not 0 < longest < MOST_TOKEN_IDS:
            raise TryLater(
                f"engine {self._url}: model_path is {shown(repr(path))} and max_model_len {shown(repr(longest))}; "
                "expected a text and a number of tokens"
            )
        return ServerInfo(model_path=path, context_length_tokens=longest, weight_version=version)

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

    async def weight_version(self) -> str | None:
        """The name of the weights that it serves; None where it gives none."""
        model = await self._get("/model_info")
        try:
            return read_version(model.get("weight_version"))
        except ValueError as error:
            raise TryLater(f"engine {self._url}: /model_info: {error}") from error

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
        try:
            async with self._session.request(
                method, self._url + path, data=data, headers=PLAIN, timeout=patience, **ASKING
            ) as response:
                yield response
        except (TimeoutError, aiohttp.ClientError, ConnectionError) as error:
            why = shown(str(error)) or type(error).__name__
            raise TryLater(f"engine {self._url}{path}: no answer ({why}); ask again") from error

    async def _check(self, response: aiohttp.ClientResponse, path: str) -> None:
        if response.status == 200:
            return
        raw = await read_error(response)
        raise self._failure(response.status, path, _message(_object(raw), raw))

    async def _content(
        self, response: aiohttp.ClientResponse, path: str, most_bytes: int = _CONTROL_BYTES
    ) -> Mapping[str, Any]:
        await self._check(response, path)
        raw, wrong = await read_body(response, most_bytes=most_bytes)
        if wrong is not None:
            raise TryLater(f"engine {self._url}{path}: its answer is not read, {wrong}; ask again")
        return _object(raw)

    async def _events(self, response: aiohttp.ClientResponse, most_tokens: int) -> AsyncIterator[list[bytes]]:
        """The data of server-sent events, as soon as an event is complete; stops at [DONE]."""
        most_bytes = _FRAME_BYTES + _STREAM_BYTES_PER_TOKEN * most_tokens
        most_event_bytes = _FRAME_BYTES + _EVENT_BYTES_PER_TOKEN * most_tokens
        rest, num_bytes = b"", 0
        async for piece in response.content.iter_any():
            num_bytes += len(piece)
            *events, rest = (rest + piece).split(b"\n\n")
            found = [data for event in events if (data := event.removeprefix(b"data:").strip())]
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

    def _failure(self, status: int, path: str, message: str) -> EngineRefused | TryLater:
        if 400 <= status < 500 and status not in (*_NOT_OURS, 408, 429):
            return EngineRefused(status, message)
        what = f"engine {self._url}{path}: status {status}, {message}"
        if status in _NOT_OURS:
            return TryLater(f"{what}; it is asked again with the same settings: check engine.urls and engine.api_key")
        return TryLater(f"{what}; ask again")

    def _read(self, event: bytes) -> Chunk:
        element = _object(event)
        if "error" in element:
            error = element["error"]
            code = error.get("code", 400) if isinstance(error, Mapping) else 400
            raise self._failure(code if type(code) is int else 500, "/generate", _message(element, event))
        try:
            chunk = read_chunk(element)
        except (LookupError, TypeError, ValueError) as error:
            raise TryLater(f"engine {self._url}: a chunk that is not SGLang's dialect: {shown(repr(error))}") from error
        if chunk.finish is not None and chunk.finish.kind is FinishKind.ABORT:
            status = element["meta_info"]["finish_reason"].get("status_code")
            if type(status) is int:
                raise self._failure(status, "/generate", str(chunk.finish.message))
        return chunk


def _object(raw: bytes) -> Mapping[str, Any]:
    content = parsed(raw)
    return content if isinstance(content, dict) else {}


def _message(content: Mapping[str, Any], raw: bytes) -> str:
    error = content.get("error")
    if isinstance(error, Mapping):
        error = error.get("message")
    found = error or content.get("message") or content.get("error_message") or raw.decode(errors="replace")
    return shown(str(found)) or "no message"
