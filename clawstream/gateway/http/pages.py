"""All routes of the gateway, and answers that need no engine: models, health, metrics, feedback, token counts.

A path that is no route is answered with the route that was likely meant.
"""

import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any

import orjson
import yaml
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from clawstream.config import LOOPBACK
from clawstream.errors import TryLater
from clawstream.gateway.access.keys import Caller
from clawstream.gateway.access.security import Guard, foreign_page
from clawstream.gateway.answering.admission import CALLER, Admission, unavailable
from clawstream.gateway.answering.endpoint import Endpoint
from clawstream.gateway.answering.outlets import Refuse, send_whole
from clawstream.gateway.answering.replies import JSON, error_headers
from clawstream.gateway.dialects.anthropic import read_messages
from clawstream.gateway.dialects.anthropic_replies import error_body
from clawstream.gateway.dialects.kinds import CHAT, MESSAGES, RESPONSES
from clawstream.gateway.requests.body import ClientGone, read_body, read_headers
from clawstream.gateway.requests.feedback import read_feedback, unknown_response
from clawstream.gateway.requests.fields import BadRequest, to_json
from clawstream.gateway.requests.wire import parse_body
from clawstream.inference.service import answer

CHAT_PATH = "/v1/chat/completions"
RESPONSES_PATH = "/v1/responses"
MESSAGES_PATH = "/v1/messages"
COUNT_PATH = f"{MESSAGES_PATH}/count_tokens"
FEEDBACK_PATH = "/v1/feedback"
MODELS_PATH = "/v1/models"

_OFFERED = (CHAT_PATH, RESPONSES_PATH, MESSAGES_PATH, COUNT_PATH, FEEDBACK_PATH, MODELS_PATH)
_NOT_OFFERED = {
    "/completions": f"completions of bare text are not offered; use {CHAT_PATH}",
    "/complete": f"Anthropic's text completions are not offered; use {MESSAGES_PATH}",
    "/responses/compact": f"a client compacts by itself here, by a request to {RESPONSES_PATH}",
    "/responses/input_tokens": f"tokens are counted at {COUNT_PATH}",
    "/embeddings": "the policy answers and has no embeddings",
    "/conversations": f"conversations are known by their session; send the history, or previous_response_id, to "
    f"{RESPONSES_PATH}",
}
_OF_OTHER_MODELS = {
    "/images/": "the policy writes text and makes no pictures",
    "/audio/": "the policy reads and writes text, and no sound",
    "/realtime": "the policy reads and writes text, and no sound",
    "/videos": "the policy writes text and makes no films",
    "/moderations": "the policy answers and moderates nothing",
}
_PREFIXES = ("/v1", "/api", "/openai", "/anthropic")

PostReply = tuple[int, Mapping[str, Any]]  # the HTTP status and the body
Answer = Callable[[Admission, Mapping[str, Any], Caller], Awaitable[PostReply]]


@dataclass(frozen=True, slots=True)
class Post:
    """One route that takes a JSON object and returns one; it refuses in its clients' dialect."""

    admission: Admission
    answer: Answer
    refuse: Refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        bounds = self.admission.bounds
        try:
            raw = await read_body(
                read_headers(scope), receive, max_bytes=bounds.max_body_bytes, within_s=bounds.request_timeout_s
            )
            status, body = await self.answer(self.admission, parse_body(raw), scope[CALLER])
        except ClientGone:
            return
        except BadRequest as refused:
            await self.refuse(send, refused)
            return
        await send_whole(send, status, [JSON], to_json(body))


async def count_tokens(admission: Admission, body: Mapping[str, Any], caller: Caller) -> PostReply:
    """Return how many tokens the messages have; nothing is generated. Raises BadRequest."""
    num_tokens = await admission.count_tokens(
        body, lambda counted, ends_session, _recall: read_messages(counted, ends_session, counted=True), caller
    )
    return 200, {"input_tokens": num_tokens}


async def give_feedback(admission: Admission, body: Mapping[str, Any], caller: Caller) -> PostReply:
    """Record the feedback; return once it is on the log or in the spool. Raises BadRequest."""
    feedback = read_feedback(body)
    session_id = admission.sessions.session_of(feedback.exchange_id) or feedback.session_id
    if session_id is None or not _is_open(admission, session_id, caller):
        raise unknown_response(str(body["response_id"]))
    if feedback.session_id not in (None, session_id):
        raise BadRequest(
            f"session_id is {feedback.session_id}, and the response was given in another session; leave it out.",
            param="session_id",
        )
    event = feedback.event(session_id, caller.name, admission.now_ms(), str(uuid.uuid4()))
    try:
        await admission.recorder.append((event,))
    except TryLater as error:
        raise unavailable(str(error)) from error
    given = {"feedback_id": event.feedback_id, "response_id": body["response_id"], "session_id": session_id}
    said = {"source": event.source.value, "score": event.score, "text": event.text, "hint": event.hint is not None}
    return 201, {"object": "feedback", **given, **said, "created": event.given_at_ms // 1000}


def _is_open(admission: Admission, session_id: str, caller: Caller) -> bool:
    try:
        return admission.owners.is_open_to(session_id, caller.name)
    except TryLater as error:
        raise unavailable(f"{error}; nothing was recorded. Try again.") from error


def openapi_json() -> bytes:
    """Return openapi.yaml as JSON."""
    # PyYAML's loader in C takes a tenth of the time, which each start of a gateway waits for.
    return orjson.dumps(yaml.load(files(__package__).joinpath("openapi.yaml").read_text(), yaml.CSafeLoader))


Page = Callable[[Request], Awaitable[Response]]


def build_app(admission: Admission, guard: Guard) -> ASGIApp:
    """Return the application; its POST routes bypass Starlette."""
    pages = _Pages(admission, guard)
    others = Starlette(
        routes=[
            Route(MODELS_PATH, pages.models),
            Route(f"{MODELS_PATH}/{{model:path}}", pages.model),
            Route("/healthz", pages.healthz),
            Route("/healthz/ready", pages.ready),
            Route("/readyz", pages.inside(pages.readyz)),
            Route("/metrics", pages.inside(pages.metrics)),
            Route("/openapi.json", pages.inside(pages.openapi)),
        ],
        exception_handlers={404: _not_found, 405: _not_allowed},
    )
    endpoints: dict[str, Endpoint | Post] = {
        CHAT_PATH: Endpoint(admission, CHAT),
        RESPONSES_PATH: Endpoint(admission, RESPONSES),
        MESSAGES_PATH: Endpoint(admission, MESSAGES),
        COUNT_PATH: Post(admission, count_tokens, MESSAGES.refuse),
        FEEDBACK_PATH: Post(admission, give_feedback, CHAT.refuse),
    }
    posts = {path: (guard.guarding(post, post.refuse), post.refuse) for path, post in endpoints.items()}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        found = posts.get(scope["path"]) if scope["type"] == "http" else None
        if found is None:
            await others(scope, receive, send)
            return
        endpoint, refuse = found
        if scope["method"] == "POST":
            await endpoint(scope, receive, send)
        else:
            await refuse(send, _wrong_method(scope["method"], scope["path"], "POST"))

    return app


class _Pages:
    """The pages, which are all routes that are read with GET."""

    def __init__(self, admission: Admission, guard: Guard) -> None:
        self._admission = admission
        self._guard = guard
        self._since_s = int(time.time())
        self._openapi = openapi_json()
        self._here_alone = admission.settings.host in LOOPBACK  # only this machine's programs can connect

    def inside(self, page: Page) -> Page:
        """Return the page behind a guard: who asks needs a key, unless only this machine's programs can connect."""

        async def shown(request: Request) -> Response:
            ours = self._here_alone and foreign_page(dict(request.headers)) is None
            refusal = None if ours else self._refusal(request)
            return refusal or await page(request)

        return shown

    async def models(self, request: Request) -> Response:
        refusal, model = self._refusal(request), self._model(request)
        as_anthropic = asks_as_anthropic(request.headers)
        return refusal or answer(anthropic_models(model) if as_anthropic else {"object": "list", "data": [model]})

    async def model(self, request: Request) -> Response:
        return self._refusal(request, request.path_params["model"]) or answer(self._model(request))

    async def healthz(self, _request: Request) -> Response:
        return answer({"ok": True})

    async def ready(self, _request: Request) -> Response:
        """Tell probes, which have no key, whether the gateway serves, but not what is missing."""
        ready = self._ready(self._recording_problem())
        return answer({"ready": ready}, 200 if ready else 503)

    async def readyz(self, _request: Request) -> Response:
        full = self._recording_problem()
        parts, ready = self._parts(full), self._ready(full)
        missing = [{"part": name, "problem": problem} for name, problem in parts if problem is not None]
        content = {"ready": ready, "missing": missing, "parts": [name for name, _ in parts], "spool": self._spool()}
        return answer(content, 200 if ready else 503)

    async def openapi(self, _request: Request) -> Response:
        return Response(self._openapi, media_type="application/json")

    async def metrics(self, _request: Request) -> Response:
        metrics = self._admission.metrics
        for engine, offered in self._admission.engines.offered().items():
            metrics.engine_offered.labels(engine.url).set(offered)
            metrics.engine_in_flight.labels(engine.url).set(engine.in_flight)
            if engine.version is not None:
                metrics.policy_version.labels(engine.url).set(engine.version)
        spool = self._spool()
        metrics.spool_records.set(spool["records"] or 0)
        metrics.spool_bytes.set(spool["bytes"] or 0)
        metrics.spool_damaged_bytes.set(self._admission.delivery.damaged_bytes)
        metrics.spool_oldest_s.set(spool["oldest_s"] or 0)
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    def _ready(self, full: str | None) -> bool:
        """Return whether the gateway serves: one engine is enough, and Kafka may be away while the spool has room."""
        return full is None and any(engine.problem is None for engine in self._admission.engines.all)

    def _recording_problem(self) -> str | None:
        """Return why nothing of a new session can be recorded; None: it can, as far as is known."""
        return self._admission.delivery.problem(str(uuid.uuid4()))

    def _parts(self, full: str | None) -> list[tuple[str, str | None]]:
        """Return the name and the problem of each part; a process without a tokenizer does not get this far."""
        engines = [(f"engine {engine.url}", engine.problem) for engine in self._admission.engines.all]
        kafka = ("kafka", full or self._admission.delivery.away)
        return [*engines, kafka, (f"tokenizer ({self._admission.renderer.family})", None)]

    def _spool(self) -> dict[str, float | None]:
        """The records that wait for Kafka on this machine's disk."""
        delivery = self._admission.delivery
        age_s = None if delivery.oldest_ms is None else (self._admission.now_ms() - delivery.oldest_ms) / 1000
        return {"records": delivery.num_waiting, "bytes": delivery.spool_bytes, "oldest_s": age_s}

    def _model(self, request: Request) -> dict[str, object]:
        served = self._admission.policy.served_model
        if asks_as_anthropic(request.headers):
            return anthropic_model(served, self._since_s)
        contexts = (engine.context_length_tokens for engine in self._admission.engines.all)
        shortest = min((context for context in contexts if context is not None), default=None)
        return openai_model(served, self._since_s, shortest, thinks=self._admission.renderer.thinks)

    def _refusal(self, request: Request, model: str | None = None) -> Response | None:
        """Return the refusal for the request's key, or for a `model` that is not served."""
        try:
            self._guard.caller(dict(request.headers))
            self._admission.check_model(model)
        except BadRequest as refused:
            return _refusal(request, refused)
        return None


def _refusal(request: Request, refused: BadRequest) -> Response:
    headers = {name.decode(): value.decode() for name, value in error_headers(refused)}
    body = error_body(refused) if asks_as_anthropic(request.headers) else refused.as_json()
    return Response(body, status_code=refused.status, headers=headers)


async def _not_found(request: Request, _error: Exception) -> Response:
    words = wrong_path(request.method, request.scope["path"])
    return _refusal(request, BadRequest(words, status=404, code="unknown_url"))


async def _not_allowed(request: Request, _error: Exception) -> Response:
    return _refusal(request, _wrong_method(request.method, request.url.path, "GET"))


def _wrong_method(found: str, path: str, expected: str) -> BadRequest:
    return BadRequest(f"{found} {path} is not offered; use {expected}.", status=405, allow=expected)


def wrong_path(method: str, path: str) -> str:
    """Return why there is nothing at `path`, and what to use in its place."""
    found = f"There is no {method} {path[:200]} here"
    rest = _without_prefixes(path.rstrip("/"))
    for offered in _OFFERED:
        if rest == offered.removeprefix("/v1"):
            return f"{found}; it is {offered}: {_mend(path)}."
    if rest in _NOT_OFFERED:
        return f"{found}: {_NOT_OFFERED[rest]}."
    for of_another, why in _OF_OTHER_MODELS.items():
        if rest.startswith(of_another):
            return f"{found}: {why}."
    if rest.startswith("/responses/"):
        return f"{found}: responses are asked for by POST {RESPONSES_PATH} and not fetched, listed or deleted."
    return (
        f"{found}; OpenAI's clients ask {CHAT_PATH} and {RESPONSES_PATH} (base URL ending in /v1), Anthropic's "
        f"{MESSAGES_PATH} (base URL without /v1). GET /openapi.json lists all."
    )


def _without_prefixes(path: str) -> str:
    for prefix in _PREFIXES:
        if path.startswith(f"{prefix}/"):
            return _without_prefixes(path.removeprefix(prefix))
    return path


def _mend(path: str) -> str:
    """Return what is to be done about a base URL that led to `path`."""
    if "/v1/v1/" in path:
        return "/v1 stands in the base URL and in the path; an Anthropic client's base URL has none"
    if path.endswith("/"):
        return "leave out the slash at the end"
    if path.startswith("/v1/"):
        return "ask for exactly that path"
    return "set the base URL to this gateway's address and /v1, or to the address alone for Anthropic's clients"


def asks_as_anthropic(headers: Mapping[str, str]) -> bool:
    """Return whether a request has the header that all of Anthropic's clients send."""
    return "anthropic-version" in headers


def openai_model(model: str, since_s: int, context_length_tokens: int | None, *, thinks: bool) -> dict[str, Any]:
    """Return OpenAI's model object, with the context length as SGLang and vLLM name it, and whether it thinks."""
    told = {"id": model, "object": "model", "created": since_s, "owned_by": "clawstream"}
    return told | {"max_model_len": context_length_tokens, "reasoning": thinks}


def anthropic_model(model: str, since_s: int) -> dict[str, Any]:
    """Return Anthropic's model object."""
    created = datetime.fromtimestamp(since_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "model", "id": model, "display_name": model, "created_at": created}


def anthropic_models(model: dict[str, Any]) -> dict[str, Any]:
    """Return Anthropic's list of this one model."""
    return {"data": [model], "has_more": False, "first_id": model["id"], "last_id": model["id"]}
