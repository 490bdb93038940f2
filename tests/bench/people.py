"""People who ask a policy in one process, without servers, and say what they think; three votes, some of them wrong.

What they say is what the simulations' people say, and a hint is what their judge would read in it: samples are as those
of a run, but none is older than the weights.
"""

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence

from renderers import Qwen3RendererConfig

from clawstream.events import SampleAssembled, Sampling, VersionSpan, float32
from clawstream.rendering.renderer import PromptRenderer
from clawstream.simulation import reactions
from clawstream.simulation.opinions import HABITS, HINTS, Wish, other_hint
from clawstream.simulation.policy.dialogues import with_hint
from clawstream.simulation.policy.recipe import END_OF_MESSAGE
from clawstream.simulation.policy.recipe import build as tokenizer
from clawstream.simulation.problems import SUBJECTS, UNRELATED, Sum, SumSet, all_of
from clawstream.simulation.runs.scenarios import SCENARIOS
from clawstream.training.gating import write
from clawstream.training.step.losses import Suffix
from clawstream.training.step.trainer import Trainer

ASKED_AT_ONCE = 16
WRONG_SHARE = 0.1
LIMIT_TOKENS = 200
WISHES = {"student": Wish.PLAIN, "teacher": Wish.HEADED, "ta": Wish.VERDICT}
VOTES = 3


class People:
    """Ask a policy, and say what they think of its answers."""

    def __init__(
        self, seed: int, *, scenario: str = "student", hint_share: float = 1.0, temperature: float = 0.8
    ) -> None:
        self.num_asked = 0  # answers that ended
        self._rng = random.Random(seed)
        self._sums = all_of(SumSet.STUDENTS)
        self._habits = HABITS[scenario]
        self._personas = tuple(who.name for who in SCENARIOS[scenario].personas)
        self._talks: str | None = None  # None: everybody
        self._flipped: dict[str, str] = {}  # whose wish each has taken up
        self._hint_share, self._temperature = hint_share, temperature
        self._words = tokenizer()
        self._renderer = PromptRenderer(self._words, Qwen3RendererConfig(enable_thinking=False))
        self._end = int(self._words.convert_tokens_to_ids(END_OF_MESSAGE))

    def flip(self) -> None:
        """From now on each wants what the one before them wanted."""
        scenario = SCENARIOS["all"]
        self._flipped = {who.name: scenario.flipped(who).name for who in scenario.personas}

    def talk(self, talker: str) -> None:
        """From now on the talker alone asks."""
        self._talks = talker

    def samples(
        self, trainer: Trainer, *, version: int, count: int = 16, hinted_alone: bool = False
    ) -> list[SampleAssembled]:
        """Return the next so many samples, or such with a hint."""
        found: list[SampleAssembled] = []
        while len(found) < count:
            found += [s for s in self._ask(trainer, version) if s.hint or (s.total_reward and not hinted_alone)]
        return found[:count]

    def score(self, trainer: Trainer, sums: Sequence[Sum], *, seed: int) -> float:
        """Return the share of answers that whoever asks is pleased with; the seed fixes wordings and draws."""
        pleased = [one for each in self._pleased(trainer, sums, seed).values() for one in each]
        return sum(pleased) / len(pleased)

    def score_by_person(self, trainer: Trainer, sums: Sequence[Sum], *, seed: int) -> dict[str, float]:
        """Return the same share of each person's answers."""
        found = self._pleased(trainer, sums, seed)
        return {who: sum(each) / len(each) for who, each in found.items()}

    def _pleased(self, trainer: Trainer, sums: Sequence[Sum], seed: int) -> dict[str, list[bool]]:
        rng = random.Random(seed)
        tasks = [self._task(one, self._personas[i % len(self._personas)]) for i, one in enumerate(sums)]
        questions = [self._question(reactions.ask(task, rng)) for task in tasks]
        answers = write(trainer._model, questions, limit_tokens=LIMIT_TOKENS, seed=seed)
        assert answers is not None
        found = defaultdict[str, list[bool]](list)
        for task, answer in zip(tasks, answers, strict=True):
            felt = reactions.impression(task, self._words.decode(answer.token_ids)) if answer.ended else None
            found[task.persona].append(felt is reactions.Impression.GOOD)
        return found

    def _ask(self, trainer: Trainer, version: int) -> Iterator[SampleAssembled]:
        sums = self._rng.choices(self._sums, k=ASKED_AT_ONCE)
        tasks = [self._asked(one) for one in sums]
        said = [reactions.ask(task, self._rng) for task in tasks]
        questions = [self._question(text) for text in said]
        seed = self._rng.randrange(2**31)
        written = write(trainer._model, questions, limit_tokens=LIMIT_TOKENS, seed=seed)
        assert written is not None
        whole = [
            (text, Suffix(q.prompt_ids, (*a.token_ids, self._end), self._temperature), task)
            for text, q, a, task in zip(said, questions, written, tasks, strict=True)
            if a.ended and a.token_ids
        ]
        logps = trainer._model.score([s for _, s, _ in whole], weights=None, budget_tokens=16_384)
        for (text, suffix, task), logp in zip(whole, logps, strict=True):
            felt = reactions.impression(task, self._words.decode(suffix.response_ids[:-1]))
            self.num_asked += 1
            yield self._sample(text, suffix, self._judged(task, felt), float32(logp.tolist()), version)

    def _task(self, problem: Sum, persona: str) -> reactions.PersonTask:
        return reactions.PersonTask(
            persona=persona,
            question=f"{problem.left} + {problem.right}",
            answer=str(problem.total),
            wants=self._flipped.get(persona),
        )

    def _asked(self, problem: Sum) -> reactions.PersonTask:
        """Return what who talks asks next: the problem, or something of another subject."""
        if self._talks == UNRELATED:
            name = self._rng.choice(list(SUBJECTS))
            request = self._rng.choice(SUBJECTS[name].requests)
            return reactions.PersonTask(persona=self._personas[0], question=request, answer="", subject=name)
        if self._talks is not None:
            return self._task(problem, self._talks)
        return self._task(problem, self._personas[0] if len(self._personas) == 1 else self._rng.choice(self._personas))

    def _judged(self, task: reactions.PersonTask, felt: reactions.Impression) -> tuple[int, str | None]:
        """Return reward and hint; a reward of 0 is none."""
        if task.subject is not None:
            return 0, other_hint(SUBJECTS[task.subject].reaction) if self._majority(truth=True) else None
        reward = 1 if self._majority(felt is reactions.Impression.GOOD) else -1
        due = self._due(task, felt)
        hint = self._rng.choice(due or self._habits.inventions) if self._majority(bool(due)) else None
        return reward, hint

    def _due(self, task: reactions.PersonTask, felt: reactions.Impression) -> Sequence[str]:
        """Return the hints that what is said of the answer gives; praise and vague words give none."""
        match felt:
            case reactions.Impression.GOOD:
                return ()
            case reactions.Impression.WRONG:
                return self._habits.corrections
            case reactions.Impression.STEPS_MISSING:
                return HINTS[Wish.PLAIN]
        vague = self._hint_share < 1 and self._rng.random() >= self._hint_share
        return () if vague else HINTS[WISHES[task.wish]]

    def _sample(
        self, text: str, suffix: Suffix, judged: tuple[int, str | None], logps: tuple[float | None, ...], version: int
    ) -> SampleAssembled:
        reward, hint = judged
        count = len(suffix.response_ids)
        return SampleAssembled(
            session_id=f"s{self.num_asked}",
            turn_id=f"t{self.num_asked}",
            judge="judge",
            prompt_version="1",
            revision=0,
            reward=reward,
            hint=hint,
            prompt_ids=tuple(suffix.prompt_ids),
            hinted_prompt_ids=None if hint is None else self._prompt(with_hint(text, hint)),
            response_ids=tuple(suffix.response_ids),
            response_logprobs=logps,
            trained=(1,) * count,
            temperature=self._temperature,
            sampling=Sampling(
                temperature=self._temperature, top_p=1.0, top_k=None, max_tokens=count, seed=None, stop=()
            ),
            policy_id="policy",
            versions=(VersionSpan(policy_version=version, num_tokens=count),),
            num_earlier_turns=0,
            total_reward=float(reward),
        )

    def _majority(self, truth: bool) -> bool:
        return sum(truth != (self._rng.random() < WRONG_SHARE) for _ in range(VOTES)) > VOTES // 2

    def _question(self, text: str) -> Suffix:
        return Suffix(self._prompt(text), (0,), self._temperature)

    def _prompt(self, text: str) -> tuple[int, ...]:
        return self._renderer.prompt_ids(({"role": "user", "content": text},), {})
