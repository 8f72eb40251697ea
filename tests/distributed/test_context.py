"""Context parallelism: pieces of a sequence, and attention over all of them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.parallel.mcore.context import own_pieces


@settings(deadline=None)
@given(cp_size=st.integers(1, 5), piece=st.integers(1, 4), samples=st.integers(1, 3))
def test_ranks_share_out_every_token_and_each_has_early_and_late_ones(cp_size: int, piece: int, samples: int) -> None:
    length = 2 * cp_size * piece
    positions = torch.arange(length).expand(samples, -1)
    shares = [own_pieces({"position_ids": positions}, cp_size, rank)["position_ids"] for rank in range(cp_size)]
    assert torch.cat(shares, dim=1).sort(dim=1).values.equal(positions)
    # the attention that a causal mask leaves to a rank is the same for all of them
    assert len({int((share + 1).sum()) for share in shares}) == 1


@pytest.mark.parametrize(("rank", "expected"), [(0, [0, 1, 6, 7]), (1, [2, 3, 4, 5])])
def test_a_rank_has_a_piece_from_either_end(rank: int, expected: list[int]) -> None:
    assert own_pieces({"tokens": torch.arange(8)[None]}, 2, rank)["tokens"].tolist() == [expected]
