"""A policy's past: what it was asked, what was said of it, and versions that learned from it, also after a rollback."""

from pathlib import Path

from clawstream.events import (
    BatchPlanned,
    Event,
    ExchangeCompleted,
    PolicyPublished,
    RequestDelta,
    SampleAssembled,
    StepTaken,
    TurnPaired,
    TurnType,
)
from tests.parts.projections.one_session import message
from tests.unit.projections.logs import example

POLICY = "policy"


def conversation(name: str, question: str = "?", *, prompt_ids: tuple[int, ...] = (1, 2)) -> list[Event]:
    """The turn `name`: a question, its answer, and what was said then, "no `name`"."""
    asked = RequestDelta(
        parent_exchange_id=None,
        kept_messages=0,
        kept_tokens=0,
        messages=(message("user", question),),
        token_ids=prompt_ids,
        options=b"{}",
    )
    replied = RequestDelta(
        parent_exchange_id=name,
        kept_messages=1,
        kept_tokens=len(prompt_ids),
        messages=(message("assistant", "answer"), message("user", f"no {name}")),
        token_ids=(3,),
        options=None,
    )
    exchanges: list[Event] = [
        example(
            ExchangeCompleted, session_id=f"of-{name}", exchange_id=exchange_id, turn_type=TurnType.MAIN,
            policy_id=POLICY, request=request, message=message("assistant", "answer"),
        )
        for exchange_id, request in ((name, asked), (f"{name}-next", replied))
    ]  # fmt: skip
    paired = TurnPaired(session_id=f"of-{name}", turn_id=name, next_exchange_id=f"{name}-next", next_state=(2,))
    return [*exchanges, paired]


def sample(name: str) -> SampleAssembled:
    """What a policy can learn from the turn `name`."""
    made: SampleAssembled = example(
        SampleAssembled, session_id=f"of-{name}", turn_id=name, judge="judge", prompt_version="v1", reward=-1,
        total_reward=-1.0, hint=f"hint {name}", prompt_ids=(1, 2), hinted_prompt_ids=(1, 9, 2), response_ids=(7,),
        response_logprobs=(-0.5,), trained=(1,), policy_id=POLICY,
    )  # fmt: skip
    return made


def planned(version: int, parent: int, *names: str, rollback: int | None = None) -> list[Event]:
    """The plan of a version that is made of `parent`, on samples of these turns, which come with it."""
    samples = [sample(name) for name in names]
    plan = example(
        BatchPlanned, policy_id=POLICY, policy_version=version, parent_version=parent, rollback=rollback,
        sample_ids=tuple(one.sample_id for one in samples),
    )  # fmt: skip
    return [*samples, plan]


def published(version: int, parent: int | None, path: Path = Path("nowhere")) -> PolicyPublished:
    """Its weights lie at `path`."""
    event: PolicyPublished = example(
        PolicyPublished, policy_id=POLICY, policy_version=version, parent_version=parent, path=str(path)
    )
    return event


def made(
    version: int, parent: int, *names: str, rollback: int | None = None, path: Path = Path("nowhere")
) -> list[Event]:
    """A version from its plan to its publication."""
    step = example(StepTaken, policy_id=POLICY, policy_version=version)
    return [*planned(version, parent, *names, rollback=rollback), step, published(version, parent, path)]
