"""A policy of its own, trained on the samples of a replay, starting from a version of another policy."""

import time
from dataclasses import dataclass, replace
from pathlib import Path

from clawstream.config import Settings
from clawstream.events import PolicyPublished
from clawstream.inference.models.version_folder import version_name
from clawstream.training.batches.progress import publication
from clawstream.training.models.checkpoints import Checkpoint, read


@dataclass(frozen=True, slots=True, kw_only=True)
class Retraining:
    """The samples that a policy of its own is trained on, and the version it starts from."""

    replay: str
    of: str  # the policy that gave the samples' answers, and whose version training starts from
    from_version: int  # 0: the base
    start: Path | None  # the checkpoint of `from_version`; None: the base


def retraining(settings: Settings, *, replay: str, from_version: int) -> tuple[Settings, Retraining]:
    """Return the settings of the policy POLICY-REPLAY and its retraining; its versions count on from the start version.

    A sample is used however old it is: its recorded log-probs say how much it weighs. Raises UnusableCheckpoint where
    the start version is not on disk any more.
    """
    start = settings.checkpoints_dir / version_name(from_version) if from_version else None
    if start is not None:
        read(start, contents=False)
    policy = settings.policy.model_copy(update={"id": f"{settings.policy.id}-{replay}"})
    training = settings.training.model_copy(update={"max_versions_behind": None})
    what = Retraining(replay=replay, of=settings.policy.id, from_version=from_version, start=start)
    return settings.model_copy(update={"policy": policy, "training": training}), what


def first_publication(policy_id: str, base: Path, start: Checkpoint | None) -> PolicyPublished:
    """Return the event that says what a policy starts from: the base, or a version of another policy."""
    now_ms = int(time.time() * 1000)
    if start is not None:
        return replace(publication(start, now_ms=now_ms, policy_id=policy_id), parent_version=None)
    return PolicyPublished(
        policy_id=policy_id,
        policy_version=0,
        parent_version=None,
        path=str(base.absolute()),
        adapter=None,
        manifest_sha256=None,
        num_bytes=sum(file.stat().st_size for file in base.iterdir() if file.is_file()),
        published_at_ms=now_ms,
    )
