"""Which waiting samples make up the next batch, and when. Pure.

A batch is due once enough samples wait, or one waited for long. Where corrections are trained on at once, a correction
is due as soon as the policy has answered its hint's prompts often enough, or can't any more, or after a minute.
"""

from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil

from clawstream.events import FOR_A_LATE_SAMPLE, SampleAssembled, TopicOffset, hint_id_of, refreshed_id_of
from clawstream.training.batches.trainable import ModelLimits, hint_counts

CORRECTION_ANSWERS = 12  # asked for at a correction
ENOUGH_ANSWERS = 8  # to train on a correction: some of the answers asked for may run into a limit
ANSWERED_WITHIN_MS = 60_000  # after this a correction is trained on with the answers that there are
MAX_OPEN_CORRECTIONS = 4  # answers are asked for so many at a time, so that engines have room for people


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A sample as it was read from the log."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int  # when the broker appended it
    sample: SampleAssembled
    waits_since_ms: int | None = None  # since when the revision that it replaced waited; None: it replaced none
    asked_ms: int | None = None  # when a correction's answers were asked for; None: not yet, or it is no correction
    asked: frozenset[str] = frozenset()  # the sessions of these answers' requests
    again: bool = False  # a dead letter that is used after all: its offset doesn't say how far the log is read

    @property
    def since_ms(self) -> int:
        """When the sample, or the first revision that it replaced, began to wait."""
        return self.timestamp_ms if self.waits_since_ms is None else self.waits_since_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRules:
    """When a batch is made, and from what."""

    policy_id: str
    of_keys_too: bool = False  # samples of the keys that have adapters of their own on this policy are taken as well
    batch_samples: int = 16  # rehearsals come on top
    rehearses: bool = False  # past hints are trained on again
    max_wait_ms: int = 3_600_000  # once the oldest sample waited so long, a smaller batch is made
    max_versions_behind: int | None = None  # None: however old
    rewards_count: bool = True
    hints_count: bool = True
    by_engine: bool = False  # an engine is the teacher, and a hint without the engine's scores doesn't count
    grouped: bool = False  # whole groups are trained on, each sample by its advantage
    refreshes: bool = False  # the prompt of a late sample with a hint is answered again
    max_unsettled_ms: int | None = None  # how long a sample waits for its group's settlement; None: for ever
    limits: ModelLimits = field(default_factory=ModelLimits)
    corrects: bool = False  # a correction is trained on as soon as its hint has enough answers of its own

    def answers_again(self, sample: SampleAssembled) -> bool:
        """Return whether a late sample has its prompt answered again; where corrections count, a person's words do."""
        if sample.hint is None or sample.refreshed_id is not None:
            return False
        return self.refreshes or (self.corrects and sample.hint_by_person)

    def asked_once(self, sample: SampleAssembled) -> tuple[str, str | None]:
        """Return what is answered again once alone: a turn, or, where corrections count, a turn and the words on it."""
        return sample.turn_id, None if self.refreshes else sample.hint


@dataclass(frozen=True, slots=True, kw_only=True)
class Merging:
    """The merged hints whose answers were asked for, and when."""

    hint_ids: frozenset[str]
    since_ms: int


def corrects(sample: SampleAssembled, rules: BatchRules) -> bool:
    """Return whether the sample's hint is to be trained on at once.

    It was said of an answer that people saw; where it came too late for that one, the answer given again stands for it.
    """
    if not rules.corrects or not rules.hints_count or sample.hint is None:
        return False
    return is_just_said(sample) and hint_counts(sample, by_engine=rules.by_engine) and sample.sampling.of_the_policy


def is_just_said(sample: SampleAssembled) -> bool:
    """Return whether the sample's hint was said of this answer, not of another one to the same prompt."""
    of_this = sample.refreshed_id in (None, refreshed_id_of(sample.turn_id, FOR_A_LATE_SAMPLE))
    return sample.hint is not None and sample.hint_id is None and of_this


def to_correct(waiting: Iterable[Arrival], rules: BatchRules) -> tuple[SampleAssembled, ...]:
    """Return the corrections whose answers are to be asked for now, in order of arrival."""
    if not rules.corrects:
        return ()
    corrections = [one for one in waiting if corrects(one.sample, rules)]
    num_open = sum(one.asked_ms is not None for one in corrections)
    unasked = [one.sample for one in corrections if one.asked_ms is None]
    return tuple(unasked[: max(0, MAX_OPEN_CORRECTIONS - num_open)])


def choose(
    waiting: Mapping[str, Arrival], rules: BatchRules, *, now_ms: int, merging: Merging | None = None,
    refused: Collection[str] = frozenset(),
) -> list[str]:  # fmt: skip
    """Return the ids of the next batch's samples in training order: rehearsals last. Empty: no batch is due.

    Beside rehearsals, a batch has either corrections alone or no correction. Answers to a correction's prompts come
    with it. Rehearsals of earlier hints, the newest of those that wait, make up at most half of a batch. Where no such
    batch is due, one of rehearsals alone may be due, for merged hints. `refused` are the sessions of requests whose
    answers are no samples: a correction doesn't wait for these.
    """
    fresh = {name: arrival for name, arrival in waiting.items() if arrival.sample.hint_id is None}
    rehearsals = {name: id_ for name, arrival in waiting.items() if (id_ := arrival.sample.hint_id) is not None}
    num_answers = Counter(rehearsals.values())
    corrections = {name: arrival for name, arrival in fresh.items() if corrects(arrival.sample, rules)}
    taken = [name for name, arrival in corrections.items() if _is_ready(arrival, num_answers, refused, now_ms)]
    if not taken:
        others = {name: arrival for name, arrival in fresh.items() if name not in corrections}
        waits_long = any(now_ms - arrival.since_ms >= rules.max_wait_ms for arrival in others.values())
        taken = list(others) if waits_long or len(others) >= rules.batch_samples else []
    if not taken:
        return [] if merging is None else _merged(rehearsals, merging, now_ms=now_ms)
    taken = taken[: rules.batch_samples]
    taught = {corrected_hint(corrections[name].sample) for name in taken if name in corrections}
    untaught = {corrected_hint(one.sample) for one in corrections.values()} - taught
    own = [name for name, hint_id in rehearsals.items() if hint_id in taught]
    past = [name for name, hint_id in rehearsals.items() if hint_id not in taught | untaught]
    most_past = len(taken) + len(own) if rules.rehearses else 0
    return [*taken, *own, *past[max(0, len(past) - most_past) :]]


def _merged(rehearsals: Mapping[str, str], merging: Merging, *, now_ms: int) -> list[str]:
    """Return the answers to merged hints, once each has enough or a minute is over, and as many other rehearsals."""
    own = [name for name, hint_id in rehearsals.items() if hint_id in merging.hint_ids]
    num_answers = Counter(rehearsals[name] for name in own)
    waits_long = now_ms - merging.since_ms >= ANSWERED_WITHIN_MS
    if not waits_long and any(num_answers[hint_id] < ENOUGH_ANSWERS for hint_id in merging.hint_ids):
        return []
    past = [name for name, hint_id in rehearsals.items() if hint_id not in merging.hint_ids]
    return [*own, *past[max(0, len(past) - len(own)) :]]


def due_ms(waiting: Mapping[str, Arrival], rules: BatchRules) -> int | None:
    """Return when the waiting samples become a batch if no others come; None: never."""
    fresh = [arrival for arrival in waiting.values() if arrival.sample.hint_id is None]
    asked = [one.asked_ms + ANSWERED_WITHIN_MS for one in fresh if one.asked_ms is not None]
    others = [one.since_ms + rules.max_wait_ms for one in fresh if not corrects(one.sample, rules)]
    return min([*asked, *others], default=None)


def retired(waiting: Mapping[str, Arrival], held: Container[str] | None, *, said: Container[str]) -> list[str]:
    """Return the ids of the samples that rehearse hints which are neither held (None: all are) nor `said` again."""
    rehearsals = [(name, id_) for name, arrival in waiting.items() if (id_ := arrival.sample.hint_id) is not None]
    return [name for name, hint_id in rehearsals if held is not None and hint_id not in held and hint_id not in said]


def offsets_before(left: Iterable[Arrival], read: Mapping[tuple[str, int], int]) -> tuple[TopicOffset, ...]:
    """Return the offset to resume each partition from: where it is `read` up to, or the first sample that is `left`."""
    next_offsets = dict(read)
    for arrival in left:
        where = (arrival.topic, arrival.partition)
        if not arrival.again:
            next_offsets[where] = min(next_offsets[where], arrival.offset)
    return tuple(
        TopicOffset(topic=topic, partition=partition, next_offset=offset)
        for (topic, partition), offset in sorted(next_offsets.items())
    )


def rehearsals_beside(num_fresh: int, *, share: float) -> int:
    """Return how many rehearsals to add to `num_fresh` other samples, to be `share` of the batch."""
    return ceil(num_fresh * share / (1 - share) - 1e-9)  # 3 at a share of .4 are 2.0000000000000004


def corrected_hint(sample: SampleAssembled) -> str:
    """Return the id of a correction's hint."""
    assert sample.hint is not None, "a correction has a hint"
    return hint_id_of(sample.policy_id, sample.key_name, sample.hint)


def _is_ready(correction: Arrival, num_answers: Mapping[str, int], refused: Collection[str], now_ms: int) -> bool:
    if correction.asked_ms is None:
        return False
    waited = now_ms - correction.asked_ms >= ANSWERED_WITHIN_MS
    most = CORRECTION_ANSWERS - len(correction.asked.intersection(refused))
    return waited or num_answers[corrected_hint(correction.sample)] >= min(ENOUGH_ANSWERS, most)
