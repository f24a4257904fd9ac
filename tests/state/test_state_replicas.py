"""R8: replicas are compared by digest, in a rotation that covers every byte."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from everstep.state.inspect import Attached
from everstep.state.replicas import compare, digests, replicated, rotation


def attached(sizes: list[int]) -> Attached:
    holder = nn.Module()
    for at, size in enumerate(sizes):
        dtype = (torch.float32, torch.int8)[at % 2]
        holder.register_buffer(f"b{at}", torch.zeros(size, dtype=dtype))
    return Attached({"model": holder}, replicated=["model"], rank=0, world=2)


@given(st.lists(st.integers(0, 9), max_size=5), st.integers(1, 40), st.integers(0, 500))
@settings(max_examples=60, deadline=None)
def test_a_rotation_comes_by_every_element(sizes: list[int], budget: int, cursor: int) -> None:
    live = attached(sizes).resolve(0)
    total = sum(h.ref.nbytes for h in live.held)
    seen: Counter[tuple[str, int]] = Counter()
    for _ in range(total // budget + 2):
        spans, cursor = rotation(live, cursor=cursor, budget_bytes=budget)
        assert sum(span.stop - span.start for span in spans) <= total
        for span in spans:
            seen.update((span.fqn, at) for at in range(span.start, span.stop))
    assert set(seen) == {(h.ref.fqn, at) for h in live.held for at in range(h.ref.box.numel)}


def test_a_rotation_stays_within_its_budget() -> None:
    live = attached([100, 100]).resolve(0)
    spans, cursor = rotation(live, cursor=390, budget_bytes=24)
    assert [(s.fqn, s.start, s.stop) for s in spans] == [("model.b0", 98, 100), ("model.b1", 0, 14)]
    assert cursor == 414


def test_digests_see_a_single_bit_whatever_the_strides() -> None:
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(torch.zeros(4, 4).t())
    held = Attached({"model": model}, replicated=["model"], world=2)
    before = digests(held.resolve(0))
    with torch.no_grad():
        model.weight[3, 0] = -0.0
    assert digests(held.resolve(0)) != before


def test_spans_of_the_rotation_are_what_is_digested() -> None:
    held = attached([8])
    live = held.resolve(0)
    part, _ = rotation(live, cursor=0, budget_bytes=16)
    before = digests(live, part)
    live.tensors[0][5] = 1.0
    assert digests(live, part) == before
    assert digests(live) != before


def test_only_replicated_tensors_are_compared() -> None:
    own, shared = nn.Linear(2, 2), nn.Linear(2, 2)
    held = Attached({"own": own, "shared": shared}, replicated=["shared"], world=2)
    assert [s.fqn for s in replicated(held.resolve(0))] == ["shared.bias", "shared.weight"]
    held.demote(["shared.bias"])
    live = held.resolve(0)
    assert [s.fqn for s in replicated(live)] == ["shared.weight"]
    assert {ref.fqn: ref.rank for ref in live.refs}["shared.bias"] == 0


def test_differences_name_the_groups_of_ranks() -> None:
    by_rank = {
        0: {"a": "1", "b": "1"},
        1: {"a": "1", "b": "2"},
        2: {"a": "1", "b": "2"},
        3: {"a": "1"},
    }
    assert compare(by_rank) == {"b": [[1, 2], [0], [3]]}
    assert compare({0: {"a": "1"}, 1: {"a": "1"}}) == {}
