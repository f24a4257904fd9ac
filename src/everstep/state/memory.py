"""A tensor as memory: names of dtypes, what identifies its memory, and its bytes.

Owns: the mapping between torch's dtypes and those of core.layout. Never does: change a tensor,
except in :meth:`Bytes.finish`. Called by: every module of this room.
"""

from __future__ import annotations

from typing import Any

import torch

from everstep.core.layout import ITEMSIZE
from everstep.errors import UnsavableObject

_NAMES: dict[torch.dtype, str] = {
    getattr(torch, name): name
    for name in ITEMSIZE
    if isinstance(getattr(torch, name, None), torch.dtype)
}
OPAQUE: dict[torch.dtype, str] = {
    getattr(torch, name): kind
    for kind, names in {
        "uint8": [*(f"{sign}int{n}" for sign in ("", "u") for n in range(1, 8)),
                  "bits8", "bits1x8", "bits2x4", "bits4x2"],
        "uint16": ["bits16"],
    }.items()
    for name in names
    if isinstance(getattr(torch, name, None), torch.dtype)
}  # fmt: skip
"""Dtypes that a layout names by an integer of their size: sub-byte integers and raw bits."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Fingerprint = tuple[Any, ...]


def dtype_name(dtype: torch.dtype) -> str | None:
    """The dtype's name in a layout; those without one of their own are kept as raw integers.
    None for quantized dtypes (see :mod:`everstep.state.quantized`) and those of a newer torch."""
    return _NAMES.get(dtype) or OPAQUE.get(dtype)


def dtype_of(name: str) -> torch.dtype:
    """torch's dtype of a layout's name. Raises ``UnsavableObject`` where this torch lacks it."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise UnsavableObject(f"this torch ({torch.__version__}) has no dtype {name}.")
    return found


def fingerprint(tensor: torch.Tensor) -> Fingerprint:
    """What says that a view taken earlier still shows the same memory in the same way."""
    return (
        tensor.data_ptr(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def check_plain(tensor: torch.Tensor, name: str) -> None:
    """Raises :class:`UnsavableObject` where a tensor is not a box of elements in memory."""
    reason = _unfit(tensor)
    if reason:
        raise UnsavableObject(
            f"{name} ({type(tensor).__name__}, {tensor.dtype}) cannot be saved: {reason}.",
            hint="Attach it after it has become a dense tensor, or leave it out of state_dict.",
        )


def _unfit(tensor: torch.Tensor) -> str:
    if torch.nn.parameter.is_lazy(tensor):
        return "it is uninitialised until the first forward; run a dry forward before attach"
    if tensor.is_meta:
        return "it is on the meta device and has no data"
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}"
    if tensor.is_nested:
        return "it is a nested tensor, which has no one shape"
    if dtype_name(tensor.dtype) is None:
        return "a checkpoint has no name for its dtype"
    if type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
        return "this tensor subclass keeps its data in other tensors"
    return ""


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A view of ``tensor`` as integers of the element's size, so that a copy moves bits and every
    dtype can be copied. A lazily conjugated or negated tensor stays as it is: its copy resolves."""
    plain = tensor.detach()
    if plain.is_conj() or plain.is_neg():
        return plain
    size = plain.element_size()
    if size == 16:
        return torch.view_as_real(plain).view(torch.int64)
    return plain.view(_INTEGERS[size])


def is_direct(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory is its row-major bytes, readable by the CPU."""
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, writable; it keeps the tensor alive."""
    if not is_direct(tensor):
        raise AssertionError("as_bytes needs contiguous CPU memory")
    flat = tensor.detach().reshape(-1)
    return flat.view(torch.uint8).numpy().data


class Bytes:
    """A tensor as writable row-major bytes: ``view`` to read into, ``finish`` to have them in the
    tensor. Contiguous CPU tensors are written directly, others over a bounce buffer."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._bounce: torch.Tensor | None = None
        if not is_direct(tensor):
            self._bounce = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        self.view = as_bytes(tensor if self._bounce is None else self._bounce)

    def finish(self) -> None:
        """Copy the bounce buffer, where there is one, into the tensor. Call it once."""
        if self._bounce is None:
            return
        source, target = self._bounce, self.tensor.detach()
        for dim, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
            if stride == 0 and size > 1:
                # An expanded tensor holds one copy of what it shows: write that one.
                source, target = source.narrow(dim, 0, 1), target.narrow(dim, 0, 1)
        with torch.no_grad():
            if _lazy(target):
                target.copy_(source)
            else:
                bits(target).copy_(bits(source))
        self._bounce = None


def _lazy(tensor: torch.Tensor) -> bool:
    return tensor.is_conj() or tensor.is_neg()
