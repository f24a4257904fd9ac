"""The folder that a benchmark writes into, gone afterwards.

Owns: making and deleting it. Called by: the benchmarks.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from everstep.errors import UsageError


@contextlib.contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """A fresh folder in ``parent``. Raises :class:`UsageError` where none can be made."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="everstep-bench-", dir=parent)).resolve()
    except OSError as error:
        raise UsageError(
            f"cannot write into {parent}: {error.strerror}.",
            hint="Give a --folder on the disk that is to be measured.",
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
