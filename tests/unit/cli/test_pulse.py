"""Whether a stage's process is there and does its rounds, as a probe sees it."""

import asyncio
import time
from pathlib import Path

from clawstream.cli.process import pulse


def hang() -> None:
    time.sleep(0.1)


async def test_a_process_whose_event_loop_turns_keeps_its_file_young_and_one_that_hangs_does_not(
    tmp_path: Path,
) -> None:
    file = tmp_path / "alive" / "turns"

    async def younger_than(before_ns: int) -> None:
        async with asyncio.timeout(10):
            while not file.is_file() or file.stat().st_mtime_ns <= before_ns:
                await asyncio.sleep(0.005)

    async with pulse(file, every_s=0.01):
        await younger_than(0)
        await younger_than(file.stat().st_mtime_ns)
        last_ns = file.stat().st_mtime_ns
        hang()
        assert file.stat().st_mtime_ns == last_ns
        await younger_than(last_ns)
    last_ns = file.stat().st_mtime_ns
    await asyncio.sleep(0.1)
    assert file.stat().st_mtime_ns == last_ns


async def test_a_folder_that_can_not_be_written_stops_no_stage(tmp_path: Path) -> None:
    (tmp_path / "alive").write_text("in the way")
    async with pulse(tmp_path / "alive" / "turns", every_s=0.01):
        await asyncio.sleep(0.05)
