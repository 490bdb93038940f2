"""deploy/compose.yaml in real containers: from a request to new weights; down and up again, and nothing is lost.

What is not as in production: the bases of the images, the CPU engine in SGLang's place, a simulated judge. The tests of
this file go on from each other: the last one ends all containers and starts them again.
"""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import count

import openai
import pytest

from clawstream.errors import PartUnavailable
from clawstream.local.servers.server_process import reserved
from tests.parts.deploy.test_deploy import DEPLOY, STAGES
from tests.parts.deploy.test_hardening import KEPT_WRITABLE
from tests.system.containers import images
from tests.system.containers.composed import KEY, PASSWORD, PROFILES, RUNNING, Composed
from tests.system.containers.podman import Podman, podman

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1800)]

VERSION_WITHIN_S = 240.0
AT_ONCE = 4  # conversations
OURS = ("engine", "judge", *(stage for stage in STAGES if stage not in PROFILES))


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Composed]:
    folder = tmp_path_factory.mktemp("composed")
    with reserved() as port:
        pass
    found = Composed(
        podman=had(), name=f"clawstream-{os.getpid()}", folder=folder, port=port,
        files=(DEPLOY / "compose.yaml", DEPLOY / "compose.cpu.yaml"),
    )  # fmt: skip
    began = time.monotonic()
    images.make(found.podman, folder)
    images.ours(found.podman)
    told("images", began)
    found.prepare()
    began = time.monotonic()
    try:
        found.up()
        told("up and healthy", began)
        yield found
    finally:
        found.down("-v")


def had() -> Podman:
    """Podman; without it these tests are skipped, but for CI, which asks before it runs them."""
    try:
        return podman()
    except PartUnavailable as error:
        if "CI" in os.environ:
            raise
        pytest.skip(str(error))


def told(what: str, began: float) -> None:
    print(f"containers: {what} after {time.monotonic() - began:.1f} s", flush=True)


async def converse(composed: Composed, session: str) -> str:
    """Ask, complain about the answer, and end the session; return the answer."""
    async with openai.AsyncOpenAI(base_url=f"{composed.gateway}/v1", api_key=KEY, max_retries=2) as client:

        async def say(messages: list[dict[str, str]], **headers: str) -> str:
            named = {"X-Session-Id": session, **headers}
            answer = await client.chat.completions.create(
                model="policy", messages=messages, extra_headers=named, max_tokens=200, temperature=1.0,  # type: ignore[arg-type]
            )  # fmt: skip
            return answer.choices[0].message.content or ""

        question = {"role": "user", "content": f"What is {sum(map(ord, session)) % 90 + 10} + 27?"}
        answer = await say([question])
        complaint = {"role": "user", "content": "no headings or bold please, just say it plainly"}
        await say([question, {"role": "assistant", "content": answer}, complaint], **{"X-Session-Done": "1"})
        return answer


@asynccontextmanager
async def talking(composed: Composed, name: str) -> AsyncIterator[None]:
    """Have people talk to the policy while the block runs; an answer that fails, fails it."""

    async def talk(person: int) -> None:
        for number in count():
            await converse(composed, f"{name}-{person}-{number}")

    async with asyncio.TaskGroup() as people:
        tasks = [people.create_task(talk(person)) for person in range(AT_ONCE)]
        yield
        for task in tasks:
            task.cancel()


async def until_served(composed: Composed, version: int) -> int:
    """Return the version that the engine serves once that is `version` or a later one."""

    def serves() -> bool:
        return composed.served_version() >= version

    await asyncio.to_thread(composed.wait, serves, f"version {version} served", within_s=VERSION_WITHIN_S)
    return composed.served_version()


async def test_a_request_is_answered_and_judged_and_leads_to_weights_that_the_engine_serves(composed: Composed) -> None:
    began = time.monotonic()
    assert await converse(composed, "first")
    told("first conversation", began)
    async with talking(composed, "before"):
        version = await until_served(composed, 1)
    told(f"version {version} served", began)
    rows = "SELECT 1 FROM lineage WHERE policy_version = 1 AND exchange_id IS NOT NULL AND vote_id IS NOT NULL LIMIT 1"
    await asyncio.to_thread(composed.wait, lambda: bool(composed.sql(rows)), "version 1 in Postgres", within_s=60)


@pytest.mark.parametrize("service", OURS)
def test_a_part_is_no_root_has_no_rights_and_can_write_its_own_folders_alone(composed: Composed, service: str) -> None:
    status = composed.execute(service, "cat", "/proc/1/status").stdout
    told = {key: value.split() for key, _, value in (line.partition(":") for line in status.splitlines())}
    assert set(told["Uid"]) == {"10001"}
    assert {int(told[name][0], 16) for name in ("CapEff", "CapPrm", "CapBnd")} == {0}
    assert told["NoNewPrivs"] == ["1"]
    model = "/models/judge" if service == "judge" else "/models/policy"
    for path in ("/opt/clawstream/written", "/etc/written", "/home/clawstream/written", f"{model}/written"):
        done = composed.execute(service, "touch", path)
        assert "Read-only file system" in done.stderr, f"{path}: {done.stderr}"
    assert composed.execute(service, "touch", "/tmp/written", "/var/cache/clawstream/written").returncode == 0


@pytest.mark.parametrize(("service", "user"), [("kafka", "1000"), ("postgres", "999")])
def test_a_server_of_others_runs_as_its_own_user(composed: Composed, service: str, user: str) -> None:
    status = composed.execute(service, "cat", "/proc/1/status").stdout
    assert f"Uid:\t{user}\t{user}\t{user}\t{user}" in status
    written = composed.execute(service, "touch", "/etc/written").stderr
    assert ("Read-only file system" in written) is (service not in KEPT_WRITABLE)


@pytest.mark.parametrize("service", RUNNING)
def test_limits_of_memory_and_processes_are_in_force(composed: Composed, service: str) -> None:
    limits = composed.inspect(service)["HostConfig"]
    assert limits["Memory"] == (4 if service in ("kafka", "postgres") else 2) * 2**30
    most = composed.execute(
        service, "sh", "-c", "cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes"
    )
    assert most.stdout.split() == [str(limits["Memory"])]
    most = composed.execute(service, "sh", "-c", "cat /sys/fs/cgroup/pids.max /sys/fs/cgroup/pids/pids.max")
    assert most.stdout.split() == ["4096"]


@pytest.mark.parametrize("service", RUNNING)
def test_a_part_is_asked_for_its_health_and_sees_no_secret_but_its_own(composed: Composed, service: str) -> None:
    assert composed.inspect(service)["Config"]["Healthcheck"]["Test"][0] in ("CMD", "CMD-SHELL")
    seen = dict(entry.partition("=")[::2] for entry in composed.inspect(service)["Config"]["Env"])
    files = {path.stem: path.read_text() for path in (composed.folder / "secrets").iterdir()}
    words = {stage: text.partition("PASSWORD=")[2].strip() for stage, text in files.items() if stage != "kafka"}
    shown = {stage for stage, word in words.items() if any(word in value for value in seen.values())}
    assert shown == ({*words} if service == "kafka" else {service} & {*words})
    assert any(KEY in value for value in seen.values()) is (service == "gateway")
    assert any(PASSWORD in value for value in seen.values()) is (service in ("postgres", "project"))


def test_engine_and_judge_reach_neither_broker_nor_database_and_these_reach_nobody(composed: Composed) -> None:
    reach = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=3)"
    for server, port in (("kafka", "9092"), ("postgres", "5432")):
        assert composed.execute("turns", "python", "-c", reach, server, port).returncode == 0
        for part in ("engine", "judge"):
            assert composed.execute(part, "python", "-c", reach, server, port).returncode != 0
        found = composed.inspect(server)["NetworkSettings"]["Networks"]
        assert [name.rpartition("_")[2] for name in found] == ["log"]
        assert composed.podman.run("network", "inspect", "-f", "{{.Internal}}", *found).strip() == "true"


async def test_after_down_and_up_nothing_is_lost_and_a_further_step_is_served(composed: Composed) -> None:
    version = await until_served(composed, 1)
    await asyncio.to_thread(settled, composed)
    before = kept(composed)
    began = time.monotonic()
    await asyncio.to_thread(composed.down)
    told("down", began)
    assert composed.podman.run("ps", "-aq", "--filter", f"name={composed.name}_") == ""
    began = time.monotonic()
    await asyncio.to_thread(composed.up)
    told("up again", began)
    assert await until_served(composed, version) >= version
    after = kept(composed)
    for what, rows in before.items():
        assert rows, what
        assert rows - after[what] == set(), what
    audit(composed)
    assert await converse(composed, "after")
    async with talking(composed, "after"):
        newer = await until_served(composed, composed.served_version() + 1)
    told(f"version {newer} served, after {version}", began)


KEPT = {
    "exchanges": "SELECT exchange_id AS id FROM exchanges",
    "votes": "SELECT event_id AS id FROM votes",
    "versions": "SELECT policy_version AS id FROM policies",
}


def kept(composed: Composed) -> dict[str, set[object]]:
    return {what: {row["id"] for row in composed.sql(query)} for what, query in KEPT.items()}


def settled(composed: Composed) -> None:
    """Return once the projection has all that is on the log, by two looks that show the same."""
    looks: list[object] = []

    def same() -> bool:
        looks.append(kept(composed))
        return len(looks) > 1 and looks[-1] == looks[-2]

    composed.wait(same, "the projection settled", within_s=120)


def audit(composed: Composed) -> None:
    """The log says what the database says: read again from its beginning, row by row."""
    done = composed.execute("project", "clawstream", "audit", "verify", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
