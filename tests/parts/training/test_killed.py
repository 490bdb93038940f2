"""The trainer on a real broker, killed at every point of its work: what it did is what it would have done unkilled."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from clawstream.config import EngineSettings, KafkaSettings, PolicySettings, Settings, TrainingSettings, dump
from clawstream.events import BatchPlanned, Event, PolicyPublished, SampleAssembled, StepTaken
from clawstream.stream.kafka import admin
from clawstream.stream.kafka.kafka_log import KafkaLog
from tests.parts.training import tiny
from tests.parts.training.outside import broken, said, weights, whole
from tests.parts.training.victim import Point, begin

pytestmark = pytest.mark.slow

BATCH = 3
LIVES = list(Point)
SAMPLES = [tiny.sample(f"s{i}", reward=1 if i % 2 else -1, hinted=i % 3 == 0) for i in range(BATCH * (len(LIVES) + 1))]
WITHIN_S = 90.0


class Rig:
    """One policy on one log."""

    def __init__(self, log: KafkaLog, base: Path, folder: Path, bootstrap: str, prefix: str) -> None:
        folder.mkdir(exist_ok=True)
        self.log = log
        self.words = folder / "words.log"
        self.config = folder / "settings.json"
        settings = Settings(
            environment=False,
            data_dir=folder,
            kafka=KafkaSettings(bootstrap=bootstrap, prefix=prefix),
            engine=EngineSettings(model_path=base),
            policy=PolicySettings(id="policy"),
            training=TrainingSettings(batch_samples=BATCH, learning_rate=1e-3, keep_checkpoints=1000),
        )
        self.policy = settings.checkpoints_dir
        self.config.write_text(dump(settings))

    async def killed_at(self, point: Point) -> None:
        """One life that gets through an update at most, and ends at `point`."""
        process = begin(self.config, self.words, point=point, occurrence=2)
        await asyncio.to_thread(process.join, WITHIN_S)
        alive = process.is_alive()
        process.kill()
        assert not alive, f"it never came to {point.value}; its words: {self.words.read_text()[-2000:]}"
        assert process.exitcode == -signal.SIGKILL, self.words.read_text()[-2000:]

    async def lives_until(self, done: Callable[[Sequence[Event]], bool]) -> list[Event]:
        """One life that ends in good order once the log says so; return what it says then."""
        before = self._starts()
        process = begin(self.config, self.words)
        try:
            async with asyncio.timeout(WITHIN_S):
                while not (done(events := await said(self.log)) and self._starts() > before):
                    assert process.is_alive(), self.words.read_text()[-2000:]
                    await asyncio.sleep(0.05)
            assert process.pid is not None
            os.kill(process.pid, signal.SIGTERM)
            await asyncio.to_thread(process.join, WITHIN_S)
        finally:
            process.kill()
        assert process.exitcode == 0, self.words.read_text()[-2000:]
        return events

    def _starts(self) -> int:
        """How often a trainer has begun: from then on it can be asked to end."""
        return self.words.read_text().count("training_starts") if self.words.exists() else 0


@asynccontextmanager
async def rig(bootstrap: str, prefix: str, base: Path, folder: Path) -> AsyncIterator[Rig]:
    await admin.apply(bootstrap, prefix)
    async with KafkaLog.connect(bootstrap, prefix=prefix, client_id="outside") as log:
        yield Rig(log, base, folder, bootstrap, prefix)


def published(version: int) -> Callable[[Sequence[Event]], bool]:
    return lambda events: any(isinstance(e, PolicyPublished) and e.policy_version == version for e in events)


def names(samples: Sequence[SampleAssembled]) -> list[str]:
    return sorted(sample.sample_id for sample in samples)


@pytest.mark.timeout(500)
async def test_a_trainer_killed_at_every_point_takes_the_steps_that_were_planned_and_each_once(
    kafka_bootstrap: str, topic_prefix: str, base: Path, tmp_path: Path
) -> None:
    last = len(SAMPLES) // BATCH
    async with rig(kafka_bootstrap, f"{topic_prefix}killed.", base, tmp_path / "killed") as killed:
        await killed.log.append(SAMPLES)
        for point in LIVES:
            await killed.killed_at(point)
            assert broken(await said(killed.log), killed.policy) == [], f"after it was killed {point.value}"
        events = await killed.lives_until(published(last))

    assert broken(events, killed.policy) == []
    plans = [event for event in events if isinstance(event, BatchPlanned)]
    assert sorted(name for plan in plans for name in plan.sample_ids) == names(SAMPLES)
    assert [event.policy_version for event in events if isinstance(event, StepTaken)] == list(range(1, last + 1))
    assert [event.policy_version for event in events if isinstance(event, PolicyPublished)] == list(range(last + 1))

    async with rig(kafka_bootstrap, f"{topic_prefix}whole.", base, tmp_path / "whole") as unkilled:
        await unkilled.log.append([*SAMPLES, *plans])
        await unkilled.lives_until(published(last))
    assert weights(killed.policy) == weights(unkilled.policy)


@pytest.mark.timeout(240)
async def test_a_half_written_version_is_passed_over_in_words_and_made_again_as_it_was_published(
    kafka_bootstrap: str, topic_prefix: str, base: Path, tmp_path: Path
) -> None:
    async with rig(kafka_bootstrap, topic_prefix, base, tmp_path) as one:
        await one.log.append(SAMPLES[: 2 * BATCH])
        await one.lives_until(published(2))
        first = whole(one.policy / "v000002")
        model = one.policy / "v000002" / "model.safetensors"
        os.truncate(model, model.stat().st_size // 2)
        await one.log.append(SAMPLES[2 * BATCH : 3 * BATCH])
        await one.lives_until(published(3))
        third = whole(one.policy / "v000003")
        (one.policy / "v000003" / "manifest.json").unlink()
        await one.log.append(SAMPLES[3 * BATCH : 4 * BATCH])
        events = await one.lives_until(published(4))

    assert None not in (first, third)
    assert [whole(one.policy / name) for name in ("v000002", "v000003")] == [first, third]
    assert broken(events, one.policy) == []
    words = one.words.read_text()
    assert "checkpoint_passed_over version=2 reason=checkpoint" in words
    assert "model.safetensors: found" in words
    assert "manifest.json: found nothing, expected a manifest, which is written last. It is not loaded." in words
