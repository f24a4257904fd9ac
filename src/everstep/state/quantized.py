"""Quantized tensors: the integers as plain memory, and what turns them into numbers beside them.

Owns: every use of torch's quantized types. A quantized tensor is kept as a plain tensor of its raw
integers (packed ones as their bytes) and a small record of dtype, size, scales and zero points.
Never does: quantize or dequantize. Called by: inspect, encode, difference.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch

from everstep.errors import UnsavableObject

_RAW: dict[str, tuple[torch.dtype, int]] = {
    "qint8": (torch.int8, 1), "quint8": (torch.uint8, 1), "qint32": (torch.int32, 1),
    "quint4x2": (torch.uint8, 2), "quint2x4": (torch.uint8, 4),
}  # fmt: skip
"""What holds the elements, and how many of them each holds."""
_PER_TENSOR = frozenset({torch.per_tensor_affine})
_PER_CHANNEL = frozenset({torch.per_channel_affine, torch.per_channel_affine_float_qparams})
_MAKERS = ("_empty_affine_quantized", "_empty_per_channel_affine_quantized")


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def raw(tensor: torch.Tensor, path: str) -> torch.Tensor:
    """A view of the tensor's integers: of its own shape, or flat where several share a byte.

    Raises :class:`UnsavableObject` naming ``path`` where this torch does not let it be made again.
    """
    why = _unfit(tensor)
    if why:
        raise UnsavableObject(
            f"{path} ({tensor.dtype}, {tensor.qscheme()}) cannot be saved: {why}.",
            hint="Give its int_repr(), scale and zero point from state_dict instead.",
        )
    dtype, packed = _RAW[dtype_name(tensor)]
    plain = torch.empty(0, dtype=dtype, device=tensor.device)
    with torch.no_grad():
        if packed == 1:
            place = tensor.storage_offset(), tensor.size(), tensor.stride()
            return plain.set_(tensor.untyped_storage(), *place)
        return plain.set_(tensor.untyped_storage(), 0, (_packed_bytes(tensor, packed),), (1,))


def _unfit(tensor: torch.Tensor) -> str:
    if dtype_name(tensor) not in _RAW or tensor.qscheme() not in _PER_TENSOR | _PER_CHANNEL:
        return "everstep does not know this quantized dtype or scheme"
    if not all(hasattr(torch, maker) for maker in _MAKERS):
        return f"this torch ({torch.__version__}) offers no way to make it again"
    packed = _RAW[dtype_name(tensor)][1]
    if packed > 1 and (
        not tensor.is_contiguous()
        or tensor.storage_offset()
        or tensor.untyped_storage().nbytes() < _packed_bytes(tensor, packed)
    ):
        return "it shares bytes with other elements of the tensor that it is a view of"
    return ""


def _packed_bytes(tensor: torch.Tensor, packed: int) -> int:
    return math.ceil(tensor.numel() / packed)


def describe(tensor: torch.Tensor) -> list[Any]:
    """What :func:`rebuild` needs besides the integers, as plain values."""
    if tensor.qscheme() in _PER_TENSOR:
        how: list[Any] = [tensor.q_scale(), tensor.q_zero_point()]
    else:
        scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
        how = [*_as_bytes(scales), *_as_bytes(zeros), tensor.q_per_channel_axis()]
    return [dtype_name(tensor), list(tensor.size()), how]


def rebuild(integers: torch.Tensor, spec: list[Any]) -> torch.Tensor:
    """A new tensor with these integers and what :func:`describe` saw."""
    name, size, how = spec
    kind: Any = {"dtype": getattr(torch, name), "device": integers.device}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that quantized types are to be replaced one day
        if len(how) == 2:
            kind.update(scale=how[0], zero_point=how[1])
            made: torch.Tensor = torch._empty_affine_quantized(size, **kind)
        else:
            scales, zeros = _from_bytes(*how[0:2]), _from_bytes(*how[2:4])
            kind.update(scales=scales.to(integers.device), zero_points=zeros.to(integers.device))
            made = torch._empty_per_channel_affine_quantized(size, axis=how[4], **kind)
    with torch.no_grad():
        raw(made, name).copy_(integers)
    return made


def _as_bytes(values: torch.Tensor) -> tuple[str, bytes]:
    plain = values.detach().cpu().contiguous()
    return str(plain.dtype).removeprefix("torch."), plain.numpy().tobytes()


def _from_bytes(dtype: str, data: bytes) -> torch.Tensor:
    if not data:
        return torch.empty(0, dtype=getattr(torch, dtype))
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype))
