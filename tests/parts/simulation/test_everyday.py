"""People and scorer of everyday requests as a run starts them: processes of their own, over HTTP."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from clawstream.config import KafkaSettings, load
from clawstream.errors import PartUnavailable
from clawstream.rendering.encoding import load_tokenizer
from clawstream.simulation.everyday import general, personas
from clawstream.simulation.everyday.person import NO_ANSWER, THANKS
from clawstream.simulation.everyday.scorer import LEAST_NATS
from clawstream.simulation.learn.scoring import CheckpointScoring
from clawstream.simulation.runs.people import People, people_of
from clawstream.simulation.runs.programs import ScorerProcess, keys_for
from clawstream.simulation.runs.scenarios import CASTS
from tests.parts.families.standins import FAMILIES, make_folder
from tests.parts.simulation.chat_server import PROMPT_TOKENS, serving
from tests.parts.simulation.test_people import lines_until_exit, program

SYSTEMS = {one.system: one.name for one in personas()}
CITIES = "Paris, Tokyo, Rome, Berlin and Cairo; 7 and 12."


def answer(messages: list[dict[str, str]]) -> str:
    """Be brief, as the clerk wants it, and the cook if it is one sentence; say the same of facts and sums."""
    if messages[0]["role"] != "system":
        return CITIES
    return f"It is about this: {messages[-1]['content'].splitlines()[0]}, and no more."


@pytest.fixture
def people(tmp_path: Path) -> People:
    return people_of("everyday", tmp_path, num_scored=3)


async def test_people_ask_through_their_assistant_and_leave_the_limit_of_an_answer_to_the_policy(
    people: People,
) -> None:
    async with (
        serving(answer) as chat,
        program(
            "student", "--everyday", "--base-url", chat.url, "--problems", str(people.asked), "--sessions", "12",
            "--concurrency", "1", "--hint-share", "0.5",
        ) as student,
    ):  # fmt: skip
        reports = await lines_until_exit(student)

    first, last = [body for _, body in chat.asked[::2]], [body for _, body in chat.asked[1::2]]
    assert [report["first_answer"] for report in reports] == [True, False] * 12
    assert not any(report["failed"] for report in reports)
    assert {SYSTEMS[body["messages"][0]["content"]] for body in first} == {"cook", "clerk", "traveller"}
    assert {"max_tokens" in body for body in first} == {False}
    assert {body["max_tokens"] for body in last} == {1}
    assert ["x-session-done" in headers for headers, _ in chat.asked] == [False, True] * 12
    said = {(SYSTEMS[body["messages"][0]["content"]], body["messages"][3]["content"]) for body in last}
    content = {name for name, words in said if words in (*THANKS, *NO_ANSWER)}
    assert content in ({"clerk"}, {"clerk", "cook"})


@pytest.mark.parametrize("hinted", [False, True])
async def test_a_score_is_of_the_wish_with_facts_and_sums_beside_it(
    people: People, tmp_path: Path, hinted: bool
) -> None:
    (tmp_path / "logs").mkdir()
    async with serving(answer) as chat:
        scorer = ScorerProcess(
            chat.url.removesuffix("/v1"), people.scored, tmp_path / "logs", cast=CASTS["everyday"], seed=0,
            temperature=0.6,
        )  # fmt: skip
        found = await scorer.score(3, hinted=hinted)

    requests = [body for _, body in chat.asked if body["messages"][0]["role"] == "system"]
    known = [body for _, body in chat.asked if body["messages"][0]["role"] != "system"]
    assert found.num_problems == len(requests) == 9
    assert {body["temperature"] for body in requests} == {0.6}
    assert not any("max_tokens" in body for body in requests)
    assert found.num_styled is not None
    assert 3 <= found.num_styled <= 6
    assert found.prompt_tokens == PROMPT_TOKENS
    if hinted:
        rows = [json.loads(line) for line in people.scored.read_text().splitlines()]
        asked = {body["messages"][1]["content"] for body in requests}
        assert asked == {f"{row['question']}\n\n[user's hint / instruction]\n{row['hint']}" for row in rows}
        assert (found.general, known) == (None, [])
    else:
        assert found.general is not None
        assert (found.general.facts, found.general.sums) == (7 / 50, 5 / 40)
        assert len(known) == len(general().facts) + len(general().sums)
        assert {body["temperature"] for body in known} == {0.0}


def about(asked: str) -> str:
    """Say something with a word of the request."""
    return f"{max(asked.splitlines()[0].split(), key=len)}, I gather, is what this is about."


@dataclass(frozen=True, slots=True)
class Untrained:
    """An engine that finds each token of an answer likely by `nats`; `asked` is what it was given."""

    url: str
    nats: list[float]
    asked: list[dict[str, Any]]


@pytest.fixture
async def untrained() -> AsyncIterator[Untrained]:
    nats, asked = list[float](), list[dict[str, Any]]()

    async def generate(request: web.Request) -> web.Response:
        asked.append(body := await request.json())
        ids, start = body["input_ids"], body["logprob_start_len"]
        entries = [(None, ids[start], None), *((nats[0], token, None) for token in ids[start + 1 :])]
        return web.json_response({"meta_info": {"input_token_logprobs": entries}})

    app = web.Application()
    app.router.add_post("/generate", generate)
    async with TestServer(app) as server:
        yield Untrained(str(server.make_url("")).rstrip("/"), nats, asked)


@pytest.mark.slow
@pytest.mark.parametrize(("nats", "share"), [(LEAST_NATS + 0.1, 1.0), (LEAST_NATS - 0.1, 0.0)])
async def test_what_the_untrained_model_finds_unlikely_is_no_answer_however_it_looks(
    people: People, untrained: Untrained, tmp_path: Path, nats: float, share: float
) -> None:
    (tmp_path / "logs").mkdir()
    base = make_folder(tmp_path / "base", FAMILIES["smollm2"])
    untrained.nats.append(nats)
    async with serving(lambda messages: about(messages[-1]["content"])) as chat:
        scorer = ScorerProcess(
            chat.url.removesuffix("/v1"), people.scored, tmp_path / "logs", cast=CASTS["everyday"], seed=0,
            temperature=0.6, base=(untrained.url, base),
        )  # fmt: skip
        found = await scorer.score(3)

    assert found.by_persona is not None
    assert found.by_persona["clerk"] == share
    words = load_tokenizer(base, trust_code=False)
    for body in untrained.asked:
        prompt, answer = (
            body["input_ids"][: body["logprob_start_len"] + 1],
            body["input_ids"][body["logprob_start_len"] + 1 :],
        )
        assert "[user's hint / instruction]" in words.decode(prompt)
        assert "is what this is about" in words.decode(answer)
        assert body.get("lora_path") is None
    assert len(untrained.asked) == 9


@pytest.mark.slow
async def test_without_an_answer_of_the_untrained_models_engine_there_is_no_score_and_the_log_says_why(
    people: People, tmp_path: Path
) -> None:
    (tmp_path / "logs").mkdir()
    base = make_folder(tmp_path / "base", FAMILIES["smollm2"])
    async with serving(answer) as chat:
        scorer = ScorerProcess(
            chat.url.removesuffix("/v1"), people.scored, tmp_path / "logs", cast=CASTS["everyday"], seed=0,
            temperature=0.6, base=("http://127.0.0.1:1", base),
        )  # fmt: skip
        with pytest.raises(PartUnavailable, match="exited with 1"):
            await scorer.score(3)
    words = (tmp_path / "logs" / "scorer.log").read_text()
    assert "There is no score; see the gateway, its engines and who grades." in words
    assert "Traceback" not in words


def test_a_version_is_scored_under_the_limit_and_the_template_of_the_run(tmp_path: Path) -> None:
    def config(scenario: str) -> Path:
        scoring = CheckpointScoring(
            folder=tmp_path, kafka=KafkaSettings(bootstrap="k:9"), problems=tmp_path, cast=CASTS[scenario]
        )
        return scoring._config(tmp_path, "http://engine:1", 1, "scored")

    found, usual = load(config("everyday")), load(config("all"))
    assert (found.gateway.default_max_tokens, found.policy.renderer, found.policy.enable_thinking) == (80, "auto", None)
    assert (usual.gateway.default_max_tokens, usual.policy.renderer, usual.policy.enable_thinking) == (
        None, "qwen3", False,
    )  # fmt: skip


def test_everybody_who_talks_can_have_a_key_of_their_own(tmp_path: Path) -> None:
    shown = json.loads(keys_for("everyday", tmp_path / "keys.json", tmp_path).read_text())
    assert set(shown) == {one.name for one in personas()}
