"""The clients of judges (at any OpenAI-compatible endpoint) and of teachers (engines that score an answer).

Whatever a judge sends is its reply, however odd; a reply beyond its limit of bytes or time is unusable. Where no reply
comes, TryLater is raised and the judge is asked again. JudgeRefused means that the judge will never take this request.
Teacher's and student's log-probs both come from engines, at temperature 1: the trainer's kernels and precision change a
log-prob as much as a hint does. During a call the student has to serve one version, not older than the answer's.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import aiohttp
import orjson

from clawstream.config import JudgeSettings, Settings
from clawstream.conversation.history import num_equal
from clawstream.errors import ClawstreamError, ConfigError, NotYet, TryLater
from clawstream.events import is_ours
from clawstream.inference.clients import engine_client, engine_session
from clawstream.inference.engine import EngineRefused, ScoreRequest, Scores, ServerInfo, VersionedEngine, served
from clawstream.inference.http_borders import ASKING, PLAIN, bearer, parsed, read_body, read_error, shown
from clawstream.inference.model_folder import difference, largest_token_id, too_small_for, vocabulary, vocabulary_sample

CALLS_AT_ONCE = 64  # to the endpoint, by each judging process; with more, servers only queue them
TEMPERATURE = 0.6  # votes of one case differ, and few are unreadable
_CONNECT_S = 10.0
_LONGEST_WAIT_S = 3600.0  # the longest wait that a judge may ask for (Retry-After)
_SHARE_OF_TIME = 0.9  # after this share of a call's time, a reply that has begun is cut off: unusable
_FRAME_BYTES = 64 * 2**10  # of a reply's JSON around its text
_TOKEN_BYTES = 64  # of up to 12 characters, escaped; in the reasoning and in the text
_MOST_BYTES = 2 * 2**20  # a vote is one record, and a byte that is no UTF-8 is recorded as three
_KEPT_CHARACTERS = 2000  # kept of an unusable reply
_MOST_TOKENS = 2**31 - 1
_TEMPORARY = (401, 403, 408, 425, 429)  # asked again: an operator can correct a bad key while the votes wait
_ADVICE = {
    "chat_template_kwargs": ". Leave judge.thinking out: it does not take that switch",
    "context length": ". Give the judge a longer context, or lower judge.max_tokens if it writes its votes",
}
_MOST_TRIAL_BYTES = 2**18
_SHOWN_CHARACTERS = 200
log = logging.getLogger(__name__)
TEACHER_CALLS_AT_ONCE = 8  # each is a prompt that the teacher reads whole
TEACHER_CALL_TIMEOUT_S = 120.0  # for the teacher's score and the policy's
TEACHER_DEADLINE_S = 600.0  # then a score that did not arrive is recorded as failed
_TRIED_EVERY_S = 5.0


class JudgeRefused(ClawstreamError):
    """The judge will not take this request, however often it is asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeReply:
    """A judge's reply; counts are the endpoint's own, None where it gives none.

    `unusable` says why the text is no whole reply. `cut`: the endpoint ended it at the limit of tokens.
    """

    text: str
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cut: bool = False
    unusable: str | None = None


class JudgeClient:
    """One judge at one endpoint."""

    def __init__(
        self, session: aiohttp.ClientSession, settings: JudgeSettings, url: str, call_timeout_s: float
    ) -> None:
        self._session = session
        self._settings = settings
        self._call_timeout_s = call_timeout_s
        self._url = f"{url.rstrip('/')}/chat/completions"
        self._most_bytes = min(_MOST_BYTES, _FRAME_BYTES + _TOKEN_BYTES * settings.max_tokens)
        self.name = judge_name(settings.model, url)

    @classmethod
    @asynccontextmanager
    async def open(
        cls, settings: JudgeSettings, *, call_timeout_s: float | None = None
    ) -> AsyncIterator["JudgeClient"]:
        """Yield a client that is open for the length of the block; without a timeout the settings' holds."""
        call_timeout_s = settings.call_timeout_s if call_timeout_s is None else call_timeout_s
        if settings.url is None:
            raise ConfigError(
                "judge.url is not set: name an OpenAI-compatible endpoint, for example http://127.0.0.1:8000/v1"
            )
        async with judge_session(settings, call_timeout_s) as session:
            yield cls(session, settings, settings.url, call_timeout_s)

    async def ask(self, system: str, user: str, *, seed: int) -> JudgeReply:
        """Return the judge's reply. Raises TryLater where none arrived, JudgeRefused where none ever will."""
        asked = {"system": system, "user": user}
        body = _body(self._settings, asked, max_tokens=self._settings.max_tokens) | {"seed": seed}
        until = asyncio.get_running_loop().time() + _SHARE_OF_TIME * self._call_timeout_s
        try:
            async with self._session.post(self._url, data=orjson.dumps(body), headers=PLAIN, **ASKING) as response:
                if response.status != 200:
                    said = await read_error(response, until=until)
                    raise failure(self.name, response.status, said, response.headers.get("Retry-After"))
                content, wrong = await read_body(response, most_bytes=self._most_bytes, until=until)
        except (TimeoutError, aiohttp.ClientError, ConnectionError) as error:
            raise TryLater(f"judge {self.name}: no reply ({shown(repr(error))}); it is asked again") from error
        if wrong is None:
            return _reply(content)
        return JudgeReply(
            text=content.decode(errors="replace")[:_KEPT_CHARACTERS],
            unusable=f"judge {self.name}: its reply is not read, {wrong}; its beginning is kept",
        )


@asynccontextmanager
async def judge_session(settings: JudgeSettings, call_timeout_s: float) -> AsyncIterator[aiohttp.ClientSession]:
    """Yield a session that shows the judge's key, for the length of the block."""
    timeout = aiohttp.ClientTimeout(total=call_timeout_s, sock_connect=_CONNECT_S)
    connector = aiohttp.TCPConnector(limit=CALLS_AT_ONCE, keepalive_timeout=60.0)
    async with aiohttp.ClientSession(
        connector=connector, headers=bearer(settings.api_key), timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()
    ) as session:
        yield session


def _body(settings: JudgeSettings, said: Mapping[str, str], *, max_tokens: int) -> dict[str, object]:
    messages = [{"role": role, "content": content} for role, content in said.items()]
    body = {"model": settings.model, "messages": messages, "temperature": TEMPERATURE, "max_tokens": max_tokens}
    # SGLang and vLLM give this to the chat template; an endpoint that does not know the key may refuse the request.
    switch = {"chat_template_kwargs": {"enable_thinking": settings.thinking}}
    return body if settings.thinking is None else body | switch


def judge_name(model: str, url: str) -> str:
    """Return how the log names a judge or a teacher: its model and host, without what may be secret in an address."""
    parts = urlsplit(url)
    return f"{model}@{parts.hostname}" + (f":{parts.port}" if parts.port is not None else "")


def name_of(judge: JudgeSettings) -> str | None:
    """Return how the log names the judge that is set; None: none is."""
    return None if judge.url is None else judge_name(judge.model, judge.url)


def name_of_teacher(settings: Settings) -> str | None:
    """Return how the log names the engine that teaches; None: the trainer does."""
    url = settings.training.teacher if settings.training.by_engine else None
    return None if url is None else judge_name(settings.teacher.model, url)


def failure(name: str, status: int, raw: bytes, retry_after: str | None) -> TryLater | JudgeRefused:
    """Return what a judge's reply of this status is to its caller."""
    said = shown(raw.decode(errors="replace"))
    if status in _TEMPORARY or not 400 <= status < 500:
        return TryLater(f"judge {name}: status {status}, {said}; it is asked again", retry_after_s=_wait(retry_after))
    advice = next((what for words, what in _ADVICE.items() if words in said), "")
    return JudgeRefused(f"judge {name}: status {status}, {said}; this vote is recorded as failed{advice}")


def _wait(retry_after: str | None) -> float | None:
    """Return the seconds that a Retry-After header asks for, as a number or a date, up to an hour."""
    if retry_after is None:
        return None
    if retry_after.strip().isdecimal():
        return min(_LONGEST_WAIT_S, float(retry_after))
    try:
        at = parsedate_to_datetime(retry_after)
    except ValueError:
        return None
    wait_s = (at.replace(tzinfo=at.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
    return min(_LONGEST_WAIT_S, max(0.0, wait_s))


def _reply(raw: bytes) -> JudgeReply:
    """Return the reply in a body; a body that is no chat completion is itself the reply, which its reader refuses."""
    body: Any = parsed(raw)
    try:
        choice = body["choices"][0]
        text = choice["message"]["content"]
    except (KeyError, IndexError, TypeError):
        return JudgeReply(text=raw.decode(errors="replace"))
    usage = body.get("usage")
    counts: Mapping[str, Any] = usage if isinstance(usage, dict) else {}
    return JudgeReply(
        text=text if isinstance(text, str) else "",
        prompt_tokens=_count(counts.get("prompt_tokens")),
        completion_tokens=_count(counts.get("completion_tokens")),
        cut=choice.get("finish_reason") == "length",
    )


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= _MOST_TOKENS else None


async def problem_with(settings: JudgeSettings, url: str, *, within_s: float = 10.0) -> str | None:
    """Return why the judge at `url` gives no vote and what to do, in words for a person; None: it gives one."""
    body = _body(settings, {"user": "Reply with \\boxed{1}."}, max_tokens=16)
    where = f"{url.rstrip('/')}/chat/completions"
    try:
        async with (
            asyncio.timeout(within_s),
            aiohttp.ClientSession(headers=bearer(settings.api_key)) as session,
            session.post(where, data=orjson.dumps(body), headers=PLAIN, **ASKING) as response,
        ):
            raw = (await read_body(response, most_bytes=_MOST_TRIAL_BYTES)).content
    except TimeoutError:
        return f"{where} gave no answer within {within_s:g} s. Is the model still loading?"
    except (aiohttp.ClientError, ConnectionError) as error:
        return f"nothing answers at {where} ({error}). Start the judge there, or set judge.url"
    if response.status != 200:
        return f"{where} answers with status {response.status}{_said(raw)}. {_advice(settings, response.status)}"
    if not _is_completion(raw):
        return f"what {where} answers is no chat completion{_said(raw)}. Is judge.url the address that ends in /v1?"
    return None


def _advice(settings: JudgeSettings, status: int) -> str:
    if status in (401, 403):
        return "Set judge.api_key to a key that it takes" if settings.api_key is None else "Is judge.api_key right?"
    if status == 404:
        return f"Has it a model {settings.model} (judge.model), and is judge.url the address that ends in /v1?"
    return "Its own log says why"


def _said(raw: bytes) -> str:
    said = " ".join(raw[:_SHOWN_CHARACTERS].decode(errors="replace").split())
    return f" ({said})" if said.isprintable() and said else ""


def _is_completion(raw: bytes) -> bool:
    body: Any = parsed(raw)
    try:
        return isinstance(body["choices"][0]["message"], dict)
    except (KeyError, IndexError, TypeError):
        return False


class ScoringEngine(VersionedEngine, Protocol):
    """The methods of an engine that are used here."""

    async def score(
        self, input_ids: Sequence[int], start: int, *, extra_key: str | None = None, lora_name: str | None = None
    ) -> tuple[float, ...]: ...
    async def server_info(self) -> ServerInfo: ...
    async def token_ids(self, text: str) -> tuple[int, ...] | None: ...


class TeacherClient:
    """A teacher at one endpoint, beside the engines of the policy that learns from it."""

    def __init__(
        self, teacher: ScoringEngine, students: Sequence[ScoringEngine], *, policy_id: str, by_key: bool = False
    ) -> None:
        self._teacher = teacher
        self._students = itertools.cycle(students)
        self._policy_id = policy_id
        self._by_key = by_key
        self._unchecked: str | None = None  # why the teacher's vocabulary is not known to be the policy's

    async def score_after(self, check: Callable[[], Awaitable[None]]) -> None:
        """Score nothing until `check` has returned; `check` is called again as long as it raises TryLater."""
        self._unchecked = "its vocabulary is not checked yet"
        while self._unchecked is not None:
            try:
                await check()
                self._unchecked = None
            except TryLater as error:
                self._unchecked = f"its vocabulary can't be checked, {error}"
                log.warning("teacher=%s state=waited_for reason=%s", self._teacher.url, self._unchecked)
                await asyncio.sleep(_TRIED_EVERY_S)

    async def score(self, wanted: ScoreRequest) -> Scores:
        """Return both scores. Raises TryLater if one is missing, EngineRefused if an engine will never give one."""
        if self._unchecked is not None:
            raise NotYet(f"teacher {self._teacher.url} is not asked: {self._unchecked}")
        version, student = await self._student_score(next(self._students), wanted)
        asked = (*wanted.hinted_ids, *wanted.response_ids)
        return Scores(await self._teacher.score(asked, len(wanted.hinted_ids)), student, version)

    async def _student_score(self, engine: ScoringEngine, wanted: ScoreRequest) -> tuple[int, tuple[float, ...]]:
        if not is_ours(wanted.policy_id, self._policy_id, by_key=self._by_key):
            raise EngineRefused(
                404, f"engine {engine.url} serves {self._policy_id}, and {wanted.policy_id} sampled the answer"
            )
        before = await served(engine, wanted.policy_id)
        if before.version < wanted.sampled_by:
            raise NotYet(
                f"engine {engine.url} serves version {before.version} of {wanted.policy_id}, and version "
                f"{wanted.sampled_by} sampled the answer: it is asked again once it is brought up to date"
            )
        asked, start = (*wanted.prompt_ids, *wanted.response_ids), len(wanted.prompt_ids)
        found: tuple[float, ...] | EngineRefused
        try:
            found = await engine.score(asked, start, extra_key=before.cache_key(), lora_name=before.adapter)
        except EngineRefused as error:
            found = error
        after = await served(engine, wanted.policy_id)
        if after != before:
            raise NotYet(
                f"engine {engine.url} went from version {before.version} of {wanted.policy_id} to {after.version} "
                "while it scored, so nobody knows whose score it is; it is asked again"
            )
        if isinstance(found, EngineRefused):
            raise found
        return before.version, found


@asynccontextmanager
async def teaching(settings: Settings, added_ids: Iterable[int]) -> AsyncIterator[TeacherClient]:
    """Yield a teacher for the length of the block; prompts may hold `added_ids` besides the policy's own ids.

    The teacher scores once its vocabulary is checked. If it is not the policy's, the block ends with ConfigError.
    """
    url, engine = settings.training.teacher, settings.engine
    assert url is not None, "settings with an engine for a teacher name it"
    async with engine_session(settings.teacher) as session, engine_session(engine) as of_policy:
        client = engine_client(engine)
        asked = client(session, url, control_s=TEACHER_CALL_TIMEOUT_S)
        students = [client(of_policy, url, control_s=TEACHER_CALL_TIMEOUT_S) for url in engine.addresses]
        policy = settings.policy
        found = TeacherClient(asked, students, policy_id=policy.id, by_key=policy.by_key)
        try:
            async with asyncio.TaskGroup() as tasks:
                checking = tasks.create_task(
                    found.score_after(lambda: refuse_another_vocabulary(asked, engine.base_policy, added_ids))
                )
                yield found
                checking.cancel()
        except ExceptionGroup as failures:  # one error, the check's or the block's own: the group adds nothing
            raise failures.exceptions[0] from failures


async def refuse_another_vocabulary(teacher: ScoringEngine, policy: Path, added_ids: Iterable[int]) -> None:
    """Raise ConfigError where the teacher gives tokens other ids than the policy in the folder.

    The teacher is asked for the ids of a text of the policy's own tokens. If it can't tell them, the tokenizer.json in
    its folder is read, if there is one on this machine; this comes second, as the folder here may hold another model.
    Without either the teacher is trusted, with a warning. An id that the model does not have ends SGLang's process
    (0.5.23).
    """
    ours, theirs = vocabulary(policy), Path((await teacher.server_info()).model_path)
    wrong = too_small_for(largest_token_id(policy, added_ids), theirs)
    if wrong is None and ours is not None:
        text = vocabulary_sample(ours)
        expected = tuple(ours.encode(text, add_special_tokens=False).ids)
        found = await teacher.token_ids(text)
        if found is None:
            known = await asyncio.to_thread(vocabulary, theirs)
            if known is not None:
                wrong = difference(ours, known)
            else:
                log.warning(
                    "teacher=%s vocabulary=unknown reason=it has no /tokenize, and %s can't be read here. It is asked "
                    "all the same: see to it that its tokenizer is the policy's",
                    teacher.url, theirs,
                )  # fmt: skip
        elif found != expected:
            at = num_equal(found, expected)
            wrong = f"it makes {len(found)} tokens of a text that is {len(expected)} tokens for the policy"
            if at < min(len(found), len(expected)):
                wrong = f"it gives {found[at]} for token {at} of a text where the policy has {expected[at]}"
    if wrong is not None:
        raise ConfigError(
            f"teacher {teacher.url} has another vocabulary than the policy in {policy}: {wrong}. Its scores would "
            "be of other words; nothing is started. Name an engine with the policy's tokenizer in training.teacher, or "
            "take another teacher"
        )
