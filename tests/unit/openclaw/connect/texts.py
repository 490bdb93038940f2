"""Configurations of OpenClaw, and what connecting and disconnecting make of them."""

import json
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from typer.testing import Result

from clawstream.local import openclaw_config
from clawstream.local.openclaw_config import Config, Provider, parse

OURS = Provider(name="claw", base_url="http://127.0.0.1:1/v1", api_key="KEY", model="policy", context_tokens=32_768)
Run = Callable[..., Result]
COMMENTED = """// mine
{
  agents: { defaults: { model: { primary: 'openai/gpt' }, }, },
}
"""
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
