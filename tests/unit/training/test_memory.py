"""Which hints a policy holds on to, and which it rehearses."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.events import (
    BatchPlanned,
    FollowedHint,
    HintHeld,
    HintRetired,
    KeptHint,
    RehearsalAsked,
    Rehearsed,
    Retired,
    SampleAssembled,
    Sampling,
    StepTaken,
    VersionSpan,
    hint_id_of,
    key_of_agent,
    policy_of_key,
)
from clawstream.training.batches.memory import (
    MAX_HINTS,
    OPEN_NATS,
    PROMPTS_A_HINT,
    TELLING_NATS,
    HintMemory,
)
from tests.examples import examples

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=None, max_tokens=9, seed=None, stop=())


def taught(name: str, hint: str | None = "shorter", key_name: str | None = None) -> SampleAssembled:
    """A sample of turn `name`, on which `hint` was said under this key."""
    return SampleAssembled(
        session_id=f"session {name}",
        turn_id=name,
        judge="judge",
        prompt_version="1",
        revision=0,
        reward=-1,
        hint=hint,
        prompt_ids=(1, 2),
        hinted_prompt_ids=None if hint is None else (1, 3, 2),
        response_ids=(4, 5),
        response_logprobs=(-0.5, -0.25),
        trained=(1, 1),
        temperature=1.0,
        sampling=SAMPLING,
        policy_id="policy",
        versions=(VersionSpan(policy_version=0, num_tokens=2),),
        num_earlier_turns=3,
        total_reward=-1.0,
        key_name=key_name,
    )


def plan(version: int = 1) -> BatchPlanned:
    return BatchPlanned(
        policy_id="policy", policy_version=version, parent_version=version - 1, sample_ids=(), offsets=(), seed=0,
        settings=b"{}", planned_at_ms=0, turns=(),
    )  # fmt: skip


def step(
    *rehearsed: Rehearsed, followed: Sequence[FollowedHint] = (), kept: Sequence[KeptHint] = (), version: int = 2
) -> StepTaken:
    """A step that found this of the memory's hints."""
    return StepTaken(
        policy_id="policy", policy_version=version, num_samples=0, num_hinted=0, num_rewarded=0, num_tokens=0,
        num_tokens_dropped=0, loss_nats=None, kl_reference_nats=None, mean_gap_nats=None, mean_reward=None,
        clipped_share=None, grad_norm=None, learning_rate=0.0, mean_versions_behind=0.0, max_versions_behind=0,
        step_ms=0, taken_at_ms=0, rehearsed=rehearsed, followed=tuple(followed), kept=tuple(kept),
    )  # fmt: skip


def told(
    held: HintMemory, *samples: SampleAssembled, version: int = 1, gain_nats: float | None = None
) -> list[HintHeld | HintRetired]:
    """What the memory writes of a batch of these; it has learned it then, and how much answers gain by these hints."""
    events = held.to_hold(plan(version), samples, now_ms=version)
    for event in events:
        held.learn(event)
    if gain_nats is not None:
        held.note(step(*(Rehearsed(hint_id=e.hint_id, open_nats=0.0, gain_nats=gain_nats) for e in events)))
    return events


def turns(asks: list[RehearsalAsked]) -> list[str]:
    return [ask.turn_id for ask in asks]


def test_a_hint_is_rehearsed_on_the_prompt_that_it_was_said_of_with_all_that_its_sample_needs() -> None:
    held, sample = HintMemory(), taught("a", key_name="ann")
    [event] = told(held, sample)
    assert isinstance(event, HintHeld)
    assert (event.sample_id, event.policy_version) == (sample.sample_id, 1)
    [ask] = held.to_ask(4, version=1, now_ms=9)
    assert (ask.turn_id, ask.number, ask.asked_at_ms) == ("a", -1, 9)
    assert ask.session_id not in ("", sample.session_id)
    assert (ask.prompt_ids, ask.hinted_prompt_ids) == (sample.prompt_ids, sample.hinted_prompt_ids)
    assert (ask.hint, ask.hint_id, ask.sampling) == ("shorter", event.hint_id, sample.sampling)


def test_equal_words_of_one_person_are_one_hint_and_of_two_people_two() -> None:
    said = {hint_id_of("policy", who, words) for who in ("ann", "bob", None) for words in ("Be  brief", "be brief\n")}
    assert len(said) == 3
    assert hint_id_of("policy", "ann", "be brief") != hint_id_of("other", "ann", "be brief")


@pytest.mark.parametrize(
    "sample",
    [
        taught("a", None),
        replace(taught("a"), hint_id="held"),
        replace(taught("a"), sampling=replace(SAMPLING, temperature=0.0)),
    ],
    ids=["no hint", "a rehearsal itself", "greedy"],
)
def test_nothing_is_held_of(sample: SampleAssembled) -> None:
    assert told(HintMemory(), sample) == []


def test_a_batch_that_is_taken_again_holds_nothing_twice() -> None:
    held = HintMemory()
    events = told(held, taught("a"))
    for event in events:
        held.learn(event)
    assert told(held, taught("a"), version=2) == []
    assert turns(held.to_ask(4, version=1, now_ms=0)) == ["a"]


def test_two_hints_that_were_not_rehearsed_for_long_go_with_the_most_open_one() -> None:
    held = HintMemory()
    told(held, *(taught(name, f"hint {name}") for name in "abcdef"))
    ids = {name: hint_id_of("policy", None, f"hint {name}") for name in "abcdef"}
    held.note(step(Rehearsed(hint_id=ids["f"], open_nats=0.3), Rehearsed(hint_id=ids["e"], open_nats=0.2)))
    held.note(step(Rehearsed(hint_id=ids["d"], open_nats=None)))
    assert turns(held.to_ask(3, version=1, now_ms=0))[:3] == ["a", "b", "f"]
    assert turns(held.to_ask(3, version=2, now_ms=0))[:3] == ["c", "d", "f"]
    held.note(step(Rehearsed(hint_id=ids["f"], open_nats=0.1)))
    assert turns(held.to_ask(3, version=3, now_ms=0))[:3] == ["a", "b", "e"]


def test_while_hints_are_open_there_is_one_more_rehearsal_for_each_up_to_twice_as_many() -> None:
    held = HintMemory()
    told(held, *(taught(f"{name}{n}", f"hint {name}") for name in "abcdef" for n in range(3)))
    ids = {name: hint_id_of("policy", None, f"hint {name}") for name in "abcdef"}

    def asked(**open_nats: float) -> list[str]:
        held.note(step(*(Rehearsed(hint_id=ids[name], open_nats=nats) for name, nats in open_nats.items())))
        return [turn[0] for turn in turns(held.to_ask(3, version=held._round + 1, now_ms=0))]

    assert len(asked(a=OPEN_NATS, b=-0.3)) == 3
    assert asked(c=0.2, d=0.3)[3:] == ["d", "c"]
    assert asked(a=0.5, b=0.4, e=0.6, f=0.7)[3:] == ["f", "e", "a"]
    assert len(asked(**dict.fromkeys("abcdef", 0.0))) == 3


def test_what_was_just_said_is_trained_on_anyway_and_is_rehearsed_last() -> None:
    held = HintMemory()
    told(held, *(taught(name, f"hint {name}") for name in "abc"))
    assert turns(held.to_ask(1, version=1, now_ms=0)) == ["a"]
    told(held, taught("b again", "hint b"), version=2)
    assert turns(held.to_ask(1, version=2, now_ms=0)) == ["c"]


def test_of_several_answers_to_a_hint_the_most_open_counts() -> None:
    held = HintMemory()
    told(held, taught("a", "x"), taught("b", "y"))
    x, y = (hint_id_of("policy", None, words) for words in "xy")
    held.note(step(*(Rehearsed(hint_id=x, open_nats=nats) for nats in (0.9, 0.0)), Rehearsed(hint_id=y, open_nats=0.5)))
    assert [one.open_nats for one in held.held] == [0.9, 0.5]


def test_each_key_has_a_rehearsal_before_any_has_two() -> None:
    held = HintMemory()
    told(held, *(taught(f"a{n}", f"hint {n}", "ann") for n in range(5)), taught("b", "hint", "bob"))
    held.note(step(*(Rehearsed(hint_id=hint_id_of("policy", "ann", f"hint {n}"), open_nats=1.0) for n in range(5))))
    assert "b" in turns(held.to_ask(2, version=1, now_ms=0))


def test_a_hint_with_several_prompts_takes_them_in_turn_and_no_prompt_twice_at_once() -> None:
    held = HintMemory()
    told(held, *(taught(name) for name in "abc"))
    assert turns(held.to_ask(1, version=1, now_ms=0)) == ["a"]
    assert turns(held.to_ask(1, version=2, now_ms=0)) == ["b"]
    assert sorted(turns(held.to_ask(9, version=3, now_ms=0))) == ["a", "b", "c"]


def test_a_retired_hint_is_not_rehearsed_until_it_is_said_again() -> None:
    held = HintMemory()
    [event] = told(held, taught("a"))
    assert isinstance(event, HintHeld)
    held.learn(HintRetired(policy_id="policy", hint_id=event.hint_id, reason=Retired.ASKED, retired_at_ms=1))
    assert held.to_ask(4, version=1, now_ms=0) == []
    told(held, taught("b"))
    assert turns(held.to_ask(4, version=2, now_ms=0)) == ["b"]


def test_of_a_hint_that_is_said_again_after_it_was_retired_steps_of_before_say_nothing() -> None:
    live = HintMemory()
    [first] = told(live, taught("a", "shorter", "ann"))
    assert isinstance(first, HintHeld)
    retired = HintRetired(policy_id="policy", hint_id=first.hint_id, reason=Retired.ASKED, retired_at_ms=1)
    followed, open_again = (
        step(Rehearsed(hint_id=first.hint_id, open_nats=nats, gain_nats=3.0), version=version)
        for version, nats in ((2, 0.01), (4, 0.3))
    )
    live.note(followed)
    live.learn(retired)
    again = told(live, taught("b", "shorter", "ann"), version=3)

    read = HintMemory()
    for event in (first, retired, *again):
        read.learn(event)
    read.note(followed, asked_elsewhere=True)

    assert [one.open_nats for one in read.held] == [None]
    assert (read.to_try([answered("x", 1)]), live.to_try([answered("x", 1)])) == ([], [])
    assert read.held == live.held
    read.note(open_again, asked_elsewhere=True)
    read.note(step(Rehearsed(hint_id=first.hint_id, open_nats=0.0, gain_nats=3.0), version=5), asked_elsewhere=True)
    assert [one.open_nats for one in read.held] == [0.0]
    assert len(read.to_try([answered("x", 1)])) == 1


def test_a_full_memory_lets_go_of_the_hint_that_was_longest_not_said() -> None:
    held = HintMemory(max_hints=3)
    told(held, *(taught(name, f"hint {name}") for name in "abc"))
    told(held, taught("again", "hint a"), version=2)
    retired, new = told(held, taught("d", "hint d"), version=3)
    assert isinstance(retired, HintRetired)
    assert isinstance(new, HintHeld)
    assert (retired.hint_id, retired.reason) == (hint_id_of("policy", None, "hint b"), Retired.CROWDED_OUT)
    assert len(held.held) == 3


@examples(1)
@given(st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=6), max_size=12))
def test_a_fold_of_the_log_holds_what_the_memory_held_when_it_was_written(
    batches: list[list[tuple[int, int]]],
) -> None:
    held, log = HintMemory(), []
    for version, batch in enumerate(batches, 1):
        samples = [taught(f"t{version}-{n}", f"hint {words}", f"key {key}") for n, (words, key) in enumerate(batch)]
        log += told(held, *samples, version=version)
    again = HintMemory()
    for event in [*log, *log]:
        again.learn(event)
    assert again.held == held.held
    assert len(held.held) <= MAX_HINTS
    asks = [memory_.to_ask(MAX_HINTS * PROMPTS_A_HINT, version=99, now_ms=0) for memory_ in (again, held)]
    assert sorted(turns(asks[0])) == sorted(turns(asks[1]))


def test_further_answers_to_one_turn_are_no_new_saying_and_fill_no_prompts() -> None:
    held = HintMemory()
    told(held, *(taught(f"t{n}") for n in range(8)))
    assert told(held, *(replace(taught("t7"), refreshed_id=f"answer {n}") for n in range(8)), version=2) == []
    assert len(held.to_ask(8, version=1, now_ms=0)) == 8
    told(held, replace(taught("t7"), num_feedback=1), version=3)  # the person spoke again of the same turn
    assert sorted(turns(held.to_ask(8, version=2, now_ms=0))) == [f"t{n}" for n in range(8)]


def test_a_further_answer_does_not_bring_back_a_retired_hint() -> None:
    held = HintMemory()
    [event] = told(held, taught("a"))
    assert isinstance(event, HintHeld)
    held.learn(HintRetired(policy_id="policy", hint_id=event.hint_id, reason=Retired.ASKED, retired_at_ms=1))
    assert told(held, replace(taught("a"), refreshed_id="answer"), version=2) == []
    assert held.held == ()


def answered(name: str, reward: int | None, key_name: str | None = "ann", hint: str | None = None) -> SampleAssembled:
    """A sample of turn `name`, whose answer a judge took so."""
    told_of = taught(name, hint, key_name)
    return replace(told_of, reward=reward, total_reward=reward, prompt_ids=(7, 2))


def test_an_answer_is_tried_against_the_hints_of_its_key_that_nobody_said_of_it() -> None:
    held = HintMemory()
    said = (taught("a", "shorter", "ann"), taught("b", "longer", "bob"), taught("c", "in verse", "ann"))
    told(held, *said, gain_nats=5.0)
    sample = answered("d", -1, hint="In  Verse")
    told(held, sample, version=2)
    [trial] = held.to_try([sample])
    assert trial.hint_id == hint_id_of("policy", "ann", "shorter")
    assert (trial.sample_id, trial.hinted_prompt_ids) == (sample.sample_id, (7, 3, 2))
    assert (trial.accepted, trial.least_gain_nats) == (False, 2.5)


@pytest.mark.parametrize("key_name", [None, "acme"])
def test_an_agents_answer_is_tried_against_its_hints_whether_there_are_api_keys_or_not(key_name: str | None) -> None:
    own = policy_of_key("policy", key_of_agent(key_name, "ann"))
    held = HintMemory()
    said = held.to_hold(replace(plan(), policy_id=own), [taught("a", "shorter", key_name)], now_ms=1)
    for event in said:
        held.learn(event)
        held.note(step(Rehearsed(hint_id=event.hint_id, open_nats=0.0, gain_nats=5.0)))
    sample = replace(answered("d", -1, key_name), policy_id=own)
    assert [trial.hint_id for trial in held.to_try([sample])] == [event.hint_id for event in said]
    assert held.to_try([replace(sample, policy_id="policy+bob")]) == []


@pytest.mark.parametrize(
    ("sample", "accepted"),
    [
        (answered("x", 1), True),
        (answered("x", -1), False),
        (replace(answered("x", 1), person_reward=-0.5), False),
        (replace(answered("x", None), person_reward=0.5), True),
    ],
    ids=["a judge's verdict", "another", "a person's word before it", "a person's word alone"],
)
def test_a_person_goes_before_a_judge_in_how_an_answer_was_taken(sample: SampleAssembled, accepted: bool) -> None:
    held = HintMemory()
    told(held, taught("a", "shorter", "ann"), gain_nats=TELLING_NATS)
    assert [trial.accepted for trial in held.to_try([sample])] == [accepted]


@pytest.mark.parametrize(
    "sample",
    [
        answered("x", None),
        replace(answered("x", None), environment_reward=-1.0, total_reward=-1.0),
        replace(answered("x", -1), cut=True),
        replace(answered("x", -1), calls_tools=True),
        replace(answered("x", 1), person_reward=0.0),
        answered("x", 1, key_name=None),
        answered("x", 1, key_name="bob"),
        replace(answered("x", 1), hint_id="held"),
        replace(answered("x", 1), refreshed_id="again"),
        replace(answered("x", 1), sampling=replace(SAMPLING, temperature=0.0)),
        replace(answered("x", 1), prompt_ids=(7, 9)),
    ],
    ids=[
        "nobody said anything", "an outcome", "cut", "a call of tools", "a person's shrug", "of nobody known",
        "another key", "a rehearsal", "a refreshed answer", "greedy", "no place for the hint",
    ],
)  # fmt: skip
def test_is_tried_against_nothing(sample: SampleAssembled) -> None:
    held = HintMemory()
    told(held, taught("a", "shorter", "ann"), taught("b", "longer", None), gain_nats=5.0)
    assert held.to_try([sample]) == []


def test_a_hint_is_tried_once_a_rehearsal_that_followed_it_shows_that_it_is_telling() -> None:
    held, sample = HintMemory(), answered("x", -1)
    told(held, taught("a", "shorter", "ann"))
    hint_id = hint_id_of("policy", "ann", "shorter")
    for open_nats, gain_nats, least in (
        (None, 9.0, None), (OPEN_NATS, None, None), (2 * OPEN_NATS, 9.0, None), (0.0, TELLING_NATS - 0.2, None),
        (0.0, TELLING_NATS + 0.4, (TELLING_NATS + 0.1) / 2), (0.0, 3.0, (TELLING_NATS + 3.1) / 4),
    ):  # fmt: skip
        held.note(step(Rehearsed(hint_id=hint_id, open_nats=open_nats, gain_nats=gain_nats)))
        found = [trial.least_gain_nats for trial in held.to_try([sample])]
        assert found == ([] if least is None else [pytest.approx(least)])


def test_a_hint_that_is_lost_before_a_version_is_published_is_open() -> None:
    held = HintMemory()
    told(held, taught("a", "x"), taught("b", "y"))
    x, y = (hint_id_of("policy", None, words) for words in "xy")
    held.note(step(Rehearsed(hint_id=x, open_nats=0.0), Rehearsed(hint_id=y, open_nats=0.0)))
    held.note(step(kept=[KeptHint(hint_id=x, lost_nats=0.4), KeptHint(hint_id=y, lost_nats=-0.1)]))
    assert [one.open_nats for one in held.held] == [0.4, 0.0]
