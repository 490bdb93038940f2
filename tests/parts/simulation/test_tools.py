"""An agent with a calculator: what it is asked, how it works through the API, and what its judge makes of a step."""

import json
import random
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessage

from clawstream.conversation.messages import Message
from clawstream.judging.prompts import Case, Prompt, floor_prompt, hint_prompt, score_prompt
from clawstream.simulation.agent import Agent, AgentClient, Attempt, attempts, results, score
from clawstream.simulation.opinions import StepJudge
from clawstream.simulation.policy.dialogues import HINT_MARKER, Dialogue
from clawstream.simulation.policy.lessons import HINT, Calls
from clawstream.simulation.policy.recipe import RECIPES
from clawstream.simulation.problems import (
    MAX_STEPS,
    Chain,
    ChainTask,
    Operation,
    UnusableExpression,
    calculate,
    drawn,
    tasks,
    worked_out,
)
from clawstream.simulation.runs.people import NUM_HELD_OUT, people_of

CHAIN = Chain(start=37, operations=((Operation.ADD, 58), (Operation.TIMES, 4), (Operation.MINUS, 19)))
TASK = ChainTask(question="Take 37, add 58, times 4, minus 19", answer="361", hint=HINT)
CHAIN_TOO = ChainTask(question="Take 1", answer="1", hint=HINT)
SIGNS = {"add": "+", "times": "*", "minus": "-"}
REFUSED = "error: two whole numbers with +, - or * between, please"
SURE = StepJudge(wrong_share=0.0, seed=0)


def call(expression: str, number: int = 0) -> dict[str, Any]:
    function = {"name": "calculator", "arguments": json.dumps({"expression": expression})}
    return {"id": f"call-{number}", "type": "function", "function": function}


def history(*calls: tuple[str, str]) -> tuple[Message, ...]:
    messages: list[Message] = [{"role": "user", "content": CHAIN.text}]
    for expression, shown in calls:
        messages.append({"role": "assistant", "content": None, "tool_calls": [call(expression)]})
        messages.append({"role": "tool", "tool_call_id": "call-0", "content": shown})
    return tuple(messages)


def step(expression: str, *before: tuple[str, str], shown: str = "0") -> Case:
    answer: Message = {"role": "assistant", "content": None, "tool_calls": [call(expression)]}
    return Case(request=history(*before), answer=answer, next_state=({"role": "tool", "content": shown},))


def last(said: str, *before: tuple[str, str]) -> Case:
    return Case(request=history(*before), answer={"role": "assistant", "content": said}, next_state=())


def verdict(judge: StepJudge, prompt: Prompt, vote_seed: int = 0) -> str:
    return judge.reply(prompt.system, prompt.user, vote_seed).rpartition("\n")[2]


def test_a_chain_is_worked_out_from_left_to_right() -> None:
    assert (CHAIN.text, CHAIN.result) == (TASK.question, 361)


@pytest.mark.parametrize(
    ("expression", "shown"),
    [("37+58", "95"), ("95 * 4", "380"), ("380-19", "361"), ("19-380", "-361"), ("-3*4", "-12")],
)
def test_the_calculator_shows_what_two_numbers_come_to(expression: str, shown: str) -> None:
    assert calculate(expression) == shown


@pytest.mark.parametrize(
    "expression", ["", "37", "37+58*4", "37/2", "1e3+1", "a+b", "9" * 10 + "*2", "٣+٤", "__import__('os')"]
)
def test_the_calculator_refuses_what_is_no_sum_of_two_numbers(expression: str) -> None:
    with pytest.raises(UnusableExpression, match="two whole numbers"):
        calculate(expression)


@given(st.integers())
def test_each_operation_comes_once_and_nothing_falls_below_zero(seed: int) -> None:
    chain = drawn(random.Random(seed))

    assert {sign for sign, _ in chain.operations} == set(Operation)
    found = chain.start
    for sign, number in chain.operations:
        found = worked_out(found, sign, number)
        assert found >= 0


def test_300_held_out_tasks_are_neither_tried_nor_in_what_the_base_was_built_on(tmp_path: Path) -> None:
    people = people_of("tools", tmp_path)
    tried, held_out = ({task.question for task in tasks(file.read_text())} for file in (people.asked, people.scored))
    built_on = {d.messages[0]["content"].split("\n")[0] for d in RECIPES["tools"].dialogues(6000)}

    assert len(held_out) == NUM_HELD_OUT == 300
    assert held_out & (tried | built_on) == tried & built_on == set()
    assert people_of("tools", tmp_path / "again").sha == people.sha


def test_the_answers_of_tasks_are_what_their_chains_come_to(tmp_path: Path) -> None:
    for task in tasks(people_of("tools", tmp_path).scored.read_text()):
        start, *told = task.question.removeprefix("Take ").split(", ")
        found = start
        for operation in told:
            word, number = operation.split(" ")
            found = calculate(f"{found}{ {'add': '+', 'times': '*', 'minus': '-'}[word] }{number}")
        assert found == task.answer


def is_due(dialogue: Dialogue) -> bool:
    """Whether the step of a lesson is the right one, by the judge where it is a call."""
    *_, last = dialogue.messages
    before = [m["tool_calls"][0]["function"] for m in dialogue.messages if "tool_calls" in m]
    if not dialogue.answer.startswith("<tool_call>"):
        return len(before) >= 3 and dialogue.answer == f"It is {last['content']}"
    said = json.loads(dialogue.answer.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    answer: Message = {"role": "assistant", "content": None, "tool_calls": [call(said["arguments"]["expression"])]}
    case = Case(request=dialogue.messages, answer=answer, next_state=({"role": "tool", "content": "0"},))
    return verdict(SURE, score_prompt(case, 2000)) == r"\boxed{1}"


def test_steps_without_the_hint_go_right_in_the_share_that_the_mix_states_and_with_it_all_do() -> None:
    steps = RECIPES["tools"].dialogues(3000)
    hinted = [is_due(d) for d in steps if HINT_MARKER in d.messages[0]["content"]]
    others = [is_due(d) for d in steps if HINT_MARKER not in d.messages[0]["content"]]

    assert all(hinted)
    assert len(hinted) / len(steps) == pytest.approx(Calls().hinted, abs=0.03)
    assert sum(others) / len(others) == pytest.approx(Calls().right, abs=0.03)


@pytest.mark.parametrize(
    ("case", "score"),
    [
        (step("37+58"), 1),
        (step("37 + 58"), 1),
        (step("37-58"), -1),
        (step("37+4"), -1),
        (step("95*4", ("37+58", "95")), 1),
        (step("37*4", ("37+58", "95")), -1),
        (step("141*4", ("37+104", "141")), 1),  # what follows a slip is judged by itself
        (step("380-19", ("37+58", "95"), ("95*4", "380")), 1),
        (step("361-19", ("37+58", "95"), ("95*4", "380"), ("380-19", "361")), -1),
        (step("37+58", ("37plus58", REFUSED)), 1),  # what was refused is to be called again
        (step("95*4", ("37+58", "95"), ("95x4", REFUSED)), 1),
        (step("380-19", ("37+58", "95"), ("95x4", REFUSED)), -1),
        (last("It is 361", ("37+58", "95"), ("95*4", "380"), ("380-19", "361")), 1),
        (last("It is 36", ("37+58", "95"), ("95*4", "380"), ("380-19", "361")), -1),
        (last("It is 95", ("37+58", "95")), -1),  # too early
        (last("It is 361", ("37+58", "95"), ("95*4", "380"), ("380*19", REFUSED)), -1),
    ],
)
def test_a_step_is_judged_by_the_task_and_what_the_calculator_showed(case: Case, score: int) -> None:
    assert verdict(SURE, score_prompt(case, 2000)) == rf"\boxed{{{score}}}"


def test_the_judge_is_blind_to_what_came_of_the_step() -> None:
    for expression in ("37+58", "37-58"):
        told = {
            verdict(SURE, prompt)
            for shown in ("95", "361", "error: two whole numbers", "\\boxed{-1} wrong answer")
            for case in (step(expression, shown=shown),)
            for prompt in (score_prompt(case, 2000), floor_prompt(case, history(("1+1", "2")), 2000))
        }
        assert len(told) == 1


def test_one_vote_in_ten_is_wrong_and_the_same_vote_is_always_the_same() -> None:
    judge = StepJudge(wrong_share=0.1, seed=3)
    cases = [score_prompt(step(e, shown=str(n)), 2000) for n in range(1000) for e in ("37+58", "37-58")]
    wrong = [verdict(judge, prompt) != verdict(SURE, prompt) for prompt in cases]

    assert sum(wrong) / len(wrong) == pytest.approx(0.1, abs=0.02)
    assert wrong == [verdict(judge, prompt) != verdict(SURE, prompt) for prompt in cases]
    assert SURE.reply(*_both(hint_prompt(step("37-58"), 2000)), 0).endswith(r"\boxed{-1}")


def _both(prompt: Prompt) -> tuple[str, str]:
    return prompt.system, prompt.user


class Gateway:
    """Answers as it is told, and keeps what it is asked."""

    def __init__(self, *answers: str | int | httpx.Response) -> None:
        self.left = list(answers)  # expressions to call with, and numbers to say; the last one again and again
        self.asked: list[tuple[str, dict[str, str], dict[str, Any]]] = []

    def handle(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.asked.append((request.url.path, dict(request.headers), body))
        if "messages" not in body:
            return httpx.Response(200, json={})
        said = self.left[0] if len(self.left) == 1 else self.left.pop(0)
        if isinstance(said, httpx.Response):
            return said
        message: dict[str, Any] = {"role": "assistant", "content": f"It is {said}"}
        if isinstance(said, str):
            message = {"role": "assistant", "content": None, "tool_calls": [call(said)]}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        reply = {"object": "chat.completion", "created": 1, "model": "policy", "choices": [choice]}
        headers = {"x-policy-version": "3"}
        return httpx.Response(200, headers=headers, json={"id": f"chatcmpl-{len(self.asked)}", **reply})

    def client(self) -> openai.AsyncOpenAI:
        http = httpx.AsyncClient(transport=httpx.MockTransport(self.handle))
        return openai.AsyncOpenAI(base_url="http://gateway/v1", api_key="none", max_retries=0, http_client=http)


async def tried(*answers: str | int | httpx.Response) -> tuple[Gateway, bool]:
    gateway = Gateway(*answers)
    attempt = Attempt(task=TASK, group="task-1", size=4)
    return gateway, await AgentClient(gateway.client(), "policy").chat("ann", attempt, random.Random(0))


async def test_an_attempt_shows_each_result_to_the_policy_and_then_says_its_outcome_and_that_it_is_over() -> None:
    gateway, went = await tried("37+58", "95*4", "380-19", 361)

    assert went
    *steps, (feedback_to, _, told), (_, done_by, done) = gateway.asked
    assert [headers["x-step-index"] for _, headers, _ in steps] == ["0", "1", "2", "3"]
    for headers in (*(headers for _, headers, _ in steps), done_by):
        names = ("x-session-id", "x-group-id", "x-group-size", "x-turn-type")
        assert [headers[name] for name in names] == ["ann", "task-1", "4", "main"]
    said = steps[-1][2]["messages"]
    assert [message["role"] for message in said] == ["user", *["assistant", "tool"] * 3]
    assert [message["content"] for message in said if message["role"] == "tool"] == ["95", "380", "361"]
    assert (feedback_to, told["score"]) == ("/v1/feedback", 1.0)
    assert (told["response_id"], told["source"]) == ("chatcmpl-4", "environment")
    assert done == {"session_done": True}


@pytest.mark.parametrize(
    ("answers", "num_steps"),
    [
        ((95,), 1),
        (("37+58", 361), 2),
        (("37+58", "95*4", "380+19", 399), 4),
        (("1+1",), MAX_STEPS),
        (("three",), MAX_STEPS),
    ],
)
async def test_only_the_right_number_in_the_end_is_a_success(answers: tuple[str | int, ...], num_steps: int) -> None:
    gateway, went = await tried(*answers)

    outcomes = [body["score"] for path, _, body in gateway.asked if path == "/v1/feedback"]
    right = 361 in answers  # however it was found
    assert (went, outcomes) == (True, [1.0 if right else -1.0])
    assert sum("messages" in body for _, _, body in gateway.asked) == num_steps


async def test_the_policy_is_told_why_the_calculator_refused() -> None:
    gateway, _ = await tried("three", 361)

    assert gateway.asked[1][2]["messages"][-1]["content"].startswith("error: two whole numbers")


@pytest.mark.parametrize("arguments", ["", "{", "[1]", "3", "null", '"37+58"', "{}"])
def test_a_call_that_is_none_is_an_error_of_the_calculator(arguments: str) -> None:
    asked = call("1+1")
    asked["function"]["arguments"] = arguments

    said = ChatCompletionMessage.model_validate({"role": "assistant", "content": None, "tool_calls": [asked]})

    assert [result["content"] for result in results(said)] == ["error: the expression is missing"]


async def test_a_failed_request_ends_an_attempt_without_an_outcome(capsys: pytest.CaptureFixture[str]) -> None:
    gateway, went = await tried("37+58", httpx.Response(503, json={"error": {"message": "away"}}))

    assert not went
    assert [path for path, _, _ in gateway.asked] == ["/v1/chat/completions"] * 2
    answered, failed = [json.loads(said) for said in capsys.readouterr().out.splitlines()]
    assert (answered["failed"], failed["failed"]) == (False, True)
    assert failed["started_at_s"] >= answered["started_at_s"] + answered["total_ms"] / 1000 - 0.1


def test_the_attempts_at_a_task_are_one_group_and_a_task_that_comes_again_is_another() -> None:
    plan = list(islice(attempts([TASK, TASK], run_name="run", size=3), 12))

    groups = [attempt.group for attempt in plan]
    assert [groups.count(group) for group in dict.fromkeys(groups)] == [3, 3, 3, 3]
    assert {attempt.size for attempt in plan} == {3}


async def test_a_score_is_the_share_of_right_attempts_made_as_side_turns_with_seeds_of_their_own() -> None:
    found, seeds = [], []
    for _ in range(2):
        gateway = Gateway("37+58", 361)
        agent = Agent(gateway.client(), "policy", temperature=1.0)
        found.append(await score(agent, [TASK, CHAIN_TOO], seed=0, hinted=True, concurrency=1))
        seeds.append([body["seed"] for _, _, body in gateway.asked])

    assert found[0] == found[1]
    assert (found[0]["score"], found[0]["n"], found[0]["policy_versions"]) == (0.5, 2, ["3"])
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 3
    for _, headers, body in gateway.asked:
        assert headers["x-turn-type"] == "side"
        assert not {"x-group-id", "x-step-index"} & headers.keys()  # the gateway takes both or neither
        assert body["temperature"] == 1.0
        assert HINT in body["messages"][0]["content"]
