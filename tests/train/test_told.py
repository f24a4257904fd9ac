"""What a person reads where no agent runs: the job, its store and the step, once."""

from __future__ import annotations

import os

import train_bodies as bodies
from train_jobs import Jobs


def test_plain_python_says_job_store_and_what_it_goes_on_from(jobs: Jobs) -> None:
    where = f"everstep: job job in {jobs.folder / 'everstep-store'} "
    said = []
    for until in (4, 6):
        started = jobs.start(bodies.train, until=until, env={"EVERSTEP_KEPE_LAST": "1"})
        assert started.wait() == 0, started.said()
        assert started.said().count("EVERSTEP_KEPE_LAST (did you mean EVERSTEP_KEEP_LAST?)") == 1
        (line,) = [line for line in started.said().splitlines() if line.startswith(where)]
        said.append(line.removeprefix(where))
    assert said[0] == "begins at step 0; started again, it goes on from its newest state"
    assert said[1].startswith("goes on from step 4 (")
    assert said[1].endswith("to start afresh: EVERSTEP_RESUME=never, or another EVERSTEP_JOB")
    assert os.path.isdir(jobs.folder / "everstep-store")
