"""The sums that the simulation talks about, and who may see which.

A hash of the sum alone decides its group, so the sums that the base policy is built on, those that students ask and the
scored ones never meet. Student and scorer read theirs from a file: `python -m clawstream.simulation.problems FOLDER`.
"""

import hashlib
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

SMALLEST, LARGEST = 11, 99
NUM_SCORED = 200


class Group(StrEnum):
    """Who sees a sum."""

    BASE = "base"
    STUDENTS = "students"
    SCORED = "scored"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Sum:
    """Two numbers to add."""

    left: int
    right: int

    @property
    def total(self) -> int:
        """The right answer."""
        return self.left + self.right

    @property
    def group(self) -> Group:
        """Who sees this sum and its mirror image: 60 %, 30 % and 10 % of all sums."""
        low, high = sorted((self.left, self.right))
        bucket = hashlib.sha256(f"{low}+{high}".encode()).digest()[0]
        if bucket < 154:
            return Group.BASE
        return Group.STUDENTS if bucket < 230 else Group.SCORED


def all_of(group: Group) -> list[Sum]:
    """Return every sum of `group`, smallest first."""
    numbers = range(SMALLEST, LARGEST + 1)
    return [s for left in numbers for right in numbers if (s := Sum(left=left, right=right)).group is group]


def scored() -> list[Sum]:
    """Return the NUM_SCORED sums that scores are taken on: always the same, spread over all sizes."""
    return sorted(sorted(all_of(Group.SCORED), key=_shuffled)[:NUM_SCORED])


def write(folder: Path) -> tuple[Path, Path]:
    """Write students.txt and scored.txt, one `LEFT RIGHT` a line, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    students_path, scored_path = folder / "students.txt", folder / "scored.txt"
    for path, sums in ((students_path, all_of(Group.STUDENTS)), (scored_path, scored())):
        path.write_text("".join(f"{s.left} {s.right}\n" for s in sums))
    return students_path, scored_path


def _shuffled(problem: Sum) -> bytes:
    return hashlib.sha256(f"scored {problem.left} {problem.right}".encode()).digest()


if __name__ == "__main__":
    for written in write(Path(sys.argv[1])):
        print(written)
