"""Several answers to one request (`n`): each is an exchange, and together they are a group."""

import uuid
from dataclasses import replace

from clawstream.gateway.answering.admission import Exchange
from clawstream.gateway.requests.grouped import Grouped

_SEEDS = 2**64


def choices_of(exchange: Exchange) -> tuple[Exchange, ...]:
    """Return an exchange for each answer; the group of several is named by the first of them."""
    num, first = exchange.chat.asked.num_choices, exchange.accepted
    if num == 1:
        return (exchange,)
    group = Grouped(group_id=first.exchange_id, size=num, step_index=None).of_key(first.key_name)
    return tuple(
        replace(
            exchange,
            accepted=replace(
                first,
                exchange_id=str(uuid.uuid4()) if index else first.exchange_id,
                sampling=replace(first.sampling, seed=_later_seed(first.sampling.seed, index)),
                group=group,
                choice_of=first.exchange_id,
            ),
            sampled=None if exchange.sampled is None else exchange.sampled.another(),
        )
        for index in range(num)
    )


def _later_seed(seed: int | None, index: int) -> int | None:
    """Return a later answer's seed, as an equal seed would repeat the first answer; 64 bits, with a sign."""
    return None if seed is None else (seed + index + _SEEDS // 2) % _SEEDS - _SEEDS // 2
