"""`clawstream openclaw`: what it changes in openclaw.json, and that nothing of a person's is ever lost."""

import asyncio
import json
import os
import re
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from clawstream.cli import app, openclaw, openclaw_config
from clawstream.cli.openclaw import openclaw_json
from clawstream.cli.openclaw_config import Config, Provider, diff, parse, too_few
from clawstream.errors import ConfigError
from tests.engine.tiny_model import make_tokenizer
from tests.gateway.house import house, until

OURS = Provider(name="claw", base_url="http://127.0.0.1:1/v1", api_key="KEY", model="policy", context_tokens=32_768)
Run = Callable[..., Result]

scalars = st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | st.text(max_size=3)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2)
)
anything = st.dictionaries(st.sampled_from(["gateway", "env", "a", "baseUrl"]), values, max_size=3)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """Configurations that have some, all or none of what connecting touches."""
    config: Config = dict(draw(anything))
    if draw(st.booleans()):
        config["models"] = draw(anything)
        if draw(st.booleans()):
            config["models"]["providers"] = draw(st.dictionaries(st.sampled_from(["claw", "openai"]), values))
    if draw(st.booleans()):
        config["agents"] = draw(anything)
        if draw(st.booleans()):
            model = st.text() | st.fixed_dictionaries({}, optional={"primary": st.text(), "fallbacks": values})
            config["agents"]["defaults"] = draw(anything) | {"model": draw(model)}
    return config


def render(config: Config) -> str:
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"


def connect(config: Config, provider: Provider) -> Config:
    return parse(openclaw_config.connect(render(config), provider), "")


def disconnect(before: Config, written: Config, now: Config) -> Config:
    return parse(openclaw_config.disconnect(render(before), render(written), render(now)), "")


def primary(config: Config) -> Any:
    model = config["agents"]["defaults"]["model"]
    return model if isinstance(model, str) else model["primary"]


@given(configs())
def test_connecting_names_the_gateway_and_changes_nothing_else(config: Config) -> None:
    found = connect(config, OURS)
    assert primary(found) == "claw/policy"
    assert found["models"]["providers"]["claw"].items() >= OURS.entry().items()
    assert {key: found[key] for key in config.keys() - {"models", "agents"}} == {
        key: config[key] for key in config.keys() - {"models", "agents"}
    }
    assert found["models"]["providers"].keys() - {"claw"} == (
        config.get("models", {}).get("providers", {}).keys() - {"claw"}
    )


@given(configs())
def test_disconnecting_undoes_connecting(config: Config) -> None:
    written = connect(config, OURS)
    assert render(disconnect(config, written, written)) == render(config)


@given(configs())
def test_connecting_twice_is_connecting_once(config: Config) -> None:
    once = connect(config, OURS)
    assert render(connect(once, OURS)) == render(once)


@given(config=configs(), key=st.sampled_from(["x", "models", "agents"]), value=values)
def test_what_a_person_adds_meanwhile_stays(config: Config, key: str, value: object) -> None:
    def edited(before: Config) -> Config:
        inner = before.get(key)
        return {**before, key: {**inner, "added": value} if isinstance(inner, dict) else {"added": value}}

    written = connect(config, OURS)
    assert disconnect(config, written, edited(written)) == edited(config)


@given(config=configs(), model=st.text(min_size=1))
def test_a_model_and_a_provider_that_a_person_changed_meanwhile_stay(config: Config, model: str) -> None:
    written = connect(config, OURS)
    now = json.loads(render(written))
    now["agents"]["defaults"]["model"] = {"primary": model}
    now["models"]["providers"]["claw"]["headers"] = {"x": "y"}
    found = disconnect(config, written, now)
    assert primary(found) == model
    assert found["models"]["providers"]["claw"] == OURS.entry() | now["models"]["providers"]["claw"]


@pytest.mark.parametrize(("context", "answer"), [(3, 1), (4_000, 1_000), (200_000, 8_192)])
def test_an_answer_gets_a_quarter_of_the_context_and_at_most_8192_tokens(context: int, answer: int) -> None:
    assert replace(OURS, context_tokens=context).entry()["models"][0]["maxTokens"] == answer


def test_a_change_from_false_to_0_is_a_person_s_too() -> None:
    written = connect({}, OURS)
    now = json.loads(render(written).replace("false", "0"))
    assert disconnect({}, written, now)["models"] == now["models"]


@given(config=configs(), kept=st.dictionaries(st.sampled_from(["headers", "apiKey", "baseUrl"]), values))
def test_an_entry_keeps_what_ours_has_not_and_has_all_of_ours(config: Config, kept: Config) -> None:
    models = {"providers": {"claw": kept}}
    assert connect(config | {"models": models}, OURS)["models"]["providers"]["claw"] == kept | OURS.entry()


def test_a_file_that_is_in_the_way_is_named() -> None:
    with pytest.raises(ConfigError, match=r"models\.providers is list"):
        connect({"models": {"providers": []}}, OURS)
    with pytest.raises(ConfigError, match="not JSON5"):
        parse("{a:", "openclaw.json")
    with pytest.raises(ConfigError, match="list, not an object"):
        parse("[]", "openclaw.json")


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({"HOME": "/h"}, "/h/.openclaw/openclaw.json"),
        ({"HOME": "/h", "OPENCLAW_HOME": "/o"}, "/o/.openclaw/openclaw.json"),
        ({"HOME": "/h", "OPENCLAW_HOME": "~/o"}, "/h/o/.openclaw/openclaw.json"),
        ({"HOME": "/h", "OPENCLAW_HOME": " undefined "}, "/h/.openclaw/openclaw.json"),
        ({"HOME": "/h", "OPENCLAW_PROFILE": "work"}, "/h/.openclaw-work/openclaw.json"),
        ({"HOME": "/h", "OPENCLAW_PROFILE": "Default"}, "/h/.openclaw/openclaw.json"),
        ({"HOME": "/h", "OPENCLAW_STATE_DIR": "/s", "OPENCLAW_HOME": "/o"}, "/s/openclaw.json"),
        ({"HOME": "/h", "OPENCLAW_STATE_DIR": "/s", "OPENCLAW_CONFIG_PATH": "~/c.json"}, "/h/c.json"),
    ],
)
def test_the_file_is_looked_for_where_openclaw_looks(environment: dict[str, str], found: str) -> None:
    assert openclaw_json(environment) == Path(found)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / ".openclaw" / "openclaw.json"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    for name in [name for name in os.environ if name.startswith("OPENCLAW_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OPENCLAW_HOME", str(tmp_path))
    settings = tmp_path / "clawstream.toml"
    settings.write_text('[gateway]\nport = 1\napi_key = "s3cret"\n')

    def invoke(*argv: str) -> Result:
        return CliRunner().invoke(app, ["--config", str(settings), "openclaw", *argv])

    return invoke


COMMENTED = """// mine
{
  agents: { defaults: { model: { primary: 'openai/gpt' }, }, },
}
"""


def test_without_write_the_change_is_shown_and_nothing_is_changed(run: Run, file: Path) -> None:
    file.parent.mkdir()
    file.write_text(COMMENTED)
    found = run("connect")
    assert found.exit_code == 0
    assert '+  agents: { defaults: { model: { primary: "clawstream/policy" }, }, },' in found.stdout
    assert "s3cret" not in found.output
    assert (file.read_text(), [one.name for one in file.parent.iterdir()]) == (COMMENTED, ["openclaw.json"])


def test_disconnecting_brings_an_untouched_file_back_byte_for_byte(run: Run, file: Path) -> None:
    file.parent.mkdir()
    file.write_text(COMMENTED)
    file.chmod(0o640)
    assert run("connect", "--write").exit_code == 0
    written = file.read_text()
    assert parse(written, "")["models"]["providers"]["clawstream"]["apiKey"] == "s3cret"
    assert written.startswith("// mine\n")
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert file.with_name("openclaw.json.before-clawstream").read_text() == COMMENTED
    again = run("connect", "--write")
    assert (again.stdout, file.read_text()) == ("", written)
    assert run("connect", "--write", "--url", "http://elsewhere").exit_code == 0
    found = run("disconnect")
    assert "s3cret" not in found.output
    assert (file.read_text(), [one.name for one in file.parent.iterdir()]) == (COMMENTED, ["openclaw.json"])
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert run("disconnect").exit_code == 0


def test_a_file_that_was_not_there_is_made_for_this_user_alone_and_goes_again(run: Run, file: Path) -> None:
    assert run("connect", "--write", "--provider", "mine", "--url", "http://there:5").exit_code == 0
    config = json.loads(file.read_text())
    assert config["models"]["providers"]["mine"]["baseUrl"] == "http://there:5/v1"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert run("disconnect").exit_code == 0
    assert list(file.parent.iterdir()) == []


def test_edits_outlive_another_connection_and_its_end(run: Run, file: Path) -> None:
    file.parent.mkdir()
    file.write_text(COMMENTED)
    run("connect", "--write", "--url", "http://a")
    file.write_text(file.read_text().replace("// mine\n{", "// mine\n{\n  env: { A: '1' }, // by hand"))
    run("connect", "--write", "--url", "http://b")
    assert parse(file.read_text(), "")["models"]["providers"]["clawstream"]["baseUrl"] == "http://b/v1"
    assert run("disconnect").exit_code == 0
    assert file.read_text() == COMMENTED.replace("{\n", "{\n  env: { A: '1' }, // by hand\n", 1)


def test_after_an_edit_by_hand_only_our_change_is_undone_and_comments_and_the_backup_stay(run: Run, file: Path) -> None:
    file.parent.mkdir()
    file.write_text(COMMENTED)
    run("connect", "--write")
    file.write_text(file.read_text().replace("// mine\n{", "// mine\n{\n  env: { A: '1' }, // by hand"))
    found = run("disconnect")
    assert found.exit_code == 0
    assert file.read_text() == COMMENTED.replace("{\n", "{\n  env: { A: '1' }, // by hand\n", 1)
    backup = file.with_name("openclaw.json.before-clawstream")
    assert backup.read_text() == COMMENTED
    assert str(backup) in found.stderr
    assert not file.with_name("openclaw.json.clawstream").exists()


def test_a_backup_that_was_kept_is_not_overwritten_by_the_next_connection(run: Run, file: Path) -> None:
    file.parent.mkdir()
    file.write_text(COMMENTED)
    run("connect", "--write")
    file.write_text(render(parse(file.read_text(), "") | {"env": {"A": "1"}}))  # as OpenClaw writes it: no comments
    run("disconnect")
    assert parse(file.read_text(), "") == parse(COMMENTED, "") | {"env": {"A": "1"}}
    run("connect", "--write")
    run("disconnect")
    assert file.with_name("openclaw.json.before-clawstream.1").read_text() == COMMENTED
    assert not file.with_name("openclaw.json.before-clawstream").exists()


ODD = """// first
{ // after the brace
  /* before */ "models": { providers: { /* none of ours */ } /* after */ }, // behind
  list: [1, {a: ["}", '{', ], }, "// no comment"],
  'agents': {
    defaults: {
      // which one
      model: 'openai/gpt', // this one
    },
  }
}
// last
"""


@pytest.mark.parametrize(
    "text", [COMMENTED, ODD, ODD.replace("\n", "\r\n"), "", "// nothing\n", "{}", "{a:1}", "{a:1,}"]
)
def test_all_but_the_layout_stays_when_connecting_and_comes_back_when_disconnecting(text: str) -> None:
    written = openclaw_config.connect(text, OURS)
    assert primary(parse(written, "")) == "claw/policy"
    for comment in re.findall(r"//[^\n]*|/\*.*?\*/", text):
        assert comment in written
    found = openclaw_config.disconnect(text, written, written)
    assert "".join(found.split()) == "".join((text if "{" in text else f"{text}{{}}").split())


@given(config=configs(), name=st.sampled_from(["x", "env"]), layout=st.sampled_from([None, 0, 3]))
def test_whatever_its_layout_a_file_is_itself_again(config: Config, name: str, layout: int | None) -> None:
    text = json.dumps(config | {name: {}}, indent=layout)
    written = openclaw_config.connect(text, OURS)
    assert parse(openclaw_config.disconnect(text, written, written), "") == parse(text, "")


def test_what_a_comment_says_is_never_shown(run: Run, file: Path) -> None:
    file.parent.mkdir()
    file.write_text("{\n  // was sk-abcdef before\n  /* and\n sk-ghijkl */\n  a: 1, // my key: 'sk-mnopqr'\n}\n")
    found = run("connect")
    assert "clawstream/policy" in found.stdout
    assert "sk-" not in found.output


@pytest.mark.parametrize("thinks", [True, False])
def test_openclaw_is_told_whether_the_model_thinks(thinks: bool) -> None:
    assert replace(OURS, thinks=thinks).entry()["models"][0]["reasoning"] is thinks


@pytest.mark.parametrize("number", range(3))
def test_wherever_connecting_was_cut_it_is_undone(
    run: Run, file: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    file.parent.mkdir()
    file.write_text(COMMENTED)
    written: list[Path] = []

    def cut(path: Path, text: str, mode: int) -> None:
        if len(written) == number:
            raise ConfigError("no space left")
        written.append(path)
        replace_file(path, text, mode)

    replace_file = openclaw._replace
    with monkeypatch.context() as broken:
        broken.setattr(openclaw, "_replace", cut)
        assert run("connect", "--write").exit_code == 1
    assert run("disconnect").exit_code == 0
    assert parse(file.read_text(), "") == parse(COMMENTED, "")
    assert run("connect", "--write").exit_code == 0
    assert run("disconnect").exit_code == 0
    assert parse(file.read_text(), "") == parse(COMMENTED, "")


async def test_the_gateway_says_how_long_its_context_is_and_has_to_serve_the_model(
    run: Run, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tokenizer(tmp_path / "model")
    async with house(tmp_path / "model") as gateway:
        await until(gateway.ready)
        connecting = await asyncio.to_thread(run, "connect", "--write", "--url", gateway.url)
        assert connecting.exit_code == 0
        written = json.loads(await asyncio.to_thread(file.read_text))
        (model,) = written["models"]["providers"]["clawstream"]["models"]
        _, listed = await gateway.get("/v1/models")
        assert model["contextWindow"] == json.loads(listed)["data"][0]["max_model_len"] != 32_768
        assert model["reasoning"] is json.loads(listed)["data"][0]["reasoning"]
        monkeypatch.setenv("CLAWSTREAM_POLICY__SERVED_MODEL", "another")
        refused = await asyncio.to_thread(run, "connect", "--url", gateway.url)
    assert isinstance(refused.exception, ConfigError)
    assert "serves policy, not 'another'" in str(refused.exception)


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://127.0.0.1:1/v1"), ("::", "http://127.0.0.1:1/v1"), ("::1", "http://[::1]:1/v1")],
)
def test_openclaw_is_told_an_address_that_it_can_reach(
    run: Run, file: Path, tmp_path: Path, host: str, url: str
) -> None:
    (tmp_path / "clawstream.toml").write_text(f'[gateway]\nport = 1\nhost = "{host}"\napi_key = "s3cret"\n')
    assert run("connect", "--write").exit_code == 0
    assert json.loads(file.read_text())["models"]["providers"]["clawstream"]["baseUrl"] == url


def test_a_link_stays_a_link(run: Run, file: Path, tmp_path: Path) -> None:
    file.parent.mkdir()
    real = tmp_path / "real.json"
    real.write_text("{}")
    file.symlink_to(real)
    run("connect", "--write")
    assert file.is_symlink()
    assert "clawstream" in real.read_text()


def test_a_file_that_can_not_be_read_is_an_operator_s_error(run: Run, file: Path) -> None:
    file.parent.mkdir()
    file.write_text("{ agents: ")
    assert isinstance(run("connect", "--write").exception, ConfigError)
    assert file.read_text() == "{ agents: "
    file.unlink()
    file.mkdir()
    assert isinstance(run("connect").exception, ConfigError)


def test_an_agent_with_a_model_of_its_own_is_named(run: Run, file: Path) -> None:
    file.parent.mkdir()
    file.write_text('{"agents": {"entries": {"ops": {"model": "openai/gpt"}, "home": {}}}}')
    found = run("connect")
    assert "agent ops names a model of its own" in found.stderr
    assert "agent home" not in found.stderr


SECRETS = """{
  // my old apiKey: 'LEAK-comment', don't use
  apiKey: 'LEAK-single', "botToken" : "LEAK-\\"double", /* password = LEAK-block */
  channels: { telegram: { botToken: /* why */
      'LEAK-next-line', AUTH_TOKEN: "LEAK-upper", maxTokens: 8192 } },
  secrets: { shown: ["LEAK-list", { name: "LEAK-inner" }] }, after: "seen",
  OPENAI_API_KEY: 'LEAK-two\\
lines', providers: [{ password: "LEAK-password", id: "also seen" }],
}
"""


def test_no_secret_of_a_file_is_shown_on_either_side_of_the_change() -> None:
    before = {"apiKey": "one", "secret": {"a": ["LEAK-json"]}, "token": "\ud800", "id": "plain"}
    for old, new in ((SECRETS, render(parse(SECRETS, ""))), (render(before), "{}"), ("", SECRETS)):
        shown = diff(old, new, "openclaw.json")
        assert "LEAK" not in shown
        assert "\0" not in shown
    shown = diff(SECRETS, render(parse(SECRETS, "")), "openclaw.json")
    for plain in ("8192", '"seen"', '"also seen"', '"name": "***"', '"maxTokens"'):
        assert plain in shown


def test_a_change_of_the_key_alone_is_still_a_change() -> None:
    shown = diff('{"apiKey": "old"}\n', '{"apiKey": "new"}\n', "openclaw.json")
    assert shown.splitlines()[-2:] == ['-{"apiKey": "***"}', '+{"apiKey": "***"}']
    assert diff('{"apiKey": "old"}', '{"apiKey": "old"}', "openclaw.json") == ""


@given(st.dictionaries(st.sampled_from(["apiKey", "botToken", "clientSecret", "PASSWORD"]), st.text(max_size=5)))
def test_what_is_hidden_is_what_the_file_holds(found: dict[str, str]) -> None:
    config = {"plugins": [{name: f"LEAK{value}" for name, value in found.items()}]}
    assert "LEAK" not in diff(json.dumps(config), render(config), "openclaw.json")


def test_a_new_key_does_not_show_the_old_one(run: Run) -> None:
    assert run("connect", "--write", "--key", "cs-old").exit_code == 0
    found = run("connect", "--key", "cs-new")
    assert (found.exit_code, '+        "apiKey": "***"' in found.stdout or '"apiKey": "***"' in found.stdout) == (
        0,
        True,
    )
    assert "cs-old" not in found.output
    assert "cs-new" not in found.output


@pytest.mark.parametrize("argv", [(), ("--key", "wrong")])
async def test_a_key_that_opens_nothing_changes_nothing(
    run: Run, file: Path, tmp_path: Path, argv: tuple[str, ...]
) -> None:
    make_tokenizer(tmp_path / "model")
    (tmp_path / "clawstream.toml").write_text("[gateway]\nport = 1\n")
    async with house(tmp_path / "model", api_key="right") as gateway:
        refused = await asyncio.to_thread(run, "connect", "--write", "--url", gateway.url, *argv)
        assert isinstance(refused.exception, ConfigError)
        assert "HTTP 401" in str(refused.exception)
        assert "--key" in str(refused.exception)
        assert not await asyncio.to_thread(file.exists)
        accepted = await asyncio.to_thread(run, "connect", "--write", "--url", gateway.url, "--key", "right")
        assert accepted.exit_code == 0


async def test_a_context_that_is_too_short_for_openclaw_is_said(run: Run, tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "model")
    async with house(tmp_path / "model") as gateway:
        await until(gateway.ready)
        shown = await asyncio.to_thread(run, "connect", "--url", gateway.url)
    assert shown.exit_code == 0
    assert "tokens of context are too few for OpenClaw" in shown.stderr


@pytest.mark.parametrize(("tokens", "too_short"), [(16_384, True), (32_767, True), (32_768, False)])
def test_32768_tokens_of_context_are_enough(tokens: int, too_short: bool) -> None:
    assert (too_few(tokens) is not None) == too_short
