"""Two machines for a test: this one, and a network namespace at the other end of a cable. Needs root and iproute2."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

LAUNCHER = (sys.executable, "-m", "torch.distributed.run")
ENDED_WITHIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a command runs, and how the other machine reaches it."""

    address: str
    interface: str
    inside: tuple[str, ...] = ()  # goes before a command

    def torchrun(
        self, command: Sequence[str], *, rendezvous: str, words: Path, inside: Sequence[str] = ()
    ) -> "subprocess.Popen[bytes]":
        """Start one process of two with the command; its output goes to the end of `words`."""
        options = {
            "--nnodes": "2", "--nproc-per-node": "1", "--rdzv-backend": "c10d", "--rdzv-endpoint": rendezvous,
            "--rdzv-conf": f"is_host={int(not self.inside)}", "--rdzv-id": "train", "--local-addr": self.address,
        }  # fmt: skip
        said = [word for option in options.items() for word in option]
        with words.open("ab") as output:
            whole = [*self.inside, *inside, *LAUNCHER, *said, *command]
            return subprocess.Popen(whole, stdout=output, stderr=output, env=self._environment())

    def _environment(self) -> Mapping[str, str]:
        return {**os.environ, "GLOO_SOCKET_IFNAME": self.interface, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Yield this machine and another one, which are there until the block ends."""
    name = f"clw{os.getpid() % 100_000}"
    net = f"10.{100 + os.getpid() % 100}.{os.getpid() // 100 % 250}"
    ours, theirs = f"{name}a", f"{name}b"
    _ip("netns", "add", name)
    try:
        _ip("link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", name)
        _ip("addr", "add", f"{net}.1/24", "dev", ours)
        _ip("link", "set", ours, "up")
        _ip("-n", name, "addr", "add", f"{net}.2/24", "dev", theirs)
        for interface in (theirs, "lo"):
            _ip("-n", name, "link", "set", interface, "up")
        yield Machine(f"{net}.1", ours), Machine(f"{net}.2", theirs, ("ip", "netns", "exec", name))
    finally:
        _ip("netns", "delete", name)


def trainer_of(launcher: "subprocess.Popen[bytes]") -> psutil.Process:
    """Return the process that the launcher started to train."""
    [trainer] = [
        child
        for child in psutil.Process(launcher.pid).children(recursive=True)
        if not {"torch.distributed.run", "multiprocessing"} & {word.split(".spawn")[0] for word in child.cmdline()}
    ]
    return trainer


def lose(launcher: "subprocess.Popen[bytes]") -> None:
    """Kill the launcher and all that it started at one moment; the kernel closes their connections."""
    with suppress(psutil.NoSuchProcess):
        whole = psutil.Process(launcher.pid)
        for process in [whole, *whole.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
    launcher.wait(ENDED_WITHIN_S)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)
