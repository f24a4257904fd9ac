"""A small training script for drills: an MLP on a loader, with DDP where ranks are many.

Never imported: ``everstep run`` runs it as it runs any script, and nothing in it knows of a fault.
A batch takes a few milliseconds to come, so that the pace is the loader's and not the machine's.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import everstep

WIDTH = 32


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Random inputs with what a fixed network makes of them. ``pace``: seconds of a batch."""

    def __init__(self, count: int, batch: int, pace: float) -> None:
        generator = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(count, WIDTH, generator=generator)
        self.targets = torch.tanh(self.inputs @ torch.randn(WIDTH, 1, generator=generator))
        self.seconds = pace / batch

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self.seconds)
        return self.inputs[index], self.targets[index]


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: list[Tensor]) -> Tensor:
    inputs, targets = batch
    loss = nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small network.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--pace", type=float, default=0.02)
    args = parser.parse_args()

    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Linear(WIDTH, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1)
    )
    if world > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    samples = Samples(4096, args.batch, args.pace)
    sampler: DistributedSampler[tuple[Tensor, Tensor]] = DistributedSampler(samples, world, rank)
    loader = DataLoader(samples, args.batch, sampler=sampler)

    run = everstep.attach(model=model, optimizer=optimizer, loader=loader)
    for batch in run.steps(until=args.steps):
        loss = train_step(model, optimizer, batch)
        run.log(loss=loss)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
