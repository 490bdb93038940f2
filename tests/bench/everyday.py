"""What a pretrained model learns from people with everyday requests, in one process: to choose wishes and settings by.

No servers and no staleness: `clawstream learn --scenario everyday` says what comes of it on the pipeline. People talk
as they do there, three votes judge what they say, and requests of the development split are scored. Beside the share
that is as wished stands how likely the untrained model finds the answers, with the hint in its prompt: what a person
would call nonsense is unlikely.
"""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, NamedTuple

import typer

from clawstream.config import PolicySettings, TrainingSettings
from clawstream.events import SampleAssembled, Sampling, VersionSpan, float32
from clawstream.rendering.renderer import PromptRenderer
from clawstream.samples.hinted import MARKER, with_hint
from clawstream.simulation.everyday import (
    EverydayPersona,
    Split,
    general,
    personas,
    requests_of,
    wish_of,
)
from clawstream.simulation.everyday.person import EverydayTask, looks_as_wished, seems_to_answer
from clawstream.simulation.everyday.scorer import holds, is_answer
from clawstream.training.gating import write
from clawstream.training.publishing import WrittenAnswer
from clawstream.training.step.losses import Suffix
from clawstream.training.step.trainer import Trainer
from tests.bench.report import report

TEMPERATURE = 0.6
VOTES, WRONG_SHARE = 3, 0.1
SCORED_WITH = 99
BUDGET_TOKENS = {"cpu": 16_384, "cuda": 200_000}  # computed at once


def everyday(
    model: Annotated[Path, typer.Option(help="The model's folder, as of `clawstream model get smollm2`.")],
    wanted: Annotated[str, typer.Option("--wishes", help="Of the three people, ids with commas.")] = "",
    seeds: Annotated[str, typer.Option(help="With commas.")] = "101",
    updates: Annotated[int, typer.Option(help="Of each run.")] = 16,
    settings: Annotated[str, typer.Option(help="Of [training], as JSON.")] = "{}",
    limit_tokens: Annotated[int, typer.Option(help="Of an answer; one that is cut is a bad one.")] = 80,
    shuffled: Annotated[bool, typer.Option(help="A control: what is said of an answer is drawn.")] = False,
    num_scored: Annotated[int, typer.Option(help="Requests, of each person.")] = 30,
    score_every: Annotated[int, typer.Option(help="Updates.")] = 4,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    json_file: Annotated[Path | None, typer.Option("--json", help="Where the figures go, answers included.")] = None,
) -> None:
    """Train with each seed, and score on the way; the ceiling is the untrained model with the hint in its prompt."""
    training = TrainingSettings(
        **({"method": "combined", "learning_rate": 1e-3, "lora_rank": 16} | json.loads(settings))
    )
    who = personas()
    if wanted:
        who = tuple(replace(one, wish=wish) for one, wish in zip(who, wanted.split(","), strict=True))
    rows: list[dict[str, Any]] = []
    for seed in map(int, seeds.split(",")):
        trainer = Trainer(model, training, device=device)
        room = Room(PromptRenderer.of(PolicySettings(), model), trainer, limit_tokens, device, num_scored)
        talk = Talk(room, who, random.Random(seed), shuffled=shuffled)
        found = {"ceiling": room.score(who, hinted=True), "0": room.score(who)}
        for version in range(1, updates + 1):
            trainer.update(talk.samples(version, training.batch_samples), version=version, seed=version)
            if version % score_every == 0 or version == updates:
                found[str(version)] = room.score(who)
            typer.echo(f"seed {seed} update {version}: {room.said(found)}", err=True)
        rows.append({"seed": seed, "scores": found})
    people = [asdict(one) for one in who]
    report(
        {"model": model.name, "settings": settings, "limit_tokens": limit_tokens, "shuffled": shuffled,
         "temperature": TEMPERATURE, "people": people, "rows": rows},
        json_file,
    )  # fmt: skip


class Scored(NamedTuple):
    """An answer to a held-out request."""

    persona: str
    request: str
    answer: str
    num_tokens: int
    as_wished: bool
    answers: bool
    base_nats: float | None  # mean log-prob of its tokens by the untrained model, with the hint; None: it is empty


@dataclass(frozen=True, slots=True)
class Room:
    """Where a policy is asked: its trainer, and the template of its prompts."""

    renderer: PromptRenderer
    trainer: Trainer
    limit_tokens: int
    device: str
    num_scored: int

    def prompt(self, who: EverydayPersona, request: str, hint: str | None = None) -> tuple[int, ...]:
        said = ({"role": "system", "content": who.system}, {"role": "user", "content": request})
        return tuple(self.renderer.prompt_ids(said if hint is None else with_hint(said, hint), {}))

    def ask(self, prompts: Sequence[tuple[int, ...]], seed: int) -> list[WrittenAnswer]:
        questions = [Suffix(prompt, (0,), TEMPERATURE) for prompt in prompts]
        written = write(
            self.trainer._model, questions, limit_tokens=self.limit_tokens, seed=seed,
            budget_tokens=BUDGET_TOKENS[self.device],
        )  # fmt: skip
        assert written is not None, "a probability was not finite"
        return written

    def text(self, answer: WrittenAnswer) -> str:
        return self.renderer.decode([token for token in answer.token_ids if token not in self.renderer.stop_token_ids])

    def whole(self, answer: WrittenAnswer) -> tuple[int, ...]:
        """Return the answer's tokens with the one that ended it, if one did."""
        return (*answer.token_ids, *sorted(self.renderer.stop_token_ids)[: bool(answer.ended)])

    def score(self, people: Sequence[EverydayPersona], *, hinted: bool = False) -> dict[str, Any]:
        """Return each person's shares, means, and all answers."""
        asked = [
            (who, request, wish_of(who).hints[number % len(wish_of(who).hints)])
            for who in people
            for number, request in enumerate(requests_of(Split.DEVELOPMENT)[: self.num_scored])
        ]
        prompts = [self.prompt(who, request, hint if hinted else None) for who, request, hint in asked]
        answers = self.ask(prompts, SCORED_WITH)
        kept = [i for i, answer in enumerate(answers) if self.whole(answer)]
        likely = self.trainer._model.score(
            [Suffix(self.prompt(*asked[i]), self.whole(answers[i]), 1.0) for i in kept],
            weights=self.trainer._reference, budget_tokens=BUDGET_TOKENS["cpu"],
        )  # fmt: skip
        nats = {i: float(logp.mean()) for i, logp in zip(kept, likely, strict=True)}
        marks = [
            Scored(
                who.name, request, (text := self.text(answer)), len(answer.token_ids), holds(who.wish, text),
                is_answer(text, request, wish=who.wish, finished=bool(answer.ended),
                          hint=f"{MARKER}\n{hint}" if hinted else None),
                nats.get(i),
            )
            for i, ((who, request, hint), answer) in enumerate(zip(asked, answers, strict=True))
        ]  # fmt: skip
        return {
            "perplexity": self._perplexity(),
            "people": {who.name: _shares([mark for mark in marks if mark.persona == who.name]) for who in people},
            "answers": [mark._asdict() for mark in marks],
        }

    def said(self, found: dict[str, dict[str, Any]]) -> str:
        """Return the newest score in a line."""
        newest = list(found.values())[-1]
        each = (f"{who} {one['won']:.2f} ({one['base_nats']:.1f} nats)" for who, one in newest["people"].items())
        return f"{', '.join(each)}, perplexity {newest['perplexity']:.1f}"

    def _perplexity(self) -> float:
        first, *rest = self.renderer.encode(general().text)
        [logp] = self.trainer._model.score(
            [Suffix((first,), tuple(rest), 1.0)], weights=None, budget_tokens=BUDGET_TOKENS["cpu"]
        )
        return math.exp(-float(logp.mean()))


def _shares(marks: Sequence[Scored]) -> dict[str, float]:
    return {
        "as_wished": fmean(mark.as_wished for mark in marks),
        "answers": fmean(mark.answers for mark in marks),
        "won": fmean(mark.as_wished and mark.answers for mark in marks),
        "base_nats": fmean(mark.base_nats for mark in marks if mark.base_nats is not None),
        "tokens": fmean(mark.num_tokens for mark in marks),
    }


class EverydayPeople:
    """The three people, who talk with whatever trainer they are given."""

    def __init__(self, model: Path, seed: int, *, limit_tokens: int = 80) -> None:
        self._renderer, self._limit_tokens = PromptRenderer.of(PolicySettings(), model), limit_tokens
        self._rng = random.Random(seed)
        self._talk: Talk | None = None

    def samples(self, trainer: Trainer, *, version: int, count: int = 16) -> list[SampleAssembled]:
        """Return the next so many samples of this version's answers."""
        room = Room(self._renderer, trainer, self._limit_tokens, "cpu", 0)
        if self._talk is None:
            self._talk = Talk(room, personas(), self._rng, shuffled=False)
        self._talk.room = room
        return self._talk.samples(version + 1, count)


class Taught(NamedTuple):
    """What was said of an answer, to say again of another."""

    who: EverydayPersona
    request: str
    hint: str


class Talk:
    """People who ask, and judges of what they say; a quarter of a batch rehearses hints on answers given again."""

    def __init__(self, room: Room, people: Sequence[EverydayPersona], rng: random.Random, *, shuffled: bool) -> None:
        self.room, self._people, self._rng, self._shuffled = room, people, rng, shuffled
        self._requests = requests_of(Split.PEOPLE)
        self._taught: list[Taught] = []
        self._count = 0

    def samples(self, version: int, count: int) -> list[SampleAssembled]:
        """Return a batch for `version`."""
        rehearsed = count // 4 if self._taught else 0
        askers = islice(cycle(self._people), count - rehearsed)
        told = [Taught(who, self._rng.choice(self._requests), "") for who in askers]
        told += [self._rng.choice(self._taught) for _ in range(rehearsed)]
        prompts = [self.room.prompt(one.who, one.request) for one in told]
        answers = self.room.ask(prompts, self._rng.randrange(2**31))
        kept = [
            (one, prompt, answer)
            for one, prompt, answer in zip(told, prompts, answers, strict=True)
            if self.room.whole(answer)
        ]
        logps = self.room.trainer._model.score(
            [Suffix(prompt, self.room.whole(answer), TEMPERATURE) for _, prompt, answer in kept],
            weights=None, budget_tokens=BUDGET_TOKENS["cpu"],
        )  # fmt: skip
        return [
            self._sample(
                one, prompt, self.room.whole(answer), float32(logp.tolist()), version, *self._judged(one, answer)
            )
            for (one, prompt, answer), logp in zip(kept, logps, strict=True)
        ]

    def _judged(self, one: Taught, answer: WrittenAnswer) -> tuple[int | None, str | None, str | None]:
        """Return reward, hint and the rehearsed hint's id; what rehearses has no reward."""
        if one.hint:
            return None, one.hint, f"{one.who.wish}-{one.hint}"
        text, wish = self.room.text(answer), wish_of(one.who)
        task = EverydayTask(persona=one.who.name, system=one.who.system, wish=wish.id, request=one.request)
        as_wished = looks_as_wished(wish.id, text)
        good = as_wished and seems_to_answer(task, text) and bool(answer.ended)
        if self._shuffled:
            good, as_wished = self._rng.random() < 0.5, self._rng.random() < 0.5
            wish = wish_of(self._rng.choice(self._people))
        hint = None if as_wished else self._rng.choice(wish.hints)
        if hint is not None:
            self._taught.append(one._replace(hint=hint))
        wrong = sum(self._rng.random() < WRONG_SHARE for _ in range(VOTES)) > VOTES // 2
        return (1 if good is not wrong else -1), hint, None

    def _sample(
        self, one: Taught, prompt: tuple[int, ...], response: tuple[int, ...], logps: tuple[float | None, ...],
        version: int, reward: int | None, hint: str | None, hint_id: str | None,
    ) -> SampleAssembled:  # fmt: skip
        self._count += 1
        count = len(response)
        return SampleAssembled(
            session_id=f"s{self._count}",
            turn_id=f"t{self._count}",
            judge="judge",
            prompt_version="1",
            revision=0,
            reward=reward,
            hint=hint,
            prompt_ids=prompt,
            hinted_prompt_ids=None if hint is None else self.room.prompt(one.who, one.request, hint),
            response_ids=response,
            response_logprobs=logps,
            trained=(1,) * count,
            temperature=TEMPERATURE,
            sampling=Sampling(temperature=TEMPERATURE, top_p=1.0, top_k=None, max_tokens=count, seed=None, stop=()),
            policy_id="policy",
            versions=(VersionSpan(policy_version=version - 1, num_tokens=count),),
            num_earlier_turns=0,
            total_reward=None if reward is None else float(reward),
            hint_id=hint_id,
        )
