"""A judge that is asked again: its votes are on the replay's topic before anything follows from them."""

import pytest

from clawstream.errors import ConfigError
from clawstream.events import Event, ReplayEnded, SampleAssembled, VotesFrom
from clawstream.inference.judge_client import JudgeReply
from clawstream.replay.registry import Registry, promote, rollback
from clawstream.replay.running import begin, compared
from clawstream.stream.topics import SAMPLES, VERDICTS, VOTES
from tests.fakes.memory_log import MemoryLog
from tests.flow import Oracle
from tests.unit.replay.recorded import OUTPUTS, SETTINGS, own, replayed, run_through, said, wanted, work, written
from tests.unit.samples.test_flow import GOOD, conversation

NEW = wanted("new", votes_from=VotesFrom.NEW, judge="another@test")


class Fickle(Oracle):
    """Never says the same twice, and dies after so many calls."""

    name = "another@test"

    def __init__(self, patience: int = 10**9) -> None:
        super().__init__()
        self.patience = patience

    async def ask(self, system: str, user: str, *, seed: int) -> JudgeReply:
        if len(self.asked) >= self.patience:
            raise ValueError("killed")
        return await super().ask(system, user, seed=seed + 1000 * len(self.asked))


def people() -> list[Event]:
    return [event for name in ("ann", "ben", "cas") for event in conversation(["ask"] * 5 + ["done"], name)]


async def asked(log: MemoryLog, judge: Oracle) -> ReplayEnded:
    return await replayed(log, NEW, workers=2, judge=judge)


async def test_another_judge_gives_what_it_would_have_given_live() -> None:
    judge = Oracle()
    judge.name = "another@test"
    flow, other = run_through(people(), 1, Oracle(GOOD)), run_through(people(), 2, judge)
    log = await written(flow, 3)
    ended = await asked(log, judge)
    found = await said(log, [own(topic, "new") for topic in OUTPUTS])
    for topic in OUTPUTS:
        assert found[own(topic, "new")] == other.log.first_by_id(topic), topic
    assert ended.num_calls == ended.num_votes_cast == len(other.log.first_by_id(VOTES))


async def test_a_killed_replay_asks_for_no_vote_twice_and_keeps_to_those_it_has() -> None:
    log = await written(run_through(people(), 1), 3)
    started, _ = await begin(log, NEW, SETTINGS.judge, SETTINGS.rewards)
    with pytest.raises(BaseExceptionGroup):
        await work(log, started, judge=Fickle(patience=20))
    first = (await said(log, [own(VOTES, "new")]))[own(VOTES, "new")]
    verdicts = (await said(log, [own(VERDICTS, "new")]))[own(VERDICTS, "new")]
    assert first

    again = Fickle()
    await work(log, started, judge=again)
    votes = (await said(log, [own(VOTES, "new")]))[own(VOTES, "new")]
    assert {id_: votes[id_] for id_ in first} == first
    assert len(again.asked) == len(votes) - len(first)
    all_verdicts = (await said(log, [own(VERDICTS, "new")]))[own(VERDICTS, "new")]
    assert {id_: all_verdicts[id_] for id_ in verdicts} == verdicts

    silent = Fickle(patience=0)
    ended = await asked(log, silent)
    assert (ended.num_calls, ended.num_votes_cast) == (0, len(votes))
    outcomes = [await work(log, started, judge=silent) for _ in range(2)]
    assert outcomes[0] == outcomes[1]
    samples = (await said(log, [own(SAMPLES, "new")]))[own(SAMPLES, "new")]
    digests = {id_ for outcome in outcomes[0] for id_ in outcome.digests}
    assert len(digests) == sum(isinstance(event, SampleAssembled) for event in samples.values())


async def test_a_comparison_reads_both_sides_and_what_they_cost() -> None:
    log = await written(run_through(people(), 1, Oracle(GOOD)), 3)
    judge = Fickle()
    await asked(log, judge)
    found = (await compared(log, (await Registry.read(log)).started["new"])).figures()
    assert found["live_judge"] == "oracle@test"
    assert found["replay_judge"] == "another@test"
    assert found["turns_missing_in_replay"] == found["turns_missing_live"] == 0
    assert found["mean_score_live"] == 1.0
    assert found["calls_replay"] == len(judge.asked)
    assert found["turns_scored_differently"] != 0


async def test_a_pointer_goes_forth_and_back() -> None:
    log = await written(run_through(people(), 1), 3)
    with pytest.raises(ConfigError, match="there is no replay 'one'"):
        await promote(log, "one", policy_id="policy", now_ms=1)
    await replayed(log, wanted("one"))
    await replayed(log, wanted("two"))
    await begin(log, wanted("three"), SETTINGS.judge, SETTINGS.rewards)
    with pytest.raises(ConfigError, match="has not ended"):
        await promote(log, "three", policy_id="policy", now_ms=1)

    seen: list[str | None] = []
    for name in ("one", "two", None, None):
        if name is None:
            await rollback(log, policy_id="policy", now_ms=2)
        else:
            await promote(log, name, policy_id="policy", now_ms=2)
        seen.append((await Registry.read(log)).pointer("policy"))
    assert seen == ["one", "two", "one", None]
    assert (await Registry.read(log)).pointer("other") is None
    with pytest.raises(ConfigError, match="nothing is promoted"):
        await rollback(log, policy_id="policy", now_ms=3)
