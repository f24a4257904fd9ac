"""The GPT of gpt_ddp.py with its parameters and optimizer state sharded by FSDP2.

everstep run --nproc-per-node 2 examples/gpt_fsdp2.py --steps 200
torchrun --nproc-per-node 2 examples/gpt_fsdp2.py
python examples/gpt_fsdp2.py
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

import everstep
from gpt_ddp import GPT, Text


def join_group() -> tuple[int, int]:
    """(world size, rank). FSDP2 needs a group even where there is one process and no launcher."""
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.get_world_size(), dist.get_rank()


def sharded(model: GPT) -> GPT:
    """The same model; each block's parameters, and the rest, are split among the ranks."""
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=8, help="windows per rank")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    args = parser.parse_args()

    world, rank = join_group()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)  # FSDP2 does not broadcast: every rank makes the same model
    model = sharded(GPT(args.width, args.layers))
    torch.manual_seed(args.seed + 1 + rank)  # each rank its own dropout
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
    text = Text()
    sampler = DistributedSampler(text, world, rank, seed=args.seed)
    loader = DataLoader(text, args.batch, sampler=sampler)

    run = everstep.attach(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    for tokens, following in run.steps(until=args.steps):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        run.log(loss=loss)
        if rank == 0 and run.step % 20 == 0:
            print(f"step {run.step:5d}  loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
