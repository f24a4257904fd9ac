"""The split over ranks: DESIGN's two owners of every byte, on any topology."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.core.layout import ITEMSIZE, SHARED, Box, Extent, RankLayout, TensorRef
from everstep.state.inspect import Held
from everstep.state.plan import plan_layout

CHUNK = 64


def held(
    fqn: str, shape: tuple[int, ...], world: int, *, split: bool, dtype: str = "int16"
) -> Held:
    ref = TensorRef(fqn, dtype, shape, Box((0,) * len(shape), shape))
    return Held(ref, tuple(range(world)), split)


def layouts(tensors: list[Held], nodes: tuple[int, ...], chunk: int = CHUNK) -> list[RankLayout]:
    world = len(nodes)
    return [
        plan_layout(tensors, world=world, rank=r, node_of_rank=nodes, chunk_bytes=chunk)
        for r in range(world)
    ]


def elements(extent: Extent) -> Counter[tuple[str, int]]:
    """Every element of an extent of whole rows, by its place in row-major order."""
    row = 1
    for size in extent.shape[1:]:
        row *= size
    start = extent.box.offsets[0] * row if extent.shape else 0
    return Counter((extent.fqn, start + at) for at in range(extent.box.numel))


def all_elements(tensors: list[Held]) -> Counter[tuple[str, int]]:
    return Counter((h.ref.fqn, at) for h in tensors for at in range(h.ref.box.numel))


shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
tensors = st.lists(st.tuples(shapes, st.booleans(), st.sampled_from(["int8", "int64"])), max_size=6)
topologies = st.lists(st.integers(1, 3), min_size=1, max_size=3).flatmap(
    lambda sizes: st.permutations([n for n, size in enumerate(sizes) for _ in range(size)])
)


@given(tensors, topologies)
@settings(max_examples=100, deadline=None)
def test_one_persist_owner_in_the_job_and_one_snapshot_owner_a_node(
    given_tensors: list[tuple[tuple[int, ...], bool, str]], topology: list[int]
) -> None:
    nodes = tuple(topology)
    facts = [
        held(f"t{i}", shape, len(nodes), split=split, dtype=dtype)
        for i, (shape, split, dtype) in enumerate(given_tensors)
    ]
    found = layouts(facts, nodes)
    every = all_elements(facts)
    persisted: Counter[tuple[str, int]] = Counter()
    for node in set(nodes):
        copied: Counter[tuple[str, int]] = Counter()
        for rank, layout in enumerate(found):
            if nodes[rank] == node:
                for extent in layout.extents:
                    copied += elements(extent)
                    persisted += elements(extent) if extent.persist else Counter()
        assert copied == every
    assert persisted == every
    assert len({layout.layout for layout in found}) == 1


@given(tensors, topologies)
@settings(max_examples=50, deadline=None)
def test_pieces_begin_and_end_on_chunk_edges(
    given_tensors: list[tuple[tuple[int, ...], bool, str]], topology: list[int]
) -> None:
    facts = [
        held(f"t{i}", shape, len(topology), split=True, dtype=dtype)
        for i, (shape, _, dtype) in enumerate(given_tensors)
    ]
    for layout in layouts(facts, tuple(topology)):
        for extent in layout.extents:
            if extent.shape:
                row = extent.nbytes // extent.box.sizes[0]
                unit = max(1, CHUNK // row)
                low, rows = extent.box.offsets[0], extent.box.sizes[0]
                assert low % unit == 0
                assert (low + rows) % unit == 0 or low + rows == extent.shape[0]


def test_work_is_balanced_within_a_chunk() -> None:
    nodes = (0, 0, 0, 1, 1, 1)
    facts = [held("a", (5000, 3), 6, split=True), held("b", (977,), 6, split=True)]
    total = sum(h.ref.nbytes for h in facts)
    for layout in layouts(facts, nodes):
        persist = sum(e.nbytes for e in layout.extents if e.persist)
        copied = sum(e.nbytes for e in layout.extents)
        assert abs(persist - total / 6) <= 2 * CHUNK
        assert abs(copied - total / 3) <= 3 * CHUNK


def test_a_broadcast_buffer_is_persisted_by_rank_0_and_copied_by_the_first_of_each_node() -> None:
    found = layouts([held("running_mean", (8,), 4, split=False)], (0, 0, 1, 1))
    assert [[e.persist for e in layout.extents] for layout in found] == [[True], [], [False], []]


def test_a_hybrid_shard_is_persisted_by_its_first_holder() -> None:
    shape, box = (4, 2), Box((2, 0), (2, 2))
    # Ranks 1 and 3 hold the second half: coordinate 0 and 1 of the replicate dimension.
    item = Held(TensorRef("w", "float32", shape, box), (1, 3))
    by_rank = {r: plan_layout([item], world=4, rank=r, node_of_rank=(0, 0, 1, 1)) for r in (1, 3)}
    assert [e.persist for e in by_rank[1].extents] == [True]
    assert [e.persist for e in by_rank[3].extents] == [False]
    together = plan_layout([item], world=4, rank=3, node_of_rank=(0, 0, 0, 0))
    assert together.extents == ()


def test_a_ranks_own_tensors_do_not_change_what_all_agree_on() -> None:
    shared = held("w", (64, 4), 2, split=True)
    own = Held(TensorRef("rng", "uint8", (7,), Box((0,), (7,)), rank=1), (1,))
    plain = layouts([shared], (0, 0))
    mixed = plan_layout([own, shared], world=2, rank=1, node_of_rank=(0, 0), chunk_bytes=CHUNK)
    assert mixed.layout == plain[0].layout
    assert [(e.rank, e.persist) for e in mixed.extents if e.fqn == "rng"] == [(1, True)]
    assert {e.rank for e in plain[0].extents} == {SHARED}


@pytest.mark.parametrize("change", ["shape", "dtype", "name", "topology", "split"])
def test_the_digest_changes_with_every_shared_fact(change: str) -> None:
    before = layouts([held("w", (8, 8), 2, split=True)], (0, 0))[0].layout
    after = layouts(
        [
            held(
                "v" if change == "name" else "w",
                (8, 9) if change == "shape" else (8, 8),
                2,
                split=change != "split",
                dtype="float16" if change == "dtype" else "int16",
            )
        ],
        (0, 1) if change == "topology" else (0, 0),
    )[0].layout
    assert ITEMSIZE["float16"] == ITEMSIZE["int16"]
    assert before != after
