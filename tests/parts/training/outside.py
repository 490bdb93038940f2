"""What can be seen of a policy from outside: its events on the log, and the bytes of its versions on disk.

Nothing of clawstream's own reading of a checkpoint is used here.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from clawstream.events import BatchPlanned, Event, PolicyPublished, StepTaken
from clawstream.stream.kafka.kafka_log import KafkaLog
from clawstream.stream.stage import Record

POLICY_TOPIC = "clawstream.policy.v1"


async def said(log: KafkaLog) -> list[Event]:
    """Everything on the policy topic."""
    found: list[Event] = []
    async for records in log.follow([POLICY_TOPIC], "earliest", until_end=True):
        found += [record.event for record in records if isinstance(record, Record)]
    return found


def whole(folder: Path) -> str | None:
    """Return the manifest's sha256 where all files are as it says; None where they are not."""
    try:
        raw = (folder / "manifest.json").read_bytes()
        files = json.loads(raw)["files"]
        contents = {file["name"]: (folder / file["name"]).read_bytes() for file in files}
    except (FileNotFoundError, ValueError):
        return None
    agree = all(hashlib.sha256(contents[file["name"]]).hexdigest() == file["sha256"] for file in files)
    return hashlib.sha256(raw).hexdigest() if agree else None


def weights(policy: Path) -> dict[str, dict[str, str]]:
    """Return, by version, the sha256 of each of its files: weights and the optimizer's state."""
    return {
        folder.name: {
            path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in folder.rglob("*")
            if path.is_file() and path.name != "manifest.json"
        }
        for folder in sorted(policy.glob("v*"))
    }


def broken(events: Sequence[Event], policy: Path) -> list[str]:
    """Return what is not as promised at this moment, whoever looks at it."""
    plans = {event.policy_version: event for event in events if isinstance(event, BatchPlanned)}
    steps = [event.policy_version for event in events if isinstance(event, StepTaken)]
    twice = [event_id for event_id, times in Counter(event.event_id for event in events).items() if times > 1]
    bad = [f"event {event_id} is on the log more than once" for event_id in twice]
    trained = Counter(name for plan in plans.values() for name in plan.sample_ids)
    bad += [f"sample {name} is in {times} plans" for name, times in trained.items() if times > 1]
    bad += [f"version {version} has a step and no plan" for version in steps if version not in plans]
    for folder in sorted(policy.glob("v*")):
        version = int(folder.name[1:])
        if (folder / "trainer").exists() and whole(folder / "trainer") is None:
            bad.append(f"the state of {folder.name} is in its place and not whole")
        if whole(folder) is None:
            bad.append(f"{folder.name} is not whole")
        elif version not in plans:
            bad.append(f"{folder.name} is on disk and its plan is not on the log")
        else:
            named = json.loads((folder / "manifest.json").read_text())["plan"]["sample_ids"]
            if tuple(named) != plans[version].sample_ids:
                bad.append(f"{folder.name} was trained on other samples than were planned")
    for event in events:
        if isinstance(event, PolicyPublished) and event.policy_version and whole(Path(event.path)) is None:
            bad.append(f"version {event.policy_version} is published and not whole on disk")
        elif isinstance(event, PolicyPublished) and event.policy_version:
            on_disk = whole(Path(event.path))
            if on_disk != event.manifest_sha256:
                bad.append(f"version {event.policy_version} is published as {event.manifest_sha256}, is {on_disk}")
    return bad
