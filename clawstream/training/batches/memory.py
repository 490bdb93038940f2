"""The hint memory: which hints a policy holds on to, and which of them to rehearse next. Pure.

A hint is held from the first batch that trains on it. Equal hints under one API key are one hint. It is rehearsed on
prompts that it was said of, and on others whose answers followed it and were accepted. The prompt of a new saying
replaces the one rehearsed longest ago. Hints rehearsed longest ago come first, as only a rehearsal shows how far the
policy is from following a hint.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice, zip_longest
from operator import itemgetter
from typing import TypeVar

from clawstream.events import (
    BatchPlanned,
    HintHeld,
    HintRetired,
    RehearsalAsked,
    Retired,
    SampleAssembled,
    StepTaken,
    TokenIds,
    hint_id_of,
    rehearsal_of,
    words_of,
)
from clawstream.events.base import derived_id
from clawstream.training.batches.choosing import CORRECTION_ANSWERS
from clawstream.training.batches.trainable import held_of, taken_well, with_anothers_hint, with_hint

MAX_HINTS = 256
PROMPTS_A_HINT = 8  # that it was said of, and as many others where it was followed
OPEN_NATS = 0.05  # per token; above this a hint is open: an answer that does not follow it is at about 0.2
TRIED_PROMPTS = 64  # of a key, the newest: a correction's hint is tried in these
REMEMBERED = 4096  # the newest samples that are known as held: a restart executes only the newest plan again
MERGED_STEPS = 6  # taken at most, one after the other, on a merged hint while it is open
CONTRADICTED_AFTER = 4  # answers in a row that followed a hint and that its person rejected
TELLING_NATS = 1.0  # a hint that gives its rehearsals less is not tried: the base half does what it asks without it
TRIALS_A_SAMPLE = 2  # held hints that an answer is tried against
LONGEST_AGO_FIRST = 2  # hints rehearsed longest ago for each most open one: nobody measured what they lost since
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldHint:
    """A hint that the policy holds on to, for people to look at."""

    hint_id: str
    hint: str
    hint_by_person: bool
    key_name: str | None
    held_since_ms: int
    num_prompts: int
    open_nats: float | None  # how far the policy was from following it when that was last measured; None: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A test of whether a sample's answer followed a held hint that nobody said of it.

    It did if the base finds the answer likelier with the hint in the prompt, by `least_gain_nats` or more.
    """

    hint_id: str
    sample_id: str
    hinted_prompt_ids: TokenIds
    accepted: bool  # whoever asked took the answer well
    least_gain_nats: float  # half of what answers gained that rehearsed the hint and followed it


@dataclass(slots=True)
class _Hint:
    """A held hint and its prompts; the prompt that was rehearsed longest ago is the first."""

    held_since_ms: int
    said: HintHeld  # the last saying
    prompts: list[HintHeld]
    since_round: int  # the round in which it was last said or rehearsed
    since_version: int  # of the batch that said it first; if it was retired, first since then
    open_nats: float | None = None  # when it was last rehearsed, or found lost; None: neither was measured
    steps_left: int = 0  # of a merged hint: how many steps may still be taken for it alone, while it is open
    gain_nats: float | None = None  # mean of its rehearsals that followed it, the newest counting most; None: unknown
    num_rejected: int = 0  # answers that followed it and were rejected, since the last that was accepted
    tried_at: int = 0  # its place among the trials of its asker's hints; 0: it had none

    def hold(self, prompt: HintHeld) -> None:
        """Rehearse this prompt too; it replaces the one of its kind that was rehearsed longest ago."""
        others = [one for one in self.prompts if one.turn_id != prompt.turn_id]
        alike = [one for one in others if one.followed == prompt.followed]
        if len(alike) == PROMPTS_A_HINT:
            others.remove(alike[0])
        self.prompts = [*others, prompt]

    @property
    def has_room(self) -> bool:
        """Whether it is to be held for another prompt where it was followed."""
        return sum(prompt.followed for prompt in self.prompts) < PROMPTS_A_HINT

    @property
    def is_open(self) -> bool:
        return self.open_nats is None or self.open_nats > OPEN_NATS


@dataclass(slots=True)
class HintMemory:
    """The fold of a policy's `HintHeld`, `HintRetired` and rehearsals; the hint that was said last is the last."""

    max_hints: int = MAX_HINTS
    _hints: dict[str, _Hint] = field(default_factory=dict)
    _known: dict[str, None] = field(default_factory=dict)  # samples whose hint was held, the newest last
    _said: dict[tuple[str, str], None] = field(default_factory=dict)  # a hint and a turn that it is held for
    _round: int = 0

    def learn(self, event: HintHeld | HintRetired) -> None:
        """Take in one event of this policy; one that was taken in before changes nothing."""
        if isinstance(event, HintRetired):
            self._hints.pop(event.hint_id, None)
        elif event.sample_id not in self._known:
            _remember(self._known, event.sample_id)
            if event.followed:
                if (known := self._hints.get(event.hint_id)) is not None:
                    known.hold(event)
                return
            _remember(self._said, (event.hint_id, event.turn_id))
            hint = self._hints.pop(event.hint_id, None) or _Hint(
                event.held_at_ms, event, [], self._round, event.policy_version
            )
            hint.said = event
            hint.since_round, hint.num_rejected = self._round, 0
            hint.steps_left = MERGED_STEPS if event.merged else hint.steps_left
            hint.hold(event)
            self._hints[event.hint_id] = hint

    def note(self, step: StepTaken, *, asked_elsewhere: bool = False) -> None:
        """Take in a step: how open its rehearsed hints were, which other hints were lost, and which answers followed a
        hint and were accepted or rejected. Of several rehearsals of one hint the most open counts.

        A step whose answers were `asked_elsewhere`, by a process before this one, counts as one of the steps of each
        merged hint that it rehearsed. Of a hint that was retired and said again, steps of before say nothing.
        """
        found: dict[str, float] = {}
        hints = {name: hint for name, hint in self._hints.items() if step.policy_version >= hint.since_version}
        for one in step.rehearsed:
            if one.open_nats is not None:
                found[one.hint_id] = max(one.open_nats, found.get(one.hint_id, one.open_nats))
                hint = hints.get(one.hint_id)
                if hint is not None and one.gain_nats is not None and one.open_nats <= OPEN_NATS:
                    before = one.gain_nats if hint.gain_nats is None else hint.gain_nats
                    hint.gain_nats = (before + one.gain_nats) / 2
        for hint_id, open_nats in found.items():
            if (hint := hints.get(hint_id)) is not None:
                hint.open_nats = open_nats
                if asked_elsewhere and hint.steps_left and step.policy_version > hint.said.policy_version:
                    hint.steps_left -= 1
        for kept in step.kept:
            if kept.lost_nats > OPEN_NATS and (hint := hints.get(kept.hint_id)) is not None:
                hint.open_nats = kept.lost_nats
        for followed in step.followed:
            hint = hints.get(followed.hint_id)
            if hint is not None and step.policy_version > hint.said.policy_version:  # else it was said again since
                hint.num_rejected = 0 if followed.accepted else hint.num_rejected + 1

    def to_try(self, samples: Iterable[SampleAssembled]) -> list[Trial]:
        """Return the trials of the samples' answers, each against some held hints of its asker.

        An asker's hints take turns; a hint comes the sooner, the more answers that followed it were rejected. Answers
        with tool calls or cut off are not tried, nor are answers to nobody known (whose hints had they to follow?).
        """
        trials: list[Trial] = []
        for sample in samples:
            accepted = taken_well(sample)
            if accepted is None or sample.asker is None:
                continue
            for hint in self._tried_next(sample):
                said, gain_nats = hint.said, hint.gain_nats
                ids = with_hint(said.prompt_ids, said.hinted_prompt_ids, sample.prompt_ids)
                if ids is not None and gain_nats is not None:
                    trials.append(
                        Trial(
                            hint_id=said.hint_id, sample_id=sample.sample_id, hinted_prompt_ids=ids,
                            accepted=accepted, least_gain_nats=gain_nats / 2,
                        )
                    )  # fmt: skip
        return trials

    def _tried_next(self, sample: SampleAssembled) -> list[_Hint]:
        """Return up to `TRIALS_A_SAMPLE` hints of the sample's asker that are to be tried next; their turn ends."""
        others = [
            (hint.tried_at - len(self._hints) * hint.num_rejected / CONTRADICTED_AFTER, hint)
            for hint_id, hint in self._hints.items()
            if hint.said.asker == sample.asker and (hint_id, sample.turn_id) not in self._said
            if hint.gain_nats is not None and hint.gain_nats >= TELLING_NATS
        ]
        chosen = [hint for _, hint in sorted(others, key=itemgetter(0))[:TRIALS_A_SAMPLE]]
        for hint in chosen:
            hint.tried_at = 1 + max(other.tried_at for _, other in others)
        return chosen

    def to_retire(self, policy_id: str, *, now_ms: int) -> list[HintRetired]:
        """Return the events that retire the hints which their person contradicted."""
        contradicted = [name for name, hint in self._hints.items() if hint.num_rejected >= CONTRADICTED_AFTER]
        return _retired(policy_id, contradicted, Retired.CONTRADICTED, now_ms)

    def to_hold(
        self, plan: BatchPlanned, samples: Sequence[SampleAssembled], *, now_ms: int
    ) -> list[HintHeld | HintRetired]:
        """Return the events that hold the hints of the plan's samples, and that retire others to make room for them."""
        held = [
            event
            for sample in samples
            if (event := held_of(sample, plan.policy_id, plan.policy_version, now_ms)) is not None
            and event.sample_id not in self._known
            # Another answer to the same turn does not say the hint again.
            and (sample.refreshed_id is None or (event.hint_id, event.turn_id) not in self._said)
        ]
        new = {event.hint_id for event in held}
        others = [hint_id for hint_id in self._hints if hint_id not in new]
        num_over = max(0, len(others) + len(new) - self.max_hints)
        return [*_retired(plan.policy_id, others[:num_over], Retired.CROWDED_OUT, now_ms), *held]

    def to_extend(self, step: StepTaken, samples: Iterable[SampleAssembled], *, now_ms: int) -> list[HintHeld]:
        """Return the events that hold hints for the prompts of those samples whose answers followed them, accepted.

        A hint that is rehearsed on the few prompts that it was said of is soon followed there, and nowhere else.
        """
        by_id = {sample.sample_id: sample for sample in samples}
        events: dict[str, HintHeld] = {}
        for one in step.followed:
            hint, sample = self._hints.get(one.hint_id), by_id.get(one.sample_id)
            if hint is None or sample is None or not one.accepted or one.hint_id in events or not hint.has_room:
                continue
            said = hint.said
            ids = with_hint(said.prompt_ids, said.hinted_prompt_ids, sample.prompt_ids)
            taught = replace(sample, hint=said.hint, hint_by_person=said.hint_by_person, hinted_prompt_ids=ids)
            held = held_of(taught, step.policy_id, step.policy_version, now_ms)
            held_id = derived_id("followed", one.hint_id, one.sample_id)
            if held is not None and held_id not in self._known:
                events[one.hint_id] = replace(
                    held, sample_id=held_id, hint_id=one.hint_id, key_name=said.key_name, followed=True
                )
        return list(events.values())

    def to_ask(self, count: int, *, version: int, now_ms: int) -> list[RehearsalAsked]:
        """Return the rehearsals to ask for after `version` was planned: `count`, and up to `count` more for open hints.

        The first `count` are of the hints said or rehearsed longest ago and of the most open ones; each key gets one
        before any gets a second. Then each open hint gets one more, until there are `count` more. Each call is a round.
        """
        self._round += 1
        asked: dict[str, RehearsalAsked] = {}
        still_open = self._most_open(above_nats=OPEN_NATS)
        self._ask(self._spread(), asked, count, version, now_ms)
        self._ask(still_open, asked, len(asked) + min(count, len(still_open)), version, now_ms)
        return list(asked.values())

    def _ask(
        self, hints: Iterable[_Hint], asked: dict[str, RehearsalAsked], up_to: int, version: int, now_ms: int
    ) -> None:
        for hint in hints:
            if len(asked) == up_to:
                break
            prompt = next((one for one in hint.prompts if one.turn_id not in asked), None)
            if prompt is None:
                continue
            hint.prompts = [*(one for one in hint.prompts if one is not prompt), prompt]
            hint.since_round = self._round
            asked[prompt.turn_id] = _asked(prompt, version, now_ms)

    def to_correct(self, sample: SampleAssembled, count: int, *, now_ms: int) -> list[RehearsalAsked]:
        """Return `count` requests for answers that teach the sample's hint; none if the hint can't be rehearsed.

        The requests take turns between the sample's own prompt and the newest other prompts of held hints under its
        key. The same sample gives the same requests as long as nothing new is held.
        """
        own = held_of(sample, sample.policy_id, 0, now_ms)
        if own is None:
            return []
        others = [one for hint in self._hints.values() for one in hint.prompts if one.key_name == own.key_name]
        newest = sorted({one.turn_id: one for one in others}.values(), key=lambda one: one.held_at_ms, reverse=True)
        tried = (with_anothers_hint(own, one) for one in newest[:TRIED_PROMPTS] if one.turn_id != own.turn_id)
        prompts = [own, *islice((one for one in tried if one is not None), count - 1)]
        return [_asked_at_once(prompts[n % len(prompts)], n, now_ms, occasion=own.turn_id) for n in range(count)]

    @property
    def prompts_by_hint(self) -> list[tuple[HintHeld, ...]]:
        """The prompts of each held hint; the prompt that the hint was last said of is the last."""
        return [
            tuple(sorted(hint.prompts, key=lambda one: (not one.followed, one.held_at_ms)))
            for hint in self._hints.values()
        ]

    @property
    def merging(self) -> frozenset[str]:
        """The ids of the merged hints that are open and have steps left."""
        return frozenset(name for name, hint in self._hints.items() if hint.steps_left and hint.is_open)

    def to_merge(self, *, version: int, now_ms: int) -> list[RehearsalAsked]:
        """Return requests for answers to the prompts of each hint in `merging`; they use up one of its steps."""
        asked: list[RehearsalAsked] = []
        for name in sorted(self.merging):
            hint = self._hints[name]
            hint.steps_left -= 1
            prompts = (hint.prompts[n % len(hint.prompts)] for n in range(CORRECTION_ANSWERS))
            asked += [_asked_at_once(prompt, n, now_ms, occasion=version) for n, prompt in enumerate(prompts)]
        return asked

    @property
    def held(self) -> tuple[HeldHint, ...]:
        """The held hints, in the order in which they were last said."""
        return tuple(
            HeldHint(
                hint_id=hint_id,
                hint=hint.said.hint,
                hint_by_person=hint.said.hint_by_person,
                key_name=hint.said.key_name,
                held_since_ms=hint.held_since_ms,
                num_prompts=len(hint.prompts),
                open_nats=hint.open_nats,
            )
            for hint_id, hint in self._hints.items()
        )

    def _spread(self) -> Iterator[_Hint]:
        """Return the hints in their order of rehearsal, repeated as often as a hint may have prompts."""
        by_key: dict[str | None, list[_Hint]] = {}
        for hint in _by_turns(self._longest_ago(), self._most_open()):
            by_key.setdefault(hint.said.key_name, []).append(hint)
        longest = max(map(len, by_key.values()), default=0)
        ordered = [hints[n] for n in range(longest) for hints in by_key.values() if n < len(hints)]
        return chain.from_iterable(ordered for _ in range(2 * PROMPTS_A_HINT))

    def _longest_ago(self) -> list[_Hint]:
        return sorted(self._hints.values(), key=lambda hint: hint.since_round)

    def _most_open(self, above_nats: float = float("-inf")) -> list[_Hint]:
        known = [(hint.open_nats, hint) for hint in self._hints.values() if hint.open_nats is not None]
        return [hint for nats, hint in sorted(known, key=itemgetter(0), reverse=True) if nats > above_nats]


def _remember(known: dict[T, None], new: T) -> None:
    """Add `new`; if more than `REMEMBERED` are known then, forget the oldest."""
    known[new] = None
    if len(known) > REMEMBERED:
        del known[next(iter(known))]


def _by_turns(longest_ago: Sequence[_Hint], most_open: Sequence[_Hint]) -> list[_Hint]:
    """Return each hint once: `LONGEST_AGO_FIRST` from `longest_ago`, then one from `most_open`, and so on."""
    ago, opened, found = iter(longest_ago), iter(most_open), dict[int, _Hint]()
    while len(found) < len(longest_ago):
        for source, count in ((ago, LONGEST_AGO_FIRST), (opened, 1)):
            fresh = (hint for hint in source if id(hint) not in found)
            found |= {id(hint): hint for hint in islice(fresh, count)}
    return list(found.values())


def _retired(policy_id: str, hint_ids: Iterable[str], reason: Retired, at_ms: int) -> list[HintRetired]:
    return [HintRetired(policy_id=policy_id, hint_id=name, reason=reason, retired_at_ms=at_ms) for name in hint_ids]


def common(memories: Iterable[HintMemory], policy_id: str, *, at_least: int) -> list[list[HintHeld]]:
    """Return the hints that `at_least` memories or more hold, each as the policy that all share is to hold it.

    A hint's prompts come from these memories in turn, so that not all are of one key.
    """
    said: dict[str, list[tuple[HintHeld, ...]]] = {}
    for memory in memories:
        for prompts in memory.prompts_by_hint:
            said.setdefault(words_of(prompts[-1].hint), []).append(prompts[::-1])
    found = []
    for words, by_memory in said.items():
        if len(by_memory) >= at_least:
            in_turn = [one for row in zip_longest(*by_memory) for one in row if one is not None][:PROMPTS_A_HINT]
            hint_id = hint_id_of(policy_id, None, words)
            found.append([replace(one, policy_id=policy_id, hint_id=hint_id, key_name=None) for one in in_turn])
    return found


def merged_into(held: HintHeld, version: int, now_ms: int) -> HintHeld:
    """Return the event that has the policy learn the hint from now on; `version` is the policy's newest."""
    # Under the key's own sample_id the memory would ignore a hint that was merged before and retired since.
    own_id = derived_id("merged", held.sample_id, now_ms)
    return replace(held, sample_id=own_id, policy_version=version, held_at_ms=now_ms, merged=True, followed=False)


def _asked_at_once(prompt: HintHeld, number: int, now_ms: int, *, occasion: str | int) -> RehearsalAsked:
    """Return the request; on another `occasion` (a correction's turn, a merge's version) it is another one."""
    name = derived_id("correction", prompt.hint_id, prompt.turn_id, occasion, number)
    return rehearsal_of(prompt, session_id=name, number=-1 - int(name[:7], 16), at_ms=now_ms)


def _asked(prompt: HintHeld, version: int, now_ms: int) -> RehearsalAsked:
    name = derived_id("rehearsal", prompt.turn_id, version)
    return rehearsal_of(prompt, session_id=name, number=-version, at_ms=now_ms)
