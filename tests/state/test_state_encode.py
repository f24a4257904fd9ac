"""S8: the tree of non-tensor state comes back with its types, and nothing is pickled."""

from __future__ import annotations

import collections
import enum
import math
import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.errors import UnsavableObject
from everstep.state.encode import decode, encode


def same(a: Any, b: Any) -> bool:
    """Equal in type, order and bits, all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        pairs = zip(a.items(), b.items(), strict=True)
        return len(a) == len(b) and all(same(k, m) and same(v, w) for (k, v), (m, w) in pairs)
    if isinstance(a, list | tuple | collections.deque):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


keys = st.one_of(
    st.text(max_size=5), st.integers(), st.booleans(), st.tuples(st.integers(), st.text(max_size=3))
)
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(2**200), 2**200), st.floats(),
    st.complex_numbers(), st.text(st.characters(codec=None), max_size=8), st.binary(max_size=8),
    st.sampled_from([torch.float32, torch.device("cpu"), torch.device("cuda", 3)]),
    st.just(torch.Size([2, 3])), st.floats(width=32).map(np.float32),
    st.integers(0, 9).map(np.int16),
    st.lists(st.integers(0, 255), max_size=4).map(lambda v: np.array(v, dtype=np.uint8)),
    st.binary(max_size=4).map(bytearray),
)  # fmt: skip
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.lists(inner, max_size=4).map(collections.deque),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(collections.OrderedDict),
        st.sets(keys, max_size=4),
        st.frozensets(keys, max_size=4),
        st.dictionaries(keys, st.integers(), max_size=3).map(collections.Counter),
        st.dictionaries(keys, inner, max_size=3).map(lambda d: collections.defaultdict(list, d)),
    ),
    max_leaves=12,
)


@given(trees)
@settings(max_examples=150, deadline=None)
def test_any_tree_round_trips_with_its_types_and_bits(tree: Any) -> None:
    assert same(decode(encode(tree, "tree")), tree)


def test_special_values_keep_their_bits() -> None:
    payload = struct.unpack("<d", b"\x01\0\0\0\0\0\xf4\x7f")[0]
    tree = [payload, math.inf, -math.inf, -0.0, 2**64, -(2**63) - 1, "\ud800", np.float64("nan")]
    assert same(decode(encode(tree, "tree")), tree)


def test_details_of_containers_come_back() -> None:
    fortran = np.asfortranarray(np.arange(6).reshape(2, 3))
    back = decode(encode([fortran, collections.deque([1], maxlen=3)], "t"))
    assert back[0].flags.f_contiguous
    assert (back[0] == fortran).all()
    assert back[0].flags.writeable
    assert back[1].maxlen == 3


def test_equal_sets_encode_to_equal_bytes() -> None:
    assert encode({"a", "b", "c"}, "s") == encode({"c", "b", "a"}, "s")


class Colour(enum.Enum):
    RED = 1


class Opaque:
    def __init__(self) -> None:
        self.file = 3


@pytest.mark.parametrize(
    "value", [Opaque(), Colour.RED, lambda: None, collections.defaultdict(lambda: 1), object]
)
def test_what_no_record_can_hold_is_refused_by_path_and_type(value: object) -> None:
    with pytest.raises(UnsavableObject, match=r"sampler\.deep\.1\.2") as caught:
        encode({"deep": [None, (0, 1, value)]}, "sampler")
    assert type(value).__name__ in str(caught.value)


def test_a_tree_that_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append({"again": loop})
    with pytest.raises(UnsavableObject, match="contains itself"):
        encode(loop, "loop")


def test_a_shared_branch_is_no_loop() -> None:
    shared = [1]
    assert decode(encode([shared, shared], "s")) == [[1], [1]]


def test_tensors_are_indices_and_keep_what_they_were() -> None:
    kept: list[torch.Tensor] = []

    def index(tensor: torch.Tensor, path: str) -> int:
        assert path == f"ema.shadow.{len(kept)}"
        kept.append(tensor)
        return len(kept) - 1

    tree = {"shadow": [torch.ones(2), torch.nn.Parameter(torch.zeros(1)), torch.ones(1)]}
    tree["shadow"][2].requires_grad_(True)
    data = encode(tree, "ema", index)
    plain, parameter, leaf = decode(data, [t.detach().clone() for t in kept])["shadow"]
    assert isinstance(parameter, torch.nn.Parameter)
    assert parameter.requires_grad
    assert (plain.requires_grad, leaf.requires_grad) == (False, True)


def test_tensors_are_refused_where_only_plain_values_fit() -> None:
    with pytest.raises(UnsavableObject, match=r"run\.x"):
        encode({"x": torch.ones(1)}, "run")
