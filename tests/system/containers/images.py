"""Images for tests, from what this machine has: no registry is asked.

The base is made from the packages of this machine's own Debian or Ubuntu, once. Kafka and Postgres are those that the
package embeds, in the places and with the variables of the images that Compose names.
"""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from clawstream.local.servers import accounts, jars
from tests.parts.deploy.test_deploy import DEPLOY
from tests.parts.deploy.test_postgres_accounts import programs
from tests.system.containers.podman import Podman, podman, said

HERE = Path(__file__).parent
BASE, UV, KAFKA, POSTGRES = (f"localhost/clawstream-test-{name}:1" for name in ("base", "uv", "kafka", "postgres"))
TARGETS = ("stage", "monitor", "engine", "train")
CACHE = "/var/cache/uv"  # in the base: where builds see this machine's cache of packages
MADE_WITHIN_S, BUILT_WITHIN_S = 600.0, 1200.0
_AUTHORITIES = "/etc/ssl/certs/ca-certificates.crt"
_SOURCES = ("/etc/apt/sources.list.d/debian.sources", "/etc/apt/sources.list.d/ubuntu.sources", "/etc/apt/sources.list")


def all_of_them() -> None:
    """Have every image that the tests start."""
    found = podman()
    with TemporaryDirectory() as folder:
        make(found, Path(folder))
    ours(found)


def make(engine: Podman, folder: Path) -> None:
    """Have all four; `folder` is for what goes into them."""
    if not engine.has(BASE):
        _base(engine, folder / "base.tar")
    _uv(engine, folder / "uv")
    _kafka(engine, folder / "kafka")
    _postgres(engine, folder / "postgres")


def ours(engine: Podman) -> None:
    """Build our images by the Dockerfile, on the base and with this machine's cache of packages."""
    cache = said(("uv", "cache", "dir"), engine.environment, within_s=30).strip()
    for target in TARGETS:
        engine.run(
            "build", "-q", "-f", str(DEPLOY / "Dockerfile"), "--target", target, "-t", f"clawstream-{target}",
            f"--build-arg=PYTHON_IMAGE={BASE}", f"--build-arg=UV_IMAGE={UV}", "--network=host",
            f"--volume={cache}:{CACHE}:O", str(DEPLOY.parent),
            within_s=BUILT_WITHIN_S,
        )  # fmt: skip


def _base(engine: Podman, rootfs: Path) -> None:
    told = said(
        ("apt-config", "dump", "--no-empty", "--format", '%F "%v";%n', "Acquire"), engine.environment, within_s=30
    )
    options = [f"--aptopt={line}" for line in told.splitlines() if "IndexTargets" not in line]
    release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    sources = next(path for path in _SOURCES if Path(path).exists())
    said(
        ("mmdebstrap", "--mode=root", "--variant=minbase", "--include=python3,ca-certificates", *options,
         f"--customize-hook=upload {_AUTHORITIES} {_AUTHORITIES}", release["VERSION_CODENAME"], str(rootfs), sources),
        engine.environment, within_s=MADE_WITHIN_S,
    )  # fmt: skip
    variables = [f"--change=ENV SSL_CERT_FILE={_AUTHORITIES}", f"--change=ENV UV_CACHE_DIR={CACHE}"]
    engine.run("import", "-q", *variables, str(rootfs), BASE, within_s=MADE_WITHIN_S)
    rootfs.unlink()


def _uv(engine: Podman, context: Path) -> None:
    context.mkdir()
    program = shutil.which("uv")
    assert program is not None
    shutil.copy(program, context / "uv")
    (context / "Dockerfile").write_text("FROM scratch\nCOPY uv /uv\n")
    engine.run("build", "-q", "-t", UV, str(context), within_s=MADE_WITHIN_S)


def _kafka(engine: Podman, context: Path) -> None:
    context.mkdir()
    shutil.copytree(jars.broker_jars(accounts.cache_folder()), context / "jars")
    shutil.copytree(jars.java().parents[1], context / "java", symlinks=True)
    _built(engine, KAFKA, context, "kafka")


def _postgres(engine: Podman, context: Path) -> None:
    install = programs().parent
    package = install.parent
    for found in (install, package.with_name(f"{package.name}.libs")):  # programs find libraries relative to them
        shutil.copytree(found, context / "packages" / found.relative_to(package.parent), symlinks=True)
    _built(engine, POSTGRES, context, "postgres", f"--build-arg=PROGRAMS={package.name}/{install.name}/bin")


def _built(engine: Podman, image: str, context: Path, name: str, *options: str) -> None:
    for script in HERE.glob(f"{name}-*.sh"):
        shutil.copy(script, context)
    file = str(HERE / f"{name}.Dockerfile")
    engine.run(
        "build", "-q", "-f", file, "-t", image, f"--build-arg=BASE={BASE}", *options, str(context),
        within_s=MADE_WITHIN_S,
    )  # fmt: skip
