"""A function of the user's own scores finished turns: each once, whatever comes first, and never as a 0."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given

from clawstream.errors import ConfigError, UnusableEvent
from clawstream.events import Event, ExchangeCompleted, FeedbackGiven, FeedbackSource, SampleAssembled, TurnPaired
from clawstream.judging.heuristics import DueTurn, FinishedTurn, Heuristic, Watched, feedback, observe
from clawstream.judging.stage import heuristic_named, heuristics_stage
from clawstream.replay.running import begin
from clawstream.stream.dead_letters import Reason
from clawstream.stream.stage import Stage
from clawstream.stream.topics import EXCHANGES, FEEDBACK, SAMPLES, TURNS
from tests import recorded
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.flow import Flow, Worker
from tests.sessions import Session, user
from tests.unit.replay.recorded import SETTINGS, own, said, wanted, work, written
from tests.unit.samples.test_flow import MOVES, SEEDS, conversation
from tests.unit.stream import toys
from tests.unit.stream.queues import dead_letters


def by_length(turn: FinishedTurn) -> float | None:
    """An opinion of its own on every other turn."""
    length = len(turn.messages)
    return None if length % 4 == 3 else 1 / length


LENGTH = Heuristic("by_length", by_length)


def told(
    state: Watched | None, events: list[Event], heuristic: Heuristic = LENGTH
) -> tuple[Watched | None, list[Event]]:
    written: list[Event] = []
    for event in events:
        state, _, due = observe(state, event)
        written += [given for one in due if (given := feedback(one, heuristic)) is not None]
    return state, written


def stage(heuristic: Heuristic) -> Stage[Watched, DueTurn]:
    """Hears of any turn, however old."""
    return heuristics_stage(heuristic, heard_ms=0, now_ms=lambda: 0)


def corrected() -> tuple[ExchangeCompleted, ExchangeCompleted, TurnPaired]:
    """An answer with a tool call, and its result."""
    session = Session()
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"b":2,"a":1}'}}
    answer = {"role": "assistant", "content": "let me see", "tool_calls": [call]}
    first = session.ask([user("1+2?")], answer)
    result = {"role": "tool", "tool_call_id": "call_1", "content": "3"}
    second = session.ask([user("1+2?"), answer, result], "3")
    turn = TurnPaired(session_id="s", turn_id=first.exchange_id, next_exchange_id=second.exchange_id, next_state=(2,))
    return first, second, turn


def test_a_function_sees_the_answer_and_not_what_the_client_asked_for_itself_meanwhile() -> None:
    session = Session()
    first = session.ask(recorded.HEARTBEAT[:2], "Answer 2.")
    second = session.ask(recorded.USER_AFTER_AN_ALERT, "Look at it.")
    turn = TurnPaired(session_id="s", turn_id=first.exchange_id, next_exchange_id=second.exchange_id, next_state=(5,))
    seen: list[FinishedTurn] = []
    told(None, [first, second, turn], Heuristic("look", seen.append))
    [what] = seen
    assert (what.answer["content"], len(what.messages)) == ("Answer 2.", 2)


def test_a_function_sees_what_was_asked_answered_called_and_what_followed() -> None:
    seen: list[FinishedTurn] = []

    def look(turn: FinishedTurn) -> float:
        seen.append(turn)
        return -0.25

    first, second, turn = corrected()
    _, [given_] = told(None, [first, second, turn], Heuristic("look", look))
    [what] = seen
    assert [what.messages[0]["content"], what.answer["content"]] == ["1+2?", "let me see"]
    assert [(call.name, call.arguments) for call in what.tool_calls] == [("add", '{"a":1,"b":2}')]
    assert [message["content"] for message in what.next_state] == ["3"]
    assert isinstance(given_, FeedbackGiven)
    assert (given_.turn_id, given_.source, given_.score) == (first.exchange_id, FeedbackSource.HEURISTIC, -0.25)
    assert (given_.text, given_.given_at_ms) == ("look", second.received_at_ms)


def test_what_a_function_does_to_a_turn_is_not_seen_by_the_next() -> None:
    def spoil(turn: FinishedTurn) -> float:
        said = turn.answer["content"]
        turn.answer["content"] = "spoilt"  # type: ignore[index]
        return 1.0 if said == "let me see" else -1.0

    first, second, turn = corrected()
    _, events = told(None, [first, second, turn, turn], Heuristic("spoil", spoil))
    assert [event.score for event in events if isinstance(event, FeedbackGiven)] == [1.0, 1.0]


@pytest.mark.slow
@given(MOVES, SEEDS)
def test_any_interleaving_and_any_restart_gives_the_same_feedback_and_one_of_each_turn(
    moves: list[str], seed: int
) -> None:
    def run_through(rng: random.Random | None, restarts: float = 0.0) -> dict[str, Event]:
        flow = Flow()
        flow.workers.append(Worker(stage(LENGTH), flow.log))
        return flow.run(conversation(moves), rng, restarts=restarts).first_by_id(FEEDBACK)

    calm = run_through(None)
    assert run_through(random.Random(seed), 0.15) == calm
    turns = Flow().run(conversation(moves)).of(TurnPaired)
    assert {event.turn_id for event in calm.values() if isinstance(event, FeedbackGiven)} <= {t.turn_id for t in turns}
    always = Heuristic("always", lambda _: 0.0)
    flow = Flow()
    flow.workers.append(Worker(stage(always), flow.log))
    scored = flow.run(conversation(moves), random.Random(seed), restarts=0.15).of(FeedbackGiven)
    assert sorted(one.turn_id for one in scored) == sorted(turn.turn_id for turn in turns)


def test_a_session_that_is_done_and_scored_leaves_nothing_behind() -> None:
    flow = Flow()
    worker = Worker(stage(LENGTH), flow.log)
    flow.workers.append(worker)
    flow.run(conversation(["ask", "ask", "ask", "done"]))
    assert worker.states == {"s": None}


@pytest.mark.parametrize("said", [float("nan"), 1.5, -2, "good", True, float("inf")])
def test_what_is_no_score_is_set_aside_and_names_function_and_turn(said: object) -> None:
    first, second, turn = corrected()
    with pytest.raises(
        UnusableEvent, match=rf"heuristic odd, turn {first.exchange_id}: it returned .*expected -1 to 1"
    ):
        told(None, [first, second, turn], Heuristic("odd", lambda _: said))  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("topics", [(EXCHANGES, TURNS), (TURNS, EXCHANGES)])
async def test_a_turn_that_a_function_breaks_on_is_in_the_dead_letter_queue_and_the_others_are_scored(
    topics: tuple[str, str],
) -> None:
    def picky(turn: FinishedTurn) -> float:
        if len(turn.messages) == 1:
            raise ZeroDivisionError("no first turns")
        return 1.0

    log = MemoryLog(MemoryBroker())
    flow = Flow()
    flow.run(conversation(["ask", "ask", "ask", "ask"]))
    async with toys.running(stage(Heuristic("picky", picky)), log):
        for topic in topics:
            await log.append([record.event for record in flow.log.topics[topic]])
            await toys.settled(log, "heuristics")
    turns = flow.log.of(TurnPaired)
    scored = [record.event for record in await toys.read(log, FEEDBACK)]
    assert {one.turn_id for one in scored if isinstance(one, FeedbackGiven)} == {turn.turn_id for turn in turns[1:]}
    [letter] = await dead_letters(log)
    assert (letter.id.group, letter.id.topic, letter.reason) == ("heuristics", topics[1], Reason.UNUSABLE)
    assert f"heuristic picky, turn {turns[0].turn_id}: it raised ZeroDivisionError" in letter.error


async def test_a_turn_is_not_scored_once_feedback_on_it_would_not_be_heard() -> None:
    first, second, turn = corrected()
    state, _, [] = observe(None, first)
    _, _, [due] = observe(observe(state, second).state, turn)
    heard_ms = 1000
    for late_ms, num_scored in ((heard_ms, 1), (heard_ms + 1, 0)):
        now_ms = second.received_at_ms + late_ms
        scoring = heuristics_stage(LENGTH, heard_ms=heard_ms, now_ms=lambda now_ms=now_ms: now_ms)  # type: ignore[misc]
        assert scoring.perform is not None
        assert len(await scoring.perform(due)) == num_scored


def test_a_score_is_the_heuristics_part_of_a_samples_reward() -> None:
    flow = Flow()
    flow.workers.append(Worker(stage(Heuristic("half", lambda _: 0.5)), flow.log))
    log = flow.run(conversation(["ask", "ask"]))
    [turn] = log.of(TurnPaired)
    *_, sample = [one for one in log.of(SampleAssembled) if one.turn_id == turn.turn_id]
    assert sample.heuristic_reward == 0.5


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package: `good` and `text` are a function and none, `gone` and `broken` can't be imported."""
    (tmp_path / "my_rules.py").write_text("def good(turn):\n    return 1.0\n\n\ntext = 'no function'\n")
    (tmp_path / "my_typo.py").write_text("def good(turn)\n")
    installed = tmp_path / "my_rules-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: my_rules\nVersion: 1.0\n")
    points = ("good = my_rules:good", "text = my_rules:text", "gone = my_rules:gone", "broken = my_typo:good")
    (installed / "entry_points.txt").write_text("\n".join(["[clawstream.heuristics]", *points, ""]))
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("package")
def test_an_installed_entry_point_is_found_by_its_name() -> None:
    name, score = heuristic_named("good")
    assert (name, score.__module__, score.__name__) == ("good", "my_rules", "good")


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("bad", r"0 installed packages have .*There are broken, gone, good, text"),
        ("gone", r"my_rules:gone can't be imported, AttributeError"),
        ("broken", r"my_typo:good can't be imported, SyntaxError"),
        ("text", r"my_rules:text is 'no function', expected a function"),
    ],
)
def test_a_name_that_is_no_function_says_which_setting_what_was_found_and_what_to_do(name: str, found: str) -> None:
    with pytest.raises(ConfigError, match=rf"rewards.heuristic_function is '{name}': {found}"):
        heuristic_named(name)


@pytest.mark.parametrize("command", ["heuristics", "up"])
def test_a_start_with_a_name_that_nobody_installed_ends_with_exit_code_two(tmp_path: Path, command: str) -> None:
    settings = tmp_path / "clawstream.toml"
    settings.write_text(f'data_dir = "{tmp_path}/data"\n[rewards]\nheuristic_function = "bad"\n')
    argv = [sys.executable, "-m", "clawstream", "--config", str(settings), command]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert not (tmp_path / "data").exists(), "nothing was started"
    assert "rewards.heuristic_function is 'bad': 0 installed packages" in ended.stderr


async def test_a_replay_has_the_past_scored_by_a_function_and_what_it_said_then_stands(package: Path) -> None:
    def then(score: float) -> Flow:
        flow = Flow()
        flow.workers.append(Worker(stage(Heuristic("good", lambda _: score)), flow.log))
        return flow

    async def again(flow: Flow) -> list[float | None]:
        flow.run(conversation(["ask", "ask", "ask", "done"]))
        log = await written(flow, 3)
        rewards = SETTINGS.rewards.model_copy(update={"heuristic_function": "good"})
        started, _ = await begin(log, wanted(), SETTINGS.judge, rewards)
        await work(log, started)
        samples = (await said(log, [own(SAMPLES)]))[own(SAMPLES)].values()
        return [one.heuristic_reward for one in samples if isinstance(one, SampleAssembled)]

    assert await again(Flow()) == [1.0, 1.0]
    (package / "my_rules.py").write_text("def good(turn):\n    return 1.0 if len(turn.messages) > 1 else 1 / 0\n")
    del sys.modules["my_rules"]
    assert sorted(await again(Flow()), key=str) == [1.0, None]
    assert await again(then(-0.5)) == [-0.5, -0.5]
