"""Node numbers, ranks and roles: pure, as every agent works them out for itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from everstep.agent.rendezvous import NodeEntry, Plan, order

entries = st.lists(
    st.builds(
        NodeEntry,
        role=st.sampled_from(["a", "b"]),
        workers=st.integers(1, 4),
        host=st.sampled_from(["h0", "h1", "h2"]),
        number=st.integers(0, 3),
    ),
    min_size=1,
    max_size=8,
)


@given(entries)
def test_numbers_are_a_permutation_in_which_hosts_keep_their_places(met: list[NodeEntry]) -> None:
    numbers = order(met)
    assert sorted(numbers) == list(range(len(met)))
    placed = {number: met[place] for place, number in enumerate(numbers)}
    assert [placed[k].host for k in range(len(met))] == [entry.host for entry in met]


def test_on_one_host_the_keepers_numbers_decide_not_the_pids() -> None:
    """So that a rank finds its memory again after all agents were started anew."""
    assert order([NodeEntry("r", 2, "h", 1), NodeEntry("r", 2, "h", 0)]) == (1, 0)


@given(entries)
def test_ranks_and_role_ranks_are_torchruns(met: list[NodeEntry]) -> None:
    plan = Plan(nodes=tuple(met))
    ranks = [rank for node in plan.ranks_of_node() for rank in node]
    assert ranks == list(range(sum(entry.workers for entry in met)))
    for role in {entry.role for entry in met}:
        nodes = [k for k, entry in enumerate(met) if entry.role == role]
        together = [rank for k in nodes for rank in plan.role_ranks(k)[0]]
        assert together == list(range(len(together)))
        assert {plan.role_ranks(k)[1] for k in nodes} == {len(together)}
