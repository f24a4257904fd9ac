"""How a chunk's raw bytes are stored. Registered by name; a reader needs only the chunk's record.

Owns: the registry. Version 1 writes ``raw`` alone. Called by: pack (names), read (decodes).
"""

from __future__ import annotations

from collections.abc import Callable

from everstep.errors import CorruptObject, NewerFormat

RAW = "raw"

Decoder = Callable[[memoryview, int], memoryview]
"""(stored bytes, raw length) -> raw bytes. Raises ``ValueError`` where they do not decode."""


def _raw(stored: memoryview, raw_length: int) -> memoryview:
    if len(stored) != raw_length:
        raise ValueError(f"{len(stored)} bytes are stored for {raw_length}")
    return stored


DECODERS: dict[str, Decoder] = {RAW: _raw}


def check_known(codec: str, base: bytes | None, key: str) -> None:
    """Raise ``NewerFormat`` where this version cannot read a chunk."""
    if codec not in DECODERS or base is not None:
        what = f"codec {codec!r}" if codec not in DECODERS else "a delta"
        raise NewerFormat(
            f"{key} holds chunks stored as {what}, which this version cannot read.",
            hint="Upgrade everstep to the version that wrote it, or later.",
        )


def decode(codec: str, stored: memoryview, raw_length: int, *, key: str) -> memoryview:
    """Raw bytes of a chunk, not yet checked against its digest."""
    try:
        return DECODERS[codec](stored, raw_length)
    except ValueError as error:
        raise CorruptObject(
            f"a chunk of {key} does not decode: {error}.",
            hint="Another checkpoint has to be used.",
        ) from error
