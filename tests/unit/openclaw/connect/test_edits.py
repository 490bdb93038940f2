"""What connecting changes in the text of openclaw.json: two values, and disconnecting takes back these two alone."""

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.errors import ConfigError
from clawstream.local import openclaw_config
from clawstream.local.openclaw_config import Config, parse
from tests.unit.openclaw.connect.texts import COMMENTED, OURS, configs, connect, disconnect, primary, render, values


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


@pytest.mark.parametrize("thinks", [True, False])
def test_openclaw_is_told_whether_the_model_thinks(thinks: bool) -> None:
    assert replace(OURS, thinks=thinks).entry()["models"][0]["reasoning"] is thinks
