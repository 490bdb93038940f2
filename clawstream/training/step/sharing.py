"""Which process computes which samples. Pure."""

from collections.abc import Sequence


def shares(lengths_tokens: Sequence[int], count: int) -> list[list[int]]:
    """Return the indices of each of `count` processes' samples, in order, so that none reads much more than others.

    The longest samples are dealt first, each to the process with the least so far; equal input gives equal shares.
    """
    found: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    for index in sorted(range(len(lengths_tokens)), key=lambda i: (-lengths_tokens[i], i)):
        least = min(range(count), key=lambda one: (tokens[one], one))
        found[least].append(index)
        tokens[least] += lengths_tokens[index]
    return [sorted(indices) for indices in found]
