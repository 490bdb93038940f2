"""An audit counts answers that the turns stage passed over, whoever cut the log or kept it from them."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from sqlalchemy import Engine

from clawstream.events import Event, TurnPaired, TurnsSettled
from tests.fakes.memory_log import MemoryBroker, MemoryLog
from tests.parts.projections import one_session
from tests.parts.projections.rebuild.test_audit import audited, projected

FIRST, SECOND, SIDE = one_session.EXCHANGES
PAIRED = TurnPaired(
    session_id=one_session.SESSION, turn_id=one_session.FIRST, next_exchange_id=one_session.SECOND, next_state=(3,)
)
SETTLED = TurnsSettled(session_id=one_session.SESSION, after_exchange_id=one_session.SIDE, done=False)
LATER = replace(FIRST, session_id="another", exchange_id="another-1")
CHOICES = [replace(LATER, exchange_id=f"another-{number}", choice_of="another-1") for number in (1, 2)]


@pytest.mark.parametrize(
    ("events", "later", "without"),
    [
        ([FIRST, SECOND, SIDE, PAIRED], [], []),
        ([FIRST], [], []),
        ([SIDE], [LATER], []),
        ([FIRST, SECOND, SIDE], [], [one_session.FIRST]),
        ([FIRST, SECOND, PAIRED], [LATER], [one_session.SECOND]),
        ([FIRST, SECOND, PAIRED, SETTLED], [LATER], []),
        (CHOICES, [], []),
        ([*CHOICES, replace(LATER, exchange_id="another-3")], [], ["another-1", "another-2"]),
    ],
)
async def test_an_answer_is_without_an_outcome_once_a_later_one_or_a_day_came_and_nobody_said_what_became_of_it(
    emptied: Engine, migrated_url: str, events: Sequence[Event], later: Sequence[Event], without: Sequence[str]
) -> None:
    days = 20_000
    log = MemoryLog(MemoryBroker(clock_ms=lambda: days * 86_400_000))
    await log.append(events)
    days += 2
    await log.append(later)
    await projected(emptied, log)
    found = await audited(migrated_url, log)
    assert found.ok
    assert (found.answers_without_outcome, list(found.without_outcome)) == (len(without), without)
    assert found.as_dict()["answers_without_outcome"] == len(without)
