"""A person's policy, engines, judge and trainer take the place of simulated ones, and are left as they were found."""

import contextlib
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from clawstream.config import EngineSettings, Settings, TrainingSettings, load
from clawstream.inference.clients import engine_session
from clawstream.inference.sglang import SglangEngine
from clawstream.local.servers.server_process import reserved
from clawstream.simulation.learn.scoring import room
from clawstream.simulation.roles import BY_CODE, Roles
from clawstream.simulation.runs.people import People, people_of
from clawstream.simulation.runs.run import Plan, _settings
from clawstream.simulation.runs.scenarios import digest, lent
from clawstream.training.step.trainer import Trainer
from tests.parts.engine.process import cpu_engine
from tests.parts.engine.tiny_model import make_model

OWN = """environment = false
[engine]
model_path = "model"
urls = ["http://gpu:30000"]
[policy]
id = "mine"
served_model = "mine"
renderer = "llama-3"
[judge]
url = "http://judge:8000/v1"
model = "large"
votes = 5
[training]
dtype = "bfloat16"
batch_samples = 99
gradient_checkpointing = true
[kafka]
bootstrap = "kafka:9092"
"""


def own_of(text: str, folder: Path) -> Settings:
    (folder / "own.toml").write_text(text)
    return load(folder / "own.toml")


def settings_of(
    folder: Path, own: Settings | None, method: Literal["opd", "binary"] = "opd", roles: Roles = BY_CODE
) -> Settings:
    files = {"asked": Path("a"), "scored": Path("b"), "scored_flipped": Path("c")}
    people = People(scenario="all", hint_share=0.5, roles=roles, **files)
    plan = Plan(
        people=people, method=method, updates=3, seed=7, folder=folder, cache_dir=folder, base=folder / "model",
        temperature=1.0, training={"learning_rate": 1e-3}, own=own,
    )  # fmt: skip
    return _settings(plan, 1234)


def test_the_run_s_plan_is_kept_and_all_other_parts_are_the_person_s(tmp_path: Path) -> None:
    found = settings_of(tmp_path, own_of(OWN, tmp_path))

    assert (found.engine.urls, found.engine.model_path) == (("http://gpu:30000",), tmp_path / "model")
    assert (found.policy.id, found.policy.served_model, found.policy.renderer) == (tmp_path.name, "policy", "llama-3")
    assert (found.judge.url, found.judge.model, found.judge.votes) == ("http://judge:8000/v1", "large", 5)
    assert (found.training.dtype, found.training.gradient_checkpointing) == ("bfloat16", True)
    assert (found.training.method, found.training.batch_samples, found.training.seed) == ("opd", 16, 7)
    assert found.kafka.bootstrap is None


def test_what_a_method_has_no_use_for_does_not_keep_it_from_being_run(tmp_path: Path) -> None:
    own = own_of(OWN.replace("[training]", '[training]\nteacher = "contrast"'), tmp_path)
    assert settings_of(tmp_path, own, "opd").training.teacher == "contrast"
    assert settings_of(tmp_path, own, "binary").training.teacher is None


def test_an_engine_of_theirs_teaches_under_its_name_and_with_its_key(tmp_path: Path) -> None:
    engine = '[teacher]\nmodel = "32b"\napi_key = "k"\n[training]\nteacher = "http://teacher"'
    own = own_of(OWN.replace("[training]", engine), tmp_path)
    found = settings_of(tmp_path, own, "opd")
    assert (found.training.by_engine, found.teacher) == (True, own.teacher)


@pytest.mark.parametrize("text", [None, OWN, OWN.replace("[judge]", '[judge]\napi_key = "of another"')])
def test_a_judge_that_is_named_for_a_run_is_asked_with_its_key_whatever_else_is_set(
    tmp_path: Path, text: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    own = None if text is None else own_of(text, tmp_path)
    judge = settings_of(tmp_path, own, roles=Roles(judge="small@http://named:1/v1")).judge
    assert (judge.url, judge.model) == ("http://named:1/v1", "small")
    assert judge.votes == (3 if text is None else 5)
    assert judge.api_key is not None
    assert judge.api_key.get_secret_value() == "k"
    assert (tmp_path / "own.json").stat().st_mode & 0o777 == 0o600
    monkeypatch.delenv("OPENAI_API_KEY")
    assert settings_of(tmp_path, own, roles=Roles(judge="small@http://named:1/v1")).judge.api_key is None


def test_without_a_judge_of_their_own_the_simulated_one_is_asked(tmp_path: Path) -> None:
    own = own_of(OWN.replace('url = "http://judge:8000/v1"\n', ""), tmp_path)
    assert settings_of(tmp_path, own).judge == settings_of(tmp_path, None).judge


def test_whatever_is_changed_of_the_policy_or_its_judge_is_another_base(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    text = OWN.replace('"model"', f'"{tmp_path / "model"}"')
    first = digest(own_of(text, tmp_path))
    assert digest(own_of(text, tmp_path)) == first
    others = {
        digest(own_of(text.replace(old, new), tmp_path))
        for old, new in (("votes = 5", "votes = 9"), ("batch_samples = 99", "batch_samples = 9"))
    } | {digest(own_of(text.replace("large", "larger"), tmp_path))}
    (tmp_path / "model" / "config.json").write_text("{ }")
    assert len({first, digest(own_of(text, tmp_path)), *others}) == 5


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_an_engine_at_an_address_is_scored_on_and_has_the_base_again_afterwards(tmp_path: Path) -> None:
    model, other = make_model(tmp_path / "model"), make_model(tmp_path / "other", seed=1)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    Trainer(model, TrainingSettings(lora_rank=2)).save(adapter)
    people = people_of("student", tmp_path)
    few = tmp_path / "few.jsonl"
    few.write_text("".join(people.scored.read_text().splitlines(keepends=True)[:3]))
    cache_dir = Settings(environment=False).cache_dir
    with reserved() as port, cpu_engine(model, port) as url:
        text = OWN.replace("http://gpu:30000", url).replace('"model"', f'"{model}"').replace("llama-3", "qwen3")
        own = own_of(text, tmp_path)
        async with engine_session(own.engine) as http:
            engine = SglangEngine(http, url)
            await engine.update_weights(str(other), "9")
            async with room(tmp_path / "room", replace(people, scored=few), cache_dir, own=own) as asking:
                for checkpoint, version in ((model, 0), (other, 7), (adapter, 8)):
                    found = await asking.score(checkpoint, version, base=model)
                    assert (found.update, found.num_problems) == (version, 3)
                    assert (await engine.weight_version(), await engine.lora_adapters()) == ("0", ())


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_an_engine_that_died_is_named_and_the_others_are_given_back_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, other = make_model(tmp_path / "model"), make_model(tmp_path / "other", seed=1)
    with contextlib.ExitStack() as dying, reserved() as first, reserved() as second, cpu_engine(model, second) as url:
        dead = dying.enter_context(cpu_engine(model, first))
        lending = EngineSettings(model_path=model, urls=(dead, url))
        async with engine_session(lending) as http:
            engine = SglangEngine(http, url)

            async def run() -> None:
                async with lent(lending, model):
                    await engine.update_weights(str(other), "9")
                    dying.close()
                    raise ArithmeticError("of the run")

            with pytest.raises(ArithmeticError, match="of the run"):
                await run()
            assert await engine.weight_version() == "0"
    (said,) = [
        record.getMessage() for record in caplog.records if record.name == "clawstream.simulation.runs.scenarios"
    ]
    assert said.startswith(f"engine={dead} state=not given back reason=")


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_an_engine_that_refuses_its_base_is_named_and_hides_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, base = make_model(tmp_path / "model"), make_model(tmp_path / "base")
    with reserved() as port, cpu_engine(model, port) as url:
        lending = EngineSettings(model_path=model, urls=(url,))

        async def run() -> None:
            async with lent(lending, base):
                shutil.rmtree(base)
                raise ArithmeticError("of the run")

        with pytest.raises(ArithmeticError, match="of the run"):
            await run()
    (said,) = [
        record.getMessage() for record in caplog.records if record.name == "clawstream.simulation.runs.scenarios"
    ]
    assert said.startswith(f"engine={url} state=not given back reason=")
