"""What goes wrong is said once, clearly, with its code, and a restart that cannot help is not
tried. Real processes; the state of each error is made by real means."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import error_bodies as bodies
import msgspec
import pytest
from train_jobs import Jobs, wait_for

from everstep.core import exits
from everstep.keeper.elect import STORE_RETRIES, STORE_RETRY_SECONDS
from everstep.store import settings as store_settings
from everstep.store.digests import digest
from everstep.store.records import HEADER_BYTES
from everstep.testing.faulty import BackendFault

Ranks = dict[str, str]


def rank(number: int, world: int) -> Ranks:
    return {"WORLD_SIZE": f"{world}", "RANK": f"{number}", "LOCAL_RANK": f"{number}"}


def refused_by_agent(jobs: Jobs, work: str, *, code: int = exits.REFUSED, ranks: int = 1) -> str:
    """What ``everstep run`` says of a job that it must not start again."""
    before = len(jobs.events("attempt.started"))
    said = jobs.fails(bodies.everstep_run, code=code, work=work, ranks=ranks)
    assert len(jobs.events("attempt.started")) == before + 1, said
    return said


# -- the store


def test_a_store_that_cannot_be_written(jobs: Jobs) -> None:
    """EVS-204, at once."""
    folder = jobs.folder / "closed"
    folder.mkdir(mode=0o500)
    store = {"EVERSTEP_STORE": str(folder / "store")}
    said = jobs.fails(bodies.short, unprivileged=True, env=store)
    assert "StoreNotWritable: EVS-204" in said
    assert str(folder / "store") in said
    assert "Give this user access" in said
    said = jobs.fails(
        bodies.everstep_run, work="short", unprivileged=True, code=exits.USAGE, env=store
    )
    assert "EVS-204" in said
    assert "Traceback" not in said


def test_a_disk_that_is_full_in_the_middle_of_a_persist(
    jobs: Jobs, end_keepers: Callable[[], list[int]]
) -> None:
    """R3: training goes on, an event says why, and the next save works when there is room."""
    during, plan = jobs.folder / "full", jobs.folder / "plan"
    fault = BackendFault("full", call="create", key=".pack", times=0, during=str(during))
    plan.write_bytes(msgspec.json.encode([fault]))
    store = f"faulty+file://{jobs.folder}/store?plan={plan}"
    found = jobs.run(bodies.full_disk, during=str(during), env={"EVERSTEP_STORE": store})
    assert found["answers"] == [False, True]
    failed = jobs.events("persist.failed")[0]
    assert (failed.step, failed.rank, failed.facts["code"]) == (2, 0, "EVS-205")
    assert "training goes on" in failed.text
    assert "no space left" in failed.text
    assert end_keepers()
    assert jobs.run(bodies.reloaded, env={"EVERSTEP_STORE": store}) == found["digest"]


def test_a_checkpoint_of_a_newer_format(jobs: Jobs, end_keepers: Callable[[], list[int]]) -> None:
    """EVS-207: never read as if it were known, never started from scratch instead."""
    jobs.run(bodies.short)
    end_keepers()
    file = jobs.folder / "everstep-store" / "everstep.json"
    settings = store_settings.decode(file.read_bytes(), str(file))
    newer = msgspec.structs.replace(settings, format=settings.format + 1)
    file.write_bytes(store_settings.encode(newer))
    said = jobs.fails(bodies.short)
    assert "NewerFormat: EVS-207" in said
    end_keepers()
    said = jobs.fails(bodies.everstep_run, work="short", code=exits.USAGE)
    assert "EVS-207" in said
    assert "Traceback" not in said


def test_a_checkpoint_whose_manifest_is_of_a_newer_format(
    jobs: Jobs, end_keepers: Callable[[], list[int]]
) -> None:
    """EVS-207: no older one is taken silently in its place, and it is not tried again and again."""
    jobs.run(bodies.short)
    end_keepers()
    newest = max(jobs.folder.glob("everstep-store/jobs/job/steps/*/manifest"))
    newest.write_bytes(_of_version(newest.read_bytes(), 3))
    said = refused_by_agent(jobs, "short")
    assert "has version 3 of its format" in said
    refused = jobs.events("restore.refused")[-1]
    began = jobs.events("attempt.started")[-1]
    assert refused.facts["code"] == "EVS-207"
    assert refused.mono - began.mono < STORE_RETRY_SECONDS * STORE_RETRIES, "tried again"


def _of_version(frame: bytes, version: int) -> bytes:
    """The same record, as sound, under another version of its format."""
    head, body = bytearray(frame[:24]), frame[HEADER_BYTES:]
    head[12:16] = version.to_bytes(4, "little")
    return bytes(head) + digest(bytes(head) + body) + body


def test_a_recovery_point_is_expected_and_none_verifies(
    jobs: Jobs, end_keepers: Callable[[], list[int]]
) -> None:
    """EVS-401 (R5): never started from scratch silently."""
    jobs.run(bodies.short)
    end_keepers()
    for manifest in jobs.folder.glob("everstep-store/jobs/job/steps/*/manifest"):
        content = bytearray(manifest.read_bytes())
        content[len(content) // 2] ^= 1
        manifest.write_bytes(content)
    said = jobs.fails(bodies.short)
    assert "NoRecoveryPoint: EVS-401" in said
    assert jobs.events("train.resumed")[1:] == []
    assert end_keepers()
    said = refused_by_agent(jobs, "short", code=exits.NO_RECOVERY_POINT)
    assert "EVS-401" in said


# -- who runs it


def test_another_process_runs_the_job(jobs: Jobs) -> None:
    """EVS-501. The first one is not disturbed."""
    go_on = jobs.folder / "go-on"
    first = jobs.start(bodies.patient, go_on=str(go_on))
    wait_for((jobs.folder / "standing").exists, "the first stands in a step")
    said = jobs.fails(bodies.short)
    assert "JobOwned: EVS-501" in said
    said = jobs.fails(bodies.everstep_run, work="short", code=exits.OWNED)
    assert "EVS-501" in said
    assert "Traceback" not in said
    go_on.touch()
    assert first.wait() == 0, first.said()
    assert jobs.events("checkpoint.committed")[-1].step == 5


def test_an_agent_runs_the_job(jobs: Jobs) -> None:
    go_on = jobs.folder / "go-on"
    first = jobs.start(bodies.everstep_run, work="patient", go_on=str(go_on))
    wait_for((jobs.folder / "standing").exists, "the agent's worker stands in a step")
    assert "JobOwned: EVS-501" in jobs.fails(bodies.short)
    go_on.touch()
    assert first.wait() == 0, first.said()


# -- what is attached


def test_another_world_size(jobs: Jobs) -> None:
    """EVS-402, until resharding lands."""
    jobs.run(bodies.short)
    both = [jobs.start(bodies.short, env=rank(number, 2)) for number in range(2)]
    assert [started.wait() for started in both] == [1, 1]
    for started in both:
        assert "WorldChanged: EVS-402" in started.said()
        assert "this run has 2 ranks" in started.said()
    said = refused_by_agent(jobs, "short", ranks=2)
    assert "EVS-402" in said


def test_names_that_are_missing_or_new(jobs: Jobs) -> None:
    """EVS-403 with a difference that can be read."""
    jobs.run(bodies.short)
    said = jobs.fails(bodies.other_names)
    assert "StateMismatch: EVS-403" in said
    assert "missing: model.3.weight is in the state, but the module has no such tensor" in said
    assert "new: model.3.0.weight is in the module, but not in the state" in said
    said = jobs.fails(bodies.other_objects)
    assert "missing: scheduler (ExponentialLR) is in the state, but not attached" in said
    assert "new: ema (Linear) is attached, but not in the state" in said
    said = jobs.fails(bodies.without_loader)
    assert "EVS-403: the saved state was made with a loader, and the script attaches none." in said
    assert "EVS-403" in refused_by_agent(jobs, "other_names")
    jobs.run(bodies.short, until=4)
    assert [step for step, _ in jobs.restored()] == [3], "the refused starts have changed nothing"


def test_an_object_that_no_checkpoint_can_hold(jobs: Jobs) -> None:
    """EVS-101 (S8): at attach, by path and type."""
    said = jobs.fails(bodies.unsavable)
    assert "UnsavableObject: EVS-101" in said
    assert "holder.deep.0.here" in said
    assert "TextIOWrapper" in said
    assert not (jobs.folder / "everstep-store").exists(), "nothing was claimed"
    assert "EVS-101" in refused_by_agent(jobs, "unsavable")


@pytest.mark.parametrize(
    ("work", "form"),
    [
        ("positional", "everstep.attach(model=model, optimizer=optimizer)"),
        ("without_until", "run.steps(until=50_000)"),
    ],
)
def test_arguments_that_do_not_fit(jobs: Jobs, work: str, form: str) -> None:
    """EVS-100, once: a restart cannot help."""
    said = refused_by_agent(jobs, work, ranks=2)
    assert "UsageError: EVS-100" in said
    assert form in said


def test_what_the_end_says(jobs: Jobs) -> None:
    """At which step it was and that it is committed, once; and why nothing is."""
    job = jobs.fails(bodies.everstep_run, code=exits.FINISHED, work="short", ranks=2)
    assert job.splitlines()[-1].endswith("exit code 0: the job finished: step 3 is committed")
    assert job.count("finished") == 1
    again = jobs.fails(bodies.everstep_run, code=exits.FINISHED, work="short", ranks=2)
    assert "nothing is left to do: job job has done 3 steps, `until` is 3" in again
    assert "(--job job)" in again
    assert again.count("finished") == 1

    early = jobs.fails(
        bodies.everstep_run, code=exits.FINISHED, work="stop_early", env={"EVERSTEP_JOB": "early"}
    )
    assert "left at step 1 of 30: its checkpoint is committed" in early
    assert "reached" not in early


@pytest.mark.parametrize(
    ("work", "said"),
    [
        ("old_loop", "has called everstep.attach and its optimizers have stepped 5 times, but it"),
        ("never_attached", "the script never called everstep.attach, or ended no step"),
    ],
)
def test_a_script_that_looks_protected_and_is_not(jobs: Jobs, work: str, said: str) -> None:
    ended = jobs.fails(bodies.everstep_run, code=exits.FINISHED, work=work)
    assert ended.count("nothing was saved") == 1
    assert said in ended


def test_pending_gradients_at_a_boundary(jobs: Jobs) -> None:
    """EVS-102 (R1): says what to pass, and is not started again."""
    said = jobs.fails(bodies.forgetful)
    assert "PendingGradients: EVS-102: rank 0, step 1" in said
    assert "accumulate=" in said
    said = refused_by_agent(jobs, "forgetful", ranks=2)
    assert "EVS-102" in said


# -- the user's code in a save


@pytest.mark.parametrize("fails", [[2], [3], [4, 5]], ids=["slots", "cut", "last"])
def test_a_state_dict_that_raises_is_an_event(jobs: Jobs, fails: list[int]) -> None:
    """R3: training goes on; the last step is cut again until it works."""
    found = jobs.run(bodies.failing_state_dict, fails=fails)
    assert found == {"step": 6}
    said = jobs.events("cut.failed")
    assert said
    assert all("ZeroDivisionError: the user's own" in event.text for event in said)
    assert jobs.events("checkpoint.committed")[-1].step == 6


def test_a_damaged_newest_checkpoint_is_skipped_for_the_one_before(
    jobs: Jobs, end_keepers: Callable[[], list[int]]
) -> None:
    """R6: a candidate that fails while it is read is voted down, and all take the next."""
    jobs.run(bodies.short, until=2)
    jobs.run(bodies.short, until=4)
    end_keepers()
    newest = max((jobs.folder / "everstep-store/jobs/job/packs").iterdir(), key=_age)
    content = bytearray(newest.read_bytes())
    content[10] ^= 1
    newest.write_bytes(content)
    jobs.run(bodies.short, until=5)
    assert [step for step, _ in jobs.restored()] == [2, 2]
    assert jobs.restored()[1] == (2, "store")
    skipped = jobs.events("restore.candidate_failed")[0]
    assert (skipped.step, skipped.facts["code"]) == (4, "EVS-206")


def _age(path: Path) -> int:
    return path.stat().st_mtime_ns


def test_one_rank_alone_refuses_the_state(jobs: Jobs) -> None:
    """R6: before the vote, so the attempt goes on from nothing that not all ranks could take."""
    jobs.fails(bodies.everstep_run, code=exits.FINISHED, work="short", ranks=2)
    assert "EVS-403" in refused_by_agent(jobs, "without_loader_on_rank_0", ranks=2)
    assert len(jobs.events("restore.elected")) == 1
