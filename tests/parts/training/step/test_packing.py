"""Many sequences in one row: everything stands there, what is alike stands once, and nothing sees its neighbours."""

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clawstream.training import torch_model
from clawstream.training.step.packing import LEAST_SHARED_TOKENS, Pack, Tokens, num_shared, pack, packed_batches
from clawstream.training.torch_model import Tree


@pytest.fixture(scope="module", autouse=True)
def _small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_model, "SMALL_TOKENS", 40)
        patch.setattr(torch_model, "ALONE_TOKENS", 20)
        patch.setattr(torch_model, "LARGE_TOKENS", 64)
        yield


@st.composite
def families(draw: st.DrawFn) -> list[Tokens]:
    """Sequences that fork from one another anywhere, go on where another ends, or are another."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    found: list[Tokens] = []
    for _ in range(draw(st.integers(1, 12))):
        begins = rng.choice(found)[: rng.choice((0, 5, 20, 60, 1000))] if found else ()
        found.append((*begins, *(rng.randrange(4) for _ in range(rng.choice((0, 1, 3, 30, 90))))) or (1,))
    return found


def seen(row: Pack, window_tokens: int | None) -> torch.Tensor:
    """Which tokens each one sees [L, L], by the blocks that attention is computed in."""
    blocks = Tree(row, torch.device("cpu")).blocks(window_tokens)
    seen_LL = torch.zeros(len(row.ids), len(row.ids), dtype=torch.bool)
    for block in blocks:
        own = torch.arange(block.start, block.end)
        before = [torch.arange(blocks[number].start, blocks[number].end) for number in block.seen]
        mask_QS = torch.ones(len(own), len(own), dtype=torch.bool).tril() if block.mask_QS is None else block.mask_QS
        seen_LL[own.unsqueeze(1), torch.cat([*before, own])] = mask_QS
    assert [b.start for b in blocks] == [0, *(b.end for b in blocks)][:-1]
    return seen_LL


@given(families())
def test_every_sequence_stands_in_the_row_at_its_own_positions(sequences: list[Tokens]) -> None:
    row = pack(sequences)
    for sequence, places in zip(sequences, row.places, strict=True):
        assert tuple(row.ids[place] for place in places) == sequence
        assert [row.positions[place] for place in places] == list(range(len(sequence)))
    assert sorted({place for places in row.places for place in places}) == list(range(len(row.ids)))


@given(families(), st.one_of(st.none(), st.integers(1, 150)))
def test_a_token_sees_what_stands_before_it_in_its_own_sequence_and_nothing_else(
    sequences: list[Tokens], window_tokens: int | None
) -> None:
    row = pack(sequences)
    expected_LL = torch.zeros(len(row.ids), len(row.ids), dtype=torch.bool)
    for places in row.places:
        for at, place in enumerate(places):
            expected_LL[place, places[max(0, at + 1 - (window_tokens or len(places))) : at + 1]] = True
    assert torch.equal(seen(row, window_tokens), expected_LL)


@given(families(), st.randoms())
def test_the_order_of_the_sequences_changes_nothing_but_the_order_of_their_places(
    sequences: list[Tokens], rng: random.Random
) -> None:
    order = list(range(len(sequences)))
    rng.shuffle(order)
    row, other = pack(sequences), pack([sequences[i] for i in order])
    assert (other.ids, other.segments) == (row.ids, row.segments)
    assert other.places == [row.places[i] for i in order]


@given(families())
def test_a_beginning_worth_sharing_is_computed_once(sequences: list[Tokens]) -> None:
    ordered = sorted(sequences)
    least = sum(len(s) for s in ordered) - sum(num_shared(*both) for both in pairwise(ordered))
    assert least <= len(pack(sequences).ids) <= least + (LEAST_SHARED_TOKENS - 1) * len(sequences)


@given(families(), st.integers(1, 400))
def test_a_group_is_a_pack_within_the_budget_or_a_single_sequence(sequences: list[Tokens], budget: int) -> None:
    groups = packed_batches(sequences, budget_tokens=budget)
    assert sorted(i for group in groups for i in group) == list(range(len(sequences)))
    assert all(len(group) == 1 or len(pack([sequences[i] for i in group]).ids) <= budget for group in groups)


def test_what_fits_into_one_group_is_not_divided_and_what_does_not_is_where_it_has_least_in_common() -> None:
    rng = random.Random(0)

    def some(num_tokens: int) -> Tokens:
        return tuple(rng.choices(range(1000), k=num_tokens))

    def session(system: Tokens) -> list[Tokens]:
        whole = system + some(200)
        return [whole[:end] for end in range(len(system) + 20, len(whole) + 1, 20)]

    sequences = [s for _ in range(3) for s in session(some(300))]
    groups = packed_batches(sequences, budget_tokens=1000)
    assert sorted(len(group) for group in groups) == [10, 20]
    assert sum(len(pack([sequences[i] for i in group]).ids) for group in groups) == 3 * 500
    assert len(packed_batches(sequences, budget_tokens=1500)) == 1

    system = some(300)
    sequences = [s for _ in range(5) for s in session(system)]
    groups = packed_batches(sequences, budget_tokens=950)
    assert all(len(group) == 10 * len({i // 10 for i in group}) for group in groups)
    assert sum(len(pack([sequences[i] for i in group]).ids) for group in groups) == 2 * 300 + 5 * 200


def test_turns_whose_prompts_only_grow_are_one_causal_row() -> None:
    whole = tuple(random.Random(0).choices(range(90), k=3000))
    row = pack([whole[:1200], whole, whole[:2100]])
    assert row.ids == list(whole)
    assert [block.mask_QS for block in Tree(row, torch.device("cpu")).blocks(None)] == [None]


def test_a_sequence_that_shares_nothing_needs_no_mask_and_short_ones_share_one() -> None:
    rng = random.Random(0)
    row = pack([tuple(rng.choices(range(1000), k=length)) for length in (30, 5, 6, 7)])
    blocks = Tree(row, torch.device("cpu")).blocks(None)
    assert [block.end - block.start for block in blocks if block.mask_QS is None] == [30]
    assert sum(block.end - block.start for block in blocks if block.mask_QS is not None) == 5 + 6 + 7


def test_turns_that_a_template_renders_again_share_their_beginning() -> None:
    prompt, first, second = (1,) * 900, (2,) * 50, (3,) * 70
    row = pack([prompt + first, prompt + second])
    assert len(row.ids) == 900 + 50 + 70
    assert [(s.parent, s.end - s.start) for s in row.segments] == [(None, 900), (0, 50), (0, 70)]
