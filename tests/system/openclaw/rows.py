"""What stands in Postgres after the run, rebuilt from its rows."""

import json
from dataclasses import dataclass
from typing import Any

from clawstream.projections.look.sql import rows_of

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """An exchange, whole."""

    exchange_id: str
    session_id: str
    client: str
    turn_type: str
    messages: tuple[Json, ...]
    token_ids: tuple[int, ...]
    answer: Json | None
    output_ids: tuple[int, ...]
    output_logprobs: tuple[float, ...]
    reason: str | None  # why it failed
    num_spliced: int | None
    cached_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The fate of an answer."""

    turn_id: str
    reason: str | None  # why it is an orphan
    next_state: tuple[Json, ...]


def exchanges_in(url: str) -> list[Exchange]:
    """All exchanges in the order in which they came."""
    found: dict[str, Exchange] = {}
    for row in _rows(url, "SELECT to_jsonb(e) AS row FROM exchanges e ORDER BY received_at_ms, source_offset"):
        parent = found.get(row["parent_exchange_id"])
        kept = () if parent is None else parent.messages[: row["kept_messages"]]
        kept_ids = () if parent is None else parent.token_ids[: row["kept_tokens"]]
        found[row["exchange_id"]] = Exchange(
            exchange_id=row["exchange_id"],
            session_id=row["session_id"],
            client=row["client"],
            turn_type=row["turn_type"],
            messages=(*kept, *row["messages"]),
            token_ids=(*kept_ids, *row["token_ids"]),
            answer=row["message"],
            output_ids=tuple(row["output_ids"]),
            output_logprobs=tuple(row["output_logprobs"] or ()),
            reason=row["reason"],
            num_spliced=row["num_spliced"],
            cached_tokens=row["cached_tokens"],
        )
    return list(found.values())


def turns_in(url: str, exchanges: list[Exchange]) -> dict[str, Turn]:
    """All turns by their exchange."""
    by_id = {exchange.exchange_id: exchange for exchange in exchanges}
    return {
        row["turn_id"]: Turn(
            turn_id=row["turn_id"],
            reason=row["reason"],
            next_state=tuple(by_id[row["next_exchange_id"]].messages[i] for i in row["next_state"] or ()),
        )
        for row in _rows(url, "SELECT to_jsonb(t) AS row FROM turns t")
    }


def num_common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many tokens both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _rows(url: str, query: str) -> list[Any]:
    return [json.loads(str(row["row"])) for row in rows_of(url, query)]
