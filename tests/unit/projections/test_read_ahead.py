"""While an item is in use the next one is read; errors and the end reach the reader in their place."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from clawstream.projections.rebuild.rebuilding import read_ahead


class Source:
    def __init__(self, num: int, *, breaks_at: int | None = None) -> None:
        self.num, self.breaks_at = num, breaks_at
        self.read: list[int] = []
        self.is_closed = False

    async def items(self) -> AsyncGenerator[int]:
        try:
            for number in range(self.num):
                if number == self.breaks_at:
                    raise OSError("the log went away")
                self.read.append(number)
                yield number
        finally:
            self.is_closed = True


def test_the_next_item_is_read_while_one_is_in_use() -> None:
    async def used() -> list[tuple[int, int]]:
        source = Source(4)
        found = []
        async with aclosing(read_ahead(source.items())) as arriving:
            async for item in arriving:
                await asyncio.sleep(0)
                found.append((item, len(source.read)))
        assert source.is_closed
        return found

    assert asyncio.run(used()) == [(0, 2), (1, 3), (2, 4), (3, 4)]


def test_an_error_of_the_source_comes_after_the_items_before_it() -> None:
    seen: list[int] = []

    async def use() -> None:
        async with aclosing(read_ahead(Source(4, breaks_at=2).items())) as arriving:
            async for item in arriving:
                seen.append(item)  # noqa: PERF401  # what came before the error counts

    with pytest.raises(OSError, match="went away"):
        asyncio.run(use())
    assert seen == [0, 1]


def test_a_reader_that_breaks_closes_the_source() -> None:
    source = Source(4)

    async def use() -> None:
        async with aclosing(read_ahead(source.items())) as arriving:
            async for _ in arriving:
                raise ValueError("no row can be made of it")

    with pytest.raises(ValueError, match="no row"):
        asyncio.run(use())
    assert source.is_closed
