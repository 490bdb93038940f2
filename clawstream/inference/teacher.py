"""Has two engines score one answer: the teacher, who sees the hint, and the policy, who does not.

The one rule: both numbers of a token are engines' scores of input tokens at temperature 1, since the trainer's kernels
and precision differ by as much as a hint changes a log-prob. The policy's weights keep one known version throughout the
call, never older than the one that sampled the answer: the gap is what the policy has yet to learn.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from clawstream.config import Settings
from clawstream.conversation.history import num_equal
from clawstream.errors import ConfigError, NotYet, TryLater
from clawstream.inference.engine import (
    EngineRefused,
    ScoreRequest,
    Scores,
    ServerInfo,
    VersionedEngine,
    cache_key,
    served,
)
from clawstream.inference.model_folder import difference, largest_token_id, spread, too_small_for, vocabulary
from clawstream.inference.sglang import SglangEngine, engine_session

log = logging.getLogger(__name__)

CALLS_AT_ONCE = 8  # each is a prompt that the teacher reads whole
CALL_TIMEOUT_S = 120.0  # for the teacher's score and the policy's
DEADLINE_S = 600.0  # a hint that was not scored by then is not learned from
_TRIED_EVERY_S = 5.0


class ScoringEngine(VersionedEngine, Protocol):
    """The methods of an engine that are used here."""

    async def score(
        self, input_ids: Sequence[int], start: int, *, extra_key: str | None = None, lora_name: str | None = None
    ) -> tuple[float, ...]: ...
    async def server_info(self) -> ServerInfo: ...
    async def token_ids(self, text: str) -> tuple[int, ...] | None: ...


class TeacherClient:
    """A teacher at one endpoint, beside the engines of the policy that learns from it."""

    def __init__(self, teacher: ScoringEngine, students: Sequence[ScoringEngine], *, policy_id: str) -> None:
        self._teacher = teacher
        self._students = itertools.cycle(students)
        self._policy_id = policy_id
        self._unchecked: str | None = None  # why the teacher's vocabulary is not known to be the policy's

    async def known(self, check: Callable[[], Awaitable[None]]) -> None:
        """Score nothing until `check` has returned; it is called again as long as it raises TryLater."""
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
        """Return both scores. Raises TryLater if one is missing, EngineRefused if an engine never will score it."""
        if self._unchecked is not None:
            raise NotYet(f"teacher {self._teacher.url} is not asked: {self._unchecked}")
        version, student = await self._student_score(next(self._students), wanted)
        asked = (*wanted.hinted_ids, *wanted.response_ids)
        return Scores(await self._teacher.score(asked, len(wanted.hinted_ids)), student, version)

    async def _student_score(self, engine: ScoringEngine, wanted: ScoreRequest) -> tuple[int, tuple[float, ...]]:
        if wanted.policy_id != self._policy_id:
            raise EngineRefused(
                404, f"engine {engine.url} serves {self._policy_id}, and {wanted.policy_id} sampled the answer"
            )
        before = await served(engine, self._policy_id)
        if before.version < wanted.sampled_by:
            raise NotYet(
                f"engine {engine.url} serves version {before.version} of {self._policy_id}, and version "
                f"{wanted.sampled_by} sampled the answer: it is asked again once it is brought up to date"
            )
        asked, start = (*wanted.prompt_ids, *wanted.response_ids), len(wanted.prompt_ids)
        key = cache_key(self._policy_id, before.weights)
        found: tuple[float, ...] | EngineRefused
        try:
            found = await engine.score(asked, start, extra_key=key, lora_name=before.adapter)
        except EngineRefused as error:
            found = error
        after = await served(engine, self._policy_id)
        if after != before:
            raise NotYet(
                f"engine {engine.url} went from version {before.version} of {self._policy_id} to {after.version} while "
                "it scored, so nobody knows whose score it is; it is asked again"
            )
        if isinstance(found, EngineRefused):
            raise found
        return before.version, found


@asynccontextmanager
async def teaching(settings: Settings, added_ids: Iterable[int]) -> AsyncIterator[TeacherClient]:
    """A teacher that lives as long as the block; prompts may hold `added_ids` besides the policy's own ids.

    It scores once its vocabulary is checked. The block ends with ConfigError once another vocabulary is found.
    """
    teacher, engine = settings.teacher, settings.engine
    assert teacher.url is not None, "settings with an engine for a teacher name it"
    async with engine_session(teacher) as session, engine_session(engine) as of_policy:
        asked = SglangEngine(session, teacher.url, control_s=CALL_TIMEOUT_S)
        students = [SglangEngine(of_policy, url, control_s=CALL_TIMEOUT_S) for url in engine.addresses]
        found = TeacherClient(asked, students, policy_id=settings.policy.id)
        try:
            async with asyncio.TaskGroup() as tasks:
                checking = tasks.create_task(
                    found.known(lambda: refuse_another_vocabulary(asked, engine.base_policy, added_ids))
                )
                yield found
                checking.cancel()
        except ExceptionGroup as failures:  # one error, the check's or the block's own: the group adds nothing
            raise failures.exceptions[0] from failures


async def refuse_another_vocabulary(teacher: ScoringEngine, policy: Path, added_ids: Iterable[int]) -> None:
    """Raise ConfigError where the teacher gives tokens other ids than the policy in the folder.

    The check asks the teacher for the ids of a text of the policy's own tokens, else reads the tokenizer.json of the
    teacher's folder if it is here, second because a folder of that name here may hold another model. If neither can be
    had, a warning says so and the teacher is trusted. Ids that a model does not know end SGLang (0.5.23).
    """
    ours, theirs = vocabulary(policy), Path((await teacher.server_info()).model_path)
    wrong = too_small_for(largest_token_id(policy, added_ids), theirs)
    if wrong is None and ours is not None:
        text = spread(ours)
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
            wrong = f"of {len(expected)} tokens of the policy's it makes {len(found)}"
            if at < min(len(found), len(expected)):
                wrong = f"it gives {found[at]} for token {at} of a text where the policy has {expected[at]}"
    if wrong is not None:
        raise ConfigError(
            f"teacher {teacher.url} has another vocabulary than the policy in {policy}: {wrong}. Its scores would "
            "be of other words; nothing is started. Name a model with the policy's tokenizer in teacher.url, or leave "
            'training.teacher at another than "engine"'
        )
