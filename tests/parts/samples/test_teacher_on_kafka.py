"""`clawstream samples` as people run it, with an engine that is the teacher."""

import asyncio
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import pytest
from tokenizers import Tokenizer

from clawstream.config import EngineSettings, KafkaSettings, PolicySettings, Settings, TeacherSettings, dump
from clawstream.events import SampleAssembled, SampleRefused, TeacherScored, VoteCast, float32
from clawstream.rendering.renderer import PromptRenderer
from clawstream.stream.kafka import admin
from clawstream.stream.kafka.kafka_log import KafkaLog
from clawstream.stream.stage import Record
from clawstream.stream.topics import HINTS, SAMPLES
from tests.fakes.scripted_engine import ScriptedBackend, counting, serving, token_logprob
from tests.flow import Flow
from tests.parts.engine.tiny_model import make_config
from tests.parts.inference.test_teacher import with_another_vocabulary
from tests.parts.training.step.test_trainer import with_settings
from tests.sessions import Session, assistant, user
from tests.unit.samples.test_teacher import judge

pytestmark = pytest.mark.slow

T = TypeVar("T")


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    make_config(tmp_path / "policy")
    return tmp_path / "policy"


@asynccontextmanager
async def samples_command(
    kafka: KafkaSettings, folder: Path, policy: Path, teacher_model: Path
) -> AsyncIterator[Process]:
    """The command beside a scripted policy of version 3 and a scripted teacher."""
    student = ScriptedBackend(script=counting(), model_path=str(policy), version="3")
    teacher = ScriptedBackend(script=counting(), model_path=str(teacher_model))
    async with serving(student) as url, serving(teacher) as teacher_url:
        settings = Settings(
            environment=False,
            data_dir=folder,
            kafka=kafka,
            engine=EngineSettings(urls=(url,), model_path=policy),
            teacher=TeacherSettings(model="32b"),
            training=with_settings(teacher=teacher_url),
        )
        (folder / "settings.json").write_text(dump(settings))
        argv = [sys.executable, "-m", "clawstream", "--config", str(folder / "settings.json"), "samples"]
        command = await asyncio.create_subprocess_exec(*argv, stderr=asyncio.subprocess.PIPE)
        try:
            yield command
        finally:
            if command.returncode is None:
                command.kill()
                await command.wait()


async def test_hints_are_weighed_by_both_engines_and_a_replayable_record_of_it_is_kept(
    kafka_bootstrap: str, topic_prefix: str, tmp_path: Path, policy: Path
) -> None:
    renderer, tokenizer = (
        PromptRenderer.of(PolicySettings(), policy),
        Tokenizer.from_file(str(policy / "tokenizer.json")),
    )
    session = Session(renderer=renderer, sampled=lambda text: tuple(tokenizer.encode(text).ids))
    session.ask([user("a")], "# four")
    session.ask([user("a"), assistant("# four"), user("no headings")], "sorry")
    lived = Flow(judge(-1), renderer=renderer).run(session.written)
    told = [record.event for topic in lived.topics.values() for record in topic]
    kafka = KafkaSettings(bootstrap=kafka_bootstrap, prefix=topic_prefix)
    await admin.apply(kafka_bootstrap, topic_prefix)
    async with KafkaLog.connect(kafka_bootstrap, prefix=topic_prefix, client_id="feed") as log:
        await log.append([event for event in told if not isinstance(event, VoteCast | SampleAssembled | SampleRefused)])
        async with samples_command(kafka, tmp_path, policy, policy) as command:
            sample = await first(log, SAMPLES, SampleAssembled)
            scored = await first(log, HINTS, TeacherScored)
            command.send_signal(signal.SIGTERM)
            async with asyncio.timeout(30):
                _, words = await command.communicate()
    assert command.returncode == 0, words.decode()
    assert sample.hinted_prompt_ids is not None
    assert len(sample.hinted_prompt_ids) > len(sample.prompt_ids)
    assert sample.teacher_logprobs == after(sample.hinted_prompt_ids, sample)
    assert sample.student_logprobs == after(sample.prompt_ids, sample)
    assert (sample.teacher or "").startswith("32b@127.0.0.1:")
    assert sample.student_version == 3
    assert (scored.teacher, scored.teacher_logprobs) == (sample.teacher, sample.teacher_logprobs)


def after(prompt_ids: tuple[int, ...], sample: SampleAssembled) -> tuple[float | None, ...]:
    """What a scripted engine makes of the response there."""
    return float32(token_logprob(len(prompt_ids) + n, token) for n, token in enumerate(sample.response_ids))


async def first(log: KafkaLog, topic: str, kind: type[T]) -> T:
    async with asyncio.timeout(60):
        async for records in log.follow([topic]):
            for record in records:
                if isinstance(record, Record) and isinstance(record.event, kind):
                    return record.event
    raise AssertionError("the log goes on")


async def test_a_teacher_of_another_vocabulary_ends_the_command_with_exit_code_two(
    kafka_bootstrap: str, topic_prefix: str, tmp_path: Path, policy: Path
) -> None:
    await admin.apply(kafka_bootstrap, topic_prefix)
    other = with_another_vocabulary(policy, tmp_path / "other")
    kafka = KafkaSettings(bootstrap=kafka_bootstrap, prefix=topic_prefix)
    async with samples_command(kafka, tmp_path, policy, other) as command, asyncio.timeout(60):
        _, words = await command.communicate()
    assert command.returncode == 2
    assert "has another vocabulary than the policy" in " ".join(words.decode().split())
