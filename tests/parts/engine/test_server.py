"""What the engine's process takes of the machine where it is not told: threads that give way, and few large caches."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
from typer.testing import CliRunner

from clawstream.cli import app
from clawstream.local.engine import __main__ as alone
from clawstream.local.engine import server
from tests.parts.engine.tiny_model import make_model


class _Started(Exception):
    """In place of serving."""


def _as_a_stage(folder: Path, *more: str) -> None:
    config = folder / "clawstream.toml"
    config.write_text("\n".join(["environment = false", "[engine]", f'model_path = "{folder}"', *more]))
    CliRunner().invoke(app, ["-c", str(config), "engine"])


def _by_itself(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["engine", "--model-path", str(folder)])
        alone.main()


@pytest.mark.parametrize("start", [_as_a_stage, _by_itself])
@pytest.mark.parametrize(("own", "then"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_its_threads_sleep_while_they_wait_unless_somebody_says_otherwise(
    start: Callable[[Path], None], own: str | None, then: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []
    monkeypatch.setattr(server, "serve", lambda **_: seen.append(os.environ.get("OMP_WAIT_POLICY")))
    monkeypatch.setenv("OMP_WAIT_POLICY", "")  # so that it is put back
    monkeypatch.delenv("OMP_WAIT_POLICY") if own is None else monkeypatch.setenv("OMP_WAIT_POLICY", own)
    start(tmp_path)
    assert seen == [then]


@pytest.mark.parametrize(("more", "dtype"), [([], "float32"), (["[training]", "lora_rank = 4"], "float16")])
def test_it_keeps_weights_in_halves_where_an_adapter_is_trained_and_they_do_not_change(
    more: Sequence[str], dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []
    monkeypatch.setattr(server, "serve", lambda **options: seen.append(options["dtype"]))
    _as_a_stage(tmp_path, *more)
    assert seen == [dtype]


@pytest.mark.parametrize(("small", "asked", "num"), [(10**9, None, 64), (1, None, 16), (1, 3, 3)])
def test_a_large_model_has_fewer_requests_at_once_as_each_takes_more_memory(
    small: int, asked: int | None, num: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def core(*_: Any, num_rows: int, **__: object) -> NoReturn:
        seen.append(num_rows)
        raise _Started

    monkeypatch.setattr(server, "SMALL_PARAMETERS", small)
    monkeypatch.setattr(server, "Core", core)
    monkeypatch.setattr(server, "listening", lambda *_: None)
    with pytest.raises(_Started):
        server.serve(str(make_model(tmp_path / "model", seed=0)), port=0, max_running_requests=asked)
    assert seen == [num]
