"""What a sample has to be for a step to be taken on it, and which groups can be trained on as a whole. Pure.

A sample on which a step would fail is found before a plan names it: else every restart would execute the plan again and
fail. The samples that a group's settlement names are planned together, or never. A group is ready once all of them were
read, or once the log is read up to the settlement: a sample that is missing by then never comes. A step trains a sample
on one of the hints that were offered for it.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite

from clawstream.events import (
    GroupSettled,
    HintHeld,
    OfferedHint,
    SampleAssembled,
    StepAdvantage,
    TokenIds,
    hint_id_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """The limits of the policy's model; None: its configuration does not say."""

    vocabulary_tokens: int | None = None
    context_tokens: int | None = None


def flaw(sample: SampleAssembled, limits: ModelLimits) -> str | None:
    """Return why no step can be taken on the sample, in words for a person; None: one can."""
    return _misaligned(sample) or _outside(sample, limits) or _not_a_number(sample)


def hint_counts(sample: SampleAssembled, *, by_engine: bool) -> bool:
    """Return whether a sample's hint counts: with an engine as teacher, only if the engine's scores came with it."""
    return sample.hinted_prompt_ids is not None and (not by_engine or sample.teacher_logprobs is not None)


def offers(sample: SampleAssembled) -> tuple[OfferedHint, ...]:
    """Return the hints that the sample may be trained on, its own first; none where it has none."""
    if sample.hint is None or sample.hinted_prompt_ids is None:
        return ()
    return (OfferedHint(hint=sample.hint, hinted_prompt_ids=sample.hinted_prompt_ids), *sample.other_hints)


def with_offer(sample: SampleAssembled, number: int) -> SampleAssembled:
    """Return the sample with only the hint that has this number among its `offers`."""
    if not (offered := offers(sample)):
        return sample
    taken = offered[number]
    return replace(sample, hint=taken.hint, hinted_prompt_ids=taken.hinted_prompt_ids, other_hints=())


def with_hint(
    said_of: TokenIds, hinted: TokenIds, prompt_ids: TokenIds, *, tail: int | None = None
) -> TokenIds | None:  # fmt: skip
    """Return `prompt_ids` with the hint that made `hinted` out of `said_of`; None: not possible token by token.

    The hint stands before the last `tail` tokens, which all three prompts share; by default these are all they share.
    """
    tail = num_alike([said_of, hinted, prompt_ids], -1) if tail is None else tail
    said, with_it, there = (ids[: len(ids) - tail] for ids in (said_of, hinted, prompt_ids))
    begin = num_alike([said, with_it])
    joined, added = said[begin:], with_it[begin:]
    if tail == 0 or there[len(there) - len(joined) :] != joined:
        return None
    return (*there[: len(there) - len(joined)], *added, *prompt_ids[len(there) :])


def taken_well(sample: SampleAssembled) -> bool | None:
    """Return whether the answer was taken well: by a person's score, else by the judge's verdict.

    None: nobody says, or it says nothing of what the asker wants: a rehearsal, a call of tools, a cut answer.
    """
    is_told = sample.hint_id is None and sample.refreshed_id is None and sample.sampling.of_the_policy
    taken = sample.reward if sample.person_reward is None else sample.person_reward
    return None if not is_told or not taken or sample.cut or sample.calls_tools else taken > 0


def held_of(sample: SampleAssembled, policy_id: str, version: int, now_ms: int) -> HintHeld | None:
    """Return the event that holds the sample's hint; None: it has none, or its log-probs are not the policy's."""
    hint, hinted_ids = sample.hint, sample.hinted_prompt_ids
    if hint is None or hinted_ids is None or sample.hint_id is not None or not sample.sampling.of_the_policy:
        return None
    return HintHeld(
        policy_id=policy_id,
        hint_id=hint_id_of(policy_id, sample.key_name, hint),
        hint=hint,
        hint_by_person=sample.hint_by_person,
        key_name=sample.key_name,
        session_id=sample.session_id,
        turn_id=sample.turn_id,
        sample_id=sample.sample_id,
        prompt_ids=sample.prompt_ids,
        hinted_prompt_ids=hinted_ids,
        sampling=sample.sampling,
        num_earlier_turns=sample.num_earlier_turns,
        policy_version=version,
        held_at_ms=now_ms,
    )


def with_anothers_hint(own: HintHeld, other: HintHeld) -> HintHeld | None:
    """Return `other` with `own`'s hint in place of its own hint; None: that can't be done token by token.

    After the hint's place all prompts have the same tokens. A tokenizer may join the last token before that place with
    the hint's first characters, and so change it; then both prompts must have the same token there.
    """
    said = (own.prompt_ids, own.hinted_prompt_ids)
    tail = num_alike([*said, other.prompt_ids, other.hinted_prompt_ids], -1)
    there, hinted_there = (ids[: len(ids) - tail] for ids in (other.prompt_ids, other.hinted_prompt_ids))
    is_at_end = len(there) - num_alike([there, hinted_there]) <= 1
    ids = with_hint(*said, other.prompt_ids, tail=tail) if is_at_end else None
    if ids is None:
        return None
    return replace(other, hinted_prompt_ids=ids, hint_id=own.hint_id, hint=own.hint, hint_by_person=own.hint_by_person)


def num_alike(rows: Sequence[TokenIds], way: int = 1) -> int:
    """Return how many tokens the rows have in common at their beginning or, if `way` is -1, at their end."""
    first, *others = (ids[::way] for ids in rows)
    low, high = 0, min(map(len, rows))
    while low < high:  # by halves: whole tuples are compared much faster than tokens
        middle = (low + high + 1) // 2
        is_alike = all(ids[low:middle] == first[low:middle] for ids in others)
        low, high = (middle, high) if is_alike else (low, middle - 1)
    return low


def _misaligned(sample: SampleAssembled) -> str | None:
    if not sample.prompt_ids or sample.hinted_prompt_ids == ():
        return "a prompt without a token: expected at least one"
    num_tokens = len(sample.response_ids)
    if not num_tokens:
        return "response_ids is empty: expected at least one token"
    rows: dict[str, Sequence[float | None] | None] = {
        "response_logprobs": sample.response_logprobs,
        "trained": sample.trained,
        "teacher_logprobs": sample.teacher_logprobs,
        "student_logprobs": sample.student_logprobs,
    }
    if (sample.teacher_logprobs is None) != (sample.student_logprobs is None):
        return "it has log-probs of only one of teacher and student: expected both, to compare them, or neither"
    for name, values in rows.items():
        if values is not None and len(values) != num_tokens:
            return f"{name} has {len(values)} values: expected {num_tokens}, one per token of the response"
    if not 0 <= sample.num_thinking <= num_tokens:
        return f"num_thinking is {sample.num_thinking}: expected 0 to {num_tokens}, the tokens of the response"
    if not set(sample.trained) <= {0, 1}:
        return f"trained has a {max(sample.trained, key=abs)}: expected 0 or 1"
    return None


def _outside(sample: SampleAssembled, limits: ModelLimits) -> str | None:
    parts: dict[str, Sequence[int]] = {
        "prompt_ids": sample.prompt_ids,
        "hinted_prompt_ids": sample.hinted_prompt_ids or (),
        "response_ids": sample.response_ids,
    }
    size, context = limits.vocabulary_tokens, limits.context_tokens
    for name, ids in parts.items():
        if ids and (min(ids) < 0 or (size is not None and max(ids) >= size)):
            strange = min(ids) if min(ids) < 0 else max(ids)
            return f"{name} has the id {strange}: expected ids from 0 to {'?' if size is None else size - 1}"
    longest = max(len(sample.prompt_ids), len(sample.hinted_prompt_ids or ())) + len(sample.response_ids)
    if context is not None and longest > context:
        return f"prompt and response have {longest} tokens: expected at most {context}, the model's context"
    return None


def _not_a_number(sample: SampleAssembled) -> str | None:
    if sample.reward not in (None, -1, 1):
        return f"the judge's part of the reward is {sample.reward}: expected -1, 1 or none"
    if sample.total_reward is not None and not abs(sample.total_reward) <= 1:
        return f"the reward is {sample.total_reward:g}: expected -1 to 1 or none"
    if not isfinite(sample.temperature) or sample.temperature < 0:
        return f"the temperature is {sample.temperature:g}: expected a finite number from 0 on"
    if any(span.policy_version < 0 for span in sample.versions):
        return "it was sampled by a version below 0: versions count from 0"
    return None


@dataclass(slots=True)
class _Settled:
    at_ms: int  # when the broker appended it
    steps: tuple[StepAdvantage, ...]
    read_past: bool = False

    def here(self, waits: Container[str]) -> dict[str, float] | None:
        """Return the advantages of the group's waiting samples; None: more of them may come."""
        found = {step.sample_id: step.advantage for step in self.steps if step.sample_id in waits}
        return found if self.read_past or len(found) == len(self.steps) else None


class SettledGroups:
    """The settlements that were read, and which samples they name."""

    def __init__(self) -> None:
        self._settled: dict[str, _Settled] = {}  # by group id, in topic order; groups that are over are removed
        self._named: dict[str, frozenset[str]] = {}  # by settled group: its samples; empty once it is over
        self._group_of: dict[str, str] = {}  # by turn, for the groups in `_settled`

    def learn(self, event: GroupSettled, at_ms: int) -> None:
        """Take in a settlement; the first one of a group counts."""
        if event.group_id in self._named:
            return
        self._named[event.group_id] = frozenset(step.sample_id for step in event.advantages)
        self._settled[event.group_id] = _Settled(at_ms, event.advantages)
        self._group_of |= {step.turn_id: event.group_id for step in event.advantages}

    def read_past(self, group_ids: Iterable[str]) -> None:
        """Note that everything is read that stood on the log when these groups were settled."""
        for group_id in group_ids:
            if group_id in self._settled:
                self._settled[group_id].read_past = True

    def is_settled(self, sample: SampleAssembled) -> bool:
        """Return whether the sample's group is settled, whether or not it names the sample."""
        return sample.group_id in self._named

    def leaves_out(self, sample: SampleAssembled) -> bool:
        """Return whether the sample's group is settled without it, which is final."""
        named = None if sample.group_id is None else self._named.get(sample.group_id)
        return named is not None and sample.sample_id not in named

    def end(self, turns: Iterable[str]) -> list[str]:
        """Remove the groups of these planned turns; return the samples that the groups name.

        Samples of these groups that come later are left out.
        """
        over = dict.fromkeys(self._group_of[turn_id] for turn_id in turns if turn_id in self._group_of)
        return [name for group_id in over for name in self._let_go(group_id)]

    def oldest_ms(self, waits: Container[str]) -> int | None:
        """Return when the earliest ready group was settled; None: no group is ready."""
        return min((one.at_ms for one in self._settled.values() if one.here(waits)), default=None)

    def choose(self, waits: Container[str], *, at_most: int, settled_before_ms: int) -> Mapping[str, float] | None:
        """Return the next batch as advantages by sample id, of as many whole groups as fit, but at least one.

        `waits` are the samples that wait; a ready group with none of them is over. None: it is not time yet, as fewer
        than `at_most` samples are ready and no group was settled before `settled_before_ms`.
        """
        advantages: dict[str, float] = {}
        num_ready, is_old = 0, False
        for group_id, one in list(self._settled.items()):
            here = one.here(waits)
            if here is None:
                continue
            if not here:
                self._let_go(group_id)
                continue
            num_ready += len(here)
            is_old = is_old or one.at_ms <= settled_before_ms
            if not advantages or num_ready <= at_most:
                advantages |= here
        return advantages if advantages and (is_old or num_ready >= at_most) else None

    def _let_go(self, group_id: str) -> list[str]:
        one = self._settled.pop(group_id)
        self._named[group_id] = frozenset()
        for step in one.steps:
            self._group_of.pop(step.turn_id, None)
        return [step.sample_id for step in one.steps]
