"""The training script of the recovery benchmark, the same under both launchers.

Owns: the order import, join, build, restore, steps, and telling of each. Called by: ``everstep
run``, ``torchrun`` and plain python, each with ``--saver`` naming what keeps the state.
"""

from __future__ import annotations

import argparse
import os
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from everstep.bench.gpt import GPT, batch_of, train_step
from everstep.bench.marks import MarkWriter
from everstep.bench.processes import began_at
from everstep.bench.training import Training


def main() -> None:
    marks = MarkWriter(os.environ)
    marks.write("began", at=began_at(os.getpid()))
    parser = argparse.ArgumentParser(description="A job of `everstep bench recover`.")
    parser.add_argument("--saver", choices=("everstep", "dcp", "none"), required=True)
    parser.add_argument("--folder", type=Path, required=True)
    for name in ("every", "width", "layers", "batch"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    # Before the imports are called done: each system pays for what it loads.
    keeper = None if args.saver == "none" else import_module(f"everstep.bench.recover_{args.saver}")
    marks.write("imported")
    torch.set_num_threads(1)
    if keeper is not None:
        dist.init_process_group("gloo")
        marks.write("joined")
    training = _build(args, marks)
    marks.write("built")
    if keeper is not None:
        keeper.train(training)


def _build(args: argparse.Namespace, marks: MarkWriter) -> Training:
    torch.manual_seed(0)
    model: nn.Module = GPT(args.width, args.layers)
    rank = 0
    if dist.is_initialized():
        model, rank = DistributedDataParallel(model), dist.get_rank()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(number: int) -> None:
        train_step(model, optimizer, batch_of(number, rank, args.batch))
        marks.write("step", step=number + 1)

    return Training(model, optimizer, step, marks, args.folder, args.every, rank)


if __name__ == "__main__":
    main()
