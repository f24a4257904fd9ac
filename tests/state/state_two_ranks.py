"""One of two gloo ranks of test_state_distributed: ``state_two_ranks.py RANK FOLDER CASE``.

Bytes and records go between the ranks over files in FOLDER, as they would over a store. Any failed
check ends the process with its traceback.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from state_cases import content, optimizer_content
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from everstep.core.layout import ITEMSIZE, SHARED, RankLayout, RankState, TensorRef
from everstep.state import difference, plan, replicas, restore
from everstep.state.capture import Capture
from everstep.state.ddp import rebuild_buckets_now
from everstep.state.gradients import Gradients
from everstep.state.inspect import Attached, LiveState

WORLD = 2


class Saved(msgspec.Struct):
    layout: RankLayout
    payload: bytes
    state: RankState
    digests: dict[str, str]


class Ranks:
    """This rank, and what both have written so far."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank = rank
        self.folder = folder

    def attach(self, **objects: Any) -> Attached:
        return Attached(objects, rank=self.rank, world=WORLD)

    def plan(self, live: LiveState, nodes: tuple[int, ...]) -> RankLayout:
        return plan.plan_layout(live.held, world=WORLD, rank=self.rank, node_of_rank=nodes)

    def cut(self, name: str, attached: Attached, nodes: tuple[int, ...] = (0, 0)) -> list[Saved]:
        """Cut on both ranks; everyone's bytes and records."""
        live = attached.resolve(1)
        layout = self.plan(live, nodes)
        payload = torch.empty(layout.payload_bytes, dtype=torch.uint8)
        Capture(live, layout).copy_into(payload, live)
        digests = replicas.digests(live)
        mine = Saved(layout, bytes(payload.tolist()), live.rank_state(), digests)
        (self.folder / f"{name}-{self.rank}").write_bytes(msgspec.msgpack.encode(mine))
        dist.barrier()
        found = [(self.folder / f"{name}-{r}").read_bytes() for r in range(WORLD)]
        cuts = [msgspec.msgpack.decode(data, type=Saved) for data in found]
        assert cuts[0].layout.layout == cuts[1].layout.layout
        return cuts

    def put_back(self, attached: Attached, cuts: list[Saved]) -> None:
        state = cuts[self.rank].state
        tree = restore.decode(state)
        difference.check(attached, state, tree)
        targets = restore.targets(attached, state, tree)
        for ref, tensor in targets:
            destination = restore.Destination(ref, tensor)
            destination.view[:] = part_of(ref, cuts)
            destination.finish()
        restore.apply(attached, state, tree, [tensor for _, tensor in targets])


def part_of(ref: TensorRef, cuts: list[Saved]) -> bytes:
    """A ref's bytes out of what all ranks persisted, each element from exactly one extent."""
    size = ITEMSIZE[ref.dtype]
    whole = torch.zeros((*ref.shape, size), dtype=torch.uint8)
    written = torch.zeros(ref.shape, dtype=torch.int32)
    for saved in cuts:
        for extent in saved.layout.extents:
            if (extent.fqn, extent.rank) == (ref.fqn, ref.rank) and extent.persist:
                place = where(extent.box)
                data = bytearray(saved.payload[extent.payload_offset :][: extent.nbytes])
                values = torch.frombuffer(data, dtype=torch.uint8)
                whole[place] = values.view(*extent.box.sizes, size)
                written[place] += 1
    place = where(ref.box)
    assert bool((written[place] == 1).all()), ref.fqn
    return bytes(whole[place].reshape(-1).tolist())


def where(box: Any) -> Any:
    return tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int) -> None:
    for step in steps:
        optimizer.zero_grad()
        torch.manual_seed(1000 * step + rank)
        model(torch.randn(6, 5)).pow(2).mean().backward()
        optimizer.step()


def net(seed: int) -> nn.Sequential:
    """Rows of 7, 3 and 1 do not divide by two: the last leaves one rank with nothing."""
    torch.manual_seed(seed)
    layers = nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3), nn.Linear(3, 1)
    return nn.Sequential(*layers)


def ddp_case(ranks: Ranks) -> None:
    def make(seed: int) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
        model = DistributedDataParallel(net(seed))
        assert rebuild_buckets_now(model)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    model, optimizer = make(ranks.rank)
    attached = ranks.attach(model=model, optimizer=optimizer)
    train(model, optimizer, range(3), ranks.rank)
    assert not torch.equal(*both(model.module[1].running_mean))
    for nodes in ((0, 0), (0, 1)):
        cuts = ranks.cut(f"ddp-{nodes}", attached, nodes)
    assert not rebuild_buckets_now(model)  # too late for this one
    names = {ref.fqn: ref.rank for ref in cuts[0].state.refs}
    assert set(names.values()) == {SHARED}
    assert "model.1.running_mean" in names
    train(model, optimizer, range(3, 6), ranks.rank)
    other, fresh = make(ranks.rank + 10)
    ranks.put_back(ranks.attach(model=other, optimizer=fresh), cuts)
    assert torch.equal(*both(other.module[1].running_mean))
    train(other, fresh, range(3, 6), ranks.rank)
    assert content(dict(other.state_dict())) == content(dict(model.state_dict()))
    assert optimizer_content(fresh) == optimizer_content(optimizer)
    replication_is_proved(ranks, model, attached)
    buffers_without_a_broadcast_are_each_ranks_own(ranks, model, optimizer, attached)


def both(tensor: torch.Tensor) -> list[torch.Tensor]:
    found = [torch.empty_like(tensor) for _ in range(WORLD)]
    dist.all_gather(found, tensor.clone())
    return found


def replication_is_proved(ranks: Ranks, model: nn.Module, attached: Attached) -> None:
    """R8: a replica that differs is found, named, and kept per rank from then on."""
    digests = {r: saved.digests for r, saved in enumerate(ranks.cut("equal", attached))}
    assert len(digests[0]) > 10
    assert replicas.compare(digests) == {}
    if ranks.rank == 1:
        with torch.no_grad():
            model.module[0].bias[2] += 1e-7
    digests = {r: saved.digests for r, saved in enumerate(ranks.cut("unequal", attached))}
    found = replicas.compare(digests)
    assert found == {"model.0.bias": [[0], [1]]}
    attached.demote(found)
    state = ranks.cut("demoted", attached)[ranks.rank].state
    assert {ref.fqn: ref.rank for ref in state.refs}["model.0.bias"] == ranks.rank


def buffers_without_a_broadcast_are_each_ranks_own(
    ranks: Ranks, model: Any, optimizer: torch.optim.Optimizer, attached: Attached
) -> None:
    """After a forward without gradients DDP does not broadcast buffers before the next one."""
    with torch.no_grad():
        model(torch.randn(6, 5, generator=torch.Generator().manual_seed(ranks.rank)))
    assert model.require_forward_param_sync is False
    cuts = ranks.cut("own", attached)
    owners = {ref.fqn: ref.rank for ref in cuts[ranks.rank].state.refs}
    assert owners["model.1.running_mean"] == ranks.rank
    train(model, optimizer, range(6, 8), ranks.rank)
    undisturbed = content(dict(model.state_dict()))
    ranks.put_back(attached, cuts)
    assert model.require_forward_param_sync is False
    train(model, optimizer, range(6, 8), ranks.rank)
    assert content(dict(model.state_dict())) == undisturbed


def gradients_case(ranks: Ranks) -> None:
    """R1 under DDP's and FSDP2's own ways of writing gradients."""
    for kind in ("ddp", "ddp-views", "fsdp2"):
        if kind == "fsdp2":
            model: Any = fully_shard(net(1), mesh=init_device_mesh("cpu", (WORLD,)))
        else:
            model = DistributedDataParallel(net(1), gradient_as_bucket_view=kind == "ddp-views")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        gradients = Gradients(ranks.attach(model=model, optimizer=optimizer))
        for step in range(3):
            for to_none in (True, False):
                optimizer.zero_grad(set_to_none=to_none)
                model(torch.randn(6, 5)).sum().backward()
                assert gradients.pending() is not None, (kind, step)
                optimizer.step()
                assert gradients.pending() is None, (kind, step)
        for to_none in (True, True, False, False, False):
            optimizer.zero_grad(set_to_none=to_none)
            model(torch.randn(6, 5)).sum().backward()
            optimizer.step()
            assert gradients.pending() is None, (kind, to_none)
        model(torch.randn(6, 5)).sum().backward()
        assert gradients.pending() is not None, kind
        gradients.close()
        stray_gradients(ranks, model, kind)


def stray_gradients(ranks: Ranks, model: Any, kind: str) -> None:
    """As in a GAN: another optimizer steps after the last backward of the body."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.01)
    gradients = Gradients(ranks.attach(model=model, optimizer=optimizer, other=other))
    told = []
    for zeroes in (True, True, True, False):
        for _ in range(2):
            if zeroes:
                optimizer.zero_grad()
            model(torch.randn(6, 5)).sum().backward()
            optimizer.step()
        model(torch.randn(6, 5)).sum().backward()
        other.step()
        told.append(gradients.pending())
    assert [why is None for why in told] == [True, True, True, False], (kind, told)
    gradients.close()


class Shadow:
    """An EMA of one's own: a dict of DTensors."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors = {name: p.detach().clone() for name, p in model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        return {"tensors": self.tensors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensors = state["tensors"]


def fsdp_case(ranks: Ranks, shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])

    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Shadow]:
        model = net(seed)
        fully_shard(model[3], mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01), Shadow(model)

    model, optimizer, shadow = make(3)
    attached = ranks.attach(model=model, optimizer=optimizer, ema=shadow)
    train(model, optimizer, range(3), ranks.rank)
    before = ranks.cut("fsdp", attached)
    with torch.no_grad():
        model.eval()
        model(torch.randn(6, 5))
        model.train()
    assert not isinstance(dict(model.named_parameters())["0.weight"], DTensor)
    cuts = ranks.cut("unsharded", attached, (0, 1))
    assert persisted(cuts) == persisted(before)
    sizes = {ref.fqn: ref.box.sizes for ref in cuts[ranks.rank].state.refs}
    assert sizes["model.4.weight"] == ((1, 3) if ranks.rank == 0 or len(shape) == 2 else (0, 3))
    expected = [content(value.full_tensor()) for value in shadow.tensors.values()]
    train(model, optimizer, range(3, 6), ranks.rank)
    other, fresh, copy = make(4)
    ranks.put_back(ranks.attach(model=other, optimizer=fresh, ema=copy), cuts)
    assert [content(value.full_tensor()) for value in copy.tensors.values()] == expected
    assert {type(v) for s in fresh.state.values() for v in s.values()} == {DTensor, torch.Tensor}
    train(other, fresh, range(3, 6), ranks.rank)
    for a, b in zip(full(model, optimizer), full(other, fresh), strict=True):
        assert content(a) == content(b)


def persisted(cuts: list[Saved]) -> dict[str, bytes]:
    return {ref.fqn: part_of(ref, cuts) for ref in cuts[0].state.refs if ref.rank == SHARED}


def full(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    model.reshard()
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]


CASES = {
    "ddp": [ddp_case, gradients_case],
    "fsdp2": [lambda ranks: fsdp_case(ranks, (2,)), lambda ranks: fsdp_case(ranks, (2, 1))],
}
"""Several in one process, because importing torch costs more than they do."""


def main() -> None:
    rank, folder, case = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD
    )
    for at, check in enumerate(CASES[case]):
        part = folder / str(at)
        part.mkdir(exist_ok=True)
        check(Ranks(rank, part))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
