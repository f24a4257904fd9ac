"""The store's errors for what the operating system says.

Owns: the translation of ``OSError`` and the words. Called by: the backends.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from everstep.errors import CorruptObject, ObjectMissing, StoreError, StoreFull, StoreNotWritable


@contextmanager
def translated(key: str, doing: str) -> Iterator[None]:
    """``OSError`` inside becomes a ``StoreError`` that names ``key`` and what to do."""
    try:
        yield
    except OSError as error:
        raise _translate(error, key, doing) from error


def _translate(error: OSError, key: str, doing: str) -> StoreError:
    what = f"cannot {doing} {key}: {error.strerror or error}."
    number = error.errno
    if number in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR) and doing in ("read", "look at"):
        return missing(key)
    if number in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull(what, hint="Free space, inodes or quota there; the next save is complete.")
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return StoreNotWritable(
            what, hint="Give this user access to the store's folder, or pass another --store."
        )
    if number in (errno.ENOTDIR, errno.EEXIST):
        return StoreNotWritable(
            what, hint="A file stands where a folder of the store must be; pass another --store."
        )
    if number == errno.ENOENT:
        return StoreError(what, hint="Was the store's file system unmounted or its folder removed?")
    return StoreError(what, hint="Look at the disk or the mount of the store.")


def missing(key: str) -> ObjectMissing:
    """The error for an object that is not there."""
    return ObjectMissing(f"{key} does not exist.", hint="Look at the store's path and its mount.")


def short(key: str, offset: int, wanted: int, size: int) -> CorruptObject:
    """The error for an object that ends before the bytes that were wanted."""
    return CorruptObject(
        f"{key} ends at byte {size}; bytes {offset} to {offset + wanted} were wanted.",
        hint="The object is cut short; another checkpoint has to be used.",
    )
