"""People, judge and scorer agree on plain cases, each by code of its own; held-out words reach no run that tunes."""

import ast
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from clawstream.judging.prompts import Case, hint_prompt, score_prompt
from clawstream.simulation import everyday
from clawstream.simulation.everyday import (
    Split,
    general,
    listener,
    person,
    personas,
    requests_of,
    scorer,
    wish_of,
    wishes,
)
from clawstream.simulation.everyday.listener import LISTENERS
from clawstream.simulation.everyday.person import (
    NO_ANSWER,
    THANKS,
    EverydayPerson,
    EverydayTask,
    looks_as_wished,
    seems_to_answer,
    tasks,
)
from clawstream.simulation.everyday.scorer import holds, is_answer
from clawstream.simulation.marks import everyday_questions
from clawstream.simulation.opinions import RandomJudge, Reaction, ShuffledJudge, SimulatedJudge
from clawstream.simulation.runs.people import people_of
from clawstream.simulation.runs.scenarios import CASTS, UnusableProblems
from tests.unit.simulation.everyday.test_scorer import EXAMPLES, PROSE, REQUEST
from tests.unit.simulation.test_opinions import boxed, hint_in

HEARD = LISTENERS["everyday"]
SURE = SimulatedJudge(wrong_share=0.0, seed=0, listener=HEARD)
KNOWN = sorted(person._LOOKS)
FRENCH = EXAMPLES["french"][0][0]
GOOD = {
    "one_sentence": "Yes, cooked pasta freezes well.",
    "french": FRENCH,
    "greeting": "Hello! Cooked pasta freezes well in bags.",
}


def task(wish: str, request: str = REQUEST, *, held_out: bool = False) -> EverydayTask:
    return EverydayTask(persona="cook", system="You help.", wish=wish, request=request, held_out=held_out)


def said_of(wish: str, answer: str, *, hint_share: float = 0.5, seed: int = 0, held_out: bool = False) -> str:
    return EverydayPerson(hint_share=hint_share).reaction(task(wish, held_out=held_out), answer, random.Random(seed))


def case(answer: str, said: str) -> Case:
    return Case(
        request=({"role": "system", "content": "You help."}, {"role": "user", "content": REQUEST}),
        answer={"role": "assistant", "content": answer},
        next_state=({"role": "user", "content": said},),
    )


def imported(module: object) -> Iterator[str]:
    for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text())):  # type: ignore[attr-defined]
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def test_people_judge_and_scorer_share_words_and_no_code() -> None:
    ours = {
        module: {name for name in imported(module) if name.startswith("clawstream.")}
        for module in (person, listener, scorer)
    }
    words = {f"{everyday.__name__}.{name}" for name in ("AnswerWish", "wishes")}
    assert ours[person] == words
    assert ours[listener] == words | {"clawstream.simulation.opinions.Reaction"}
    assert ours[scorer] == set()
    assert {name for name in imported(everyday) if name.startswith("clawstream.")} == set()


def test_people_judge_and_scorer_share_no_patterns() -> None:
    def written(module: object) -> set[str]:
        tree = ast.parse(Path(str(module.__file__)).read_text())  # type: ignore[attr-defined]
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        found = (n for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in docs)
        return {one.value for one in found if isinstance(one.value, str) and len(one.value) > 12} - set(KNOWN)

    people, judge, score = map(written, (person, listener, scorer))
    assert people & judge == people & score == judge & score == set()


@pytest.mark.parametrize("wish", KNOWN)
def test_an_answer_that_the_scorer_calls_as_wished_looks_so_to_the_person(wish: str) -> None:
    good, bad = EXAMPLES[wish]
    assert holds(wish, good[0]) and looks_as_wished(wish, good[0])  # noqa: PT018
    assert not holds(wish, bad[0])
    assert not looks_as_wished(wish, bad[0])


def test_each_person_s_wish_is_one_that_people_can_see_the_judge_can_name_and_the_scorer_can_tell() -> None:
    assert {one.wish for one in personas()} <= {*KNOWN} & {wish.id for wish in HEARD.known} & scorer.WISH_IDS
    assert len({one.system for one in personas()}) == len({one.name for one in personas()}) == 3
    assert not any(
        word in one.system.lower() for one in personas() for word in ("sentence", "word", "short", "brief", "question")
    )


@pytest.mark.parametrize("wish", GOOD)
def test_thanks_are_said_for_an_answer_as_wished_and_read_as_praise_without_a_hint(wish: str) -> None:
    answer = GOOD[wish]
    assert holds(wish, answer) and is_answer(answer, REQUEST, wish=wish, finished=True)  # noqa: PT018
    said = said_of(wish, answer)
    assert said in THANKS
    prompts = score_prompt(case(answer, said)), hint_prompt(case(answer, said))
    assert [boxed(SURE.reply(p.system, p.user, 0)) for p in prompts] == [1, -1]


@pytest.mark.parametrize("wish", GOOD)
@pytest.mark.parametrize("hint_share", [0.0, 1.0])
def test_a_complaint_is_of_the_wish_and_the_judge_gives_one_of_its_hints(wish: str, hint_share: float) -> None:
    words = next(one for one in wishes() if one.id == wish)
    heard = {said_of(wish, PROSE, hint_share=hint_share, seed=seed) for seed in range(20)}
    assert heard == set(words.says if hint_share else words.rejects)
    for said in heard:
        assert HEARD.reaction(said.lower()) is Reaction.WANTS_STYLE
        scored, hinted = score_prompt(case(PROSE, said)), hint_prompt(case(PROSE, said))
        assert boxed(SURE.reply(scored.system, scored.user, 0)) == -1
        assert {hint_in(SURE.reply(hinted.system, hinted.user, seed)) for seed in range(40)} == set(words.hints)


@pytest.mark.parametrize(
    "answer",
    [
        "Hello!",
        "Hello! The user wants to freeze pasta.",
        "Hello there, pasta freezes and",
        "Hello! The Thames flows to the sea.",
    ],
)
def test_who_gets_no_answer_says_so_and_the_judge_suggests_nothing(answer: str) -> None:
    said = said_of("greeting", answer)
    assert said in NO_ANSWER
    prompts = score_prompt(case(answer, said)), hint_prompt(case(answer, said))
    assert [boxed(SURE.reply(p.system, p.user, 0)) for p in prompts] == [-1, -1]
    assert not is_answer(answer, REQUEST, wish="greeting", finished=False)


def test_every_complaint_is_heard_as_that_of_its_wish() -> None:
    for wish in wishes():
        for said in wish.complaints:
            assert HEARD.hints(said.lower()) == wish.hints, said


def test_what_people_say_of_no_wish_names_none() -> None:
    assert {HEARD.reaction(said.lower()) for said in THANKS} == {Reaction.PLEASED}
    assert {HEARD.reaction(said.lower()) for said in NO_ANSWER} == {Reaction.DISPLEASED}
    assert HEARD.reaction("hm.") is Reaction.UNCLEAR
    assert [HEARD.hints(said.lower()) for said in (*THANKS, *NO_ANSWER)] == [()] * 6


@pytest.mark.parametrize("wish", GOOD)
@pytest.mark.parametrize("hint_share", [0.0, 1.0])
def test_words_held_out_are_said_where_they_may_be_and_never_while_settings_are_tuned(
    wish: str, hint_share: float
) -> None:
    words = next(one for one in wishes() if one.id == wish)
    usual, others = (words.says, words.says_held_out) if hint_share else (words.rejects, words.rejects_held_out)

    tuned, reported = (
        {said_of(wish, PROSE, hint_share=hint_share, seed=seed, held_out=held_out) for seed in range(50)}
        for held_out in (False, True)
    )

    assert (tuned, reported) == ({*usual}, {*usual, *others})
    assert others
    assert not {*usual} & {*others}


def test_no_judge_gives_a_hint_in_words_that_are_held_out() -> None:
    given = {hint for wish in wishes() for hint in wish.hints} | set(HEARD.inventions)
    assert given & {hint for wish in wishes() for hint in wish.hints_held_out} == set()


def test_about_one_vote_in_ten_is_wrong_and_a_coin_keeps_the_hints() -> None:
    wrong = SimulatedJudge(wrong_share=0.1, seed=0, listener=HEARD)
    cases = [case(PROSE, said_of("french", PROSE, seed=n)) for n in range(20)]
    scored, hinted = [score_prompt(one) for one in cases], [hint_prompt(one) for one in cases]
    votes = [boxed(wrong.reply(p.system, p.user, seed)) for p in scored for seed in range(20)]
    assert 0.04 < votes.count(1) / len(votes) < 0.16
    coin = RandomJudge(SURE, seed=0)
    drawn = [boxed(coin.reply(p.system, p.user, seed)) for p in scored for seed in range(20)]
    assert 0.4 < drawn.count(1) / len(drawn) < 0.6
    assert all(coin.reply(p.system, p.user, 0) == SURE.reply(p.system, p.user, 0) for p in hinted)


def test_shuffled_gives_a_turn_the_hints_of_another_session() -> None:
    judge = ShuffledJudge(SURE, seed=0)
    ours = hint_prompt(case(PROSE, said_of("french", PROSE, hint_share=1.0)))
    other = case(PROSE, said_of("one_sentence", PROSE, hint_share=1.0))
    theirs = hint_prompt(
        Case(request=({"role": "user", "content": "Why?"},), answer=other.answer, next_state=other.next_state)
    )
    judge.reply(ours.system, ours.user, 0)
    french = next(one for one in wishes() if one.id == "french")
    assert hint_in(judge.reply(theirs.system, theirs.user, 0)) in french.hints


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("split", [Split.REPORT, Split.DEVELOPMENT])
def test_each_person_asks_every_request_of_a_run_and_is_scored_on_others(split: Split, tmp_path: Path) -> None:
    people = people_of("everyday", tmp_path, split=split, num_scored=10)
    asked, scored = tasks(people.asked.read_text()), everyday_questions(people.scored.read_text())

    assert {(one.persona, one.request) for one in asked} == {
        (one.name, request) for one in personas() for request in requests_of(Split.PEOPLE)
    }
    assert {one.question for one in scored} <= {*requests_of(split)}
    assert len({one.question for one in scored}) == len(scored) == 30
    assert {one.persona: (one.system, one.wish) for one in scored} == {p.name: (p.system, p.wish) for p in personas()}
    assert {one.persona: one.system for one in asked} == {p.name: p.system for p in personas()}
    assert {one.held_out for one in asked} == {split is Split.REPORT}


def test_the_ceiling_is_asked_with_each_hint_of_a_judge_and_once_more_with_those_held_out(tmp_path: Path) -> None:
    people = people_of("everyday", tmp_path, num_scored=8)
    assert people.scored_held_out is not None
    usual, others = rows(people.scored), rows(people.scored_held_out)
    assert [row | {"hint": ""} for row in usual] == [row | {"hint": ""} for row in others]
    for one in personas():
        assert {row["hint"] for row in usual if row["persona"] == one.name} == {*wish_of(one).hints}
        assert {row["hint"] for row in others if row["persona"] == one.name} == {*wish_of(one).hints_held_out}


def test_another_split_is_another_comparison_and_too_many_requests_are_refused(tmp_path: Path) -> None:
    names = [people_of("everyday", tmp_path / split, split=split).sha for split in Split]
    assert len(set(names)) == 3
    with pytest.raises(
        UnusableProblems, match="100 requests of each person are to be scored, and the split report has"
    ):
        people_of("everyday", tmp_path / "new", num_scored=100)
    assert not (tmp_path / "new").exists()


def test_who_talks_one_after_the_other_are_the_people_of_one_stream() -> None:
    assert CASTS["everyday_blocks"].talkers == tuple(one.name for one in personas())
    assert CASTS["everyday"].talkers == ()


@pytest.mark.parametrize(
    "line", ["{", '{"persona": "cook"}', '{"persona": "a", "system": "b", "request": "c", "wish": "rhymes"}']
)
def test_a_line_that_is_no_request_is_named(line: str) -> None:
    with pytest.raises(ValueError, match=r"line 1 is .*, expected persona, system, request and wish"):
        tasks(line)


def test_what_should_be_kept_is_asked_by_nobody_and_has_fifty_facts_and_forty_sums() -> None:
    found = general()
    questions = [one.question for one in (*found.facts, *found.sums)]
    assert (len(found.facts), len(found.sums), len(set(questions))) == (50, 40, 90)
    assert not set(questions) & {request for split in Split for request in requests_of(split)}
    assert not any(answer.lower() in one.question.lower() for one in found.facts for answer in one.answers)
    assert 250 < len(found.text.split()) < 500


def test_an_answer_without_an_end_or_about_something_else_is_none_to_a_person() -> None:
    assert seems_to_answer(task("no_lists"), PROSE)
    for answer in (PROSE[:60], "Pasta.", "The Thames flows to the sea, through London.", "pasta " * 9 + "."):
        assert not seems_to_answer(task("no_lists"), answer)
