"""Who may use the embedded broker: clients with the password in its folder, which only this user can read.

Clients prove that they have the password (SCRAM) and do not send it, so a stranger who listens on the port of a broker
that is down learns nothing. The controller's port is for the broker itself, by a password that changes with each start.
"""

import secrets
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from clawstream.local.servers.folders import write_private
from clawstream.local.servers.ports import HOST

_USER = "clawstream"
_MECHANISM = "SCRAM-SHA-256"
_KEPT_IN = "password"
_MODULES = "org.apache.kafka.common.security"


def new_password() -> str:
    """Return a password that needs no quoting anywhere."""
    return secrets.token_hex(24)


def password_in(folder: Path) -> str | None:
    """Return the password of the broker in `folder`; None: it lets everybody in."""
    try:
        return (folder / _KEPT_IN).read_text()
    except FileNotFoundError:
        return None


def keep_password(folder: Path, password: str) -> None:
    """Store the password where `password_in` finds it."""
    write_private(folder / _KEPT_IN, password)


def access_to(folder: Path, bootstrap: str) -> dict[str, Any]:
    """Return the Kafka settings of a client of the broker in `folder`, which is at `bootstrap`."""
    password = password_in(folder)
    if password is None:
        return {"bootstrap": bootstrap}
    return {
        "bootstrap": bootstrap,
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": _MECHANISM,
        "sasl_username": _USER,
        "sasl_password": SecretStr(password),
    }


def credential(password: str) -> str:
    """Return what Kafka's tools take as a user's password, with the user's name before it."""
    return f"{_MECHANISM}=[name={_USER},password={password}]"


def alteration(password: str) -> tuple[str, list[str]]:
    """Return a file's content, and what kafka.admin.ConfigCommand is told with it, that gives the user the password."""
    return f"{_MECHANISM}=password={password}\n", ["--alter", "--entity-type", "users", "--entity-name", _USER]


def listeners(port: int, controller_port: int, password: str | None) -> str:
    """Return the broker's settings for its two ports; with no password they are open to all on this machine."""
    if password is None:
        return (
            f"listeners=PLAINTEXT://{HOST}:{port},CONTROLLER://{HOST}:{controller_port}\n"
            f"advertised.listeners=PLAINTEXT://{HOST}:{port}\n"
        )
    own = new_password()
    client, controller = "listener.name.client", "listener.name.controller"
    return (
        f"listeners=CLIENT://{HOST}:{port},CONTROLLER://{HOST}:{controller_port}\n"
        f"advertised.listeners=CLIENT://{HOST}:{port}\n"
        "listener.security.protocol.map=CLIENT:SASL_PLAINTEXT,CONTROLLER:SASL_PLAINTEXT\n"
        "inter.broker.listener.name=CLIENT\n"
        f"sasl.mechanism.inter.broker.protocol={_MECHANISM}\n"
        f"{client}.sasl.enabled.mechanisms={_MECHANISM}\n"
        f"{client}.{_MECHANISM.lower()}.sasl.jaas.config={_MODULES}.scram.ScramLoginModule required "
        f'username="{_USER}" password="{password}";\n'
        "sasl.mechanism.controller.protocol=PLAIN\n"
        f"{controller}.sasl.enabled.mechanisms=PLAIN\n"
        f"{controller}.plain.sasl.jaas.config={_MODULES}.plain.PlainLoginModule required "
        f'username="broker" password="{own}" user_broker="{own}";\n'
    )
