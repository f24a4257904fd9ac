"""Random number generators: Python's, NumPy's, torch's on the CPU and on every device in use.

Owns: which generators belong to a rank's state. Values are plain (encodable by
:mod:`everstep.state.encode`), no tensors. Never does: initialise a device. Called by: train.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from everstep.errors import RestoreError


def capture() -> dict[str, Any]:
    """The state of all generators now; drawing nothing. ``numpy`` is there where the process
    has imported NumPy, ``devices`` holds each generator of accelerators already initialised."""
    found: dict[str, Any] = {
        "python": random.getstate(),
        "torch": _as_bytes(torch.get_rng_state()),
        "devices": _devices(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found["numpy"] = numpy.random.get_state(legacy=False)
    return found


def restore(state: dict[str, Any]) -> None:
    """Put what :func:`capture` gave back, bit for bit.

    Raises :class:`RestoreError` where a device's generator was recorded that is not here.
    """
    random.setstate(state["python"])
    torch.set_rng_state(_as_tensor(state["torch"]))
    if "numpy" in state:
        import numpy

        numpy.random.set_state(state["numpy"])
    for kind, states in state["devices"].items():
        _restore_devices(kind, states)


def _devices() -> dict[str, list[bytes]]:
    found = {}
    for kind in _kinds():
        module: Any = torch.get_device_module(kind)
        if not _initialised(module):
            continue
        if hasattr(module, "device_count") and kind != "mps":
            states = [module.get_rng_state(index) for index in range(module.device_count())]
        else:
            states = [module.get_rng_state()]
        found[kind] = [_as_bytes(state) for state in states]
    return found


def _kinds() -> list[str]:
    accelerator = torch.accelerator.current_accelerator()
    return [] if accelerator is None else [accelerator.type]


def _initialised(module: Any) -> bool:
    return bool(module.is_initialized()) if hasattr(module, "is_initialized") else True


def _restore_devices(kind: str, states: list[bytes]) -> None:
    module: Any = torch.get_device_module(kind) if kind in _kinds() else None
    count = 0 if module is None else getattr(module, "device_count", lambda: 1)()
    if len(states) > count:
        raise RestoreError(
            f"the state holds {len(states)} {kind} generators, and this process has {count}.",
            hint="Start the job with as many visible devices as before.",
        )
    for index, state in enumerate(states):
        if kind == "mps":
            module.set_rng_state(_as_tensor(state))
        else:
            module.set_rng_state(_as_tensor(state), index)


def _as_bytes(state: torch.Tensor) -> bytes:
    return state.cpu().numpy().tobytes()


def _as_tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
