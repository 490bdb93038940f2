"""Logs as an installation leaves them, of any size: sessions that were asked, and the votes that were cast on them."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from clawstream.events import Event, Question, TurnPaired, VoteCast, VoteStatus
from clawstream.judging.prompts import PROMPT_VERSION
from clawstream.simulation.policy import recipe
from clawstream.simulation.policy.dialogues import COMPLAINTS, CORRECTIONS, HINTS, THANKS, Style, answer
from clawstream.simulation.problems import Sum
from clawstream.turns.stage import step
from tests.bench.words import make_words
from tests.renderers import load_renderer
from tests.sessions import Session, assistant, record, user

JUDGE = "judge@recorded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What sessions are like."""

    num_exchanges: int  # of a session
    system_bytes: int = 0  # of the system prompt
    hinted_share: float = 0.6  # of the turns that a judge finds wanting
    votes: int = 3


DEMO = Kind(num_exchanges=4)
LONG = Kind(num_exchanges=4, system_bytes=54_000)


def demo_model(folder: Path) -> Path:
    """The tokenizer and template of the policy that the demo talks to, without weights."""
    folder.mkdir()
    recipe.save(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return folder


def long_model(folder: Path) -> Path:
    """A tokenizer of byte pairs with the family's template."""
    folder.mkdir()
    return make_words(folder)[0]


class Maker:
    """Makes sessions; each follows from its number."""

    def __init__(self, model_path: Path, kind: Kind) -> None:
        self._kind = kind
        self._renderer = load_renderer(model_path)
        self._core = Tokenizer.from_file(str(model_path / "tokenizer.json"))
        self._end = self._renderer.stop_token_ids[0]
        self._system = _filler(kind.system_bytes)

    def sessions(self, count: int) -> Iterator[tuple[list[Event], list[Event]]]:
        """Yield each session's exchanges, and the votes on its turns."""
        for number in range(count):
            exchanges = self._session(number)
            yield exchanges, list(self._votes(exchanges, random.Random(number)))

    def _sampled(self, text: str) -> tuple[int, ...]:
        return (*self._core.encode(text, add_special_tokens=False).ids, self._end)

    def _session(self, number: int) -> list[Event]:
        rng = random.Random(number)
        session = Session(f"session-{number:06d}", renderer=self._renderer, sampled=self._sampled)
        problem = Sum(left=rng.randrange(10, 99), right=rng.randrange(10, 99))
        messages: list[dict[str, Any]] = [{"role": "system", "content": self._system}] if self._system else []
        messages.append(user(f"What is {problem.left} + {problem.right}?"))
        for _ in range(self._kind.num_exchanges):
            said = answer(problem, rng.choice(list(Style)), rng)
            session.ask(messages, said)
            messages = [*messages, assistant(said), user(rng.choice((*COMPLAINTS, *CORRECTIONS, *THANKS)))]
        session.done()
        return session.written

    def _votes(self, exchanges: Sequence[Event], rng: random.Random) -> Iterator[Event]:
        state = None
        for offset, event in enumerate(exchanges):
            state, events, _ = step(state, record(event, offset=offset))
            for turn in events:
                if isinstance(turn, TurnPaired):
                    wanting = rng.random() < self._kind.hinted_share
                    for ballot in range(self._kind.votes):
                        yield _vote(turn, Question.SCORE, ballot, -1 if wanting else 1, None)
                        yield _vote(turn, Question.HINT, ballot, 1 if wanting else -1, rng.choice(HINTS))


def _vote(turn: TurnPaired, question: Question, ballot: int, score: int, hint: str | None) -> VoteCast:
    said = f"The user reacts to the answer, and that says what it was like. \\boxed{{{score}}}"
    return VoteCast(
        session_id=turn.session_id,
        turn_id=turn.turn_id,
        question=question,
        judge=JUDGE,
        prompt_version=PROMPT_VERSION,
        revision=0,
        ballot=ballot,
        status=VoteStatus.READABLE,
        score=score,
        hint=hint if question is Question.HINT and score == 1 else None,
        text=said,
        error=None,
        prompt_tokens=400,
        completion_tokens=30,
        latency_ms=800,
        cast_at_ms=1_700_000_000_000,
    )


def _filler(num_bytes: int) -> str:
    rng = random.Random(0)
    words = ["the", "agent", "reads", "a", "file", "and", "tells", "its", "user", "what", "stands", "in", "it"]
    text = ""
    while len(text) < num_bytes:
        text += " ".join(rng.choices(words, k=200)) + ".\n"
    return text[:num_bytes]
