"""A policy that answers again what it is asked, and hints for what it said."""

from collections.abc import Iterable

from clawstream.events import (
    AnswerRefreshed,
    Event,
    FinishReason,
    Question,
    RefreshAsked,
    SampleAssembled,
    VersionSpan,
)
from clawstream.refresh.asking import RefreshRequest
from tests.sessions import tokens

HINT = {
    Question.SCORE: ["\\boxed{-1}"],
    Question.HINT: ["\\boxed{1} [HINT_START]Leave out the headings.[HINT_END]"],
}


class FakeRefresher:
    """A policy whose answer follows from what is asked; every `bad`th is cut off."""

    def __init__(self, bad: int = 1000) -> None:
        self.bad = bad
        self.asked: list[RefreshRequest] = []

    async def answer(self, ask: RefreshRequest) -> list[Event]:
        self.asked.append(ask)
        said = tokens(f"{ask.seeded.seed} to {len(ask.prompt_ids)}".encode())
        answered = AnswerRefreshed(
            session_id=ask.session_id,
            turn_id=ask.turn_id,
            number=ask.number,
            policy_id="policy",
            sampling=ask.seeded,
            versions=(VersionSpan(policy_version=8, num_tokens=len(said)),),
            message=b'{"role":"assistant","content":"again"}',
            output_ids=said,
            output_logprobs=(-0.25,) * len(said),
            finish_reason=FinishReason.LENGTH if (ask.seeded.seed or 0) % self.bad == 0 else FinishReason.STOP,
            error=None,
            answered_at_ms=0,
        )
        return [answered]

    def give_up(self, ask: RefreshRequest, why: str) -> list[Event]:
        none = AnswerRefreshed(
            session_id=ask.session_id, turn_id=ask.turn_id, number=ask.number, policy_id="policy",
            sampling=ask.seeded, versions=(), message=None, output_ids=(), output_logprobs=(), finish_reason=None,
            error=why, answered_at_ms=0,
        )  # fmt: skip
        return [none]


def of_refreshed(events: Iterable[Event]) -> list[SampleAssembled]:
    """The samples of answers given again."""
    return [one for one in events if isinstance(one, SampleAssembled) and one.refreshed_id is not None]


def too_late(sample: SampleAssembled) -> RefreshAsked:
    """What a trainer says of a sample that came too late."""
    assert sample.sampling is not None
    return RefreshAsked(
        session_id=sample.session_id,
        turn_id=sample.turn_id,
        sample_id=sample.sample_id,
        policy_id=sample.policy_id,
        prompt_ids=sample.prompt_ids,
        sampling=sample.sampling,
        asked_at_ms=0,
    )
