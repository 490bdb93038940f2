"""Podman with a store of its own below the cache folder: nothing of this machine's containers is seen or changed.

It is installed by apt where root may. Containers have networks of their own, for which netavark asks for iptables. A
machine may have neither systemd nor the right to raise limits; it can still start containers with runc and cgroupfs.
"""

import os
import resource
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from clawstream.errors import PartUnavailable
from clawstream.local.servers import accounts
from clawstream.local.servers.accounts import write_private

PACKAGES = ("podman", "buildah", "runc", "netavark", "aardvark-dns", "iptables", "mmdebstrap")
PROGRAMS = ("podman", "runc", "iptables", "mmdebstrap")
COMPOSE = "podman-compose==1.6.0"
INSTALLED_WITHIN_S = 600.0
SERVICE_WITHIN_S = 30.0
ENOUGH = 4096  # files of a process, and processes of a user: nobody but a privileged user can raise them


@dataclass(frozen=True, slots=True, kw_only=True)
class Podman:
    """Podman's commands, and the variables that name its store."""

    folder: Path
    environment: Mapping[str, str] = field(repr=False)

    def run(self, *words: str, within_s: float = 60.0, check: bool = True) -> str:
        """Return what `podman WORDS` printed; raises CalledProcessError, which holds its stderr."""
        return said(("podman", *words), self.environment, within_s=within_s, check=check)

    def ran(self, *words: str, within_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Return how `podman WORDS` ended, however it did; 124: not in time."""
        command = ("podman", *words)
        try:
            return subprocess.run(
                command, env=self.environment, capture_output=True, text=True, timeout=within_s, check=False
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 124, stdout="", stderr=f"not within {within_s:g} s")

    def has(self, image: str) -> bool:
        return self.ran("image", "exists", image).returncode == 0

    @contextmanager
    def service(self) -> Iterator[str]:
        """Yield the address at which Docker's clients are answered while the block runs."""
        path = self.folder / "podman.sock"
        path.unlink(missing_ok=True)
        with (self.folder / "service.log").open("w") as log:
            process = subprocess.Popen(
                ("podman", "system", "service", "--time=0", f"unix://{path}"),
                env=self.environment, stdout=log, stderr=log,
            )  # fmt: skip
        try:
            deadline = time.monotonic() + SERVICE_WITHIN_S
            while not _pings(path):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise PartUnavailable(f"podman's service: {(self.folder / 'service.log').read_text()}")
                time.sleep(0.05)
            yield f"unix://{path}"
        finally:
            process.terminate()
            process.wait()


def podman() -> Podman:
    """Return podman, installed where it is missing; raises PartUnavailable where it can't be."""
    if any(shutil.which(program) is None for program in PROGRAMS):
        _install()
    folder = accounts.cache_folder() / "containers"
    folder.mkdir(parents=True, exist_ok=True)
    _write_settings(folder)
    named = {"CONTAINERS_CONF": "containers.conf", "CONTAINERS_STORAGE_CONF": "storage.conf"}
    return Podman(folder=folder, environment={**os.environ, **{key: str(folder / name) for key, name in named.items()}})


def _pings(path: Path) -> bool:
    """Whether who listens there answers Docker's clients; the first answer takes a while."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(SERVICE_WITHIN_S)
        try:
            connection.connect(str(path))
            connection.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
            return b" 200 " in connection.recv(64)
        except OSError:
            return False


def said(command: Sequence[str], environment: Mapping[str, str], *, within_s: float, check: bool = True) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=within_s, check=False)
    if check and done.returncode != 0:
        raise PartUnavailable(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def _install() -> None:
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise PartUnavailable(
            f"tests of containers need {', '.join(PROGRAMS)}, as root: apt-get install {' '.join(PACKAGES)}"
        )
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    said(("apt-get", "update", "-qq"), environment, within_s=INSTALLED_WITHIN_S)
    packages = ("install", "-y", "-qq", "--no-install-recommends", *PACKAGES)
    said(("apt-get", *packages), environment, within_s=INSTALLED_WITHIN_S)


def _write_settings(folder: Path) -> None:
    limits = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC}
    most = {name: resource.getrlimit(limit)[1] for name, limit in limits.items()}
    counts = {name: ENOUGH if most[name] == resource.RLIM_INFINITY else min(most[name], ENOUGH) for name in limits}
    told = ", ".join(f'"{name}={count}:{count}"' for name, count in counts.items())
    write_private(
        folder / "containers.conf",
        f'[containers]\ndefault_ulimits = [{told}]\n[engine]\ncgroup_manager = "cgroupfs"\nruntime = "runc"\n'
        f'events_logger = "file"\ntmp_dir = "{folder}/tmp"\n[network]\nnetwork_config_dir = "{folder}/networks"\n',
    )
    write_private(
        folder / "storage.conf",
        f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/store"\nrunroot = "{folder}/run"\n',
    )
