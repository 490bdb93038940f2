"""What `clawstream replay start` does, on an installation with fewer partitions than the topics' files say."""

import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path

from clawstream.cli.replay import work_on
from clawstream.config import load
from clawstream.events import VotesFrom
from clawstream.replay.running import ReplayRequest
from clawstream.stream.kafka.kafka_log import KafkaLog


async def main(settings_file: Path, name: str, num_workers: int, judge: str | None = None) -> None:
    """Replay all there is, with the votes that were cast or those of `judge`, and print how it ended."""
    settings = load(settings_file)
    assert settings.kafka.bootstrap is not None
    async with KafkaLog.connect(settings.kafka.bootstrap, prefix=settings.kafka.prefix) as log:
        votes_from = VotesFrom.LOG if judge is None else VotesFrom.NEW
        wanted = ReplayRequest(name=name, since=None, until=None, session_id=None, votes_from=votes_from, judge=judge)
        ended = await work_on(settings, log, wanted, num_workers=num_workers, rate=None)
    sys.stdout.write(json.dumps(asdict(ended)))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), *sys.argv[4:]))
