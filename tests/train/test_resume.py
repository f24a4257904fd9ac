"""R4: whatever dies and whenever, the losses and the final state are those of a run that nothing
disturbed. Real processes under plain python, a real keeper, real kills."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from train_bodies import LAST, train, undisturbed
from train_jobs import Jobs, fault

CUTS = (3, 6, 9)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    jobs = Jobs(tmp_path_factory.mktemp("reference"), {})
    found: dict[str, Any] = jobs.run(undisturbed, until=LAST)
    return found


def agree(jobs: Jobs, digest: str, reference: dict[str, Any]) -> None:
    """Every loss of every attempt, and the end."""
    expected = {step: {loss} for step, loss in enumerate(reference["losses"], 1)}
    assert jobs.losses() == expected
    assert digest == reference["digest"]


def killed(jobs: Jobs, point: str, *, after: int = 0) -> None:
    """One life of the job that ends by SIGKILL at ``point``."""
    faults = fault(point, after=after)
    started = jobs.start(train, at=CUTS, env={"EVERSTEP_FAULTS": faults})
    assert started.wait() == -signal.SIGKILL, started.said()


def test_undisturbed_it_is_the_same_training_as_without_everstep(
    jobs: Jobs, reference: dict[str, Any]
) -> None:
    agree(jobs, jobs.run(train, at=CUTS), reference)
    assert [e.step for e in jobs.events("checkpoint.committed")] == [*CUTS, LAST]


@pytest.mark.parametrize(
    ("point", "resumed"),
    [
        pytest.param("train.cut.before", 3, marks=pytest.mark.soak),
        ("train.cut.begun", 3),
        pytest.param("state.capture.before_copy", 3, marks=pytest.mark.soak),
        pytest.param("train.cut.copied", 3, marks=pytest.mark.soak),
        ("train.cut.committed", 6),
    ],
)
def test_killed_in_the_second_cut(
    jobs: Jobs, reference: dict[str, Any], point: str, resumed: int
) -> None:
    """R7: the snapshot before is untouched by a cut that is torn; one that is whole counts, also
    where its maker died before he could say so."""
    killed(jobs, point, after=1)
    agree(jobs, jobs.run(train, at=CUTS), reference)
    assert jobs.restored() == [(resumed, "memory")]


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("train.restore.before_load", marks=pytest.mark.soak),
        pytest.param("train.restore.in_load", marks=pytest.mark.soak),
        "train.restore.before_apply",
        pytest.param("train.data.prepare.before_open", marks=pytest.mark.soak),
    ],
)
@pytest.mark.parametrize("source", ["memory", pytest.param("store", marks=pytest.mark.soak)])
def test_killed_in_a_restore(
    jobs: Jobs,
    reference: dict[str, Any],
    end_keepers: Callable[[], list[int]],
    point: str,
    source: str,
) -> None:
    killed(jobs, "train.cut.begun", after=1)
    if source == "store":
        assert end_keepers()
    killed(jobs, point)
    assert jobs.restored() == []
    if source == "store":
        assert end_keepers()
    agree(jobs, jobs.run(train, at=CUTS), reference)
    assert jobs.restored() == [(3, source)]


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("keeper.branch.before_write", marks=pytest.mark.soak),
        pytest.param("keeper.branch.after_write", marks=pytest.mark.soak),
        pytest.param("keeper.cut.before_take", marks=pytest.mark.soak),
        pytest.param("keeper.digest.before_write", marks=pytest.mark.soak),
        pytest.param("keeper.persist.before_claim_check", marks=pytest.mark.soak),
        pytest.param("keeper.persist.before_pack", marks=pytest.mark.soak),
        pytest.param("store.local.before_fsync", marks=pytest.mark.soak),
        pytest.param("store.local.before_link", marks=pytest.mark.soak),
        pytest.param("keeper.persist.after_index", marks=pytest.mark.soak),
        "keeper.commit.before_manifest",
        pytest.param("store.commit.before_last_look", marks=pytest.mark.soak),
        pytest.param("keeper.commit.after_manifest", marks=pytest.mark.soak),
        pytest.param("keeper.retain.before_plan", marks=pytest.mark.soak),
    ],
)
def test_a_keeper_that_dies_in_its_work_does_not_stop_training(
    jobs: Jobs,
    reference: dict[str, Any],
    end_keepers: Callable[[], list[int]],
    tmp_path: Path,
    point: str,
) -> None:
    """R3, and the new keeper finishes what the dead one had begun."""
    faults = fault(point, once=str(tmp_path / "once"))
    digest = jobs.run(train, at=CUTS, env={"EVERSTEP_FAULTS": faults})
    assert (tmp_path / "once").exists(), "the fault did not fire"
    agree(jobs, digest, reference)
    end_keepers()
    assert jobs.run(train) == digest, "the last checkpoint is in the store"
    assert jobs.restored() == [(LAST, "store")]


def test_from_the_store_where_the_memory_is_gone(
    jobs: Jobs, reference: dict[str, Any], end_keepers: Callable[[], list[int]]
) -> None:
    killed(jobs, "train.cut.begun", after=2)
    assert end_keepers()
    agree(jobs, jobs.run(train, at=CUTS), reference)
    assert jobs.restored() == [(6, "store")]
