"""A small ResNet with BatchNorm, dropout, autocast, a GradScaler, accumulation and an EMA copy.

everstep run --nproc-per-node 2 examples/resnet_amp_accumulate.py --steps 100
torchrun --nproc-per-node 2 examples/resnet_amp_accumulate.py
python examples/resnet_amp_accumulate.py
"""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler, Sampler

import everstep

CLASSES = 10


class Stage(nn.Module):
    """Two convolutions beside a shortcut; halves the image and doubles the channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = 2 * channels
        self.path = nn.Sequential(
            nn.Conv2d(channels, wide, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU(),
            nn.Conv2d(wide, wide, 3, padding=1, bias=False),
            nn.BatchNorm2d(wide),
        )
        self.shortcut = nn.Conv2d(channels, wide, 1, stride=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.path(x) + self.shortcut(x))


def resnet(channels: int) -> nn.Sequential:
    stem = (nn.Conv2d(3, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU())
    tail = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2))
    stages = Stage(channels), Stage(2 * channels)
    return nn.Sequential(*stem, *stages, *tail, nn.Linear(4 * channels, CLASSES))


class Pictures(Dataset[tuple[Tensor, int]]):
    """Made-up pictures: a pattern for each class, noise for each picture, flipped at random."""

    def __init__(self, count: int, side: int = 16) -> None:
        drawn = torch.Generator().manual_seed(7)
        self.patterns = torch.randn(CLASSES, 3, side, side, generator=drawn)
        self.noise = torch.randn(count, 3, side, side, generator=drawn)

    def __len__(self) -> int:
        return len(self.noise)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        label = index % CLASSES
        picture = self.patterns[label] + 2 * self.noise[index]
        return (picture.flip(-1) if torch.rand(()) < 0.5 else picture), label


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=16, help="pictures per rank and micro-batch")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--channels", type=int, default=16)
    args = parser.parse_args()

    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    net = resnet(args.channels)
    model: nn.Module = net
    ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    pictures = Pictures(1000)
    order = torch.Generator().manual_seed(args.seed)
    sampler: Sampler[int] = RandomSampler(pictures, generator=order)
    if world > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(net)
        sampler = DistributedSampler(pictures, world, rank, seed=args.seed)
    torch.manual_seed(args.seed + 1 + rank)  # each rank its own dropout and flips
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10_000)
    scaler = torch.amp.GradScaler("cpu")
    loader = DataLoader(pictures, args.batch, sampler=sampler, drop_last=True)

    run = everstep.attach(
        model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, ema=ema, loader=loader
    )
    for images, labels in run.steps(until=args.steps, accumulate=args.accumulate):
        no_sync = nullcontext() if run.at_boundary or world == 1 else model.no_sync()
        with no_sync:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(images), labels) / args.accumulate
            scaler.scale(loss).backward()
        if run.at_boundary:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
            ema.update_parameters(net)
            run.log(loss=loss * args.accumulate)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
