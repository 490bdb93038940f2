"""What the log says of a policy so far, and which events it still lacks. Pure.

The one rule: of two events with one id the first on the log counts. So a version stays what it was first published as,
and a step that is taken again must have the same outcome.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from math import inf

from clawstream.errors import SamplesGone, UnusableCheckpoint
from clawstream.events import (
    BatchPlanned,
    PolicyActivated,
    PolicyEvent,
    PolicyPublished,
    RollbackAsked,
    SampleAssembled,
    StepRejected,
    StepTaken,
)
from clawstream.inference.engine import adapter_name
from clawstream.training.checkpoints import Checkpoint
from clawstream.training.step.trainer import StepSummary


@dataclass(slots=True)
class PolicyProgress:
    """The events of this policy on the log so far."""

    plans: list[BatchPlanned] = field(default_factory=list)
    steps: dict[int, StepTaken] = field(default_factory=dict)  # by version
    published: dict[int, PolicyPublished] = field(default_factory=dict)  # by version
    rejected: dict[int, StepRejected] = field(default_factory=dict)  # by version
    active: int | None = None  # None: no engine has taken any version over

    def learn(self, event: PolicyEvent) -> None:
        """Take in one event of this policy."""
        match event:
            case BatchPlanned():
                self.plans.append(event)
            case StepTaken():
                self.steps.setdefault(event.policy_version, event)
            case PolicyPublished():
                self.published.setdefault(event.policy_version, event)
            case StepRejected():
                self.rejected.setdefault(event.policy_version, event)
            case PolicyActivated():
                self.active = event.policy_version

    def decided(self, version: int) -> int:
        """Return the newest version number that is decided: on disk (`version` is the newest there) or rejected.

        Numbers of rejected steps after `version` count only up to the first plan that is still to be executed.
        """
        first_open = min((plan.policy_version for plan in self.pending(version)), default=inf)
        return max([version, *(plan.policy_version for plan in self.plans if plan.policy_version < first_open)])

    def pending(self, version: int) -> list[BatchPlanned]:
        """Return the plans that are still to be executed, in order; `version` is the newest one on disk."""
        return [
            plan
            for plan in first_plans(self.plans)
            if plan.policy_version > version and plan.policy_version not in self.rejected
        ]

    def num_updates(self, first_version: int, version: int) -> int:
        """Return how many steps lie between two versions, not counting rejected steps and rollbacks."""
        back = {plan.policy_version for plan in first_plans(self.plans) if plan.rollback is not None}
        return version - first_version - sum(first_version < none <= version for none in back | self.rejected.keys())

    def rollback(self, asked: Sequence[RollbackAsked]) -> RollbackAsked | None:
        """Return the newest rollback that is still to be carried out; None: there is none."""
        done = max((plan.rollback for plan in self.plans if plan.rollback is not None), default=0)
        first = {event.number: event for event in reversed(asked)}
        newest = max(first, default=0)
        return first[newest] if newest > done else None

    def needed(self, asked: Sequence[RollbackAsked], version: int) -> frozenset[int | None]:
        """Return the versions that are served or that plans or rollbacks start from; `version`: the newest on disk."""
        back = self.rollback(asked)
        parents = {plan.parent_version for plan in self.pending(version)}
        return frozenset({self.active, None if back is None else back.to_version} | parents)

    def missing_events(self, checkpoint: Checkpoint, *, now_ms: int) -> list[PolicyEvent]:
        """Return the events that the log lacks about a version that is whole on disk.

        Raises UnusableCheckpoint where the version was published with other bytes.
        """
        version = checkpoint.version
        published = self.published.get(version)
        if published is not None and published.manifest_sha256 != checkpoint.manifest_sha256:
            raise UnusableCheckpoint(
                f"checkpoint {checkpoint.path}: its manifest has sha256 {checkpoint.manifest_sha256[:12]}, but version "
                f"{version} of {published.policy_id} was published with {(published.manifest_sha256 or 'none')[:12]}. "
                "It is not published again and nothing is trained. Restore the folder from a backup. Or, on the "
                "machine that took the step, remove the folder: the step is taken again. On another machine, set a "
                "policy.id of its own."
            )
        events: list[PolicyEvent] = [] if version in self.steps else [checkpoint.step]
        return events if published is not None else [*events, publication(checkpoint, now_ms=now_ms)]


def step_taken(
    plan: BatchPlanned, samples: Sequence[SampleAssembled], update: StepSummary, *, rejected: Collection[int],
    step_ms: int, now_ms: int,
) -> StepTaken:  # fmt: skip
    """Return the event of what the plan's step did; `samples` are the plan's samples that it was taken on.

    `rejected` names the earlier versions that were never published.
    """
    behind = [versions_behind(sample, plan.parent_version, rejected) for sample in samples] or [0]
    figures = asdict(update)
    loss = figures.pop("loss")
    figures |= {"rehearsed": update.rehearsed, "followed": update.followed, "kept": update.kept}
    return StepTaken(
        policy_id=plan.policy_id,
        policy_version=plan.policy_version,
        mean_versions_behind=sum(behind) / len(behind),
        max_versions_behind=max(behind),
        step_ms=step_ms,
        taken_at_ms=now_ms,
        **figures,
        **loss,
    )


def rejection(plan: BatchPlanned, why: str, *, step_ms: int, now_ms: int) -> StepRejected:
    """Return the event which says that the outcome of the plan's step is not published."""
    return StepRejected(
        policy_id=plan.policy_id,
        policy_version=plan.policy_version,
        num_samples=len(plan.sample_ids),
        reason=why,
        step_ms=step_ms,
        rejected_at_ms=now_ms,
    )


def publication(checkpoint: Checkpoint, *, now_ms: int, policy_id: str | None = None) -> PolicyPublished:
    """Return the event that makes engines load the checkpoint; `policy_id`: another policy that starts from it."""
    policy_id = policy_id or checkpoint.plan.policy_id
    return PolicyPublished(
        policy_id=policy_id,
        policy_version=checkpoint.version,
        parent_version=checkpoint.plan.parent_version,
        path=str(checkpoint.path.absolute()),
        adapter=adapter_name(policy_id, checkpoint.version) if checkpoint.is_adapter else None,
        manifest_sha256=checkpoint.manifest_sha256,
        num_bytes=checkpoint.num_bytes,
        published_at_ms=now_ms,
    )


def first_plans(planned: Iterable[BatchPlanned]) -> list[BatchPlanned]:
    """Return the plan of each version, in order; of two plans for one version the first on the log counts."""
    first: dict[int, BatchPlanned] = {}
    for plan in planned:
        first.setdefault(plan.policy_version, plan)
    return [first[version] for version in sorted(first)]


def resume_offsets(planned: Iterable[BatchPlanned], executed_version: int) -> dict[tuple[str, int], int]:
    """Return where each partition's newest executed plan ends; a missing partition is read from its beginning."""
    offsets: dict[tuple[str, int], int] = {}
    for plan in first_plans(planned):
        if plan.policy_version <= executed_version:
            offsets |= {(o.topic, o.partition): o.next_offset for o in plan.offsets}
    return offsets


def versions_behind(sample: SampleAssembled, parent_version: int, rejected: Collection[int]) -> int:
    """Return how many versions, up to the parent, were published after the newest that sampled a token of the answer.

    Numbers of rejected steps don't count. 0 where the sample names no version.
    """
    newest = max((s.policy_version for s in sample.versions), default=parent_version)
    return max(parent_version - newest - sum(newest < none <= parent_version for none in rejected), 0)


def gone(plan: BatchPlanned, missing: Sequence[str]) -> SamplesGone:
    """Return the error which says that these samples of the plan are not on the log any more."""
    places = ", ".join(f"{o.topic}-{o.partition} before {o.next_offset}" for o in plan.offsets)
    return SamplesGone(
        f"the plan of version {plan.policy_version} of {plan.policy_id} names {len(missing)} samples of "
        f"{len(plan.sample_ids)} that are not on the log any more, {missing[0]} first. They stood in {places}, and are "
        "past their topic's retention. Its step is not taken, nor any later one. Restore the topic from a backup; or "
        "derive the samples again with `clawstream replay start --votes-from log --name again` and go on with "
        f"`clawstream train --samples again --from-policy {plan.parent_version}`, as a policy of its own"
    )
