"""What the monitor and the status read of the log, and from where."""

from clawstream.monitoring.policy import PolicyBoard
from clawstream.stream.kafka import KafkaLog
from clawstream.stream.stage import Record

GROUP = "monitor"
POLICY_TOPIC = "clawstream.policy.v1"
SAMPLES_TOPIC = "clawstream.samples.v1"
TOPICS = (
    "clawstream.exchanges.v1",
    "clawstream.turns.v1",
    "clawstream.votes.v1",
    "clawstream.verdicts.v1",
    "clawstream.answers.v1",
    SAMPLES_TOPIC,
    POLICY_TOPIC,
)


async def read_policy(kafka_log: KafkaLog, board: PolicyBoard) -> None:
    """Let `board` know all that the policy topic says by now."""
    async for records in kafka_log.follow([POLICY_TOPIC], "earliest", until_end=True):
        for record in records:
            if isinstance(record, Record):
                board.learn(record)


async def waiting_since(kafka_log: KafkaLog, board: PolicyBoard) -> dict[tuple[str, int], int]:
    """Return where the samples begin that may be in no plan that `board` knows."""
    begins = await kafka_log.begin_offsets([SAMPLES_TOPIC])
    return {place: max(begin, board.used_up.get(place, begin)) for place, begin in begins.items()}
