"""A place for each test, and no keeper left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from keeper_fakes import Place


@pytest.fixture
def place(tmp_path: Path, end_keepers: Callable[[], list[int]]) -> Iterator[Place]:
    yield Place(tmp_path)
    end_keepers()
