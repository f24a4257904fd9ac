"""R4 and R1 in one process: train, cut, train on; put back in fresh objects, train on; compare.

The optimizers and parameters are those at which get_state_dict steps, drops or raises.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from state_cases import content, cut, optimizer_content, put_back
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from everstep.errors import UsageError
from everstep.state import rng
from everstep.state.inspect import Attached

Optimizer = torch.optim.Optimizer


class Net(nn.Module):
    """Frozen, never used and tied parameters, buffers of every kind, dropout, a 0-d parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.body = nn.Linear(6, 6)
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.zeros(6), persistent=False)
        self.register_buffer("nothing", None)
        self.register_buffer("empty", torch.zeros(0, 4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        self.mask += 0.25
        x = self.norm(self.embed(tokens) + self.mask)
        x = torch.dropout(self.body(x) + self.frozen(x), 0.1, self.training)
        return self.head(x * self.scale)


@dataclass
class Job:
    """A training job on one rank: its objects and one step of it."""

    model: Net
    optimizer: Optimizer
    scheduler: lr_scheduler.LRScheduler
    ema: AveragedModel
    scaler: torch.amp.GradScaler

    @property
    def attached(self) -> Attached:
        return Attached(vars(self))

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            tokens = torch.randint(0, 11, (8,))
            loss = nn.functional.cross_entropy(self.model(tokens), tokens)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.ema.update_parameters(self.model)

    def content(self) -> Any:
        tensors = [
            dict(m.named_parameters()) | dict(m.named_buffers()) for m in (self.model, self.ema)
        ]
        rest = [self.scheduler.state_dict(), self.scaler.state_dict()]
        return [content(tensors), optimizer_content(self.optimizer), content(rest)]


def start(make: Callable[[Any], Optimizer], seed: int) -> Job:
    torch.manual_seed(seed)
    model = Net()
    optimizer = make(model.parameters())
    return Job(
        model,
        optimizer,
        lr_scheduler.StepLR(optimizer, 2, gamma=0.7),
        AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True),
        torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3),
    )


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True, amsgrad=True),
    "adamw-loop": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "adamw-tensor-lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resumed_training_is_bit_exact(name: str) -> None:
    """R4, and by its asserts on the way R1: the cut itself changes nothing."""
    job = start(OPTIMIZERS[name], seed=1)
    job.attached.check()
    job.train(3)
    before = job.content()
    saved = cut(job.attached, 3, {"rng": rng.capture()})
    assert job.content() == before
    job.train(4)
    fresh = start(OPTIMIZERS[name], seed=2)
    rng.restore(put_back(fresh.attached, saved)["rng"])
    assert fresh.content() == before
    assert fresh.model.head.weight is fresh.model.embed.weight
    fresh.train(4)
    assert fresh.content() == job.content()


def test_a_state_put_back_over_a_later_one_is_exact() -> None:
    """The next candidate of R6 is loaded over objects that hold another step already."""
    job = start(OPTIMIZERS["adamw-fused"], seed=1)
    job.train(2)
    saved, before = cut(job.attached, 2), job.content()
    job.train(3)
    put_back(job.attached, saved)
    assert job.content() == before


def test_optimizer_is_not_stepped_by_saving_a_fresh_one() -> None:
    """Known defect: get_state_dict on an empty optimizer runs a step; AdamW's step becomes 1."""
    job = start(OPTIMIZERS["adamw-fused"], seed=1)
    before = job.content()
    saved = cut(job.attached)
    assert job.content() == before
    assert len(job.optimizer.state) == 0
    job.train(2)
    put_back(job.attached, saved)
    assert len(job.optimizer.state) == 0
    assert job.content() == before


def test_saving_calls_no_optimizer_hook_and_no_forward() -> None:
    job = start(OPTIMIZERS["adamw-loop"], seed=1)
    job.train(1)
    called: list[str] = []
    job.optimizer.register_step_pre_hook(lambda *_: called.append("step"))
    job.model.register_forward_pre_hook(lambda *_: called.append("forward"))
    cut(job.attached)
    assert called == []


def test_state_of_frozen_parameters_is_kept() -> None:
    """Known defect (pytorch#192202): a parameter frozen after training keeps its momentum."""

    def make(seed: int) -> tuple[nn.Linear, Optimizer]:
        torch.manual_seed(seed)
        model = nn.Linear(3, 2)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    model, optimizer = make(1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    model.bias.requires_grad_(False)
    before = optimizer_content(optimizer)
    saved = cut(Attached({"model": model, "optimizer": optimizer}))
    other, fresh = make(2)
    put_back(Attached({"model": other, "optimizer": fresh}), saved)
    assert optimizer_content(fresh) == before
    assert "momentum_buffer" in fresh.state[other.bias]


def test_missing_state_is_restored_as_missing() -> None:
    """A parameter that never had a gradient has no entry, before and after, whatever was there."""
    job = start(OPTIMIZERS["adamw-foreach"], seed=1)
    job.train(1)
    saved = cut(job.attached)
    other = start(OPTIMIZERS["adamw-foreach"], seed=2)
    unused = other.model.unused.weight
    other.optimizer.state[unused] = {"step": torch.tensor(4.0)}
    other.optimizer.state["mine"] = 3
    put_back(other.attached, saved)
    assert unused not in other.optimizer.state
    assert "mine" not in other.optimizer.state
    assert job.model.unused.weight not in job.optimizer.state


def test_sparse_adam_round_trips() -> None:
    def make(seed: int) -> tuple[nn.Embedding, Optimizer]:
        torch.manual_seed(seed)
        table = nn.Embedding(20, 4, sparse=True)
        return table, torch.optim.SparseAdam(table.parameters(), lr=0.1)

    def train(table: nn.Embedding, optimizer: Optimizer) -> None:
        for _ in range(3):
            optimizer.zero_grad()
            table(torch.randint(0, 20, (5,))).pow(2).sum().backward()
            optimizer.step()

    table, optimizer = make(1)
    train(table, optimizer)
    saved = cut(Attached({"table": table, "optimizer": optimizer}), 3, {"rng": rng.capture()})
    train(table, optimizer)
    other, fresh = make(2)
    extra = put_back(Attached({"table": other, "optimizer": fresh}), saved)
    rng.restore(extra["rng"])
    train(other, fresh)
    assert optimizer_content(fresh) == optimizer_content(optimizer)
    assert content(other.weight) == content(table.weight)


def test_a_tensor_that_two_groups_share_only_now_is_parted_again() -> None:
    def make(rates: list[torch.Tensor]) -> Optimizer:
        torch.manual_seed(0)
        groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates]
        return torch.optim.AdamW(groups, fused=True)

    optimizer = make([torch.tensor(0.1), torch.tensor(0.2)])
    shared = torch.tensor(0.5)
    fresh = make([shared, shared])
    put_back(Attached({"optimizer": fresh}), cut(Attached({"optimizer": optimizer})))
    assert optimizer_content(fresh) == optimizer_content(optimizer)


def test_lbfgs_keeps_its_lists_and_scalars() -> None:
    def make() -> tuple[nn.Linear, Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        return model, torch.optim.LBFGS(model.parameters(), max_iter=3)

    def train(model: nn.Linear, optimizer: Optimizer) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.eye(3)).sub(2).pow(2).sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    model, optimizer = make()
    train(model, optimizer)
    saved = cut(Attached({"model": model, "optimizer": optimizer}))
    train(model, optimizer)
    other, fresh = make()
    put_back(Attached({"model": other, "optimizer": fresh}), saved)
    train(other, fresh)
    assert optimizer_content(fresh) == optimizer_content(optimizer)


def test_parameters_of_no_attached_module_are_named_by_position() -> None:
    loose = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([loose], lr=0.1, momentum=0.5)
    loose.grad = torch.ones(2)
    optimizer.step()
    live = Attached({"optimizer": optimizer}).resolve(0)
    assert [ref.fqn for ref in live.refs] == ["optimizer.state.param_groups.0.0.momentum_buffer"]


def test_names_are_torchs_and_wrappers_leave_no_trace() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    compiled = torch.compile(model)
    expected = [f"model.{name}" for name in model.state_dict()]
    for held in (model, compiled):
        assert [ref.fqn for ref in Attached({"model": held}).resolve(0).refs] == expected


class WithExtra(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.counter: Any = {"n": (0, np.int64(1)), "t": torch.zeros(1)}

    def get_extra_state(self) -> Any:
        return self.counter

    def set_extra_state(self, state: Any) -> None:
        self.counter = state


def test_extra_state_of_modules_is_kept() -> None:
    module = nn.Sequential(WithExtra())
    module[0].counter = {"n": (7, np.int64(9)), "t": torch.ones(1)}
    saved = cut(Attached({"m": module}))
    other = nn.Sequential(WithExtra())
    put_back(Attached({"m": other}), saved)
    assert content(other[0].counter) == content(module[0].counter)
    assert type(other[0].counter["n"]) is tuple


def test_lazily_made_buffers_come_and_go() -> None:
    """A cache that grows is state too, though torch leaves it out of a state dict."""

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", None, persistent=False)
            self.register_buffer("late", None)

    module = Cached()
    empty = cut(Attached({"m": module}))
    module.cache = torch.arange(5.0)
    module.late = torch.ones(2)
    full = cut(Attached({"m": module}))
    other = Cached()
    other.cache = torch.zeros(2)
    put_back(Attached({"m": other}), full)
    assert content([other.cache, other.late]) == content([module.cache, module.late])
    put_back(Attached({"m": other}), empty)
    assert (other.cache, other.late) == (None, None)


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [2, 5]),
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 20),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.StepLR(o, 2)], [3]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:.*lr_scheduler:UserWarning")
def test_schedulers_go_on_where_they_were(name: str) -> None:
    def make() -> tuple[Optimizer, Any]:
        parameters = [nn.Parameter(torch.ones(2))]
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        return optimizer, SCHEDULERS[name](optimizer)

    def train(optimizer: Optimizer, scheduler: Any, steps: int) -> list[Any]:
        rates = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            rates.append([optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]])
        return rates

    optimizer, scheduler = make()
    train(optimizer, scheduler, 2)
    saved = cut(Attached({"optimizer": optimizer, "scheduler": scheduler}))
    undisturbed = train(optimizer, scheduler, 5)
    fresh, other = make()
    put_back(Attached({"optimizer": fresh, "scheduler": other}), saved)
    assert train(fresh, other, 5) == undisturbed
    assert len({rate for rate, _ in undisturbed}) > 1


def test_random_streams_go_on_where_they_were() -> None:
    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), torch.rand(1).item(), random.gauss(0, 1)]

    random.gauss(0, 1)
    np.random.randn()
    saved = cut(Attached({}), 0, {"rng": rng.capture()})
    undisturbed = draw()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    rng.restore(put_back(Attached({}), saved)["rng"])
    assert draw() == undisturbed


def test_objects_without_the_two_methods_are_refused() -> None:
    with pytest.raises(UsageError, match=r"sampler \(object\) has no state_dict"):
        Attached({"sampler": object()})
    with pytest.raises(UsageError, match="names no attached object"):
        Attached({}, replicated=["ema"])
