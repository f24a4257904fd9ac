"""Ratings predicted from embeddings: sparse gradients, two optimizers, no loader.

everstep run --nproc-per-node 2 examples/embedding_sparse.py --steps 200
torchrun --nproc-per-node 2 examples/embedding_sparse.py
python examples/embedding_sparse.py
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import everstep


class Rater(nn.Module):
    """A rating for each pair of a user and an item. Only the rows looked up get a gradient."""

    def __init__(self, users: int, items: int, width: int) -> None:
        super().__init__()
        self.user = nn.Embedding(users, width, sparse=True)
        self.item = nn.Embedding(items, width, sparse=True)
        self.score = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return self.score(torch.cat((self.user(user), self.item(item)), dim=-1)).squeeze(-1)


def ratings(users: int, items: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """``count`` random pairs and what each user truly thinks of each item, drawn from the RNG
    of torch: where the run goes on after a restart, so do the draws."""
    user, item = torch.randint(users, (count,)), torch.randint(items, (count,))
    return user, item, torch.sin(user * 0.37) * torch.cos(item * 0.73)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=256, help="pairs per rank")
    parser.add_argument("--users", type=int, default=2000)
    parser.add_argument("--items", type=int, default=500)
    args = parser.parse_args()

    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    net = Rater(args.users, args.items, width=32)
    model: nn.Module = net
    if world > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(net)
    torch.manual_seed(args.seed + 1 + rank)  # each rank its own pairs
    sparse = torch.optim.SparseAdam([net.user.weight, net.item.weight], lr=0.02)
    dense = torch.optim.Adam(net.score.parameters(), lr=0.005)

    run = everstep.attach(model=model, sparse=sparse, dense=dense)
    for step in run.steps(until=args.steps):
        user, item, wanted = ratings(args.users, args.items, args.batch)
        loss = F.mse_loss(model(user, item), wanted)
        sparse.zero_grad()
        dense.zero_grad()
        loss.backward()
        sparse.step()
        dense.step()
        run.log(loss=loss)
        if rank == 0 and step % 50 == 0:
            print(f"step {step:5d}  loss {loss.item():.4f}", flush=True)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
