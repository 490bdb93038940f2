"""A test in this folder touches memory and its own temporary folder alone: a process or a connection fails it."""

import multiprocessing.process
import socket
import subprocess
from typing import NoReturn

import pytest


@pytest.fixture(autouse=True)
def _no_real_part(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> NoReturn:
        raise AssertionError("this test starts a process or opens a connection: it belongs in tests/parts")

    monkeypatch.setattr(subprocess.Popen, "__init__", refused)
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", refused)
    for name in ("connect", "connect_ex", "bind"):
        monkeypatch.setattr(socket.socket, name, refused)
