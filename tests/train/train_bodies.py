"""What the jobs of the tests train: small, and dependent on everything that a restore must bring
back (dropout's and the sampler's random numbers, the optimizer's moments, the schedule)."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from train_jobs import kill_keeper, seen, wait_for

import everstep
from everstep import Options

LAST = 12
BATCHES = 5
"""Batches of an epoch; not a divisor of what the tests count."""


class Training:
    """The user's objects, made anew in every process, and their step."""

    def __init__(self, width: int = 8) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(3)
        self.model = nn.Sequential(
            nn.Linear(6, width), nn.Dropout(0.3), nn.BatchNorm1d(width), nn.Linear(width, 2)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        draw = torch.Generator().manual_seed(5)
        data = TensorDataset(
            torch.randn(BATCHES * 4, 6, generator=draw), torch.randn(BATCHES * 4, 2, generator=draw)
        )
        self.loader = DataLoader(data, 4, shuffle=True)

    def objects(self) -> dict[str, Any]:
        return {
            "model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler,
            "loader": self.loader,
        }  # fmt: skip

    def backward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = F.mse_loss(self.model(batch[0]), batch[1])
        loss.backward()
        return loss

    def step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.backward(batch)
        self.end()
        return loss

    def end(self) -> None:
        self.optimizer.step()
        self.scheduler.step()

    def digest(self) -> str:
        """Of everything that trained: parameters, buffers and moments, bit for bit."""
        state = self.optimizer.state_dict()["state"]
        tensors = [*self.model.state_dict().values()]
        tensors += [value for entry in state.values() for value in entry.values()]
        joined = b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)
        return hashlib.sha256(joined).hexdigest()


def undisturbed(until: int = LAST, accumulate: int = 1) -> dict[str, Any]:
    """The same training without everstep."""
    training = Training()
    batches = _endless(training.loader)
    losses = []
    for _ in range(until):
        training.optimizer.zero_grad()
        for _ in range(accumulate):
            loss = training.backward(next(batches))
        training.end()
        losses.append(loss.item())
    return {"losses": losses, "digest": training.digest()}


def _endless(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def train(until: int = LAST, at: Collection[int] = (), wait: bool = True) -> str:
    """Training with everstep, and a checkpoint at the end of each step of ``at``."""
    training = Training()
    run = everstep.attach(**training.objects())
    for batch in run.steps(until=until):
        run.log(loss=training.step(batch))
        if run.step + 1 in at:
            run.checkpoint(wait=wait)
    return training.digest()


def train_accumulating(until: int, accumulate: int, at: Collection[int] = ()) -> str:
    training = Training()
    run = everstep.attach(**training.objects())
    for batch in run.steps(until=until, accumulate=accumulate):
        loss = training.backward(batch)
        if run.at_boundary:
            training.end()
            training.optimizer.zero_grad()
            run.log(loss=loss)
            if run.step + 1 in at:
                run.checkpoint()
    return training.digest()


def train_and_kill_keeper(until: int, kill_at: int, at: Collection[int]) -> str:
    training = Training()
    run = everstep.attach(**training.objects())
    for batch in run.steps(until=until):
        run.log(loss=training.step(batch))
        if run.step + 1 == kill_at:
            kill_keeper(os.environ)
        if run.step + 1 in at:
            run.checkpoint(wait=True)
    return training.digest()


def train_and_be_terminated(until: int, at: int, told: str) -> str:
    """SIGTERM comes within step ``at``; a handler of the user's writes the file ``told``."""
    signal.signal(signal.SIGTERM, lambda *_: open(told, "w").close())
    training = Training()
    run = everstep.attach(**training.objects())
    terminated = False
    for batch in run.steps(until=until):
        run.log(loss=training.step(batch))
        if terminated:
            wait_for(lambda: seen("job.preempting"), "the keeper knows of the SIGTERM")
        if run.step + 1 == at:
            os.kill(os.getpid(), signal.SIGTERM)
            terminated = True
    return training.digest()


def own_loop(until: int = LAST, at: Collection[int] = ()) -> dict[str, Any]:
    """A loop of the user's own, whose data follows from the step."""
    training = Training()
    objects = training.objects()
    del objects["loader"]
    run = everstep.attach(**objects)
    answers = {}
    began = run.restore()
    while run.step < until:
        run.log(loss=training.step(_batch(run.step)))
        run.step_end()
        if run.step in at:
            answers[run.step] = run.checkpoint(wait=True)
    answers[run.step] = run.checkpoint(wait=True)
    return {"began": began, "answers": answers, "digest": training.digest()}


def _batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(4, 6, generator=draw), torch.randn(4, 2, generator=draw)


def count_steps(until: int, store: str | None = None) -> list[int]:
    """No loader: the loop gives numbers."""
    training = Training()
    options = Options(store=store)
    run = everstep.attach(options, model=training.model, optimizer=training.optimizer)
    found = []
    for step in run.steps(until=until):
        training.step(_batch(step))
        found.append(step)
    return found
