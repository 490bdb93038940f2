"""What the trainer logs about samples that it has no use for, in words for a person. Pure.

A reason is logged when 1, 2, 4, 8 ... samples were dropped for it, so the lines stay few however many samples come.
"""

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from clawstream.training.batches.planning import DropReason

WHY: Mapping[DropReason, str] = MappingProxyType(
    {
        DropReason.LATE: "another revision of their turns is trained on already (training.late)",
        DropReason.SUPERSEDED: "a newer revision of their turns came",
        DropReason.STALE: "they are more than training.max_versions_behind versions old",
        DropReason.NO_SIGNAL: "they have nothing that training.method learns from",
        DropReason.OTHER_POLICY: "another policy than policy.id gave the answers",
        DropReason.UNGROUPED: "they are of no group, and training.method = 'stepwise' learns from groups alone",
        DropReason.LEFT_OUT: "their groups were settled without them",
        DropReason.UNSETTLED: "their groups were not settled",
    }
)  # what came before is in a batch or named by what it was then; what can't be trained on is set aside and named there
LOST = frozenset({DropReason.STALE, DropReason.UNGROUPED, DropReason.LEFT_OUT, DropReason.UNSETTLED})


def grown(dropped: Mapping[DropReason, int], said: Counter[DropReason]) -> dict[DropReason, int]:
    """Return the counts that are at least twice the number last logged, for reasons that have words."""
    return {reason: number for reason in WHY if (number := dropped.get(reason, 0)) >= max(1, 2 * said[reason])}
