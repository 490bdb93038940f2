"""What judges answer in runs that must not learn: a coin's verdicts, or those of another session's turn."""

import random

from hypothesis import given
from hypothesis import strategies as st

from clawstream.judging.prompts import Case, Prompt, floor_prompt, hint_prompt, score_prompt
from clawstream.simulation.opinions import RandomJudge, ShuffledJudge, SimulatedJudge, opening_of
from tests.unit.simulation.test_opinions import SAID, boxed, hint_in

SURE = SimulatedJudge(wrong_share=0.0, seed=0)
COMPLAINT, THANKS = "no headings or bold please, just say it plainly", "thanks, that's perfect!"


class Listening:
    """A judge that says which prompt it was given."""

    def reply(self, system: str, prompt: str, vote_seed: int) -> str:  # noqa: ARG002  # what a judge is called with
        return prompt


def turn(session: int, number: int = 0, *, said: str = COMPLAINT) -> Case:
    """Turn `number` of a session that opens with a question of its own."""
    opening = ({"role": "user", "content": f"What is {session} + 1?"},)
    earlier = [{"role": role, "content": f"{role} {n}"} for n in range(number) for role in ("assistant", "user")]
    return Case(
        request=(*opening, *earlier),
        answer={"role": "assistant", "content": f"answer {number} of {session}"},
        next_state=({"role": "user", "content": said},),
    )


def both(case: Case) -> tuple[Prompt, Prompt]:
    return score_prompt(case, 2000), hint_prompt(case, 2000)


TURNS = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 3)), min_size=1, max_size=40)


@given(TURNS, st.integers(0, 3))
def test_shuffled_never_judges_a_turn_by_one_of_its_own_session(turns: list[tuple[int, int]], seed: int) -> None:
    judge = ShuffledJudge(Listening(), seed=seed)

    for session, number in turns:
        for prompt in both(turn(session, number)):
            judged = judge.reply(prompt.system, prompt.user, 1)
            assert f"What is {session} + 1?" not in judged
            assert judged == "" or "<next_state" in judged


@given(TURNS)
def test_all_votes_on_a_turn_rest_on_the_same_other_turn_whatever_comes_between(turns: list[tuple[int, int]]) -> None:
    judge = ShuffledJudge(Listening(), seed=0)
    used: dict[tuple[int, int], set[str]] = {}

    for session, number in [*turns, *turns]:
        case = turn(session, number)
        floor = floor_prompt(case, case.request, 2000)
        for prompt in (*both(case), floor):
            used.setdefault((session, number), set()).add(judge.reply(prompt.system, prompt.user, 7))

    assert all(len(of_turn) == 1 for of_turn in used.values())


def test_before_any_other_session_spoke_a_turn_is_judged_by_nothing_and_gives_neither_verdict_nor_hint() -> None:
    judge = ShuffledJudge(SURE, seed=0)
    score, hint = both(turn(1))

    assert boxed(judge.reply(score.system, score.user, 1)) == 0
    assert hint_in(judge.reply(hint.system, hint.user, 1)) is None


def test_shuffled_gives_a_turn_the_verdict_and_the_hint_of_the_other_together() -> None:
    judge, rng = ShuffledJudge(SURE, seed=0), random.Random(0)
    verdicts = []
    for session in range(300):
        score, hint = both(turn(session, said=rng.choice((COMPLAINT, THANKS))))
        verdict = boxed(judge.reply(score.system, score.user, 1))
        assert (hint_in(judge.reply(hint.system, hint.user, 1)) is not None) == (verdict == -1)
        verdicts.append(verdict)

    assert 100 < verdicts.count(1) < 200  # a coin's share: what is said of others says nothing of this one


def test_shuffled_draws_from_all_that_came_before_and_the_same_again_for_a_seed() -> None:
    def judged(seed: int) -> list[str]:
        judge = ShuffledJudge(Listening(), seed=seed)
        prompts = [score_prompt(turn(session), 2000) for session in range(200)]
        return [judge.reply(p.system, p.user, 1) for p in prompts]

    assert judged(0) == judged(0) != judged(1)
    assert len(set(judged(0))) > 80


def test_the_opening_of_a_session_is_the_same_in_all_its_turns() -> None:
    openings = {opening_of(score_prompt(turn(7, number), 2000).user) for number in range(5)}

    assert openings == {"[user]\nWhat is 7 + 1?"}


def test_a_coin_decides_scores_whatever_was_said_and_hints_stay() -> None:
    judge = RandomJudge(SURE, seed=0)
    for _, said in SAID:
        score, hint = both(turn(1, said=said))
        scores = [boxed(judge.reply(score.system, score.user, vote)) for vote in range(1000)]
        assert set(scores) == {-1, 1}
        assert 430 < scores.count(1) < 570
        assert judge.reply(hint.system, hint.user, 3) == SURE.reply(hint.system, hint.user, 3)
