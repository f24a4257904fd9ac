"""R1: a boundary with gradients that no step has used is told; every normal loop passes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from everstep.state.gradients import Gradients, _Watch, stand_again, standing
from everstep.state.inspect import Attached

Zero = Callable[[torch.optim.Optimizer], None]


class Loop:
    """The parts of a training loop, to be called in any order."""

    def __init__(self, *, scaler: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaler)
        objects: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.gradients = Gradients(Attached({**objects, "scaler": self.scaler}))

    def backward(self, factor: float = 1.0) -> None:
        self.scaler.scale(self.model(torch.ones(2, 3)).sum() * factor).backward()

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.gradients.close()


@pytest.fixture
def scaled() -> Iterator[Loop]:
    made = Loop(scaler=True)
    yield made
    made.gradients.close()


def to_none(optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()


def in_place(optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


def by_data(optimizer: torch.optim.Optimizer) -> None:
    """The way of old tutorials, which moves no version."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.data.zero_()


ways_to_zero = pytest.mark.parametrize("zero", [to_none, in_place, by_data])


@ways_to_zero
@pytest.mark.parametrize("zero_first", [True, False])
def test_loops_that_zero_at_either_end_are_normal(loop: Loop, zero_first: bool, zero: Zero) -> None:
    for _ in range(5):
        if zero_first:
            zero(loop.optimizer)
        loop.backward()
        loop.step()
        if not zero_first:
            zero(loop.optimizer)
        assert loop.gradients.pending() is None


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_accumulated_gradients_are_pending(loop: Loop, steps_before: int, to_none: bool) -> None:
    for _ in range(steps_before):
        loop.optimizer.zero_grad(set_to_none=to_none)
        loop.backward()
        loop.step()
        assert loop.gradients.pending() is None
    loop.optimizer.zero_grad(set_to_none=to_none)
    loop.backward()
    reason = loop.gradients.pending()
    assert reason is not None
    assert "accumulate=" in reason
    assert "optimizer" in reason
    loop.backward()
    assert loop.gradients.pending() is not None
    loop.step()
    assert loop.gradients.pending() is None


def test_gradients_added_to_used_ones_are_pending(loop: Loop) -> None:
    loop.backward()
    loop.step()
    assert loop.gradients.pending() is None
    loop.backward()
    assert loop.gradients.pending() is not None


def test_a_step_given_up_by_zeroing_is_normal(loop: Loop) -> None:
    """The loop skips a batch whose loss is not finite: backward, zero_grad, no step."""
    for to_none in (True, False):
        loop.backward()
        loop.optimizer.zero_grad(set_to_none=to_none)
        assert loop.gradients.pending() is None


def test_a_scaler_skip_counts_as_a_step(scaled: Loop) -> None:
    before = scaled.model[0].weight.detach().clone()
    for factor in (float("inf"), 1.0, float("inf"), float("inf")):
        scaled.optimizer.zero_grad()
        scaled.backward(factor)
        scaled.step()
        assert scaled.gradients.pending() is None
    assert scaled.scaler.get_scale() == 1.0
    assert not torch.equal(before, scaled.model[0].weight)


def test_a_scaler_skip_before_its_update_counts_too(scaled: Loop) -> None:
    scaled.backward(float("inf"))
    scaled.scaler.step(scaled.optimizer)
    assert scaled.gradients.pending() is None
    scaled.scaler.update()


def test_accumulation_under_a_scaler_is_pending(scaled: Loop) -> None:
    scaled.backward(float("inf"))
    scaled.step()
    assert scaled.gradients.pending() is None
    scaled.optimizer.zero_grad()
    scaled.backward()
    assert scaled.gradients.pending() is not None


class Pair:
    """A generator and a discriminator with an optimizer each, as in a GAN."""

    def __init__(self, *, scaler: bool = False) -> None:
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.discriminator = nn.Linear(2, 1)
        self.g = torch.optim.SGD(self.generator.parameters(), lr=0.01)
        self.d = torch.optim.SGD(self.discriminator.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaler)
        self.gradients = Gradients(Attached({"g": self.g, "d": self.d, "scaler": self.scaler}))

    def backward(self, *, detach: bool = False) -> None:
        fake = self.generator(torch.ones(1, 2))
        loss = self.discriminator(fake.detach() if detach else fake).sum()
        self.scaler.scale(loss).backward()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self.scaler.step(optimizer)
        self.scaler.update()


@pytest.fixture(params=[False, True], ids=["plain", "scaler"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(scaler=request.param)
    yield made
    made.gradients.close()


@ways_to_zero
@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("generator_first", [True, False])
def test_two_optimizers_that_meet_in_one_backward_are_normal(
    pair: Pair, generator_first: bool, detach: bool, zero: Zero
) -> None:
    """A GAN: the backward of one network leaves gradients in the other, after the other's step and
    over the boundary, and they are thrown away before they are used."""

    def train_d() -> None:
        zero(pair.d)
        pair.backward(detach=detach)
        pair.step(pair.d)

    def train_g() -> None:
        zero(pair.g)
        pair.backward()
        pair.step(pair.g)

    for _ in range(4):
        for train in (train_g, train_d) if generator_first else (train_d, train_g):
            train()
        assert pair.gradients.pending() is None


@ways_to_zero
def test_a_generator_that_zeroes_before_each_of_its_rare_steps_is_normal(
    pair: Pair, zero: Zero
) -> None:
    """The critic's backwards add to the generator's gradients over several boundaries."""
    for step in range(8):
        if step % 3 == 0:
            zero(pair.g)
            pair.backward()
            pair.step(pair.g)
        zero(pair.d)
        pair.backward()
        pair.step(pair.d)
        assert pair.gradients.pending() is None


def test_zeroing_the_others_gradients_before_ones_own_step_is_normal(pair: Pair) -> None:
    for _ in range(4):
        pair.backward(detach=True)
        pair.step(pair.d)
        pair.g.zero_grad(set_to_none=False)
        pair.backward()
        pair.d.zero_grad(set_to_none=False)
        pair.step(pair.g)
        assert pair.gradients.pending() is None


@pytest.mark.parametrize("to_none", [True, False])
def test_a_part_stepped_more_rarely_than_the_body_ends_is_refused(
    pair: Pair, to_none: bool
) -> None:
    """R1: the other optimizer's steps use nothing of what is accumulated for this one."""
    told = []
    for step in range(3):
        pair.d.zero_grad(set_to_none=to_none)
        pair.backward()
        pair.step(pair.d)
        if step == 2:
            pair.step(pair.g)
            pair.g.zero_grad(set_to_none=to_none)
        told.append(pair.gradients.pending())
    assert told[:2] == [None, None]
    assert told[2] is not None
    assert "g's last step" in told[2]
    assert "accumulate=" in told[2]
    assert "g.zero_grad()" in told[2]


def test_a_step_put_off_to_the_next_body_is_refused(pair: Pair) -> None:
    pair.backward()
    pair.step(pair.d)
    assert pair.gradients.pending() is None
    pair.step(pair.g)
    assert "g's last step" in (pair.gradients.pending() or "")


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_gradients_added_to_with_a_graph_of_their_own_are_still_known(pair: Pair) -> None:
    """create_graph makes a new tensor of the sum, as if it had been zeroed."""
    for step in range(2):
        loss = pair.discriminator(pair.generator(torch.ones(1, 2))).pow(2).sum()
        pair.scaler.scale(loss).backward(create_graph=True)
        pair.step(pair.g if step else pair.d)
        told = pair.gradients.pending()
    assert "g's last step" in (told or "")
    pair.g.zero_grad()
    pair.d.zero_grad()


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_added_to_without_autograd_are_told_apart_by_none_alone(to_none: bool) -> None:
    """FSDP2 adds to a shard's gradient by hand: no hook sees whether it was zeroed in place."""
    pair = Pair()
    weight = pair.generator[0].weight

    def add() -> None:
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        weight.grad += 1

    told = None
    for _ in range(3):
        pair.g.zero_grad(set_to_none=to_none)
        add()
        pair.g.step()
        add()
        pair.d.step()
        told = told or pair.gradients.pending()
    assert (told is None) == to_none
    assert to_none or "set_to_none=True" in str(told)
    pair.gradients.close()


@pytest.mark.parametrize("large", [False, True])
def test_accumulation_in_one_parameter_alone_is_pending(large: bool) -> None:
    """Whichever of many it is: none is too large or too late to be watched."""
    model = nn.ModuleList(nn.Linear(2, 2 + size) for size in range(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = Gradients(Attached({"model": model, "optimizer": optimizer}))
    sum(layer(torch.ones(1, 2)).sum() for layer in model).backward()
    optimizer.step()
    assert gradients.pending() is None
    model[-1 if large else 0](torch.ones(1, 2)).sum().backward()
    assert "optimizer" in (gradients.pending() or "")
    gradients.close()


def test_a_loop_that_never_zeroes_is_refused(loop: Loop) -> None:
    """Each step uses the sum of all gradients since the process began; a restart would lose it."""
    told = []
    for _ in range(3):
        loop.backward()
        loop.step()
        told.append(loop.gradients.pending())
    assert "optimizer's last step" in (told[-1] or "")


def test_gradients_a_replayed_graph_writes_anew_are_normal(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CUDA graph writes the same tensors at every replay, and no version tells."""
    monkeypatch.setattr(_Watch, "_may_be_of_a_graph", lambda *_: True)
    loop.backward()
    for _ in range(3):
        for parameter in loop.model.parameters():
            parameter.grad.numpy().fill(1.0)
        loop.step()
        assert loop.gradients.pending() is None


def test_gradients_that_a_second_step_uses_as_they_stand_are_refused(loop: Loop) -> None:
    """A backward for every second step: a restart between the two would have none to use."""
    told = []
    for step in range(4):
        if step % 2 == 0:
            loop.optimizer.zero_grad()
            loop.backward()
        loop.step()
        told.append(loop.gradients.pending())
    assert [bool(why) for why in told] == [False, True, False, True]


class Heads:
    """A backbone and two heads that are used in turn, and one optimizer that moves them all: the
    unused head has a zero gradient where the loop zeroes in place, and none where it does not."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.ModuleDict({name: nn.Linear(3, 3) for name in ("back", "one", "two")})
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.attached = Attached({"model": self.model, "optimizer": self.optimizer})

    def run(self, steps: range, zero: Zero) -> None:
        for step in steps:
            zero(self.optimizer)
            head = self.model["one" if step % 3 else "two"]
            head(self.model["back"](torch.ones(2, 3) * step)).square().sum().backward()
            self.optimizer.step()

    def restart(self) -> Heads:
        other = Heads()
        other.model.load_state_dict(self.model.state_dict())
        other.optimizer.load_state_dict(self.optimizer.state_dict())
        stand_again(other.attached, standing(self.attached))
        return other


@ways_to_zero
def test_r4_a_gradient_of_zero_that_stands_at_the_boundary_stands_there_again(zero: Zero) -> None:
    """Adam moves a parameter whose gradient is zero, and leaves alone one that has none."""
    undisturbed = Heads()
    undisturbed.run(range(9), zero)
    for cut in range(1, 9):
        first = Heads()
        first.run(range(cut), zero)
        second = first.restart()
        second.run(range(cut, 9), zero)
        for one, other in zip(
            undisturbed.model.parameters(), second.model.parameters(), strict=True
        ):
            assert torch.equal(one, other), f"cut at {cut}"


def test_sparse_gradients_stand_again_as_sparse_ones() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())
    attached = Attached({"model": table, "optimizer": optimizer})
    table(torch.tensor([1, 3])).sum().backward()
    kinds = standing(attached)
    optimizer.zero_grad()
    assert standing(attached) == {}
    stand_again(attached, kinds)
    assert table.weight.grad is not None
    assert table.weight.grad.is_sparse
    assert table.weight.grad._nnz() == 0
    optimizer.step()


@pytest.mark.parametrize("to_none", [True, False])
def test_a_closure_that_zeroes_within_the_step_is_normal(to_none: bool) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, lr=0.1)
    gradients = Gradients(Attached({"model": model, "optimizer": optimizer}))

    def closure() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=to_none)
        loss = model(torch.eye(3)).sub(2).pow(2).sum()
        loss.backward()
        return loss

    for _ in range(4):
        optimizer.step(closure)
        assert gradients.pending() is None
    gradients.close()


def test_watching_keeps_no_gradient_alive(loop: Loop) -> None:
    """It would cost a model's memory again during each backward."""
    loop.backward()
    loop.step()
    assert loop.gradients.pending() is None
    gradient = weakref.ref(loop.model[0].weight.grad)
    assert gradient() is not None
    loop.optimizer.zero_grad()
    assert gradient() is None


def test_closing_takes_the_hooks_off(pair: Pair) -> None:
    hooks = pair.g._optimizer_step_post_hooks
    pair.backward()
    pair.step(pair.d)
    assert pair.gradients.pending() is None
    watch = pair.gradients._watches[0]
    assert (len(hooks), len(watch._hooks)) == (1, 4)
    assert not any(p._backward_hooks for p in pair.generator.parameters())
    pair.gradients.close()
    assert (len(hooks), len(watch._hooks)) == (0, 0)
