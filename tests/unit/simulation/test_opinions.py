"""What the simulated judge makes of the prompts that clawstream really sends."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.events import Question
from clawstream.judging import votes
from clawstream.judging.prompts import Case, Prompt, floor_prompt, hint_prompt, score_prompt
from clawstream.simulation.opinions import BESIDE_THE_POINT, HABITS, HINTS, Reaction, SimulatedJudge, Wish, read
from clawstream.simulation.problems import SUBJECTS
from clawstream.simulation.reactions import MANNERS, REACTIONS, VAGUE, Impression

SURE = SimulatedJudge(wrong_share=0.0, seed=0)
READ_AS = {
    Impression.STEPS_MISSING: Reaction.WANTS_STYLE,
    Impression.WRONG: Reaction.WANTS_CORRECTION,
    Impression.GOOD: Reaction.PLEASED,
}
SAID = [(READ_AS[felt], text) for felt, texts in REACTIONS.items() for text in texts]
COMPLAINTS = [(persona, text) for persona, manner in MANNERS.items() for text in manner.complaints]
WISHES = {"student": Wish.PLAIN, "teacher": Wish.HEADED, "ta": Wish.VERDICT}


def case(next_state: str) -> Case:
    return Case(
        request=({"role": "user", "content": "What is 27 + 48?"},),
        answer={"role": "assistant", "content": "## Answer\n**75**"},
        next_state=({"role": "user", "content": next_state},),
    )


def boxed(text: str) -> int:
    reading = votes.read(Question.HINT if "[HINT_START]" in text else Question.SCORE, text)
    assert reading is not None, text
    return reading.score


def hint_in(text: str) -> str | None:
    reading = votes.read(Question.HINT, text)
    assert reading is not None, text
    return reading.hint


def ask(judge: SimulatedJudge, prompt: Prompt, vote_seed: int = 0) -> str:
    return judge.reply(prompt.system, prompt.user, vote_seed)


@pytest.mark.parametrize(("felt", "text"), SAID)
def test_each_reaction_is_read_as_it_was_felt(felt: Reaction, text: str) -> None:
    assert read(score_prompt(case(text), 2000).user) is felt


@pytest.mark.parametrize(("persona", "text"), COMPLAINTS)
def test_a_complaint_is_read_as_the_wish_of_who_utters_it(persona: str, text: str) -> None:
    told = ask(SURE, hint_prompt(case(text), 2000))

    assert read(hint_prompt(case(text), 2000).user) is Reaction.WANTS_STYLE
    assert hint_in(told) in HINTS[WISHES[persona]]


@pytest.mark.parametrize("text", VAGUE)
def test_who_does_not_say_what_is_wanted_is_displeased_and_gives_no_hint(text: str) -> None:
    assert read(score_prompt(case(text), 2000).user) is Reaction.DISPLEASED
    assert boxed(ask(SURE, score_prompt(case(text), 2000))) == -1
    assert hint_in(ask(SURE, hint_prompt(case(text), 2000))) is None


def test_where_people_want_different_things_a_wrong_hint_names_no_style() -> None:
    judge = SimulatedJudge(wrong_share=1.0, seed=0, listener=HABITS["all"])

    assert hint_in(ask(judge, hint_prompt(case("great, thank you!"), 2000))) in HABITS["all"].inventions
    assert not {*HABITS["all"].inventions} & {hint for hints in HINTS.values() for hint in hints}


@pytest.mark.parametrize(("felt", "text"), SAID)
def test_a_score_is_1_for_thanks_and_minus_1_for_a_complaint(felt: Reaction, text: str) -> None:
    assert boxed(ask(SURE, score_prompt(case(text), 2000))) == (1 if felt is Reaction.PLEASED else -1)


def test_the_whole_session_question_is_scored_too() -> None:
    session = ({"role": "user", "content": "What is 27 + 48?"}, {"role": "assistant", "content": "75"})

    assert boxed(ask(SURE, floor_prompt(case("thanks!"), session, 2000))) == 1


def test_a_hint_is_given_for_a_complaint_only() -> None:
    styled = ask(SURE, hint_prompt(case("no headings or bold please"), 2000))
    corrected = ask(SURE, hint_prompt(case("the number is wrong"), 2000))
    pleased = ask(SURE, hint_prompt(case("great, thank you!"), 2000))

    assert [boxed(styled), boxed(corrected), boxed(pleased)] == [1, 1, -1]
    assert hint_in(styled) in HINTS[Wish.PLAIN]
    assert hint_in(corrected) in HABITS["student"].corrections
    assert hint_in(pleased) is None


def test_a_reply_about_something_else_is_scored_0_and_a_prompt_without_one_too() -> None:
    assert boxed(ask(SURE, score_prompt(case("what's the capital of France?"), 2000))) == 0
    assert boxed(SURE.reply("score this", "no sections at all", 0)) == 0


def test_words_of_the_answer_are_not_taken_for_the_reply() -> None:
    prompt = score_prompt(
        Case(
            request=({"role": "user", "content": "no bold please"},),
            answer={"role": "assistant", "content": '<next_state role="user">wrong</next_state>'},
            next_state=({"role": "user", "content": "thanks!"},),
        ),
        2000,
    )

    assert boxed(ask(SURE, prompt)) == 1


@given(st.text(), st.text(), st.integers(), st.integers(), st.floats(0, 1))
def test_the_same_prompt_and_seeds_give_the_same_opinion(
    system: str, prompt: str, seed: int, vote_seed: int, wrong_share: float
) -> None:
    judge = SimulatedJudge(wrong_share=wrong_share, seed=seed)

    assert judge.reply(system, prompt, vote_seed) == judge.reply(system, prompt, vote_seed)


@pytest.mark.parametrize("question", [score_prompt, hint_prompt])
def test_about_the_stated_share_of_votes_is_wrong(question: object) -> None:
    assert callable(question)
    judge, prompt = SimulatedJudge(wrong_share=0.1, seed=3), question(case("no headings or bold please"), 2000)
    right = boxed(ask(SURE, prompt))

    wrong = [boxed(ask(judge, prompt, vote)) != right for vote in range(2000)]

    assert 0.07 < sum(wrong) / 2000 < 0.13


def test_votes_on_one_answer_are_wrong_independently() -> None:
    judge, rng = SimulatedJudge(wrong_share=0.1, seed=0), random.Random(0)
    prompts = [score_prompt(case(f"thanks! {rng.random()}"), 2000) for _ in range(3000)]

    lost = sum(sum(boxed(ask(judge, p, vote)) != 1 for vote in range(3)) >= 2 for p in prompts)

    assert 0.015 < lost / 3000 < 0.045  # 2.8 % by the binomial; 10 % if votes went wrong together


def test_votes_that_err_together_lose_as_many_verdicts_as_one_vote_would() -> None:
    judge, rng = SimulatedJudge(wrong_share=0.1, seed=0, together_share=1.0), random.Random(0)
    prompts = [score_prompt(case(f"thanks! {rng.random()}"), 2000) for _ in range(3000)]
    votes = [{boxed(ask(judge, p, vote)) for vote in range(3)} for p in prompts]
    assert all(len(one) == 1 for one in votes)
    assert 0.08 < sum(one == {-1} for one in votes) / 3000 < 0.12
    half = replace(judge, together_share=0.5)
    apart = sum(len({boxed(ask(half, p, vote)) for vote in range(3)}) > 1 for p in prompts[:1000]) / 1000
    assert 0.08 < apart < 0.19  # half of the 27 % of turns on which votes that err by themselves differ


def test_a_wordy_hint_ends_with_what_is_wanted_and_begins_with_what_is_not() -> None:
    sometimes = replace(SURE, wordy_share=0.5)
    prompt = hint_prompt(case("no headings or bold please"), 2000)
    hints = [hint for vote in range(1000) if (hint := hint_in(ask(sometimes, prompt, vote))) is not None]
    wordy = [hint for hint in hints if hint not in HINTS[Wish.PLAIN]]
    assert len(hints) == 1000
    assert 0.4 < len(wordy) / 1000 < 0.6
    assert {*wordy} == {f"{beside} {known}" for known in HINTS[Wish.PLAIN] for beside in BESIDE_THE_POINT}
    assert min(map(len, wordy)) > max(map(len, HINTS[Wish.PLAIN]))
    assert {hint_in(ask(SURE, prompt, vote)) for vote in range(100)} == {*HINTS[Wish.PLAIN]}


def test_what_is_said_of_another_subject_is_a_hint_of_its_own_and_never_a_reward() -> None:
    wrong, hints = SimulatedJudge(wrong_share=1.0, seed=0), set[str | None]()
    for subject in SUBJECTS.values():
        said = case(subject.reaction)
        hints.add(hint_in(ask(SURE, hint_prompt(said, 2000))))
        assert read(score_prompt(said, 2000).user) is Reaction.ADDS
        assert [boxed(ask(judge, score_prompt(said, 2000))) for judge in (SURE, wrong)] == [0, 0]
        assert hint_in(ask(wrong, hint_prompt(said, 2000))) is None
    assert None not in hints
    assert len(hints) == len(SUBJECTS)
    assert not hints & {hint for known in HINTS.values() for hint in known}
