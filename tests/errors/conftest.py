"""The same jobs as the training side's tests have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from train_jobs import Jobs


@pytest.fixture
def jobs(tmp_path: Path, job_environment: dict[str, str]) -> Iterator[Jobs]:
    made = Jobs(tmp_path, job_environment)
    yield made
    made.close()
