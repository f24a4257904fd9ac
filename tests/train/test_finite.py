"""Looks at what training computes, one by one: what is a fault and what is none."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from everstep.core.health import Health
from everstep.errors import NonFinite
from everstep.faults.catalog import load
from everstep.faults.judge import judge
from everstep.faults.read import log
from everstep.state.inspect import Attached
from everstep.train import finite as finite_room
from everstep.train import uncaught
from everstep.train.finite import Finite
from everstep.train.place import Place
from everstep.train.since import Since

NAN, INF = math.nan, math.inf
ROOM = 1 << 30
"""Bytes of a cut whose 20th part holds every parameter here."""


class Watched:
    """A model, its optimizer and what looks at them on rank 1 of 2."""

    def __init__(
        self, *, scaler: GradScaler | None = None, fused: bool = False, **how: Any
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=fused)
        objects: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        if scaler is not None:
            objects["scaler"] = scaler
        self.scaler = scaler
        self.said: list[tuple[str, dict[str, Any]]] = []
        place = Place(1, 2, 1, 0, ((0, 1),), "launch")
        attached = Attached(objects, rank=1, world=2)
        self.since = Since(attached, lambda: ({}, None))
        self.finite = Finite(attached, self.since, place, self._say, **how)
        self.since.start()
        self.finite.start()
        self.step = 0

    def _say(self, kind: str, text: str, **facts: Any) -> None:
        self.said.append((kind, {"text": text, **facts}))

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.said]

    def train(self, scale: float = 1.0, **logged: Any) -> None:
        """One step, whose loss is multiplied by ``scale``, and its boundary."""
        self.optimizer.zero_grad()
        loss = self.model(torch.ones(2, 3)).square().mean() * scale
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.finite.note({"loss": loss, **logged})
        self.end()

    def end(self) -> None:
        self.step += 1
        self.finite.look(self.step)
        self.since.boundary()

    def cut(self, *, whole: bool = False, nbytes: int = ROOM) -> Health | None:
        health = self.finite.before_cut(self.step, nbytes=nbytes, whole=whole)
        self.finite.cut_taken()
        return health


# -- figures


@pytest.mark.parametrize(
    "value",
    [NAN, INF, -INF, torch.tensor(NAN), torch.tensor(INF, dtype=torch.bfloat16), np.float32(NAN)],
    ids=str,
)
def test_a_figure_that_is_no_number_ends_the_step(value: Any) -> None:
    watched = Watched()
    watched.train(grad_norm=1.0)
    with pytest.raises(NonFinite) as found:
        watched.train(grad_norm=value)
    error = found.value
    assert (error.rank, error.step, error.figure) == (1, 2, "grad_norm")
    assert not math.isfinite(error.value)
    assert (error.retryable, error.blame) == (True, "none")
    assert watched.kinds() == ["train.nonfinite"]
    assert watched.said[0][1]["step"] == 2


@pytest.mark.parametrize(
    "value", [0, 3, True, 10**400, 1e38, torch.tensor(7), np.float64(2)], ids=str
)
def test_a_number_is_no_fault_however_large(value: Any) -> None:
    """A spike is for a person to judge."""
    watched = Watched()
    watched.train(grad_norm=value)
    assert watched.cut() == Health("finite", "all", "agreed")


def test_only_what_is_watched_is_looked_at() -> None:
    watched = Watched()
    watched.train(best_loss=INF, perplexity=NAN)
    other = Watched(watched=("train_loss",))
    other.train(scale=1.0, grad_norm=NAN)
    with pytest.raises(NonFinite, match="train_loss is nan"):
        other.train(train_loss=NAN)


def test_what_was_found_is_raised_again_at_whatever_comes_next() -> None:
    watched = Watched()
    with pytest.raises(NonFinite):
        watched.train(grad_norm=NAN)
    with pytest.raises(NonFinite):
        watched.end()
    with pytest.raises(NonFinite):
        watched.cut()
    assert watched.kinds() == ["train.nonfinite"]


def test_warn_tells_of_it_and_goes_on() -> None:
    watched = Watched(mode="warn")
    watched.train(grad_norm=NAN)
    assert [(k, f["level"]) for k, f in watched.said] == [("train.nonfinite", "warning")]
    health = watched.cut()
    assert health == Health("bad", "all", "agreed")
    assert not health.sound
    watched.train(grad_norm=1.0)
    assert watched.cut() == Health("finite", "all", "agreed")


def test_off_looks_at_nothing_and_calls_nothing_healthy() -> None:
    watched = Watched(mode="off")
    watched.train(scale=NAN, grad_norm=NAN)
    assert watched.cut(whole=True) is None
    assert not watched.said


def test_nothing_logged_is_no_finite_figure() -> None:
    watched = Watched()
    watched.optimizer.step()
    watched.end()
    assert watched.cut() == Health("none", "all", "agreed")


def test_a_step_without_an_optimizer_step_is_the_users_own_affair() -> None:
    """The usual guard of a loop: a loss that is no number is left out."""
    watched = Watched()
    watched.finite.note({"loss": NAN})
    watched.end()
    assert watched.kinds() == ["train.step_unused"]
    watched.train()
    assert watched.cut() == Health("finite", "all", "agreed")


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_scaler_skips_is_no_fault(fused: bool) -> None:
    """A fused optimizer is called by the scaler all the same, and told to change nothing."""
    watched = Watched(scaler=GradScaler("cpu", init_scale=2.0**10), fused=fused)
    watched.train(grad_norm=INF, scale=INF)
    assert watched.kinds() == ["train.step_unused"] * 2
    assert watched.cut(whole=True) == Health("none", "all", "agreed")
    watched.train()
    with pytest.raises(NonFinite, match="grad_norm is nan"):
        watched.train(grad_norm=NAN)  # this one the scaler has used


# -- figures of a device


class Device:
    """Stands in for a device that is behind: a figure is there when it says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.there = False
        self.waits = 0
        monkeypatch.setattr(finite_room, "_figure", self._figure)

    def _figure(self, name: str, value: Any) -> Any:
        def read() -> float:
            self.waits += not self.there
            return value

        value = float(value.detach()) if isinstance(value, torch.Tensor) else value
        return finite_room._Figure(name, lambda: self.there, read)


def test_a_figure_on_its_way_is_not_waited_for_and_ends_a_later_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, watched = Device(monkeypatch), Watched()
    watched.train()
    waited = device.waits
    watched.train(grad_norm=NAN)
    watched.train(grad_norm=1.0)
    assert device.waits == waited
    device.there = True
    with pytest.raises(NonFinite, match="step 2: grad_norm is nan"):
        watched.train()


def test_the_first_step_of_an_attempt_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """F7: that its loss is finite proves the resume."""
    Device(monkeypatch)
    with pytest.raises(NonFinite, match="step 1: grad_norm is nan"):
        Watched().train(grad_norm=NAN)


def test_a_cut_waits_for_what_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a step that gave no numbers would be a recovery point."""
    Device(monkeypatch)
    watched = Watched()
    watched.train()
    watched.train(grad_norm=NAN)
    with pytest.raises(NonFinite, match="step 2"):
        watched.cut()


def test_steps_that_are_replayed_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that had failed may have been told some steps late: now it is told by itself."""
    Device(monkeypatch)
    watched = Watched()
    watched.finite.replay_until = 4
    watched.train()
    with pytest.raises(NonFinite, match="step 2"):
        watched.train(grad_norm=NAN)


def test_figures_on_their_way_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    device, watched = Device(monkeypatch), Watched()
    for _ in range(20):
        watched.train()
    assert 0 < device.waits <= 12


# -- parameters


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_parameter_that_is_no_number_is_never_cut(value: float, dtype: torch.dtype) -> None:
    """Also where nothing is logged."""
    watched = Watched()
    watched.model.to(dtype)
    with torch.no_grad():
        watched.model[1].weight[1, 2] = value
    watched.end()
    with pytest.raises(NonFinite, match=f"parameter model.1.weight is {value}"):
        watched.cut()


def test_large_values_that_add_up_to_infinity_are_numbers() -> None:
    watched = Watched()
    with torch.no_grad():
        watched.model[0].weight.fill_(torch.finfo(torch.float32).max)
    watched.end()
    assert watched.cut() == Health("none", "all", "agreed")


def test_a_frozen_parameter_may_hold_what_it_likes() -> None:
    watched = Watched()
    watched.model.mask = nn.Parameter(torch.full((2,), -INF), requires_grad=False)
    watched.end()
    assert watched.cut(whole=True) == Health("none", "all", "agreed")


def test_a_part_at_each_cut_comes_to_every_element(monkeypatch: pytest.MonkeyPatch) -> None:
    """R8's budget: between looks at all of them, cuts look at a part that moves on."""
    monkeypatch.setattr(finite_room, "_LEAST", 1)
    watched = Watched()
    assert watched.cut() == Health("none", "all", "agreed")
    watched.finite._parameters._whole_again_at = INF
    assert watched.cut(nbytes=400) == Health("none", "part", "agreed")
    with torch.no_grad():
        watched.model[1].bias[1] = NAN
    seen = [watched.finite._parameters.look(20, whole=False)[1] for _ in range(6)]
    assert {wrong.name for wrong in seen if wrong is not None} == {"model.1.bias"}
    with torch.no_grad():
        watched.model[1].bias[1] = 0.0
        watched.model[0].weight.t()[1, 2] = NAN
    watched.model[0].weight.data = watched.model[0].weight.data.t().contiguous().t()  # scattered
    seen = [watched.finite._parameters.look(20, whole=False)[1] for _ in range(9)]
    assert None in seen
    assert {wrong.name for wrong in seen if wrong is not None} == {"model.0.weight"}


def test_what_spoils_all_parameters_is_seen_in_the_smallest_part() -> None:
    """A rank whose loss nobody logs has spoilt the gradients of all."""
    watched = Watched()
    watched.model.append(nn.Linear(2, 100_000))
    watched.cut()
    watched.finite._parameters._whole_again_at = INF
    with torch.no_grad():
        for parameter in watched.model.parameters():
            parameter.mul_(NAN)
    assert watched.finite._parameters.look(1, whole=False)[1] is not None


def test_a_checkpoint_that_is_asked_for_looks_at_everything() -> None:
    watched = Watched()
    watched.cut()
    watched.finite._parameters._whole_again_at = INF
    health = watched.cut(whole=True, nbytes=1)
    assert health is not None
    assert health.parameters == "all"


def test_looking_changes_nothing() -> None:
    """R1."""
    watched = Watched()
    watched.train()
    before = [p.detach().clone() for p in watched.model.parameters()]
    versions = [p._version for p in watched.model.parameters()]
    drawn = torch.get_rng_state()
    watched.cut(whole=True)
    assert all(map(torch.equal, before, watched.model.parameters()))
    assert versions == [p._version for p in watched.model.parameters()]
    assert torch.equal(drawn, torch.get_rng_state())


# -- words


@pytest.mark.parametrize(("figure", "value"), [("loss", NAN), ("parameter a.b", INF), ("gn", -INF)])
def test_the_error_is_judged_as_a_numerical_fault_of_its_step(figure: str, value: float) -> None:
    error = NonFinite.at(rank=3, step=57, figure=figure, value=value)
    text = (
        "[rank3]: Traceback (most recent call last):\n"
        '[rank3]:   File "train.py", line 31, in <module>\n'
        "[rank3]:     for batch in run.steps(until=100):\n"
        '[rank3]:   File "everstep/train/finite.py", line 9, in _tell\n'
        "[rank3]:     raise found\n"
        f"[rank3]: everstep.errors.NonFinite: {error}\n"
    )
    verdict = judge(log("numbers", text.encode()), load())
    assert (verdict.fault, verdict.domain, verdict.action) == ("NAN_INF", "numerical", "rollback")
    assert verdict.step == 57


def test_the_error_keeps_what_it_says_between_processes() -> None:
    error = NonFinite.at(rank=3, step=57, figure="loss", value=INF)
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert (copy.rank, copy.step, copy.figure, copy.value) == (3, 57, "loss", INF)


def test_an_uncaught_one_is_in_the_error_file_and_printed_as_ever(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    printed: list[BaseException] = []
    told = uncaught.hook(
        lambda _, error, __: printed.append(error), {"TORCHELASTIC_ERROR_FILE": str(path)}
    )
    error = NonFinite.at(rank=3, step=57, figure="loss", value=INF)
    told(NonFinite, error, None)
    assert printed == [error]
    assert "rank 3: non-finite value at step 57: loss is inf" in path.read_text()
