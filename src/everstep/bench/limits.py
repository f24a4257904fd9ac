"""The physical limits of one save: a copy of the same tensors, a raw write of the same bytes.

Owns: memory that was touched before, both kinds of write. Called by: save_job.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from everstep.bench.rounds import Limits as Figures

BLOCK = 8 << 20
ALIGN = 4096
"""What O_DIRECT asks of addresses and lengths, at most, on common disks."""


class Limits:
    """Measures them for ``tensors``, writing into ``folder``."""

    def __init__(self, tensors: Sequence[Tensor], folder: Path) -> None:
        self._tensors = tensors
        self._file = folder / "raw"
        starts, end = [], 0
        for tensor in tensors:
            starts.append(end)
            end += -(-tensor.nbytes // 64) * 64
        self._memory = mmap.mmap(-1, -(-max(end, 1) // ALIGN) * ALIGN)
        flat = torch.frombuffer(self._memory, dtype=torch.uint8)
        flat.fill_(1)  # every page is there before anything is timed
        self.copies = [
            flat[at : at + t.nbytes].view(t.dtype).view(t.shape)
            for at, t in zip(starts, tensors, strict=True)
        ]

    def measure(self) -> Figures:
        """Once each: copy, buffered write + fsync, direct write + fsync."""
        copy = _seconds(self._copy)
        buffered = _seconds(lambda: self._write(os.O_WRONLY))
        self._file.unlink()
        return Figures(copy, buffered, self._direct())

    def _direct(self) -> float | None:
        try:
            seconds = _seconds(lambda: self._write(os.O_WRONLY | os.O_DIRECT))
        except OSError:
            return None  # a filesystem without it, which the other write stands for
        finally:
            self._file.unlink(missing_ok=True)
        return seconds

    def _copy(self) -> None:
        for copy, tensor in zip(self.copies, self._tensors, strict=True):
            copy.copy_(tensor)

    def _write(self, flags: int) -> None:
        fd = os.open(self._file, flags | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            with memoryview(self._memory) as view:
                at = 0
                while at < len(view):
                    at += os.write(fd, view[at : at + BLOCK])
            os.fsync(fd)
        finally:
            os.close(fd)


def _seconds(call: Callable[[], None]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began
