"""Gradients that are told to be no numbers, as a device that computes wrongly would give them.

Owns: the point ``train.step.gradients``. Never does: anything at all where no fault is set there.
Called by: :class:`everstep.train.run.Run`, once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from everstep.core.points import armed, spoils
from everstep.state.inspect import Attached


def spoil_gradients(attached: Attached, step: Callable[[], int]) -> None:
    """Give one trained parameter a hook that spoils its gradient in the step the fault names.
    It comes before the ranks add their gradients up, so all of them get it."""
    if not armed("train.step.gradients"):
        return

    def spoilt(gradient: torch.Tensor) -> torch.Tensor:
        wrong = spoils("train.step.gradients", step())
        return torch.full_like(gradient, torch.nan) if wrong else gradient

    trained = [p for _, m in attached.modules() for p in m.parameters() if p.requires_grad]
    if trained:
        trained[0].register_hook(spoilt)  # type: ignore[no-untyped-call]
