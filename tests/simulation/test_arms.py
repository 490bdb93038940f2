"""The arms of a run with agents differ in what rewards count, and in nothing else; each takes as many steps."""

from pathlib import Path

import pytest

from clawstream.config import Settings
from clawstream.simulation import rounds
from clawstream.simulation.casting import CASTS, STEPS_A_ROUND
from clawstream.simulation.chains import MAX_STEPS
from clawstream.simulation.people import people_of
from clawstream.simulation.run import Method, Plan, _settings
from clawstream.simulation.watch import Watch


def settings(method: Method, folder: Path) -> Settings:
    people = people_of("tools", folder)
    plan = Plan(
        people=people, method=method, updates=4, seed=0, folder=folder, cache_dir=folder, base=folder, temperature=1.0,
        learning_rate=1e-3,
    )  # fmt: skip
    return _settings(plan, 1)


def test_outcome_is_stepwise_with_verdicts_that_do_not_count(tmp_path: Path) -> None:
    both, alone = settings("stepwise", tmp_path), settings("outcome", tmp_path)

    assert (both.training.method, both.rewards.judge, both.rewards.environment) == ("stepwise", 1.0, 1.0)
    assert alone.rewards.judge == 0.0
    assert alone.model_copy(update={"rewards": both.rewards}) == both


def test_as_many_verdicts_on_steps_are_wrong_as_votes(tmp_path: Path) -> None:
    assert settings("stepwise", tmp_path).judge.votes == 1


class Agents:
    """Each attempt of theirs takes one step more than the one before it, as far as there may be."""

    def __init__(self) -> None:
        self.chats: list[int] = []
        self.num_attempts = 0

    async def hold(self, num_sessions: int) -> None:
        for _ in range(num_sessions):
            self.chats += [0] * (1 + self.num_attempts % MAX_STEPS)
            self.num_attempts += 1


class Log:
    async def lag(self, _stage: str) -> int:
        return 0


async def test_every_round_has_its_steps_and_at_most_those_of_a_group_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "PLANNED_WITHIN_S", 0.01)
    agents, watch, cast = Agents(), Watch(), CASTS["tools"]
    watch.published = {0: Path("base")}
    for num_rounds in (1, 3):
        await rounds.steps(num_rounds, 4, cast, agents, watch, Log())  # type: ignore[arg-type]

        assert 0 <= len(agents.chats) - num_rounds * STEPS_A_ROUND < 4 * MAX_STEPS
        assert agents.num_attempts % 4 == 0
    assert watch.rounds == (0, 0, 0, 0, 0)
