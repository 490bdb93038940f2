"""The other hints that judges offer: samples have them only where the trainer chooses, and never beside a person's."""

import random
from collections.abc import Sequence

from hypothesis import given

from clawstream.events import Event, HintFound, LearnsFrom, Question, SampleAssembled
from clawstream.stream.topics import SAMPLES
from tests.flow import Flow, Log, Oracle
from tests.unit.samples.test_flow import MOVES, SEEDS, conversation
from tests.unit.samples.test_words import WORDS, told

HINTS = ("Leave out all of the headings.", "Say it in plain words.", "Use no headings.", "Plain words.")
WORDY = Oracle(
    {
        Question.SCORE: ["\\boxed{-1}"],
        Question.HINT: [f"\\boxed{{1}} [HINT_START]{hint}[HINT_END]" for hint in HINTS],
    }
)
CHOOSING = LearnsFrom(other_hints=True)


def logged(events: Sequence[Event], seed: int, learns: LearnsFrom = CHOOSING) -> Log:
    return Flow(WORDY, learns=learns).run(events, random.Random(seed), restarts=0.1)


@given(MOVES, SEEDS)
def test_a_sample_has_the_prompts_of_all_hints_that_were_offered(moves: list[str], seed: int) -> None:
    log = logged(conversation(moves), seed)
    found = {(one.turn_id, one.revision): one for one in log.of(HintFound)}
    for sample in log.of(SampleAssembled):
        one = found[sample.turn_id, sample.revision]
        assert sample.hint == one.hint
        assert [other.hint for other in sample.other_hints] == [other.hint for other in one.others]
        for other in sample.other_hints:
            assert sample.hinted_prompt_ids is not None
            assert sample.hint is not None
            words = other.hint.encode(), sample.hint.encode()
            assert bytes(other.hinted_prompt_ids) == bytes(sample.hinted_prompt_ids).replace(words[1], words[0])


@given(MOVES, SEEDS)
def test_any_interleaving_and_any_restart_gives_the_same_offers(moves: list[str], seed: int) -> None:
    events = conversation(moves)
    calm = Flow(WORDY, learns=CHOOSING).run(events)
    assert logged(events, seed).first_by_id(SAMPLES) == calm.first_by_id(SAMPLES)


@given(MOVES, SEEDS)
def test_where_nobody_chooses_samples_have_the_longest_alone_and_the_log_still_has_the_others(
    moves: list[str], seed: int
) -> None:
    events = conversation([*moves, *["ask"] * 4])
    log = logged(events, seed, LearnsFrom())
    assert not any(sample.other_hints for sample in log.of(SampleAssembled))
    assert any(found.others for found in log.of(HintFound))


def test_beside_a_person_s_own_words_no_other_hint_is_kept() -> None:
    by_judge, *_, sample = Flow(WORDY, learns=CHOOSING).run(told((None, WORDS))).of(SampleAssembled)
    assert by_judge.other_hints
    assert (sample.turn_id, sample.hint, sample.other_hints) == (by_judge.turn_id, WORDS, ())
