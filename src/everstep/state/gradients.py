"""Gradients that a step boundary would lose (R1): accumulated since the last optimizer step.

Owns: the optimizer step hooks and what they saw. Never does: raise, change a gradient. Called by:
train at every boundary.

A few of each optimizer's smallest gradients are remembered, as objects and by version, when a step
ends. Unchanged ones at a boundary are what that step has used, which a loop that zeroes at the
start of its body leaves behind. The references are kept so that a new gradient cannot take an old
one's identity; they are the smallest ones so that this costs no memory. A step of any optimizer
counts: with two of them (a GAN) the backward of one leaves gradients in the other's parameters.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.amp.grad_scaler import GradScaler, OptState

from everstep.state import sharding
from everstep.state.inspect import Attached

_WATCHED = 4


class _Seen(NamedTuple):
    parameter: torch.Tensor
    gradient: torch.Tensor
    version: int


class Gradients:
    """Watches the attached optimizers until :meth:`close`. One for each run."""

    def __init__(self, attached: Attached) -> None:
        self._optimizers = dict(attached.optimizers())
        self._scalers = [held for _, held in attached.others() if isinstance(held, GradScaler)]
        self._seen: dict[str, list[_Seen]] = {keyword: [] for keyword in self._optimizers}
        self._states = [_states(scaler) for scaler in self._scalers]
        self._by_size: dict[str, list[torch.Tensor]] = {}
        self._hooks = [
            optimizer.register_step_post_hook(self._after_step)
            for optimizer in self._optimizers.values()
        ]
        self._remember()

    def pending(self) -> str | None:
        """Why this boundary is none: gradients that no step has used, or None.

        Call it at every boundary: a skip of the scaler is told from the state it leaves between
        two calls. Gradients that are all zero are not pending.
        """
        skipped = self._skipped()
        self._states = [_states(scaler) for scaler in self._scalers]
        if skipped:
            self._remember()
            return None
        for keyword, optimizer in self._optimizers.items():
            if self._changed(keyword) and _any_nonzero(optimizer):
                return _reason(keyword, bool(self._scalers))
        return None

    def close(self) -> None:
        """Take the hooks off and let the gradients go."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._seen = {keyword: [] for keyword in self._optimizers}

    def _after_step(self, *_: Any) -> None:
        self._remember()

    def _remember(self) -> None:
        for keyword, optimizer in self._optimizers.items():
            self._seen[keyword] = _first_with_gradient(self._smallest_first(keyword, optimizer))

    def _smallest_first(self, keyword: str, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """Sorted once, and anew when parameters were added: this runs in every step."""
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        parameters = self._by_size.get(keyword)
        if parameters is None or len(parameters) != count:
            parameters = self._by_size[keyword] = sorted(
                _parameters(optimizer), key=torch.Tensor.numel
            )
        return parameters

    def _changed(self, keyword: str) -> bool:
        seen = self._seen[keyword]
        gone = 0
        for was in seen:
            now = was.parameter.grad
            if now is None:
                gone += 1
            elif now is not was.gradient or _version(now) != was.version:
                return True
        if gone == len(seen):
            # Nothing was there, or all was set to None: whatever is there now is new.
            return any(p.grad is not None for p in _parameters(self._optimizers[keyword]))
        return False

    def _skipped(self) -> bool:
        """Whether a scaler has stepped or updated since the last boundary. ``update`` replaces the
        scaler's record of its optimizers; until then it says that ``step`` was called."""
        return any(
            _states(scaler) is not before or _stepped(scaler)
            for scaler, before in zip(self._scalers, self._states, strict=True)
        )


def _states(scaler: GradScaler) -> Any:
    return getattr(scaler, "_per_optimizer_states", None)


def _stepped(scaler: GradScaler) -> bool:
    states: dict[int, dict[str, Any]] = _states(scaler) or {}
    return any(state["stage"] is OptState.STEPPED for state in states.values())


def _parameters(optimizer: torch.optim.Optimizer) -> Any:
    return (p for group in optimizer.param_groups for p in group["params"])


def _first_with_gradient(parameters: list[torch.Tensor]) -> list[_Seen]:
    found = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            found.append(_Seen(parameter, gradient, _version(gradient)))
            if len(found) == _WATCHED:
                break
    return found


def _version(gradient: torch.Tensor) -> int:
    return sharding.local(gradient)._version


def _any_nonzero(optimizer: torch.optim.Optimizer) -> bool:
    with torch.no_grad():
        for parameter in _parameters(optimizer):
            gradient = parameter.grad
            if gradient is not None and bool(sharding.local(gradient).detach().abs().sum() != 0):
                return True
    return False


def _reason(keyword: str, has_scaler: bool) -> str:
    text = (
        f"{keyword}'s parameters hold gradients accumulated since the last optimizer step, and "
        "a cut here would lose them. Pass accumulate=<micro-batches per step> to run.steps, or "
        "end the step before run.step_end()."
    )
    if not has_scaler:
        text += " If a GradScaler skipped the step, attach it (scaler=...)."
    return text
