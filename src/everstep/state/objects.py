"""The records of what is not tensor bytes: what each attached object was, by keyword.

Owns: their form inside ``RankState.objects`` (spec: msgpack maps). Never does: torch. Called by:
inspect (which fills them) and restore (which reads them).
"""

from __future__ import annotations

from typing import Literal

import msgspec

Treatment = Literal["module", "optimizer", "other"]


class ModuleRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A module besides its tensors. Names are relative to the keyword.

    ``absent`` are buffers registered as None, ``volatile`` those that torch leaves out of a state
    dict, ``extra`` each ``get_extra_state`` (encoded), ``flags`` what DDP wrappers remember,
    ``quantized`` each quantized tensor (encoded), whose integers stand under its name.
    """

    absent: tuple[str, ...] = ()
    volatile: tuple[str, ...] = ()
    extra: dict[str, bytes] = {}
    flags: dict[str, bool] = {}
    quantized: dict[str, bytes] = {}


class EntryRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """``optimizer.state`` of one parameter: tensors by key as indices into the refs, the rest
    encoded. ``order`` keeps the keys' order where both kinds mix; ``dtypes`` names dtypes that a
    ref cannot; ``sharded`` are the keys that were DTensors."""

    tensors: dict[str, int] = {}
    rest: bytes = b""
    order: tuple[str, ...] = ()
    dtypes: dict[str, str] = {}
    sharded: tuple[str, ...] = ()


class GroupRecord(msgspec.Struct, frozen=True):
    """A param_group: its parameters' names in order, and its options, encoded."""

    params: tuple[str, ...]
    options: bytes


class OptimizerRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """An optimizer. A parameter without an entry had no state, and gets none back. ``loose`` holds
    state under keys that are no parameters, encoded."""

    groups: tuple[GroupRecord, ...]
    entries: dict[str, EntryRecord]
    loose: bytes = b""


class Objects(msgspec.Struct, frozen=True, omit_defaults=True):
    """All of them. ``treated`` and ``types`` are by keyword, in the order of attach; ``extra`` is
    what train keeps beside the attached objects, encoded."""

    treated: dict[str, Treatment]
    types: dict[str, str]
    modules: dict[str, ModuleRecord] = {}
    optimizers: dict[str, OptimizerRecord] = {}
    others: dict[str, bytes] = {}
    extra: bytes = b"\xc0"


_decoder = msgspec.msgpack.Decoder(Objects)


def encode_objects(objects: Objects) -> bytes:
    return msgspec.msgpack.encode(objects)


def decode_objects(data: bytes) -> Objects:
    """Raises ``msgspec.DecodeError`` where the bytes are no such record."""
    return _decoder.decode(data)
