"""The task and attempt that a request belongs to, as an agent's harness says in headers. Pure.

Unusable headers are refused by name, since an advantage is computed among all attempts at a task. For the same reason a
group belongs to its key: no other key can join it, hold it open or skew it. Names of keys have no slash.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from clawstream.gateway.requests.fields import check_name
from clawstream.gateway.requests.refusal import BadRequest

MAX_GROUP_SIZE = 4096
MAX_STEP_INDEX = 10**6
_DIGITS = re.compile(r"0|[1-9][0-9]{0,8}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouped:
    """The request's group, and its place there."""

    group_id: str
    size: int | None  # attempts at the task; None: not said
    step_index: int | None  # None: its number among the session's turns

    def of_key(self, key_name: str | None) -> "Grouped":
        """Return the group as recorded: under its key, so that another key's group of that name is a different one."""
        return self if key_name is None else replace(self, group_id=f"{key_name}/{self.group_id}")


def read_group(headers: Mapping[str, str]) -> Grouped | None:
    """Return the group that the headers name; None: they name none. Raises BadRequest for unusable headers."""
    group_id = headers.get("x-group-id") or None
    size = _number(headers, "X-Group-Size", low=1, high=MAX_GROUP_SIZE)
    step_index = _number(headers, "X-Step-Index", low=0, high=MAX_STEP_INDEX)
    if group_id is None:
        for name, value in (("X-Group-Size", size), ("X-Step-Index", step_index)):
            if value is not None:
                raise BadRequest(f"{name} is {value}, without X-Group-Id; expected both, or neither.", param=name)
        return None
    return Grouped(group_id=check_name(group_id, "X-Group-Id"), size=size, step_index=step_index)


def refuse_beside_choices(group: Grouped | None, num_choices: int) -> None:
    """Raise BadRequest for a group that is named beside several answers to one request."""
    if group is not None:
        raise BadRequest(
            f"n is {num_choices} beside X-Group-Id {group.group_id[:50]!r}: the choices of a request are a group of "
            "their own. Leave one of them out.",
            param="n",
        )


def _number(headers: Mapping[str, str], name: str, *, low: int, high: int) -> int | None:
    found = headers.get(name.lower(), "").strip()
    if not found:
        return None
    if not _DIGITS.fullmatch(found) or not low <= int(found) <= high:
        raise BadRequest(f"{name} is {found[:50]!r}; expected a whole number from {low} to {high}.", param=name)
    return int(found)
