"""Cut the batch of a step into pieces that fit in memory. Pure.

The one rule: the cut changes no gradient, only how much is computed twice. All chance comes from the seed.
"""

from collections.abc import Sequence

from clawstream.training.step.packing import Tokens, in_order, num_added


def micro_batches(lengths_tokens: Sequence[int], *, budget_tokens: int) -> list[list[int]]:
    """Return groups of indices, each of at most `budget_tokens` once its rows are padded to its longest.

    Rows of similar length go together, longest first, so that a batch too large for the machine fails at once. A row
    longer than the budget is a group of its own.
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


def packed_batches(sequences: Sequence[Tokens], *, budget_tokens: int) -> list[list[int]]:
    """Return groups of indices, each of at most `budget_tokens` once it is a pack.

    Sequences with a common beginning go together, so that it is computed once. The largest group comes first, and a
    sequence longer than the budget is a group of its own.
    """
    groups: list[list[int]] = []
    sizes: list[int] = []
    for index in in_order(sequences):
        added = num_added(sequences[groups[-1][-1]], sequences[index]) if groups else 0
        if groups and sizes[-1] + added <= budget_tokens:
            groups[-1].append(index)
            sizes[-1] += added
        else:
            groups.append([index])
            sizes.append(len(sequences[index]))
    return [group for _, group in sorted(zip(sizes, groups, strict=True), key=lambda pair: -pair[0])]
