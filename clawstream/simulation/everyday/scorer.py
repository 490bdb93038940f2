"""Whether an answer is as a wish wants it, and whether it still answers the request. Pure.

Each wish is told by what it wants (`wanted` in its file), and no word of a hint or complaint is looked for. An answer
wins only where both hold: what is short, empty, repeated or copied from the request wins nothing.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

LEAST_WORDS, MOST_WORDS = 3, 250
LEAST_NATS = (
    -2.0
)  # a token, by the untrained model with the hint: of its own answers to hints two of three are likelier
LEAST_DISTINCT = 0.7  # of three words in a row: an answer that goes in circles has fewer
MOST_OF_ONE_WORD = 0.35  # of all words; twice may be
MOST_COPIED = 0.5  # of three words in a row: more is the request again
_STEM_LETTERS = 5  # equal so far: two forms of one word
_LEAST_ROWS_OF_THREE = 10  # fewer say nothing about repetition

_WORD = re.compile(r"[^\W\d_]+(?:['\u2019-][^\W\d_]+)*")
_MARK = r"[ \t]*(?:\*\*|__)?"
_BULLET = re.compile(rf"^{_MARK}(?:[-+\u2022\u2013]|\*(?!\*))[ \t]+(?=\S)", re.MULTILINE)
_NUMBER = re.compile(rf"^{_MARK}(\d{{1,2}})[.)](?:[ \t]+|(?=\*))(?=\S)", re.MULTILINE)
_ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|etc|mr|mrs|ms|dr|st|vs)\.(?=\s+\S)", re.IGNORECASE)
_SENTENCE_END = re.compile(r"(?<=[.!?\u2026])[\"'\u201d\u2019)*_]*\s+|\n+")
_BOLD = re.compile(r"\*\*(?=\S)([^*\n]{1,80}?)(?<=\S)\*\*")
_GREETING = re.compile(
    r"(?:hello|hi|hey|greetings|welcome|howdy|good (?:morning|day|afternoon|evening))\b", re.IGNORECASE
)
_SALUTATION = re.compile(r"dear\s[^\n.?]{1,60}?[,:!]", re.IGNORECASE)
_CLOSING = re.compile(
    r"(?:(?:with )?(?:my |our )?(?:best|kind|kindest|warm|warmest|many)? ?(?:wishes|regards|love)|best|all the best|"
    r"(?:yours )?(?:sincerely|truly|faithfully)|yours|take care|cheers|(?:good)?bye|farewell|see you|until next time|"
    r"good luck|happy \w+ing|enjoy|have an? \w+ \w+)\b",
    re.IGNORECASE,
)
_EXAMPLE = re.compile(
    r"\b(?:for example|for instance|e\.g\.|as an example|examples?:|an example (?:is|of|would))", re.I
)
_LIKENESS = re.compile(
    r"(?:\b(?:is|are|was|were|be|being|been|works?|acts?|feels?|looks?|sounds?|behaves?|moves?|just|much|bit|kind of)|"
    r"['\u2019](?:s|re))\s+(?:a bit |a lot |just |much |kind of )?like\s+(?!to\b)\w|\bas (?:if|though)\b|"
    r"\bas \w+ as an?\b",
    re.IGNORECASE,
)
_QUANTITY = re.compile(r"\d+(?:[.,]\d+)*")
_EMOJI = re.compile("[\U0001f300-\U0001faff\u2600-\u26ff\u2728\u2744\u2764]")
_TABLE = re.compile(r"^[ \t]*\|?[^|\n]+\|[^\n]*\n[ \t]*\|?[ \t]*:?-{2,}[-:| \t]*\|[-:| \t]*\n[ \t]*\|?[^|\n]+\|", re.M)


def _set_of(words: str) -> frozenset[str]:
    return frozenset(words.split())


_FIRST_PERSON = frozenset({"i", "me", "my", "mine", "myself", "i'd", "i'm", "i've", "i'll"})
_SECOND_PERSON = frozenset({"you", "your", "yours", "yourself", "you're", "you'll", "you've", "you'd"})
_COMMON: Mapping[str, frozenset[str]] = MappingProxyType(
    {  # what most sentences of a language have; a language is told by which of these come most often
        "english": _set_of(
            "the a an of to and in is are it that for on with as be your you can or by from this at not have if"
        ),
        "french": _set_of(
            "le la les de des du un une et est en dans pour que qui vous il elle au aux ce cette pas ne sur avec votre "
            "vos sont \u00e0 plus ou je nous peut son sa ses mais comme l'eau d'une d'un se"
        ),
        "spanish": _set_of(
            "el la los las de del un una y es en para que por con su sus al no se lo son m\u00e1s o como puede "
            "est\u00e1 ser tu te si pero muy"
        ),
        "german": _set_of(
            "der die das und ist ein eine einen einem einer in zu mit den dem des nicht sie es f\u00fcr auf von im "
            "sich oder werden kann sind wie er ich aus bei haben wenn auch als ihr ihre man"
        ),
    }
)
_LEAST_COMMON = 0.2
_LANGUAGES = frozenset({"french", "spanish", "german"})  # wishes whose answers share no words with the request
_EMPTY_WORDS = _set_of(
    "about after again also because been before being best better cannot could does doesn't doing don't each ever "
    "every from getting give good have having help into isn't just keep know like made make many more most much "
    "need never only other over please really right same several should show since some something someone such take "
    "tell than that that's their them then there these they thing things think this those through want what what's "
    "when where which while will with without work would write your"
)


def holds(wish: str, answer: str) -> bool:
    """Whether an answer is as the wish with this id wants it; nonsense may be."""
    return _WISHES[wish](answer)


def is_answer(
    answer: str, request: str, *, wish: str, finished: bool, hint: str | None = None, mean_nats: float | None = None
) -> bool:
    """Whether a text that the model `finished` can be an answer to the request, be it as wished or not.

    It is neither too short nor too long, says nothing over and over, is about the request, and doesn't copy it. It
    repeats no short line and no four words in a row of the `hint` that was in the prompt, given with the mark before
    it. Where the wish is another language, no words of the request are looked for. `mean_nats`, the tokens' mean
    log-prob under the untrained model with the hint in its prompt, is at least LEAST_NATS; None: it isn't looked at.
    """
    if mean_nats is not None and not mean_nats >= LEAST_NATS:
        return False
    words, requested = _words(answer), _words(request)
    return (
        finished
        and LEAST_WORDS <= len(words) <= MOST_WORDS
        and not _repeats(words)
        and not _copies(words, requested)
        and not (hint is not None and _tells(words, hint))
        and (wish in _LANGUAGES or _is_about(words, requested))
    )


def _repeats(words: Sequence[str]) -> bool:
    rows = _rows(words, 3)
    if len(rows) >= _LEAST_ROWS_OF_THREE and len(set(rows)) < LEAST_DISTINCT * len(rows):
        return True
    return max(Counter(words).values()) > max(2, MOST_OF_ONE_WORD * len(words))


def _copies(words: Sequence[str], requested: Sequence[str]) -> bool:
    rows, given = _rows(words, 3), set(_rows(requested, 3))
    return sum(row in given for row in rows) > MOST_COPIED * len(rows)


def _tells(words: Sequence[str], hint: str) -> bool:
    """Whether an answer tells of a hint; two words of it may be there, as a hint may say what to write."""
    lines = [line for line in map(_words, _lines(hint)) if len(line) >= 3]
    return any(set(_rows(line, min(4, len(line)))) & set(_rows(words, min(4, len(line)))) for line in lines)


def _is_about(words: Sequence[str], requested: Sequence[str]) -> bool:
    """Whether a word of the request that carries meaning is in the answer; a request without any asks for nothing."""
    wanted = _stems(requested)
    return not wanted or bool(wanted & _stems(words))


def _stems(words: Iterable[str]) -> set[str]:
    return {word[:_STEM_LETTERS] for word in words if len(word) > 3 and word not in _EMPTY_WORDS}


def _rows(words: Sequence[str], length: int) -> list[tuple[str, ...]]:
    return [tuple(words[n : n + length]) for n in range(len(words) - length + 1)]


def _words(text: str) -> list[str]:
    return [word.lower().replace("\u2019", "'") for word in _WORD.findall(text)]


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _sentences(text: str) -> list[str]:
    """Return what full stops and line breaks part; a list's marks are left out."""
    bare = _ABBREVIATION.sub(lambda found: found[0][:-1], _NUMBER.sub("", _BULLET.sub("", text)))
    return [part for part in _SENTENCE_END.split(bare) if _WORD.search(part)]


def _items(text: str) -> list[str]:
    """Return the lines of a list that are indented least; numbered ones go before bullets below them."""
    lines = [line for line in text.splitlines() if _NUMBER.match(line)]
    lines = lines or [line for line in text.splitlines() if _BULLET.match(line)]
    indents = [len(line) - len(line.lstrip()) for line in lines]
    return [line for line, indent in zip(lines, indents, strict=True) if indent == min(indents)]


def _bare(line: str) -> str:
    """Return a line without the marks of headings and bold print."""
    return line.strip().strip("#*_ \t")


def _ending(text: str) -> str:
    return _EMOJI.sub("", text).rstrip(" \t\n\ufe0f*_\"'\u201d\u2019)")[-1:]


def _one_sentence(text: str) -> bool:
    return len(_sentences(text)) == 1 and len(_words(text)) <= 25 and not _items(text)


def _two_paragraphs(text: str) -> bool:
    parts = [part for part in re.split(r"\n\s*\n", text.strip()) if part.strip()]
    return len(parts) == 2 and not _items(text) and all("\n" not in p and _ending(p) in (*".!?",) for p in parts)


def _numbered(text: str) -> bool:
    numbers = [int(number) for number in _NUMBER.findall(text)]
    return len(numbers) >= 2 and numbers[:2] == [1, 2]


def _bold(text: str) -> bool:
    bold = sum(len(_words(part)) for part in _BOLD.findall(text))
    return 0 < bold <= len(_words(text)) / 2


def _short_first(text: str) -> bool:
    sentences = _sentences(text)
    if len(sentences) < 2 or _NUMBER.match(text) or _BULLET.match(text):
        return False
    first = sentences[0].strip()
    count, is_verdict = len(_words(first)), _words(first)[0] in ("yes", "no")
    return (is_verdict or count >= 3) and count <= 10 and _ending(first) in (".", "!")


def _capitals_heading(text: str) -> bool:
    lines = _lines(text)
    return len(lines) >= 2 and bool(re.search(r"[^\W\d_]{3}", lines[0])) and lines[0].isupper() and not text.isupper()


def _title(text: str) -> bool:
    lines = _lines(text)
    if len(lines) < 2 or _items(lines[0]):
        return False
    return 1 <= len(_words(lines[0])) <= 10 and _bare(lines[0])[-1:] not in (*".!?,;:",)


def _letter(text: str) -> bool:
    found = _SALUTATION.match(_bare(text))
    return found is not None and len(_words(_bare(text)[found.end() :])) >= 5


def _sign_off(text: str) -> bool:
    """A name may follow in a line of its own."""
    lines = [_bare(line) for line in _lines(text)]
    return any(_CLOSING.match(line) and len(_words(line)) <= 6 for line in lines[1:][-2:])


def _in_short(text: str) -> bool:
    lines = [_bare(line).replace("*", "") for line in _lines(text)]
    return len(lines) >= 2 and lines[-1].startswith("In short:") and len(_words(lines[-1])) > 2


def _simple_words(text: str) -> bool:
    words = _words(text)
    return len(words) >= 5 and sum(len(word.replace("'", "")) for word in words) / len(words) <= 4.2


def _short_sentences(text: str) -> bool:
    sentences = _sentences(text)
    return len(sentences) >= 2 and all(len(_words(sentence)) <= 12 for sentence in sentences)


def _poem(text: str) -> bool:
    lines = _lines(text)
    return len(lines) >= 4 and not _items(text) and all(1 <= len(_words(line)) <= 12 for line in lines)


def _speaks(text: str, language: str) -> bool:
    words = _words(text)
    counts = {name: sum(word in common for word in words) for name, common in _COMMON.items()}
    best = max(counts, key=lambda name: counts[name])
    return best == language and counts[best] >= max(2, _LEAST_COMMON * len(words))


def _has(text: str, words: frozenset[str], at_least: int) -> bool:
    return sum(word in words for word in _words(text)) >= at_least


_WISHES: Mapping[str, Callable[[str], bool]] = MappingProxyType(
    {
        "one_sentence": _one_sentence,
        "forty_words": lambda text: 1 <= len(_words(text)) <= 40,
        "long": lambda text: len(_words(text)) >= 80,
        "one_paragraph": lambda text: len(_lines(text)) == 1,
        "two_paragraphs": _two_paragraphs,
        "no_lists": lambda text: bool(_words(text)) and not _items(text),
        "bullets": lambda text: len(_BULLET.findall(text)) >= 2,
        "numbered": _numbered,
        "three_points": lambda text: len(_items(text)) == 3,
        "bold": _bold,
        "plain_text": lambda text: bool(_words(text)) and re.search(r"[*#`]|__", text) is None,
        "short_first": _short_first,
        "ends_with_question": lambda text: _ending(text) == "?",
        "exclamation": lambda text: _ending(text) == "!",
        "lower_case": lambda text: bool(_words(text)) and not any(letter.isupper() for letter in text),
        "capitals_heading": _capitals_heading,
        "title": _title,
        "greeting": lambda text: _GREETING.match(_bare(text)) is not None,
        "letter": _letter,
        "sign_off": _sign_off,
        "in_short": _in_short,
        "first_person": lambda text: _has(text, _FIRST_PERSON, 2),
        "you": lambda text: _has(text, _SECOND_PERSON, 2),
        "example": lambda text: _EXAMPLE.search(text) is not None,
        "comparison": lambda text: _LIKENESS.search(text) is not None,
        "no_digits": lambda text: bool(_words(text)) and re.search(r"\d", text) is None,
        "numbers": lambda text: len(_QUANTITY.findall(_NUMBER.sub("", text))) >= 2,
        "french": lambda text: _speaks(text, "french"),
        "spanish": lambda text: _speaks(text, "spanish"),
        "german": lambda text: _speaks(text, "german"),
        "simple_words": _simple_words,
        "short_sentences": _short_sentences,
        "emoji": lambda text: _EMOJI.search(text) is not None,
        "poem": _poem,
        "pros_and_cons": lambda text: _has(text, frozenset({"pros"}), 1) and _has(text, frozenset({"cons"}), 1),
        "table": lambda text: _TABLE.search(text) is not None,
    }
)
WISH_IDS = frozenset(_WISHES)
