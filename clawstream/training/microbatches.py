"""Cut a batch into pieces that fit in memory. Pure; the cut changes no gradient, only the padding."""

from collections.abc import Sequence


def micro_batches(lengths_tokens: Sequence[int], *, budget_tokens: int) -> list[list[int]]:
    """Return groups of indices, each of at most `budget_tokens` once its rows are padded to its longest.

    Rows of like length go together, longest first, so that a batch too large for the machine fails at once. A row that
    is longer than the budget is a group of its own.
    """
    order = sorted(range(len(lengths_tokens)), key=lambda i: (-lengths_tokens[i], i))
    groups: list[list[int]] = []
    for index in order:
        longest = lengths_tokens[groups[-1][0]] if groups else 0
        if groups and longest * (len(groups[-1]) + 1) <= budget_tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups
