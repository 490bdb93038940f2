"""The refresh stage: samples with hints, late samples and rehearsals -> new answers, and the samples of rehearsals.

Each request ends in one AnswerRefreshed, with an answer or an error; a rehearsal's sample or refusal goes with it.
While no engine answers at all, requests wait.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from clawstream.errors import TooLate
from clawstream.events import Event
from clawstream.refresh.asking import NOTHING, Known, RefreshRequest, observe
from clawstream.stream import topics
from clawstream.stream.stage import DAY_MS, Stage, now_ms

READS = (topics.SAMPLES, topics.ANSWERS)
ASKED_AT_ONCE = 8  # few, so that engines have room for people
ANSWERED_WITHIN_S = 600.0
GIVEN_UP_AFTER_S = 3600.0


class Policy(Protocol):
    """Answers prompts."""

    async def answer(self, ask: RefreshRequest) -> Sequence[Event]:
        """Return the answer; raises TryLater."""

    def give_up(self, ask: RefreshRequest, why: str) -> Sequence[Event]:
        """Return the event that says why there is no answer."""


def refresh_stage(
    policy: Policy,
    policy_id: str,
    *,
    by_key: bool = False,
    answers_per_hint: int,
    heard_ms: int = DAY_MS,
    now_ms: Callable[[], int] = now_ms,
) -> Stage[Known, RefreshRequest]:
    """Return the stage that asks `policy` for new answers; `by_key`: also to the prompts of keys' policies.

    Requests from samples older than `heard_ms` are given up unasked, as every stage has forgotten their turns. So the
    first start on a long log does not ask about all of it.
    """

    async def perform(ask: RefreshRequest) -> Sequence[Event]:
        age_ms = now_ms() - ask.at_ms
        if age_ms > heard_ms:
            raise TooLate(
                f"too old: its sample was written {age_ms / DAY_MS:.3g} days ago, and stages forget a turn after "
                f"{heard_ms / DAY_MS:.3g} days; it was not asked"
            )
        return await policy.answer(ask)

    return Stage(
        name="refresh",
        reads=READS,
        step=lambda known, record: observe(
            known or NOTHING,
            record.event,
            record.timestamp_ms,
            policy_id=policy_id,
            by_key=by_key,
            answers_per_hint=answers_per_hint,
        ),
        perform=perform,
        give_up=policy.give_up,
        calls_at_once=ASKED_AT_ONCE,
        call_timeout_s=ANSWERED_WITHIN_S,
        deadline_s=GIVEN_UP_AFTER_S,
        retain_ms=heard_ms,
    )
