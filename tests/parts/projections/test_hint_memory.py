"""The view `hint_memory` says of held hints what `clawstream hints list` says."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sqlalchemy import Engine, text

from clawstream.cli.hints import memory_of
from clawstream.events import HintRetired, KeptHint, Rehearsed, Retired
from clawstream.training.batches.memory import OPEN_NATS
from tests.parts.projections.one_memory import HELD, held, said_hint, step
from tests.parts.projections.reading import empty, write_all
from tests.unit.projections import logs


def _rows(engine: Engine) -> dict[str, Mapping[str, Any]]:
    with engine.connect() as connection:
        found = connection.execute(text("SELECT * FROM hint_memory")).mappings()
        return {row["hint_id"]: dict(row) for row in found}


def test_the_hint_memory_says_whose_words_are_held_how_open_they_are_and_what_was_retired(emptied: Engine) -> None:
    brief, steps = said_hint("ann", "be brief"), said_hint(None, "show the steps")
    retired = HintRetired(policy_id="policy", hint_id=steps, reason=Retired.ASKED, retired_at_ms=5)
    rehearsals = [
        step(2, Rehearsed(hint_id=brief, open_nats=0.75)),
        step(3, Rehearsed(hint_id=brief, open_nats=0.25), Rehearsed(hint_id=brief, open_nats=0.5)),
    ]
    write_all(emptied, logs.records([*HELD, retired, *rehearsals]))
    rows = _rows(emptied)
    assert rows.keys() == {brief, steps}
    one, other = rows[brief], rows[steps]
    assert (one["hint"], one["key_name"], one["num_said"]) == ("Be brief", "ann", 2)
    assert (one["num_rehearsed"], one["rehearsed_for"], one["open_nats"], one["retired_at"]) == (3, 3, 0.5, None)
    assert (other["num_rehearsed"], other["open_nats"], other["hint_by_person"]) == (0, None, True)
    assert (other["retired_because"], other["retired_at"] is not None) == ("asked", True)

    followed = replace(held("d", "show the steps", None), followed=True)
    for last, found in ((followed, ("asked", 1)), (held("d", "show the steps", None), (None, 2))):
        empty(emptied)
        write_all(emptied, logs.records([*HELD, retired, last]))
        row = _rows(emptied)[steps]
        assert (row["retired_because"], row["num_said"]) == found


def test_the_view_and_the_list_agree_on_how_open_hints_are_after_each_step(emptied: Engine) -> None:
    brief, steps = said_hint("ann", "be brief"), said_hint(None, "show the steps")
    taken = [
        step(2, Rehearsed(hint_id=brief, open_nats=0.01), Rehearsed(hint_id=steps, open_nats=0.75)),
        step(3, kept=[KeptHint(hint_id=brief, lost_nats=0.25), KeptHint(hint_id=steps, lost_nats=OPEN_NATS)]),
        step(4, Rehearsed(hint_id=brief, open_nats=None), kept=[KeptHint(hint_id=steps, lost_nats=0.5)]),
        step(5, Rehearsed(hint_id=steps, open_nats=0.02), kept=[KeptHint(hint_id=brief, lost_nats=-0.1)]),
    ]
    said = []
    for count in range(len(taken) + 1):
        empty(emptied)
        write_all(emptied, logs.records([*HELD, *taken[:count]]))
        told = {name: row["open_nats"] for name, row in _rows(emptied).items()}
        assert told == {one.hint_id: one.open_nats for one in memory_of("policy", HELD, taken[:count]).held}
        said.append((told[brief], told[steps]))
    assert said == [(None, None), (0.01, 0.75), (0.25, 0.75), (0.25, 0.5), (0.25, 0.02)]
    assert [_rows(emptied)[name]["rehearsed_for"] for name in (brief, steps)] == [4, 5]
