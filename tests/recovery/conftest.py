"""Folders, undisturbed runs and disturbed ones."""

from __future__ import annotations

import shutil
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import mkdtemp

import pytest
from recovery_runs import Begin, Case, Reference, Trial, Undisturbed

from everstep.core.points import Fault

_PASSED = pytest.StashKey[bool]()


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    """``reference(case)``: what the case comes to when nothing disturbs it; run once a session."""
    known: dict[Case, Undisturbed] = {}
    folder = tmp_path_factory.mktemp("undisturbed")

    def run(case: Case) -> Undisturbed:
        if case not in known:
            # A folder of its own each time: a run that failed leaves what it wrote.
            place = Path(mkdtemp(dir=folder))
            with Trial(case, place, name="undisturbed") as trial:
                trial.run()
                assert trial.attempt == 1, trial.told("the undisturbed run was disturbed")
                known[case] = trial.outcome()
        return known[case]

    yield run
    shutil.rmtree(folder)


@pytest.fixture
def begin(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Begin]:
    """``begin(case, faults, name=...)``: a run that leaves no process, and files only where the
    test failed."""
    with ExitStack() as runs:

        def make(case: Case, faults: list[Fault] | None = None, *, name: str = "") -> Trial:
            return runs.enter_context(Trial(case, tmp_path / "run", faults or (), name=name))

        yield make
    if request.node.stash.get(_PASSED, False):
        shutil.rmtree(tmp_path / "run")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let the fixtures know whether their test has passed."""
    report = yield
    if call.when == "call":
        item.stash[_PASSED] = report.passed
    return report
