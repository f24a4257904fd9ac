"""S8, R4: what no checkpoint can hold whole is refused when it is attached, by name and with a way
out, instead of being left out of the state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from state_cases import cut, put_back
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial

from everstep.errors import RestoreError, UnsavableObject, UsageError
from everstep.state.encode import decode, encode
from everstep.state.inspect import Attached


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class MyZero(ZeroRedundancyOptimizer):
    """A user's own, by any name."""


class MyFsdp(FullyShardedDataParallel):
    """A user's own, by any name."""


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", [ZeroRedundancyOptimizer, MyZero])
def test_zero_redundancy_optimizer_is_refused(kind: Any) -> None:
    optimizer = kind(nn.Linear(2, 2).parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(UnsavableObject, match="opt is a ZeroRedundancyOptimizer") as refused:
        Attached({"opt": optimizer})
    assert "fully_shard" in str(refused.value)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", [FullyShardedDataParallel, MyFsdp])
@pytest.mark.parametrize("inside", [True, False])
def test_fsdp1_is_refused_wherever_it_wraps(inside: bool, kind: Any) -> None:
    wrapped = kind(nn.Linear(2, 2), device_id=torch.device("cpu"))
    model = nn.ModuleDict({"body": wrapped}) if inside else wrapped
    with pytest.raises(UnsavableObject, match="FullyShardedDataParallel") as refused:
        Attached({"model": model}).check()
    assert ("model.body is wrapped" if inside else "model is wrapped") in str(refused.value)
    assert "fully_shard" in str(refused.value)


@pytest.mark.usefixtures("one_rank")
def test_a_dtensor_of_partial_sums_is_refused_in_an_object() -> None:
    """In a module it is loaded in place; in an object's tree it would have to be made anew."""
    mesh = init_device_mesh("cpu", (1,))
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(UnsavableObject, match=r"ema\.0 is a DTensor placed as \(Partial"):
        encode([partial], "ema", lambda _tensor, _path: 0)


class Twice(torch.Tensor):
    """A tensor whose data is in another one, as those of quantization libraries are."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Twice:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __repr__(self) -> str:
        return "Twice()"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        raise NotImplementedError(func)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (lambda: Twice(torch.ones(2)), "Twice.*keeps its data in other tensors"),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
            "layout is torch.jagged",
        ),
        (lambda: torch.nested.nested_tensor([torch.ones(2)]), "no one shape"),
        (lambda: torch.eye(3).to_sparse_csr(), "layout is torch.sparse_csr"),
    ],
    ids=["subclass", "jagged", "nested", "csr"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning", "ignore:.*nested:UserWarning")
def test_tensors_that_are_no_box_of_elements_are_refused_by_name(tensor: Any, reason: str) -> None:
    module = nn.Module()
    module.register_buffer("held", tensor())
    with pytest.raises(UnsavableObject, match=rf"m\.held .*{reason}"):
        Attached({"m": module}).check()


def test_optimizer_state_that_is_no_dict_of_text_is_refused() -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for state in ([1.0], {0: 1.0}):
        optimizer.state[parameter] = state
        with pytest.raises(UnsavableObject, match=r"opt\.state\.param_groups\.0\.0 .*text keys"):
            Attached({"opt": optimizer}).check()


def test_keywords_that_names_cannot_be_built_from_are_refused() -> None:
    with pytest.raises(UsageError, match=r"'a\.b' is no keyword"):
        Attached({"a.b": nn.Linear(1, 1)})


def test_trees_without_an_end_are_refused() -> None:
    loop: dict[str, Any] = {}
    loop["deep"] = {"again": loop}
    with pytest.raises(UnsavableObject, match=r"s\.deep\.again \(dict\) contains itself"):
        encode(loop, "s")
    lists: list[Any] = []
    dicts: dict[str, Any] = {}
    for _ in range(10_000):
        lists, dicts = [lists], {"d": dicts}
    for deep in (lists, dicts):
        with pytest.raises(UnsavableObject, match="nested too deeply"):
            encode(deep, "s")


class Listed(list[int]):
    """No list of torch's own."""


def test_a_subclass_that_would_come_back_as_its_base_is_refused() -> None:
    with pytest.raises(UnsavableObject, match=r"s\.x .*Listed"):
        encode({"x": Listed([1])}, "s")


def test_a_dtype_that_this_torch_lacks_is_told() -> None:
    data = encode({"d": torch.float32}, "s").replace(b"float32", b"float31")
    with pytest.raises(UnsavableObject, match="has no dtype float31"):
        decode(data)


def test_an_object_that_refuses_its_state_is_named() -> None:
    class Refuses:
        def state_dict(self) -> dict[str, Any]:
            return {"n": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            state["m"]

    saved = cut(Attached({"sampler": Refuses()}))
    with pytest.raises(RestoreError, match=r"sampler \(.*Refuses\) refused its saved state.*'m'"):
        put_back(Attached({"sampler": Refuses()}), saved)
