"""A small GPT learns the source text of Python's standard library, with DDP where ranks are many.

everstep run --nproc-per-node 2 examples/gpt_ddp.py --steps 200
torchrun --nproc-per-node 2 examples/gpt_ddp.py
python examples/gpt_ddp.py
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import everstep

CONTEXT, BYTES = 64, 256  # a token is a byte


class Block(nn.Module):
    """Attention and a feed-forward layer, normalised first, with dropout."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before_attention, self.before_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        wide, narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.feed = nn.Sequential(wide, nn.GELU(), narrow, nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.before_attention(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        x = x + self.mix(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed(self.before_feed(x))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out. The output layer is the embedding, used again."""

    def __init__(self, width: int, layers: int, heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(BYTES, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, BYTES, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Text(Dataset[tuple[Tensor, Tensor]]):
    """The modules of the standard library as windows of bytes, each with the bytes that follow."""

    def __init__(self) -> None:
        folder = Path(sysconfig.get_path("stdlib"))
        text = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.bytes[index * CONTEXT : (index + 1) * CONTEXT + 1].long()
        return window[:-1], window[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    defaults = {"steps": 200, "seed": 0, "batch": 8, "width": 128, "layers": 2}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    args = parser.parse_args()

    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    model: nn.Module = GPT(args.width, args.layers)
    if world > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    torch.manual_seed(args.seed + 1 + rank)  # each rank its own dropout
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 50))
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
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
