"""Slurm's short form of host names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.conf.problems import RefusedError
from shardwright.pretrain.nodelist import expand


@pytest.mark.parametrize(
    ("nodelist", "names"),
    [
        ("linux[1,2]", ["linux1", "linux2"]),
        ("alpha,beta,gamma", ["alpha", "beta", "gamma"]),
        ("nodeA,nodeB[001,003],nodeC", ["nodeA", "nodeB001", "nodeB003", "nodeC"]),
        ("node1g[0010,0011],node2g0005,node3g0007", ["node1g0010", "node1g0011", "node2g0005", "node3g0007"]),
        ("my-site-ia810", ["my-site-ia810"]),
        ("n[09-11]", ["n09", "n10", "n11"]),
        ("rack[1-2]node[01,03-04]-ib", [f"rack{r}node{n}-ib" for r in (1, 2) for n in ("01", "03", "04")]),
    ],
)
def test_a_nodelist_is_written_out_in_its_order(nodelist: str, names: list[str]) -> None:
    assert expand(nodelist) == names


@pytest.mark.parametrize(
    "nodelist", ["", "a,", ",a", "n[1", "n1]", "n[]", "n[2-1]", "n[a-b]", "n[1,]", "a b", "n[[1]]"]
)
def test_what_is_no_nodelist_is_refused_by_the_variable_s_name(nodelist: str) -> None:
    with pytest.raises(RefusedError, match="SLURM_JOB_NODELIST"):
        expand(nodelist)


@given(first=st.integers(0, 500), count=st.integers(1, 20), width=st.integers(1, 5))
def test_a_range_keeps_its_leading_zeros(first: int, count: int, width: int) -> None:
    last = first + count - 1
    expected = [f"n{number:0{width}d}" for number in range(first, last + 1)]
    assert expand(f"n[{first:0{width}d}-{last:0{width}d}]") == expected
