"""What the monitor and the status read from the log, and where they begin."""

import time

from clawstream.config import TrainingSettings
from clawstream.monitoring.alarm import BatchRule
from clawstream.monitoring.policy import PolicyBoard
from clawstream.monitoring.windows import AppendTimes
from clawstream.stream import topics
from clawstream.stream.kafka.kafka_log import KafkaLog
from clawstream.stream.log import Start
from clawstream.stream.stage import Record

GROUP = "monitor"
NUM_VOTES = 20  # of each partition; they show how the judge fares
NUM_EXCHANGES = 3  # of each partition, as ends of sessions may follow the newest, which shows the broker's clock
TOPICS = (topics.EXCHANGES, topics.TURNS, topics.VOTES, topics.VERDICTS, topics.ANSWERS, topics.SAMPLES, topics.POLICY)


def now_ms() -> int:
    """Return the time of this machine's clock."""
    return time.time_ns() // 1_000_000


def due_of(training: TrainingSettings) -> BatchRule | None:
    """Return when the trainer takes a batch; None: that depends on groups, which samples alone don't show."""
    if training.method == "stepwise":
        return None
    return BatchRule(batch_samples=training.batch_samples, max_wait_ms=round(training.max_wait_s * 1000))


async def newest_records(kafka_log: KafkaLog, topic: str, most: int) -> list[Record]:
    """Return the newest records of each partition, at most so many."""
    begins = await kafka_log.begin_offsets([topic])
    ends = await kafka_log.end_offsets([topic])
    ranges = {place: (max(begins[place], end - most), end) for place, end in ends.items()}
    return [record async for records in kafka_log.replay(ranges) for record in records if isinstance(record, Record)]


async def read_policy(kafka_log: KafkaLog, board: PolicyBoard) -> None:
    """Let `board` learn all that the policy topic holds by now."""
    await _learn(kafka_log, board, topics.POLICY, "earliest")


async def read_samples(kafka_log: KafkaLog, board: PolicyBoard) -> None:
    """Let `board`, which knows the policy topic, learn the samples that no plan may have used by now."""
    await _learn(kafka_log, board, topics.SAMPLES, await waiting_since(kafka_log, board))


async def _learn(kafka_log: KafkaLog, board: PolicyBoard, topic: str, start: Start) -> None:
    append_times = AppendTimes()
    async for records in kafka_log.follow([topic], start, until_end=True):
        for record in records:
            if isinstance(record, Record):
                board.learn(append_times.corrected(record, now_ms()))


async def waiting_since(kafka_log: KafkaLog, board: PolicyBoard) -> dict[tuple[str, int], int]:
    """Return the first offsets whose samples may be in no plan that `board` knows."""
    begins = await kafka_log.begin_offsets([topics.SAMPLES])
    return {place: max(begin, board.used_up.get(place, begin)) for place, begin in begins.items()}
