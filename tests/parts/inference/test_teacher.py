"""A teacher and the policy's engine asked together: whose score it is, and whether they speak of the same tokens."""

import asyncio
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tokenizers import Tokenizer

from clawstream.config import EngineSettings, Settings
from clawstream.errors import ConfigError, NotYet, TryLater
from clawstream.inference import judge_client as teaching_module
from clawstream.inference.engine import EngineRefused, ScoreRequest, ServerInfo
from clawstream.inference.judge_client import TeacherClient, refuse_another_vocabulary
from clawstream.inference.sglang import SglangEngine
from tests.parts.engine.tiny_model import make_config
from tests.parts.training.step.test_trainer import with_settings

WANTED = ScoreRequest(hinted_ids=(1, 2, 9), prompt_ids=(1, 2), response_ids=(5, 6), policy_id="policy", sampled_by=4)


class Engine:
    """An engine whose score of a token is how many stand before it, times `scale`; it names its weights in turn."""

    def __init__(self, *versions: str | None, scale: float = -1.0, adapters: Sequence[str] = ()) -> None:
        self.url = "http://engine"
        self.versions = list(versions)
        self.scale = scale
        self.adapters = tuple(adapters)
        self.refusal: EngineRefused | None = None
        self.asked: list[tuple[str | None, str | None]] = []
        self.folder = Path("/nowhere")
        self.tokenizer: Tokenizer | None = None
        self.texts: list[str] = []

    async def score(
        self, input_ids: Sequence[int], start: int, *, extra_key: str | None = None, lora_name: str | None = None
    ) -> tuple[float, ...]:
        self.asked.append((extra_key, lora_name))
        if self.refusal is not None:
            raise self.refusal
        return tuple(self.scale * place for place in range(start, len(input_ids)))

    async def weight_version(self) -> str | None:
        return self.versions.pop(0) if len(self.versions) > 1 else self.versions[0]

    async def lora_adapters(self) -> tuple[str, ...]:
        return self.adapters

    async def server_info(self) -> ServerInfo:
        return ServerInfo(model_path=str(self.folder), context_length_tokens=99, weight_version=None)

    async def token_ids(self, text: str) -> tuple[int, ...] | None:
        self.texts.append(text)
        return None if self.tokenizer is None else tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)


def teacher(*students: Engine, of: Engine | None = None) -> TeacherClient:
    return TeacherClient(of or Engine("default", scale=-0.5), students, policy_id="policy")


async def test_each_scores_the_answer_after_its_own_prompt_and_the_policy_s_version_is_named() -> None:
    student = Engine("6")
    scores = await teacher(student).score(WANTED)
    assert scores == ((-1.5, -2.0), (-2.0, -3.0), 6)
    assert student.asked == [("policy:6", None)]


@pytest.mark.parametrize(
    ("versions", "why"),
    [
        (("4", "5"), "went from version 4 of policy to 5 while it scored"),
        (("3",), "serves version 3 of policy, and version 4 sampled the answer"),
        (("default",), "serves version 0 of policy, and version 4"),
        (("nightly",), "named 'nightly'; expected a version number"),
    ],
)
async def test_a_score_whose_version_is_not_known_or_too_old_is_asked_for_again(
    versions: tuple[str, ...], why: str
) -> None:
    asked = Engine("default")
    refused = TryLater if versions == ("nightly",) else NotYet  # whoever is behind is there, and no peer that is away
    with pytest.raises(refused, match=why):
        await teacher(Engine(*versions), of=asked).score(WANTED)
    assert asked.asked == [], "a teacher is not asked for what would be thrown away"


async def test_the_policy_s_newest_adapter_scores_where_it_is_newer_than_the_weights() -> None:
    student = Engine("0", adapters=["policy-v4", "policy-v5", "other-v9"])
    assert (await teacher(student).score(WANTED)).student_version == 5
    assert student.asked == [("policy:0", "policy-v5")]


async def test_the_next_engine_is_asked_where_one_is_behind() -> None:
    both = teacher(Engine("3"), Engine("4"))
    with pytest.raises(TryLater):
        await both.score(WANTED)
    assert (await both.score(WANTED)).student_version == 4


async def test_an_answer_of_another_policy_is_not_scored_as_this_one_s() -> None:
    student = Engine("6")
    with pytest.raises(EngineRefused, match="serves policy, and older sampled the answer"):
        await teacher(student).score(WANTED._replace(policy_id="older"))
    assert student.asked == []


@pytest.mark.parametrize("versions", [("4",), ("4", "5")])
async def test_a_refusal_is_final_unless_the_weights_changed_meanwhile(versions: tuple[str, ...]) -> None:
    student = Engine(*versions)
    student.refusal = EngineRefused(400, "no such adapter")
    with pytest.raises(EngineRefused if len(versions) == 1 else TryLater):
        await teacher(student).score(WANTED)


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    make_config(tmp_path / "policy")
    return tmp_path / "policy"


def with_another_vocabulary(folder: Path, to: Path) -> Path:
    """The model with two tokens' ids changed round."""
    shutil.copytree(folder, to)
    content = json.loads((to / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (to / "tokenizer.json").write_text(json.dumps(content))
    return to


async def test_a_teacher_with_the_policy_s_vocabulary_may_teach(policy: Path) -> None:
    there, elsewhere = Engine("default"), Engine("default")
    there.folder, elsewhere.tokenizer = policy, Tokenizer.from_file(str(policy / "tokenizer.json"))
    for engine in (there, elsewhere):
        await refuse_another_vocabulary(engine, policy, ())


async def test_what_a_teacher_says_decides_where_its_folder_has_the_name_of_one_of_this_machine(
    policy: Path, tmp_path: Path
) -> None:
    other = with_another_vocabulary(policy, tmp_path / "other")
    engine = Engine("default")
    engine.folder, engine.tokenizer = policy, Tokenizer.from_file(str(other / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"it gives \d+ for token \d+"):
        await refuse_another_vocabulary(engine, policy, ())


async def test_a_teacher_is_not_asked_before_its_vocabulary_is_known_and_is_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(teaching_module, "_TRIED_EVERY_S", 0.0)
    asked, tried = Engine("default", scale=-0.5), 0
    both = teacher(Engine("6"), of=asked)

    async def check() -> None:
        nonlocal tried
        tried += 1
        if tried < 3:
            with pytest.raises(NotYet, match="vocabulary"):
                await both.score(WANTED)
            raise TryLater("connection refused")

    await both.score_after(check)
    assert (asked.asked, tried) == ([], 3)
    assert (await both.score(WANTED)).student_version == 6


async def test_a_teacher_that_answers_late_may_begin_late_and_then_ends_what_asks_it_if_its_vocabulary_is_another(
    policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter([TryLater("connection refused"), ConfigError("another vocabulary")])

    async def check(*_: object) -> None:
        raise next(found)

    monkeypatch.setattr(teaching_module, "refuse_another_vocabulary", check)
    monkeypatch.setattr(teaching_module, "_TRIED_EVERY_S", 0.1)
    settings = Settings(
        environment=False,
        engine=EngineSettings(urls=("http://engine",), model_path=policy),
        training=with_settings(teacher="http://teacher"),
    )
    refusals: list[str] = []

    async def work() -> None:
        async with teaching_module.teaching(settings, ()) as late:
            await asyncio.sleep(0)
            try:
                await late.score(WANTED)
            except NotYet as error:
                refusals.append(str(error))
            await asyncio.wait_for(asyncio.Event().wait(), 30)

    with pytest.raises(ConfigError, match="another vocabulary"):
        await work()
    assert ["connection refused" in refusal for refusal in refusals] == [True]


async def test_a_teacher_with_other_ids_is_refused_whether_its_folder_can_be_read_or_not(
    policy: Path, tmp_path: Path
) -> None:
    other = with_another_vocabulary(policy, tmp_path / "other")
    there, elsewhere = Engine("default"), Engine("default")
    there.folder, elsewhere.tokenizer = other, Tokenizer.from_file(str(other / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"token '[ab]' has id \d+, expected \d+.*training\.teacher, or take"):
        await refuse_another_vocabulary(there, policy, ())
    with pytest.raises(ConfigError, match=r"it gives \d+ for token \d+ of a text where the policy has \d+"):
        await refuse_another_vocabulary(elsewhere, policy, ())


async def test_a_teacher_without_an_embedding_for_one_of_the_policy_s_ids_is_refused_unasked(policy: Path) -> None:
    engine = Engine("default")
    engine.folder = policy
    with pytest.raises(ConfigError, match="can give id 5000, and the vocab_size of"):
        await refuse_another_vocabulary(engine, policy, (5000,))
    assert engine.asked == []


async def test_a_teacher_that_does_not_say_what_its_tokens_are_is_believed_and_that_is_said(
    policy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await refuse_another_vocabulary(Engine("default"), policy, ())
    assert "vocabulary=unknown" in caplog.text


@pytest.mark.parametrize(("status", "body", "found"), [(200, {"tokens": [5, 6]}, (5, 6)), (404, {}, None)])
async def test_an_engine_says_what_its_tokenizer_makes_of_a_text_or_has_no_route_for_it(
    status: int, body: dict[str, object], found: tuple[int, ...] | None
) -> None:
    async def tokenize(request: web.Request) -> web.Response:
        assert await request.json() == {"prompt": "ab", "add_special_tokens": False}
        return web.json_response(body, status=status)

    app = web.Application()
    app.router.add_post("/tokenize", tokenize)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        assert await SglangEngine(session, str(server.make_url(""))).token_ids("ab") == found


@pytest.mark.parametrize("by_key", [True, False])
async def test_a_keys_answer_is_scored_by_that_keys_adapter_where_each_key_has_one(by_key: bool) -> None:
    student = Engine("0", adapters=["policy-v5", "policy+ben-v4", "policy+anna-v9"])
    client = TeacherClient(Engine("default"), [student], policy_id="policy", by_key=by_key)
    of_key = WANTED._replace(policy_id="policy+ben")
    if by_key:
        assert (await client.score(of_key)).student_version == 4
        assert student.asked == [("policy+ben:policy+ben-v4:0", "policy+ben-v4")]
        of_key = WANTED._replace(policy_id="another+ben")
    with pytest.raises(EngineRefused, match="serves policy, and"):
        await client.score(of_key)
