"""Each wish's rule on answers of both sides, and answers that are none."""

import pytest

from clawstream.simulation.everyday.scorer import WISH_IDS, holds, is_answer

REQUEST = "Can you freeze cooked pasta?"
PROSE = (
    "Cooked pasta freezes well. Drain it, toss it with a little oil and spread it on a tray. Once it is firm, move it "
    "into bags and keep it in the freezer."
)
BULLETS = "Freezing pasta is easy:\n\n- Drain it well.\n- Add a drop of oil.\n- Pack it in bags."
STEPS = "To freeze pasta:\n\n1. Drain it well.\n2. Add a drop of oil.\n3. Pack it in bags.\n4. Label them."

EXAMPLES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "one_sentence": (
        ("Yes, cooked pasta freezes well.", "Drain, cool and freeze the pasta in bags, e.g. in small portions."),
        (PROSE, BULLETS, "Yes. Pasta freezes well.", f"Yes, pasta freezes {'and ' * 25}keeps."),
    ),
    "forty_words": ((PROSE, "Yes, freeze the pasta in bags."), (f"{PROSE} {PROSE}", "")),
    "long": ((f"{PROSE} " * 3,), (PROSE,)),
    "one_paragraph": ((PROSE,), (BULLETS, f"{PROSE}\n\nLabel the bags.", "")),
    "two_paragraphs": (
        (f"{PROSE}\n\nPasta in sauce keeps for two months.",),
        (PROSE, BULLETS, f"{PROSE}\n\nYes.\n\nNo.", f"Freezing pasta\n\n{PROSE}"),
    ),
    "no_lists": ((PROSE, "Well-drained pasta freezes best - in bags."), (BULLETS, STEPS, "")),
    "bullets": (
        (BULLETS, BULLETS.replace("-", "*"), BULLETS.replace("-", "\u2022"), "- **Drain** pasta.\n- Freeze it."),
        (PROSE, STEPS, "- Freeze the pasta in bags.", "**Pasta** freezes.\n**Bags** help."),
    ),
    "numbered": (
        (STEPS, STEPS.replace(".", ")"), "1. **Drain** the pasta.\n\n2. **Freeze** it.", "**1. Pasta**\n**2. Bags**"),
        (PROSE, BULLETS, "1. Freeze the pasta.", "Pasta keeps.\n3. In bags.\n4. In boxes."),
    ),
    "three_points": (
        (BULLETS, "1. Drain the pasta\n   - well\n   - at once\n2. Oil it\n3. Freeze it"),
        (STEPS, PROSE, "- Drain the pasta\n- Freeze it"),
    ),
    "bold": (
        ("Cooked **pasta** freezes well in **bags**, for two months or so.",),
        (PROSE, "**Pasta freezes well**", "Pasta ** freezes ** in bags.", "2**3**4 bags of pasta"),
    ),
    "plain_text": ((PROSE,), ("Cooked **pasta** freezes.", "# Pasta\nIt freezes.", "Use `bags` for pasta.", "")),
    "short_first": (
        ("Yes. Drain the pasta and freeze it in bags.", f"Cooked pasta freezes well. {PROSE}"),
        (
            "Yes, cooked pasta freezes well.",
            "Sure! Drain the pasta and freeze it.",
            "Cooked pasta of any shape can be frozen for up to two whole months. Use bags.",
            STEPS,
            "Are you sure? Pasta freezes well.",
        ),
    ),
    "ends_with_question": (
        (f"{PROSE} How much pasta is left?", 'Pasta freezes. Shall I say how? \U0001f642', "Pasta: **is it cooked?**"),
        (PROSE, f"Can you? {PROSE}"),
    ),
    "exclamation": (("Yes, pasta freezes well. Enjoy it!", "Freeze that **pasta!**"), (PROSE, f"Yes! {PROSE}")),
    "lower_case": (("yes, cooked pasta freezes well.",), (PROSE, "yes, Pasta freezes well.", "1234")),
    "capitals_heading": (
        (f"FREEZING PASTA\n{PROSE}", f"## FREEZING PASTA\n\n{PROSE}"),
        (PROSE, f"Freezing Pasta\n{PROSE}", "YES, PASTA FREEZES.", "YES, PASTA\nFREEZES WELL."),
    ),
    "title": (
        (f"Freezing Pasta\n\n{PROSE}", f"**How to Freeze Pasta**\n{PROSE}", f"# Pasta\n{PROSE}"),
        (PROSE, f"Here is how to freeze pasta:\n{PROSE}", f"Yes.\n{PROSE}", BULLETS, "Freezing Pasta"),
    ),
    "greeting": (
        (f"Hello! {PROSE}", f"Good morning, pasta lover. {PROSE}", f"**Hi there**, {PROSE}"),
        (PROSE, f"Highly likely: {PROSE}", f"{PROSE} Hello!"),
    ),
    "letter": (
        (f"Dear friend,\n\n{PROSE}\n\nYours, Ann", f"Dear Reader: {PROSE}"),
        (PROSE, "Dear friend,", f"Dearly loved: {PROSE}"),
    ),
    "sign_off": (
        (f"{PROSE}\n\nBest wishes,\nYour assistant", f"{PROSE}\nTake care!", f"{PROSE}\n\nHave a nice day!"),
        (PROSE, f"Best wishes\n{PROSE}", f"{PROSE}\nBest of all, it keeps for months in a bag.", "Take care!"),
    ),
    "in_short": (
        (f"{PROSE}\nIn short: freeze it in bags.", f"{PROSE}\n\n**In short:** it freezes well."),
        (PROSE, f"In short: yes.\n{PROSE}", f"{PROSE}\nIn short:", f"{PROSE}\nIn summary: it freezes."),
    ),
    "first_person": (
        ("I freeze my pasta in bags.", "I'd freeze the pasta, and I'd label it."),
        (PROSE, "I think that pasta freezes well."),
    ),
    "you": (("You can freeze your pasta in bags.",), (PROSE, "You can freeze pasta.")),
    "example": (
        (f"{PROSE} For example, penne keep well.", "Pasta freezes, e.g. in bags.", "For instance, freeze penne."),
        (PROSE, "An exemplary pasta freezes well."),
    ),
    "comparison": (
        ("Frozen pasta is like a brick.", "It looks as if it snowed on the pasta.", "It's like pasta is asleep."),
        (PROSE, "Would you like a bag of pasta?", "I like pasta.", "It is like to freeze."),
    ),
    "no_digits": ((PROSE,), (STEPS, "Pasta keeps for 2 months.", "")),
    "numbers": (
        ("Freeze the pasta for 2 hours, then keep it at -18 degrees.", "It takes 1.5 hours; 3 bags of pasta fit."),
        (PROSE, STEPS, "Freeze pasta for 2 months.", "1. Keep pasta for 2 months.\n2. Thaw it."),
    ),
    "french": (
        ("Oui, vous pouvez congeler les p\u00e2tes dans un sac pour deux mois.",),
        (PROSE, "Bonjour! You can freeze the pasta in a bag.", "S\u00ed, la pasta se puede congelar en una bolsa."),
    ),
    "spanish": (
        ("S\u00ed, la pasta cocida se puede congelar en una bolsa y no pierde el sabor.",),
        (PROSE, "Oui, vous pouvez congeler les p\u00e2tes dans un sac pour deux mois.", "Pasta!"),
    ),
    "german": (
        ("Ja, die Nudeln kann man in einem Beutel einfrieren und sie sind noch nach zwei Monaten gut.",),
        (PROSE, "S\u00ed, la pasta se puede congelar en una bolsa."),
    ),
    "simple_words": (
        ("You can put the pasta in a bag and let it get cold as ice.",),
        ("Refrigeration of carbohydrates necessitates appropriate pasta containers.", "Pasta is ok."),
    ),
    "short_sentences": (
        ("Yes. Drain the pasta. Put it in bags.", STEPS),
        ("Yes, you can freeze pasta.", PROSE),
    ),
    "emoji": (("Pasta freezes well \U0001f35d", "Freeze the pasta \u2744 now"), (PROSE, "Pasta freezes well :)")),
    "poem": (
        ("The pasta lies so cold and white,\nit sleeps in bags all night,\nand when you call\nit's there.",),
        (PROSE, BULLETS, STEPS, f"{PROSE}\n{PROSE}\n{PROSE}\n{PROSE}"),
    ),
    "pros_and_cons": (
        ("Pros: frozen pasta saves time.\nCons: it gets soft.", "**Pros**\n- quick pasta\n\n**Cons**\n- soft"),
        (PROSE, "Pros freeze pasta.", "Professional consent to freeze pasta."),
    ),
    "table": (
        ("| Pasta | Months |\n|---|---|\n| penne | 2 |", "Here:\n\nPasta | Months\n--- | ---\npenne | 2"),
        (PROSE, "| Pasta | Months |", "Pasta | Months\n---", "| Pasta |\n|---|"),
    ),
}  # fmt: skip

NO_ANSWERS = {
    "empty": "",
    "blank": " \n\n",
    "one word": "Pasta.",
    "the request": REQUEST,
    "the request with a mark": f"# {REQUEST}!",
    "the request twice": f"{REQUEST}\n{REQUEST}",
    "a word three times": "Pasta, pasta, pasta.",
    "a word again and again": "pasta " * 30,
    "a line again and again": "You can freeze cooked pasta in a bag for two months.\n" * 6,
    "a list of one thing": "\n".join(f"{n}. Freeze the pasta in bags." for n in range(1, 9)),
    "another subject": "The Thames flows through London and into the North Sea.",
    "marks alone": "**?** - 1. | |---| :) !!",
    "no end": "pasta " + " ".join(f"word{chr(97 + n % 26)}{chr(97 + n // 26)}" for n in range(300)),
}


def test_every_wish_has_examples() -> None:
    assert set(EXAMPLES) == WISH_IDS


@pytest.mark.parametrize("wish", EXAMPLES)
def test_an_answer_as_wished_holds_and_another_does_not(wish: str) -> None:
    good, bad = EXAMPLES[wish]
    assert [one for one in good if not holds(wish, one)] == []
    assert [one for one in bad if holds(wish, one)] == []


@pytest.mark.parametrize("wish", EXAMPLES)
def test_an_answer_as_wished_is_an_answer_once_it_is_finished(wish: str) -> None:
    answer = EXAMPLES[wish][0][0]
    assert is_answer(answer, REQUEST, wish=wish, finished=True) is (wish != "long")  # that one says all three times
    assert not is_answer(answer, REQUEST, wish=wish, finished=False)


@pytest.mark.parametrize("answer", NO_ANSWERS.values(), ids=NO_ANSWERS.keys())
def test_what_is_no_answer_wins_nothing(answer: str) -> None:
    won = {w for w in WISH_IDS if holds(w, answer) and is_answer(answer, REQUEST, wish=w, finished=True)}
    assert won == set()


@pytest.mark.parametrize(
    ("answer", "is_one"),
    [
        ("For short pasta, yes, it freezes well.", True),
        ("The user wants one short sentence about pasta.", False),
        ("Yes, pasta freezes. [A mark before hints] It keeps.", False),
    ],
)
def test_who_tells_of_the_hint_gives_no_answer(answer: str, is_one: bool) -> None:
    hint = "[a mark before hints]\nThe user wants one short sentence. Say it of short pasta."
    assert is_answer(answer, REQUEST, wish="one_sentence", finished=True, hint=hint) is is_one


def test_an_answer_in_another_language_shares_no_words() -> None:
    answer = "Ja, die Nudeln kann man einfrieren."
    assert is_answer(answer, REQUEST, wish="german", finished=True)
    assert not is_answer(answer, REQUEST, wish="lower_case", finished=True)


@pytest.mark.parametrize(("mean_nats", "is_one"), [(-1.9, True), (-2.0, True), (-2.1, False), (float("nan"), False)])
def test_an_answer_that_the_base_would_hardly_give_is_none(mean_nats: float, is_one: bool) -> None:
    found = is_answer(PROSE, REQUEST, wish="no_lists", finished=True, mean_nats=mean_nats)
    assert found is is_one
