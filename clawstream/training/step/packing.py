"""How a batch is divided over processes, into pieces, and into packed rows. Pure.

The division changes no gradient, only how much is computed twice. A packed row holds sequences as a tree of segments,
parents first: a common beginning stands in it once. A token sees only the earlier tokens of its own segment and of the
segments above it, so no sequence sees another.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

LEAST_SHARED_TOKENS = 16  # a shorter common beginning is computed again, which costs less than one more segment

Tokens = tuple[int, ...]


class Segment(NamedTuple):
    """Tokens that follow one another in every sequence that reaches them."""

    parent: int | None  # the parent's number in the pack; None: the segment begins a sequence
    start: int  # in the row
    end: int
    subtree_end: int  # where the last segment below this one ends; its own end if there is none below


@dataclass(frozen=True, slots=True)
class Pack:
    """The row, and where each sequence stands in it."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)  # of each token in its sequence
    segments: list[Segment] = field(default_factory=list)  # in the order of the row
    places: list[list[int]] = field(default_factory=list)  # of each sequence's tokens, in the row


def pack(sequences: Sequence[Tokens]) -> Pack:
    """Return the sequences, none of them empty, in one row; their order affects only the order of `places`."""
    order = in_order(sequences)
    ordered = [sequences[i] for i in order]
    shared = [0, *(num_shared(one, other) for one, other in pairwise(ordered))]  # with the one before
    row = Pack(places=[[] for _ in sequences])
    parents: list[tuple[int | None, int]] = []  # and where the segment starts
    waiting: list[tuple[int, int, int, int | None]] = [(0, len(ordered), 0, None)]  # from, to, depth, parent
    while waiting:
        first, stop, depth, parent = waiting.pop()
        forks = [k for k in range(first + 1, stop) if shared[k] < len(ordered[k - 1])]
        end = min((shared[k] for k in forks), default=len(ordered[stop - 1]))
        if not forks or end - depth >= LEAST_SHARED_TOKENS:
            start = len(row.ids)
            row.ids.extend(ordered[stop - 1][depth:end])
            row.positions.extend(range(depth, end))
            for k in range(first, stop):
                row.places[order[k]].extend(range(start, start + min(len(ordered[k]), end) - depth))
            parents.append((parent, start))
            depth, parent = end, len(parents) - 1
        bounds = [first, *(k for k in forks if shared[k] == end), stop]
        waiting += [(*both, depth, parent) for both in reversed(list(pairwise(bounds))) if forks]
    row.segments.extend(_segments(parents, len(row.ids)))
    return row


def in_order(sequences: Sequence[Tokens]) -> list[int]:
    """Return the indices ordered so that sequences with a common beginning are neighbours, the beginning first."""
    return sorted(range(len(sequences)), key=lambda i: sequences[i])


def num_shared(one: Tokens, other: Tokens) -> int:
    """Return the length of the common beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def num_added(before: Tokens, sequence: Tokens) -> int:
    """Return how many tokens, at most, `sequence` adds to a pack that has its predecessor `before`."""
    shared = num_shared(before, sequence)
    unshared = 0 if shared == len(before) else LEAST_SHARED_TOKENS - 1  # what is gone on from is never computed again
    return len(sequence) - max(0, shared - unshared)


def _segments(parents: Sequence[tuple[int | None, int]], num_tokens: int) -> list[Segment]:
    ends = [*(start for _, start in parents[1:]), num_tokens]
    subtree_ends = list(ends)
    for number in reversed(range(len(parents))):
        parent = parents[number][0]
        if parent is not None:
            subtree_ends[parent] = max(subtree_ends[parent], subtree_ends[number])
    return [Segment(p, start, end, last) for (p, start), end, last in zip(parents, ends, subtree_ends, strict=True)]


def side_by_side(
    segments: Sequence[Segment], *, small_tokens: int, alone_tokens: int | None
) -> list[tuple[int, int, int]]:
    """Return runs of segments [from, to) and the row's place behind them: small subtrees side by side, or one segment.

    A run of subtrees has at most `small_tokens`. A sequence that shares nothing is a run of its own from `alone_tokens`
    on; None: never for that reason.
    """

    def alone(segment: Segment) -> bool:
        shares = segment.parent is not None or segment.subtree_end > segment.end
        return not shares and alone_tokens is not None and segment.end - segment.start >= alone_tokens

    runs, number = [], 0
    while number < len(segments):
        first, after = segments[number], number + 1
        end = first.end
        if first.subtree_end - first.start <= small_tokens and not alone(first):
            end = first.subtree_end
            while after < len(segments):
                segment = segments[after]
                if segment.start >= end:
                    beside = segment.parent == first.parent and not alone(segment)
                    if not beside or segment.subtree_end - first.start > small_tokens:
                        break
                    end = segment.subtree_end
                after += 1
        runs.append((number, after, end))
        number = after
    return runs


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

    Sequences with a common beginning go together, so that it is computed once: those that fit into one group are not
    divided, and others are where they have least in common. The largest group comes first, and a sequence longer than
    the budget is a group of its own.
    """
    order = in_order(sequences)
    pairs = [(sequences[one], sequences[other]) for one, other in pairwise(order)]
    shared = [0, *(num_shared(*pair) for pair in pairs)]  # with the one before
    added = [0, *accumulate((num_added(*pair) for pair in pairs), initial=0)]  # after the first of all, up to here
    groups: list[list[int]] = []
    sizes: list[int] = []
    waiting = [(0, len(order))] if order else []  # from, to
    while waiting:
        first, stop = waiting.pop()
        alone = len(sequences[order[first]]) + added[stop] - added[first + 1]
        if groups and sizes[-1] + added[stop] - added[first] <= budget_tokens:
            groups[-1] += order[first:stop]
            sizes[-1] += added[stop] - added[first]
        elif alone <= budget_tokens or stop == first + 1:
            groups.append(order[first:stop])
            sizes.append(alone)
        else:
            least = min(shared[first + 1 : stop])
            bounds = [first, *(k for k in range(first + 1, stop) if shared[k] == least), stop]
            waiting += reversed(list(pairwise(bounds)))
    return [group for _, group in sorted(zip(sizes, groups, strict=True), key=lambda pair: -pair[0])]


def shares(lengths_tokens: Sequence[int], count: int) -> list[list[int]]:
    """Return the indices of the samples that each of `count` processes computes; none reads much more than the others.

    The longest samples are dealt first, each to the process with the least so far; equal input gives equal shares.
    """
    found: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    for index in sorted(range(len(lengths_tokens)), key=lambda i: (-lengths_tokens[i], i)):
        least = min(range(count), key=lambda one: (tokens[one], one))
        found[least].append(index)
        tokens[least] += lengths_tokens[index]
    return [sorted(indices) for indices in found]


def forks(vocabulary_tokens: int, *, small_tokens: int) -> list[tuple[Tokens, Tokens]]:
    """Return prompts with answers whose row has each kind of block: a beginning alone, and continuations of it."""
    one = tuple(7 * n % vocabulary_tokens for n in range(24 + small_tokens // 2))
    other = (*one[:24], (one[24] + 1) % vocabulary_tokens, *one[25:])
    return [*((ids[:-4], ids[-4:]) for ids in (one, other)), (one[:20], one[20:24]), (one[9:20], one[:1])]
