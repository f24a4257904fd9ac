"""The non-tensor part of the state as bytes, and back, without pickle (S8).

Owns: the encoding of Python values. Plain msgpack where msgpack keeps the type, an extension with
a nested payload where it would not. Tensors are not encoded: the caller names each one and gives
its index. What nothing here knows goes through ``torch.save`` if torch's weights-only loader gives
it back, else it is refused with its path and type. Never does: look into attached objects.
Called by: inspect, restore, and train for what is on a run itself.
"""

from __future__ import annotations

import collections
import io
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from everstep.errors import UnsavableObject
from everstep.state import quantized, sharding
from everstep.state.memory import OPAQUE, dtype_of

Path = tuple["Path | None", object]
TensorIndex = Callable[[torch.Tensor, str], int]
MeshOfShape = Callable[[Sequence[int]], Any]

_BIG_INT, _COMPLEX, _TUPLE, _SET, _FROZENSET, _DICT, _ORDERED, _DEFAULT, _COUNTER, _DEQUE = range(
    10
)
_NUMPY_SCALAR, _NUMPY_ARRAY, _DTYPE, _DEVICE, _SIZE, _TENSOR, _BLOB, _TEXT, _BYTEARRAY = range(
    10, 19
)
_QUANTIZED = 19

_FACTORIES: dict[str, Any] = {
    "": None, "int": int, "float": float, "str": str, "bool": bool, "list": list, "dict": dict,
    "set": set, "tuple": tuple,
}  # fmt: skip
_FACTORY_NAMES = {factory: name for name, factory in _FACTORIES.items()}
_NUMPY_KINDS = frozenset("biufcSUmM")
_AS_IS = frozenset({type(None), bool, float, bytes})


def encode(value: object, path: str, tensor: TensorIndex | None = None) -> bytes:
    """``value`` as msgpack. ``path`` is its name in errors; ``tensor(value, path)`` gives the index
    under which a tensor's bytes are kept (without it tensors are refused).

    Raises :class:`UnsavableObject` naming the path and type of what cannot be held.
    """
    packer = _Packer(tensor)
    return packer.encode(packer.pack(value, (None, path)))


def decode(
    data: bytes, tensors: Sequence[torch.Tensor] = (), mesh: MeshOfShape | None = None
) -> Any:
    """What :func:`encode` was given, with the same types; ``tensors`` are those of the indices.

    ``mesh`` gives the device mesh of a shape, for what was a DTensor.
    """
    return _Unpacker(tensors, mesh).decode(data)


def render(path: Path) -> str:
    """``optimizer.state.0.exp_avg`` of a chain of keys."""
    keys: list[str] = []
    at: Path | None = path
    while at is not None:
        keys.append(str(at[1]))
        at = at[0]
    return ".".join(reversed(keys))


class _Packer:
    """Turns one value into what msgpack holds natively, with extensions for the rest."""

    def __init__(self, tensor: TensorIndex | None) -> None:
        self._tensor = tensor
        self._open: set[int] = set()
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, packed: object) -> bytes:
        return self._encoder.encode(packed)

    def pack(self, value: Any, path: Path) -> Any:
        kind = type(value)
        if kind in _AS_IS:
            return value
        handler = _HANDLERS.get(kind)
        if handler is not None:
            return handler(self, value, path)
        if isinstance(value, torch.Tensor):
            return self.tensor(value, path)
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.generic):
            return self.numpy_scalar(value, path)
        if numpy is not None and kind is numpy.ndarray:
            return self.numpy_array(value, path)
        return self.blob(value, path)

    def extension(self, code: int, inner: object) -> msgspec.msgpack.Ext:
        return msgspec.msgpack.Ext(code, self.encode(inner))

    def integer(self, value: int, _path: Path) -> Any:
        if -(1 << 63) <= value < (1 << 64):
            return value
        size = value.bit_length() // 8 + 1
        return msgspec.msgpack.Ext(_BIG_INT, value.to_bytes(size, "little", signed=True))

    def text(self, value: str, _path: Path) -> Any:
        try:
            value.encode()
        except UnicodeEncodeError:
            return msgspec.msgpack.Ext(_TEXT, value.encode("utf-8", "surrogatepass"))
        return value

    def pack_complex(self, value: complex, _path: Path) -> Any:
        return msgspec.msgpack.Ext(_COMPLEX, struct.pack("<dd", value.real, value.imag))

    def items(self, values: Any, path: Path) -> list[Any]:
        if id(values) in self._open:
            raise UnsavableObject(
                f"{render(path)} ({type(values).__name__}) contains itself.",
                hint="Its state_dict must be a tree.",
            )
        self._open.add(id(values))
        try:
            return [self.pack(value, (path, at)) for at, value in enumerate(values)]
        except RecursionError as bad:
            raise UnsavableObject(f"{render(path)} is nested too deeply to be saved.") from bad
        finally:
            self._open.discard(id(values))

    def pack_list(self, value: Any, path: Path) -> Any:
        return self.items(value, path)

    def pack_tuple(self, value: Any, path: Path) -> Any:
        return self.extension(_TUPLE, self.items(value, path))

    def pack_set(self, value: Any, path: Path) -> Any:
        code = _SET if type(value) is set else _FROZENSET
        return self.extension(code, sorted(self.items(value, path), key=self.encode))

    def pairs(self, value: dict[Any, Any], path: Path) -> list[Any]:
        if id(value) in self._open:
            raise UnsavableObject(f"{render(path)} ({type(value).__name__}) contains itself.")
        self._open.add(id(value))
        try:
            return [
                [self.pack(key, (path, key)), self.pack(held, (path, key))]
                for key, held in value.items()
            ]
        except RecursionError as bad:
            raise UnsavableObject(f"{render(path)} is nested too deeply to be saved.") from bad
        finally:
            self._open.discard(id(value))

    def pack_dict(self, value: dict[Any, Any], path: Path) -> Any:
        pairs = self.pairs(value, path)
        if all(type(key) is str for key, _ in pairs):
            return dict(pairs)
        return self.extension(_DICT, pairs)

    def ordered(self, value: Any, path: Path) -> Any:
        return self.extension(_ORDERED, self.pairs(value, path))

    def counter(self, value: Any, path: Path) -> Any:
        return self.extension(_COUNTER, self.pairs(value, path))

    def default(self, value: Any, path: Path) -> Any:
        name = _FACTORY_NAMES.get(value.default_factory)
        if name is None:
            raise UnsavableObject(
                f"{render(path)} is a defaultdict whose factory {value.default_factory!r} cannot "
                "be named in a checkpoint.",
                hint="Give a plain dict from state_dict.",
            )
        return self.extension(_DEFAULT, [name, self.pairs(value, path)])

    def deque(self, value: Any, path: Path) -> Any:
        return self.extension(_DEQUE, [value.maxlen, self.items(value, path)])

    def pack_bytearray(self, value: Any, _path: Path) -> Any:
        return msgspec.msgpack.Ext(_BYTEARRAY, bytes(value))

    def dtype(self, value: torch.dtype, _path: Path) -> Any:
        return self.extension(_DTYPE, str(value).removeprefix("torch."))

    def device(self, value: torch.device, _path: Path) -> Any:
        return self.extension(_DEVICE, str(value))

    def size(self, value: torch.Size, _path: Path) -> Any:
        return self.extension(_SIZE, list(value))

    def tensor(self, value: torch.Tensor, path: Path) -> Any:
        name = render(path)
        if self._tensor is None:
            raise UnsavableObject(f"{name} is a tensor where only plain values can be saved.")
        if value.is_quantized:
            return self.quantized(self._tensor, value, name)
        index = self._tensor(value, name)
        dtype = str(value.dtype).removeprefix("torch.") if value.dtype in OPAQUE else ""
        parameter = isinstance(value, torch.nn.Parameter)
        spec = self.placement(value, name) if sharding.is_dtensor(value) else None
        return self.extension(_TENSOR, [index, dtype, parameter, value.requires_grad, spec])

    def placement(self, value: Any, name: str) -> list[Any]:
        if not sharding.is_regular(value):
            raise UnsavableObject(
                f"{name} is a DTensor placed as {value.placements}, which cannot be made again.",
                hint="Give its to_local() from state_dict, or shard and replicate it only.",
            )
        return sharding.describe(value)

    def quantized(self, index: TensorIndex, value: torch.Tensor, name: str) -> Any:
        at = index(quantized.raw(value, name), name)
        parameter = isinstance(value, torch.nn.Parameter)
        return self.extension(_QUANTIZED, [at, parameter, quantized.describe(value)])

    def numpy_scalar(self, value: Any, path: Path) -> Any:
        if value.dtype.kind not in _NUMPY_KINDS:
            return self.blob(value, path)
        return self.extension(_NUMPY_SCALAR, [value.dtype.str, value.tobytes()])

    def numpy_array(self, value: Any, path: Path) -> Any:
        if value.dtype.kind not in _NUMPY_KINDS:
            return self.blob(value, path)
        order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
        inner = [value.dtype.str, list(value.shape), order, value.tobytes(order)]
        return self.extension(_NUMPY_ARRAY, inner)

    def blob(self, value: Any, path: Path) -> Any:
        """torch's weights-only container, where it gives the value back."""
        what = f"{render(path)} ({type(value).__module__}.{type(value).__qualname__})"
        try:
            data = _saved(value)
            back = torch.load(io.BytesIO(data), weights_only=True)
            same = type(back) is type(value) and (_equal(value, back) or _saved(back) == data)
        except Exception as bad:
            raise UnsavableObject(
                f"{what} cannot be held in a checkpoint: {_first_line(bad)}",
                hint="Checkpoints hold no pickles; give numbers, text, lists, dicts and tensors "
                "from state_dict.",
            ) from bad
        if not same:
            raise UnsavableObject(
                f"{what} does not come back from torch's weights-only loader as it was.",
                hint="Give numbers, text, lists, dicts and tensors from state_dict.",
            )
        return msgspec.msgpack.Ext(_BLOB, data)


def _saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _equal(a: Any, b: Any) -> bool:
    answer = a == b
    return answer is True


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"


_HANDLERS: dict[type, Callable[[_Packer, Any, Path], Any]] = {
    int: _Packer.integer,
    str: _Packer.text,
    complex: _Packer.pack_complex,
    list: _Packer.pack_list,
    tuple: _Packer.pack_tuple,
    set: _Packer.pack_set,
    frozenset: _Packer.pack_set,
    dict: _Packer.pack_dict,
    collections.OrderedDict: _Packer.ordered,
    collections.defaultdict: _Packer.default,
    collections.Counter: _Packer.counter,
    collections.deque: _Packer.deque,
    bytearray: _Packer.pack_bytearray,
    torch.dtype: _Packer.dtype,
    torch.device: _Packer.device,
    torch.Size: _Packer.size,
}


class _Unpacker:
    def __init__(self, tensors: Sequence[torch.Tensor], mesh: MeshOfShape | None) -> None:
        self._tensors = tensors
        self._mesh = mesh
        self._decoder = msgspec.msgpack.Decoder(ext_hook=self._hook)

    def decode(self, data: bytes | memoryview) -> Any:
        return self._decoder.decode(data)

    def _hook(self, code: int, data: memoryview) -> Any:
        if code in _RAW:
            return _RAW[code](bytes(data))
        inner = self.decode(data)
        if code == _TENSOR:
            return self._restore(*inner)
        if code == _QUANTIZED:
            return self._requantized(*inner)
        return _NESTED[code](inner)

    def _restore(
        self, index: int, dtype: str, parameter: bool, requires_grad: bool, spec: Any
    ) -> torch.Tensor:
        held = self._tensors[index]
        if dtype and held.dtype != dtype_of(dtype):
            held = held.view(dtype_of(dtype))
        if spec is not None:
            if self._mesh is None:
                raise AssertionError("a DTensor cannot be decoded without meshes")
            held = sharding.wrap(held, spec, self._mesh(spec[0]))
        if parameter and not isinstance(held, torch.nn.Parameter):
            return torch.nn.Parameter(held, requires_grad=requires_grad)
        if requires_grad and not held.requires_grad:
            held.requires_grad_(True)
        return held

    def _requantized(self, index: int, parameter: bool, spec: list[Any]) -> torch.Tensor:
        made = quantized.rebuild(self._tensors[index], spec)
        return torch.nn.Parameter(made, requires_grad=False) if parameter else made


def _numpy_scalar(inner: Any) -> Any:
    import numpy

    return numpy.frombuffer(inner[1], dtype=numpy.dtype(inner[0]))[0]


def _numpy_array(inner: Any) -> Any:
    import numpy

    kind, shape, order, data = inner
    flat = numpy.frombuffer(data, dtype=numpy.dtype(kind)).copy()
    return flat.reshape(shape, order=order)


def _default(inner: Any) -> Any:
    return collections.defaultdict(_FACTORIES[inner[0]], inner[1])


def _counter(inner: Any) -> Any:
    counted: collections.Counter[Any] = collections.Counter()
    counted.update(dict(inner))
    return counted


_RAW: dict[int, Callable[[bytes], Any]] = {
    _BIG_INT: lambda data: int.from_bytes(data, "little", signed=True),
    _COMPLEX: lambda data: complex(*struct.unpack("<dd", data)),
    _TEXT: lambda data: data.decode("utf-8", "surrogatepass"),
    _BYTEARRAY: bytearray,
    _BLOB: lambda data: torch.load(io.BytesIO(data), weights_only=True),
}
_NESTED: dict[int, Callable[[Any], Any]] = {
    _TUPLE: tuple,
    _SET: set,
    _FROZENSET: frozenset,
    _DICT: dict,
    _ORDERED: collections.OrderedDict,
    _DEFAULT: _default,
    _COUNTER: _counter,
    _DEQUE: lambda inner: collections.deque(inner[1], maxlen=inner[0]),
    _NUMPY_SCALAR: _numpy_scalar,
    _NUMPY_ARRAY: _numpy_array,
    _DTYPE: dtype_of,
    _DEVICE: torch.device,
    _SIZE: torch.Size,
}
