"""A training job of a given state size, for the saving and memory benchmarks.

Owns: model, optimizer, one step on all cores, the list of its tensors. Called by:
:mod:`everstep.bench.save_job`.

A share of the state is trained by AdamW in every step (a stack of square layers, so that a step is
matrix products); the rest is frozen, as in fine-tuning. All of it is saved.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTHS = (1024, 512, 256, 128)
FROZEN_BYTES = 32 << 20
"""One frozen tensor, at most."""


class _Stack(nn.Module):
    """``layers`` square layers of ``width``, and ``frozen`` bytes beside them."""

    def __init__(self, width: int, layers: int, frozen: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.frozen = nn.ParameterList(
            nn.Parameter(torch.randn(size // 4), requires_grad=False) for size in _pieces(frozen)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return x


class Workload:
    """About ``state_bytes`` of state, ``trained`` (0 to 1) of it trained, ``batch`` samples a
    step, on ``threads`` threads (0: as many as there are cores)."""

    def __init__(self, state_bytes: int, trained: float, batch: int, threads: int) -> None:
        if threads:
            torch.set_num_threads(threads)
        torch.manual_seed(0)
        width, layers = shape_of(int(state_bytes * trained))
        self.model = _Stack(width, layers, state_bytes - 12 * layers * width * width)
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trainable, lr=1e-5, fused=True)
        self._batch = torch.randn(batch, width)

    def step(self) -> None:
        """Forward, backward and update."""
        loss = self.model(self._batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> list[Tensor]:
        """Every tensor of the state; the optimizer's exist after the first step."""
        of_optimizer = [
            value
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]
        return [*(p.detach() for p in self.model.parameters()), *of_optimizer]


def shape_of(trained_bytes: int) -> tuple[int, int]:
    """(width, layers) of the trained stack whose parameters and two moments take about so much:
    the widest of at least four layers."""
    width = next((w for w in WIDTHS if trained_bytes >= 4 * 12 * w * w), WIDTHS[-1])
    return width, max(1, round(trained_bytes / (12 * width * width)))


def _pieces(nbytes: int) -> list[int]:
    whole, rest = divmod(max(nbytes, 0), FROZEN_BYTES)
    return [FROZEN_BYTES] * whole + ([rest] if rest >= 4 else [])
