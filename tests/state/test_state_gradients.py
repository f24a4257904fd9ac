"""R1: a boundary with gradients that no step has used is told; every normal loop passes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from everstep.state.gradients import Gradients
from everstep.state.inspect import Attached


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


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("zero_first", [True, False])
def test_loops_that_zero_at_either_end_are_normal(
    loop: Loop, zero_first: bool, to_none: bool
) -> None:
    for _ in range(4):
        if zero_first:
            loop.optimizer.zero_grad(set_to_none=to_none)
        loop.backward()
        loop.step()
        if not zero_first:
            loop.optimizer.zero_grad(set_to_none=to_none)
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


def test_two_optimizers_that_meet_in_one_backward_are_normal() -> None:
    """A GAN: the generator's backward leaves gradients in the discriminator after its step."""
    generator, discriminator = nn.Linear(2, 2), nn.Linear(2, 1)
    g = torch.optim.SGD(generator.parameters(), lr=0.1)
    d = torch.optim.SGD(discriminator.parameters(), lr=0.1)
    gradients = Gradients(Attached({"g": g, "d": d}))
    for _ in range(3):
        d.zero_grad()
        discriminator(generator(torch.ones(1, 2)).detach()).sum().backward()
        d.step()
        g.zero_grad()
        discriminator(generator(torch.ones(1, 2))).sum().backward()
        g.step()
        assert gradients.pending() is None
    gradients.close()


def test_closing_takes_the_hooks_off(loop: Loop) -> None:
    hooks = loop.optimizer._optimizer_step_post_hooks
    assert len(hooks) == 1
    loop.gradients.close()
    assert len(hooks) == 0
