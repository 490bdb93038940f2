"""The topics, as topics/*.yaml describes them, and the changes that make a broker's topics match. Reads files only.

No topic is ever deleted or repartitioned, and no retention is shortened. A difference that would need this is a
`RefusedChange`, about which a person has to decide.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from clawstream import resources
from clawstream.events import EVENTS, Event

DLQ_SUFFIX = ".dlq"
EXCHANGES = "clawstream.exchanges.v1"
TURNS = "clawstream.turns.v1"
VOTES = "clawstream.votes.v1"
VERDICTS = "clawstream.verdicts.v1"
HINTS = "clawstream.hints.v1"
FEEDBACK = "clawstream.feedback.v1"
SAMPLES = "clawstream.samples.v1"
ANSWERS = "clawstream.answers.v1"
GROUPS = "clawstream.groups.v1"
POLICY = "clawstream.policy.v1"
CONTROL = "clawstream.control.v1"
MEMORY = "clawstream.memory.v1"
SCHEMAS = "clawstream.schemas.v1"
FOR_EVER_MS = -1
REPLAYED = (
    "turns",
    "votes",
    "verdicts",
    "hints",
    "feedback",
    "samples",
    "groups",
)  # a replay has its own topics for these

_REPLAY = re.compile(r"^clawstream\.replay\.[^.]+\.")

# The settings that readers rely on: a stage refuses to start where the broker has others. The rest is tuning.
_PROMISES = ("cleanup.policy", "retention.ms", "retention.bytes", "message.timestamp.type")
# Kafka's own defaults, for a promise that a topic's file leaves out.
_DEFAULTS = {"cleanup.policy": "delete", "retention.ms": "604800000", "retention.bytes": "-1"}
_KEPT = ("retention.ms", "retention.bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """One topic. A dead-letter queue is a topic too; it has the key of the topic whose records it takes."""

    name: str  # without the installation's prefix
    partitions: int
    replicas: int
    config: Mapping[str, str]
    description: str
    key: str
    events: tuple[type[Event], ...]
    producers: tuple[str, ...]
    consumers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExistingTopic:
    """A topic as the broker has it."""

    partitions: int
    config: Mapping[str, str]  # all settings in force, the broker's defaults included
    overrides: Mapping[str, str]  # the settings that are set on the topic itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Created:
    """The topic is not there yet."""

    topic: Topic

    def __str__(self) -> str:
        """One line for people."""
        number = self.topic.partitions
        return f"create {self.topic.name} with {number} partition{'' if number == 1 else 's'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Altered:
    """A setting of the topic differs and can be changed."""

    topic: Topic
    setting: str
    found: str | None  # None: not set
    wanted: str

    def __str__(self) -> str:
        """One line for people."""
        return f"alter {self.topic.name}: {self.setting} from {self.found} to {self.wanted}"

    @property
    def is_promise(self) -> bool:
        """Whether readers rely on the setting."""
        return self.setting in _PROMISES


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedChange:
    """A difference that only a person may mend."""

    topic: Topic
    what: str
    found: str
    wanted: str
    remedy: str

    def __str__(self) -> str:
        """One line for people."""
        return f"refuse {self.topic.name}: {self.what} is {self.found}, expected {self.wanted}; {self.remedy}"


Change = Created | Altered | RefusedChange


@cache
def all_topics() -> tuple[Topic, ...]:
    """Return every topic that an installation has, the dead-letter queues included."""
    return load(resources.folder("topics"))


def load(folder: Path) -> tuple[Topic, ...]:
    """Return the topics in `folder`; raises ValueError where a file contradicts itself or another."""
    files = sorted(folder.glob("*.yaml"))
    topics = tuple(topic for path in files for topic in _read(path, yaml.safe_load(path.read_text())))
    _refuse_contradictions(topics)
    return topics


def topic_of(kind: type[Event]) -> str:
    """Return the topic that an event of this type is written to, without the installation's prefix."""
    return _homes()[kind]


@cache
def _homes() -> dict[type[Event], str]:
    return {kind: topic.name for topic in all_topics() for kind in topic.events}


def replay_topic(topic: str, replay: str) -> str:
    """Return the topic that a replay writes to in place of `topic`."""
    return topic.replace("clawstream.", f"clawstream.replay.{replay}.", 1)


def replay_topics(replay: str, *, partitions: int, retention_ms: int) -> tuple[Topic, ...]:
    """Return a replay's topics: like the live ones that they stand in for, but with these partitions and retention."""
    return tuple(
        dataclasses.replace(
            topic,
            name=replay_topic(topic.name, replay),
            partitions=partitions,
            config={**topic.config, "retention.ms": str(retention_ms)},
            producers=("replay",),
            consumers=("replay", "training"),
        )
        for topic in all_topics()
        if topic.events and topic.name.split(".")[1] in REPLAYED
    )


@cache
def event_topics() -> tuple[str, ...]:
    """Return the topics that hold events: all but the schemas and the dead-letter queues."""
    return tuple(topic.name for topic in all_topics() if topic.events)


def dead_letter_topic(topic: str) -> str | None:
    """Return the queue for unusable records of `topic`; None: no reader of it sets records aside.

    Records of a replay's topic go to the queue of the live topic that it stands in for.
    """
    name = _REPLAY.sub("clawstream.", topic) + DLQ_SUFFIX
    return name if any(other.name == name for other in all_topics()) else None


def diff(wanted: Iterable[Topic], found: Mapping[str, ExistingTopic], *, partitions: int | None = None) -> list[Change]:
    """Return the changes that turn the broker's topics, `found` by name, into those that are `wanted`.

    `partitions` replaces each file's count that is more than one: installations for tests are small.
    """
    changes: list[Change] = []
    for topic in wanted:
        count = count_of(topic, partitions)
        there = found.get(topic.name)
        if there is None:
            changes.append(Created(topic=topic))
            continue
        if there.partitions != count:
            changes.append(
                RefusedChange(
                    topic=topic, what="number of partitions", found=str(there.partitions), wanted=str(count),
                    remedy="records would move between partitions: create the topic again and copy it, "
                    "or use another kafka.prefix",
                )
            )  # fmt: skip
        changes += _setting_changes(topic, there)
    return changes


def count_of(topic: Topic, partitions: int | None) -> int:
    """Return how many partitions the topic is to have; `partitions` replaces a file's count that is more than one."""
    return topic.partitions if partitions is None or topic.partitions == 1 else partitions


def mermaid(topics: Sequence[Topic]) -> str:
    """Return the flow of events as a Mermaid graph: who writes which topic, and who reads it."""
    lines = ["flowchart LR"]
    for topic in topics:
        if topic.events:
            node = topic.name.replace(".", "_")
            lines.append(f'    {node}[("{topic.name}")]')
            lines += [f"    {producer}([{producer}]) --> {node}" for producer in topic.producers]
            lines += [f"    {node} --> {consumer}([{consumer}])" for consumer in topic.consumers]
    return "\n".join(lines) + "\n"


def resources_of(topics: Sequence[Topic], *, cluster: str, replicas: int | None) -> str:
    """Return the topics as Strimzi's KafkaTopic resources, in YAML."""
    documents = [
        {
            "apiVersion": "kafka.strimzi.io/v1",
            "kind": "KafkaTopic",
            "metadata": {"name": topic.name, "labels": {"strimzi.io/cluster": cluster}},
            "spec": {
                "partitions": topic.partitions,
                "replicas": replicas or topic.replicas,
                "config": dict(topic.config),
            },
        }
        for topic in topics
    ]
    return yaml.safe_dump_all(documents, sort_keys=False, explicit_start=True)


def _setting_changes(topic: Topic, there: ExistingTopic) -> list[Change]:
    changes: list[Change] = []
    wanted_settings = _DEFAULTS | dict(topic.config)
    for setting, wanted in wanted_settings.items():
        current = there.config.get(setting)
        if current == wanted or (setting in _KEPT and wanted_settings["cleanup.policy"] == "compact"):
            continue
        remedy = None
        if current is not None and setting in _KEPT and _longer(current, wanted):
            remedy = "records would be deleted: lower it by hand, or raise it in the topic's file"
        elif current is not None and setting == "cleanup.policy":
            remedy = "records would be deleted by another rule: change it by hand"
        if remedy is None:
            changes.append(Altered(topic=topic, setting=setting, found=current, wanted=wanted))
        else:
            assert current is not None
            changes.append(RefusedChange(topic=topic, what=setting, found=current, wanted=wanted, remedy=remedy))
    return changes


def _longer(found: str, wanted: str) -> bool:
    """Return whether a retention of `found` keeps more than one of `wanted`."""
    return int(wanted) != FOR_EVER_MS and (int(found) == FOR_EVER_MS or int(found) > int(wanted))


def _read(path: Path, document: Any) -> list[Topic]:
    kinds = {kind.__name__: kind for kind in EVENTS}
    try:
        ours = document["x-clawstream"]
        topic = Topic(
            name=document["metadata"]["name"],
            partitions=document["spec"]["partitions"],
            replicas=document["spec"]["replicas"],
            config={name: str(value) for name, value in document["spec"]["config"].items()},
            description=ours["description"],
            key=ours["key"],
            events=tuple(kinds[name] for name in ours["schemas"]),
            producers=tuple(ours["producers"]),
            consumers=tuple(ours["consumers"]),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: {error} is missing or unknown; the other files show what a topic has") from error
    if path.name != f"{topic.name}.yaml":
        raise ValueError(f"{path}: it describes {topic.name}, so its name has to be {topic.name}.yaml")
    dead_letters = ours.get("deadLetter")
    return [topic] if dead_letters is None else [topic, _dead_letter_queue(topic, dead_letters)]


def _dead_letter_queue(topic: Topic, document: Any) -> Topic:
    return dataclasses.replace(
        topic,
        name=topic.name + DLQ_SUFFIX,
        partitions=document["partitions"],
        config={name: str(value) for name, value in document["config"].items()},
        description=f"Records of {topic.name} that a stage could not use, byte for byte, and why.",
        events=(),
        producers=topic.consumers,
        consumers=(),
    )


def _refuse_contradictions(topics: Sequence[Topic]) -> None:
    homes: dict[type[Event], str] = {}
    for topic in topics:
        for kind in topic.events:
            if homes.setdefault(kind, topic.name) != topic.name:
                raise ValueError(f"{kind.__name__} is in {homes[kind]} and in {topic.name}; an event has one topic")
    homeless = [kind.__name__ for kind in EVENTS if kind not in homes]
    if homeless:
        raise ValueError(f"no topic holds {', '.join(homeless)}")
    counts = {topic.partitions for topic in topics if topic.key == "session_id" and topic.events}
    if len(counts) > 1:
        raise ValueError(
            f"topics about sessions have {sorted(counts)} partitions; they need one count, "
            "so that one worker gets all records of a session"
        )
