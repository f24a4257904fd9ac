"""Digests of raw bytes: what identifies a chunk and finds damage.

Owns: the algorithms by name. Never does: I/O. Called by: every module of the store, and the keeper
for its own memory.
"""

from __future__ import annotations

from collections.abc import Callable

import xxhash

from everstep.errors import UsageError

DEFAULT = "xxh3-128"
SIZES = {"xxh3-128": 16, "blake3": 32}
"""Bytes of a digest, by algorithm."""

Digest = Callable[[bytes | bytearray | memoryview], bytes]


def digest(data: bytes | bytearray | memoryview) -> bytes:
    """XXH3-128 in canonical form, 16 bytes: the default algorithm of stores."""
    return xxhash.xxh3_128_digest(data)


def digester(algorithm: str) -> Digest:
    """The function of an algorithm named in ``everstep.json``. Raises ``UsageError``."""
    if algorithm == "xxh3-128":
        return digest
    if algorithm == "blake3":
        return _blake3()
    raise UsageError(
        f"digest algorithm {algorithm!r} is not known.", hint=f"Use one of {', '.join(SIZES)}."
    )


def _blake3() -> Digest:
    try:
        from blake3 import blake3
    except ImportError:
        raise UsageError(
            "this store uses BLAKE3 and the blake3 package is not installed.",
            hint="pip install 'everstep[blake3]'.",
        ) from None

    def of(data: bytes | bytearray | memoryview) -> bytes:
        found: bytes = blake3(data).digest()
        return found

    return of
