"""The small model that the recovery benchmark trains under both launchers.

Owns: model, batches, one training step. Called by: :mod:`everstep.bench.recover_job`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

TOKENS, CONTEXT, HEADS = 256, 64, 4


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind()
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.feed(self.norm2(x))
        return out


class GPT(nn.Module):
    """Tokens of shape (batch, length) in, logits of shape (batch, length, TOKENS) out."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(TOKENS, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(_Block(width) for _ in range(layers)))
        self.head = nn.Linear(width, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place.weight[: tokens.shape[1]]
        out: Tensor = self.head(self.blocks(x))
        return out


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    """One step on tokens of shape (batch, CONTEXT + 1)."""
    logits = model(batch[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    optimizer.step()


def batch_of(step: int, rank: int, size: int) -> Tensor:
    """The rank's batch of a step: a function of both, so that a restart needs no data position."""
    generator = torch.Generator().manual_seed(step * 1009 + rank)
    return torch.randint(TOKENS, (size, CONTEXT + 1), generator=generator)
