"""A trainer on two machines takes the steps of one; a machine that is slow or lost changes no number."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path

import pytest
import torch

from clawstream.config import EngineSettings, KafkaSettings, PolicySettings, Settings, TrainingSettings, dump
from clawstream.events import BatchPlanned, Event, PolicyPublished
from clawstream.local.servers.server_process import reserved
from clawstream.stream.kafka import admin
from clawstream.stream.kafka.kafka_log import KafkaLog
from clawstream.training.base_folder import limits_of
from clawstream.training.checkpoints import Checkpoint
from clawstream.training.stepping import Stepper, Team
from tests.keeping import keep
from tests.parts.training import tiny
from tests.parts.training.outside import broken, said, weights
from tests.parts.training.parallel.conftest import two_processes
from tests.parts.training.parallel.test_trainers import ADAPTER, DATA, FSDP, MIXED, PIPELINE, TENSOR
from tests.system.machines.machines import ENDED_WITHIN_S, Machine, lose, trainer_of, two_machines
from tests.system.machines.stepping import HELD, IN_STEP

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="root makes network namespaces, by iproute2's ip"
    ),
]
CUTS: dict[str, dict[str, object]] = {
    "tensor": TENSOR,  # this one is taken up again after a machine was lost
    "fsdp": FSDP, "fsdp-adapter": FSDP | ADAPTER, "pipeline": PIPELINE, "data": DATA,
}  # fmt: skip
SAMPLES = [tiny.sample(f"s{i}", reward=1 if i % 2 else -1, hinted=i % 3 == 0) for i in range(9)]
LAST = [tiny.sample(f"l{i}", reward=1 if i % 2 else -1) for i in range(3)]
WITHIN_S = 180.0


@pytest.fixture(scope="module")
def machines() -> Iterator[tuple[Machine, Machine]]:
    """This machine, and another."""
    with two_machines() as both:
        yield both


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small policy."""
    return tiny.build(tmp_path_factory.mktemp("base"), dtype=torch.bfloat16)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_two_machines_write_the_same_bytes_as_one_also_after_a_machine_was_lost_in_a_step(
    machines: tuple[Machine, Machine], base: Path, tmp_path: Path
) -> None:
    """With all weights, an adapter, and Megatron-Core's tensor, pipeline and data groups over both."""
    changes = [{"learning_rate": 1e-3, "micro_batch_tokens": 64} | cut for cut in CUTS.values()]
    folder, words = tmp_path / "two", [tmp_path / "words0", tmp_path / "words1"]
    folder.mkdir()
    command = ["-m", "tests.system.machines.stepping", str(base), str(folder), json.dumps(changes)]

    def launch() -> "list[subprocess.Popen[bytes]]":
        with reserved() as port:
            pass
        rendezvous = f"{machines[0].address}:{port}"
        return [
            machine.torchrun(command, rendezvous=rendezvous, words=said)
            for machine, said in zip(machines, words, strict=True)
        ]

    (folder / HELD).touch()
    launched = launch()
    with lost_at_the_end(launched):
        wait_for(folder / IN_STEP, words[0])
        member = trainer_of(launched[1])
        member.suspend()  # so the step is not over when its machine is lost
        (folder / HELD).unlink()
        lose(launched[1])
        assert launched[0].wait(WITHIN_S) != 0
        assert "stepping: of the trainer's 2 processes, " in words[0].read_text()

    launched = launch()
    with lost_at_the_end(launched):
        for launcher, said in zip(launched, words, strict=True):
            assert launcher.wait(WITHIN_S) == 0, said.read_text()[-3000:]

    with closing(two_processes()) as processes:
        for number, (name, cut) in enumerate(zip(CUTS, changes, strict=True)):
            team = Team(base, TrainingSettings(**cut), device="cpu", processes=processes)
            for version in (1, 2):
                team.update(MIXED, version=version, seed=version)
                one = files(keep(team, tmp_path / "one" / f"{number}" / f"{version}"))
                assert files(folder / f"{number}" / f"{version}") == one, name
                assert len([file for file in one if file.endswith(".safetensors")]) > 1


def wait_for(file: Path, words: Path) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not file.exists():
        assert time.monotonic() < deadline, words.read_text()[-3000:]
        time.sleep(0.05)


class Rig:
    """One policy on one log, and what its trainers say."""

    def __init__(self, log: KafkaLog, base: Path, folder: Path, kafka: KafkaSettings) -> None:
        folder.mkdir()
        self.log, self.words = log, folder / "words"
        self.config = folder / "settings.json"
        settings = Settings(
            environment=False,
            data_dir=folder,
            kafka=kafka,
            engine=EngineSettings(model_path=base),
            policy=PolicySettings(id="policy"),
            training=TrainingSettings(batch_samples=3, learning_rate=1e-3, processes=2, keep_checkpoints=1000),
        )
        self.versions = settings.checkpoints_dir
        self.config.write_text(dump(settings))
        with reserved() as self._port:
            pass

    @property
    def command(self) -> list[str]:
        return ["-m", "clawstream", "--config", str(self.config), "train"]

    def start(self, machine: Machine, endpoint: Machine, inside: Sequence[str] = ()) -> "subprocess.Popen[bytes]":
        rendezvous = f"{endpoint.address}:{self._port}"
        return machine.torchrun(self.command, rendezvous=rendezvous, words=self.words, inside=inside)

    async def until(self, done: Callable[[Sequence[Event]], bool]) -> list[Event]:
        try:
            async with asyncio.timeout(WITHIN_S):
                while not done(events := await said(self.log)):
                    await asyncio.sleep(0.1)
        except TimeoutError:
            pytest.fail(f"it did not come to that: {self.words.read_text()[-4000:]}")
        return events

    async def kept(self, version: int) -> list[Event]:
        """Wait until the version is published, and what training goes on from is beside it."""
        state = self.versions / f"v{version:06d}" / "trainer" / "manifest.json"
        return await self.until(lambda events: published(version)(events) and state.exists())

    async def heard(self, words: str) -> None:
        try:
            async with asyncio.timeout(WITHIN_S):
                while words not in self.words.read_text():
                    await asyncio.sleep(0.1)
        except TimeoutError:
            pytest.fail(f"it never said {words!r}: {self.words.read_text()[-4000:]}")


@asynccontextmanager
async def rig(base: Path, folder: Path, bootstrap: str, prefix: str) -> AsyncIterator[Rig]:
    await admin.apply(bootstrap, prefix)
    kafka = KafkaSettings(bootstrap=bootstrap, prefix=prefix)
    async with KafkaLog.connect(bootstrap, prefix=prefix) as log:
        await log.publish_schemas()
        yield Rig(log, base, folder, kafka)


@contextmanager
def lost_at_the_end(launched: "list[subprocess.Popen[bytes]]") -> Iterator[None]:
    try:
        yield
    finally:
        for launcher in launched:
            lose(launcher)


def published(version: int) -> Callable[[Sequence[Event]], bool]:
    return lambda events: any(isinstance(e, PolicyPublished) and e.policy_version == version for e in events)


def tensors(policy: Path) -> dict[str, str]:
    """Return the sha256 of each file of tensors: weights, masters and moments of all versions."""
    files_of = weights(policy).items()
    return {f"{v}/{file}": sha for v, files in files_of for file, sha in files.items() if file.endswith(".safetensors")}


def planned(version: int) -> Callable[[Sequence[Event]], bool]:
    return lambda events: any(isinstance(e, BatchPlanned) and e.policy_version == version for e in events)


async def test_a_slow_machine_and_one_that_is_lost_in_a_step_change_no_number(
    machines: tuple[Machine, Machine], base: Path, tmp_path: Path, kafka_bootstrap: str, topic_prefix: str
) -> None:
    here, there = machines
    async with rig(base, tmp_path / "two", kafka_bootstrap, topic_prefix) as two:
        launched = [two.start(here, here), two.start(there, here)]
        with lost_at_the_end(launched):
            await two.log.append(SAMPLES[:3])
            await two.kept(1)

            member = trainer_of(launched[1])
            member.suspend()  # a slow machine
            await two.log.append(SAMPLES[3:6])
            await two.until(planned(2))
            await asyncio.sleep(2.0)  # that long it is slow
            assert not published(2)(await said(two.log)), "the others wait for it"
            member.resume()
            await two.kept(2)

            member.suspend()
            await two.log.append(SAMPLES[6:])
            await two.until(planned(3))
            lose(launched[1])
            await two.heard("can't be reached by process 0")
            assert await asyncio.to_thread(launched[0].wait, ENDED_WITHIN_S) != 0, "its unit starts it again"
            launched += [two.start(here, here), two.start(there, here)]
            await two.kept(3)

            lose(launched[3])  # while nothing is done
            launched.append(two.start(there, here))
            await two.heard("training_starts policy=policy version=3")
            await two.log.append(LAST)
            events = await two.kept(4)

            before = two.words.read_text()
            launched[2].send_signal(signal.SIGTERM)
            for launcher in (launched[2], launched[4]):
                await asyncio.to_thread(launcher.wait, ENDED_WITHIN_S)
            assert "clawstream: " not in two.words.read_text().removeprefix(before), "nobody takes it for a failure"
        assert broken(events, two.versions) == []

    await asyncio.to_thread(taken_by_one_machine, events, base, tmp_path / "one")
    found = tensors(two.versions)
    assert found == tensors(tmp_path / "one")
    assert len(found) > 6


def taken_by_one_machine(events: Sequence[Event], base: Path, versions: Path) -> None:
    """Take the steps of the plans on the log in two processes of this machine."""
    by_id = {sample.sample_id: sample for sample in (*SAMPLES, *LAST)}
    stepper = Stepper(base, limits_of(base))
    try:
        parent = None
        for plan in (event for event in events if isinstance(event, BatchPlanned)):
            samples = tuple(by_id[name] for name in plan.sample_ids)
            taken = stepper.execute(plan, samples, parent=parent, versions=versions, recorded=None)
            assert isinstance(taken, Checkpoint)
            stepper.keep(taken)
            parent = taken.path
    finally:
        stepper.close()


async def test_a_machine_without_the_folder_of_versions_is_named_before_anything_is_trained(
    machines: tuple[Machine, Machine], base: Path, tmp_path: Path, kafka_bootstrap: str, topic_prefix: str
) -> None:
    here, there = machines
    async with rig(base, tmp_path / "two", kafka_bootstrap, topic_prefix) as two:
        two.versions.mkdir(parents=True)
        elsewhere = ("unshare", "-m", "sh", "-c", f'mount -t tmpfs none {two.versions} && exec "$@"', "sh")
        launched = [two.start(here, here), two.start(there, here, elsewhere)]
        with lost_at_the_end(launched):
            await two.heard(f"does not see what the trainer's first machine writes to {two.versions}")
        assert not planned(1)(await said(two.log))
