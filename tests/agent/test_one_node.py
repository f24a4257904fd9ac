"""``everstep run`` on one node: real workers, real signals, a real keeper. The scripts here never
import everstep: for them the agent is torchrun with a rule of its own for restarts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked import Agent, Start, alive, wait_for

from everstep.agent.watch.flight import variables
from everstep.core import exits

DIES = """
import os, signal, sys, time
count, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.environ["RANK"]
print("begin", rank, count, os.environ["MASTER_PORT"], os.getpid(), flush=True)
open(f"up-{{rank}}-{{count}}", "w").close()
if count < {deaths}:
    if rank == "1":
        while not os.path.exists(f"up-0-{{count}}"):
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
"""

SLEEPS = """
import os, signal, subprocess, time
{before}
child = subprocess.Popen(["sleep", "600"])
print("begin", os.getpid(), child.pid, flush=True)
time.sleep(600)
"""


def test_a_killed_worker_restarts_all_at_once(start: Start) -> None:
    agent = start("--nproc-per-node", "2", script=DIES.format(deaths=2))
    assert agent.wait() == exits.FINISHED, agent.said()
    begun = [line.split()[1:] for line in agent.printed() if line.startswith("begin")]
    assert sorted((rank, count) for rank, count, *_ in begun) == [
        (rank, str(count)) for rank in "01" for count in range(3)
    ]
    # pytorch#167288: a restart must not meet the store of the attempt before.
    assert len({port for _, _, port, _ in begun}) == 3
    exited = [event for event in agent.events("worker.exited") if event.facts["code"] != 0]
    assert [event.facts["by_everstep"] for event in exited] == [False, True, False, True]
    assert [e.attempt for e in agent.events("attempt.started")] == [1, 2, 3]
    killed = agent.events("workers.killed")[0]
    seen = next(event for event in exited if event.rank == 1)
    assert killed.mono - seen.mono < 0.1, "a signal is its own evidence: no grace"


def test_three_attempts_without_progress_stop(start: Start) -> None:
    agent = start("--nproc-per-node", "2", script=DIES.format(deaths=99))
    assert agent.wait() == exits.NO_PROGRESS
    assert len(agent.events("attempt.started")) == 3
    said = agent.said()
    assert "EVS-502" in said
    assert "Root Cause (first observed failure)" in said
    assert agent.events("job.stopped")[-1].facts["exit_code"] == exits.NO_PROGRESS


@pytest.mark.parametrize("told", [["--max_restarts=4"], []], ids=["flag", "PET_MAX_RESTARTS"])
def test_max_restarts_is_honoured_when_given(start: Start, told: list[str]) -> None:
    variables = {} if told else {"PET_MAX_RESTARTS": "4"}
    agent = start(*told, "--nproc-per-node=2", script=DIES.format(deaths=99), **variables)
    assert agent.wait() == exits.FAILED
    assert len(agent.events("attempt.started")) == 5
    assert "--max-restarts 4 is used up" in agent.said()


def test_error_files_are_honoured_and_the_first_one_is_the_root_cause(
    start: Start, tmp_path: Path
) -> None:
    script = """
import os, sys, time
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    if os.environ["RANK"] == "1":
        raise ValueError("bad batch 17")
    while not os.path.exists("seen"):
        time.sleep(0.01)
    raise ConnectionError("closed by peer")
try:
    main()
finally:
    open("seen", "w").close()
"""
    above = tmp_path / "above.json"
    agent = start(
        "--nproc-per-node", "2", "--max-restarts", "0", script=script,
        TORCHELASTIC_ERROR_FILE=str(above),
    )  # fmt: skip
    assert agent.wait() == exits.FAILED
    root = agent.said().split("Root Cause (first observed failure):")[1]
    assert "ValueError: bad batch 17" in root
    assert "bad batch 17" in json.loads(above.read_text())["message"]["message"]


@pytest.mark.parametrize("code", [exits.REFUSED, exits.NO_RECOVERY_POINT])
def test_final_codes_of_a_worker_are_not_restarted(start: Start, code: int) -> None:
    script = f"""
import os, sys, time
if os.environ["RANK"] == "0":
    sys.exit({code})
time.sleep(600)
"""
    agent = start("--nproc-per-node", "2", script=script)
    assert agent.wait() == code
    assert len(agent.events("attempt.started")) == 1


def test_what_a_worker_left_in_its_group_dies_with_it(start: Start) -> None:
    script = """
import os, signal, subprocess
child = subprocess.Popen(["sleep", "600"])
print("child", child.pid, flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
child.kill()
"""
    agent = start(script=script)
    assert agent.wait() == exits.FINISHED
    children = [int(line.split()[1]) for line in agent.printed()]
    assert len(children) == 2
    wait_for(lambda: not any(alive(pid) for pid in children))


def sleepers(start: Start, *arguments: str, before: str = "") -> tuple[Agent, list[int]]:
    """An agent with two workers that sleep, and the pids of workers and their children."""
    agent = start(*arguments, "--nproc-per-node", "2", script=SLEEPS.format(before=before))
    agent.until(lambda: len(agent.printed()) == 2)
    pids = [int(word) for line in agent.printed() for word in line.split()[1:]]
    return agent, pids


def test_sigterm_is_passed_on_to_scripts_without_everstep_and_has_its_code(start: Start) -> None:
    agent, pids = sleepers(start)
    agent.kill(signal.SIGTERM)
    assert agent.wait() == exits.PREEMPTED
    wait_for(lambda: not any(alive(pid) for pid in pids))
    assert "Root Cause" not in agent.said()


def test_a_second_signal_kills_what_ignores_the_first(start: Start) -> None:
    agent, pids = sleepers(start, before="signal.signal(signal.SIGINT, signal.SIG_IGN)")
    agent.kill(signal.SIGINT)
    agent.until(lambda: agent.events("signal.received"))
    assert any(alive(pid) for pid in pids)
    agent.kill(signal.SIGINT)
    assert agent.wait() == 128 + signal.SIGINT
    wait_for(lambda: not any(alive(pid) for pid in pids))


def test_the_shutdown_timeout_is_honoured(start: Start) -> None:
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    agent, pids = sleepers(start, "--shutdown-timeout", "1", before=ignore)
    agent.kill(signal.SIGTERM)
    assert agent.wait() == exits.PREEMPTED
    wait_for(lambda: not any(alive(pid) for pid in pids))


def test_workers_of_a_dead_agent_end_within_five_seconds(start: Start) -> None:
    """And its keeper stays: a new agent adopts it."""
    agent, pids = sleepers(start)
    keeper = agent.events("keeper.started")[0].facts["pid"]
    agent.kill(signal.SIGKILL)
    assert agent.wait() == -signal.SIGKILL
    workers = pids[::2]
    died = time.monotonic()
    wait_for(lambda: not any(alive(pid) for pid in workers))
    assert time.monotonic() - died < 5.0
    again, _ = sleepers(start)
    adopted = again.events("keeper.started")[-1].facts
    assert adopted == {"pid": keeper, "adopted": True}
    assert again.events("attempt.started")[-1].attempt == 2
    again.kill(signal.SIGTERM)
    assert again.wait() == exits.PREEMPTED


def test_a_second_agent_is_refused_and_the_first_not_disturbed(start: Start) -> None:
    """S6: no attempt is claimed by it."""
    first, pids = sleepers(start)
    second = start("--nproc-per-node", "2", script=SLEEPS.format(before=""))
    assert second.wait() == exits.OWNED
    assert "EVS-501" in second.said()
    assert all(alive(pid) for pid in pids)
    assert len(first.events("job.claimed")) == 1
    first.kill(signal.SIGTERM)
    assert first.wait() == exits.PREEMPTED


def test_a_dead_keeper_is_replaced_and_training_does_not_notice(start: Start) -> None:
    agent, pids = sleepers(start)
    keeper = int(str(agent.events("keeper.started")[0].facts["pid"]))
    os.kill(keeper, signal.SIGKILL)
    agent.until(lambda: len(agent.events("keeper.started")) == 2)
    lost, begun = agent.events("keeper.lost")[0], agent.events("keeper.started")[1]
    assert lost.mono <= begun.mono
    assert begun.facts["pid"] != keeper
    assert all(alive(pid) for pid in pids)
    # The new one knows the attempt and its workers: it ends them when the agent dies.
    agent.kill(signal.SIGKILL)
    wait_for(lambda: not any(alive(pid) for pid in pids[::2]))


def test_a_store_that_cannot_be_made_is_a_clear_error(start: Start, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    agent = start("--store", str(tmp_path / "file" / "store"), script="raise SystemExit(0)")
    assert agent.wait() == exits.USAGE
    said = agent.said()
    assert str(tmp_path / "file") in said
    assert "Traceback" not in said
    assert agent.printed() == []


def test_resume_require_does_not_make_a_store(start: Start, tmp_path: Path) -> None:
    """R5: an unmounted path looks like a first start."""
    agent = start("--resume", "require", "--store", "not-there", script="raise SystemExit(0)")
    assert agent.wait() == exits.NO_RECOVERY_POINT
    assert "EVS-401" in agent.said()
    assert not (tmp_path / "not-there").exists()


def test_bad_settings_are_said_without_a_traceback(start: Start) -> None:
    agent = start("x.py", EVERSTEP_RESUME="sometimes")
    assert agent.wait() == exits.USAGE
    assert "EVERSTEP_RESUME" in agent.said()
    assert "Traceback" not in agent.said()


DUMP = """
import json, os, sys
path = os.path.join(sys.argv[1], os.environ["RANK"] + ".json")
json.dump({"environ": dict(os.environ), "argv": sys.argv[2:], "cwd": os.getcwd()}, open(path, "w"))
"""


def test_workers_have_torchruns_environment(
    start: Start, tmp_path: Path, job_environment: dict[str, str]
) -> None:
    """Name by name against the installed torchrun; only what differs between any two runs may."""
    flags = ["--nproc-per-node", "2", "--max-restarts", "3", "--role", "trainer"]
    script = tmp_path / "script.py"
    script.write_text(DUMP)
    for name in ("theirs", "ours"):
        (tmp_path / name).mkdir()
    environment = {k: v for k, v in job_environment.items() if k != "OMP_NUM_THREADS"}
    torchrun = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *flags, str(script), "theirs", "a b"],
        cwd=tmp_path, env=environment, stderr=subprocess.PIPE,
    )  # fmt: skip
    job_environment.pop("OMP_NUM_THREADS")
    agent = start(*flags, str(script), "ours", "a b")
    assert agent.wait() == 0, agent.said()
    _, said = torchrun.communicate(timeout=60)
    assert torchrun.returncode == 0, said
    for rank in "01":
        ours, theirs = (
            json.loads((tmp_path / name / f"{rank}.json").read_text())
            for name in ("ours", "theirs")
        )
        added = {k: v for k, v in ours["environ"].items() if not k.startswith("EVERSTEP_")}
        for name in variables(tmp_path, job_environment):  # NCCL's recorder, where there is NCCL
            added.pop(name)
        expected = {k: v for k, v in theirs["environ"].items() if not k.startswith("EVERSTEP_")}
        assert added.keys() == expected.keys()
        random = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
        assert {k: v for k, v in added.items() if k not in random} == {
            k: v for k, v in expected.items() if k not in random
        }
        assert ours["argv"] == theirs["argv"]
        assert ours["cwd"] == theirs["cwd"]
        assert ours["environ"]["EVERSTEP_ATTEMPT"] == "1"
        assert ours["environ"]["EVERSTEP_KEEPER"].startswith("everstep/")


def test_logs_are_redirected_as_torchrun_does(start: Start, tmp_path: Path) -> None:
    script = "import os, sys; print('to file', os.environ['RANK'])"
    agent = start("--nproc-per-node=2", "-r", "0:1,1:0", "--log-dir", "logs", script=script)
    assert agent.wait() == 0, agent.said()
    assert agent.printed() == ["to file 1"]
    (written,) = tmp_path.glob("logs/*/attempt_0/0/stdout.log")
    assert written.read_text() == "to file 0\n"


def test_torchs_folder_for_logs_goes_with_a_run_that_ended_well(
    start: Start, tmp_path: Path
) -> None:
    good = start(script="raise SystemExit(0)")
    assert good.wait() == 0
    assert not list(tmp_path.glob("torchelastic_*"))
    bad = start("--max-restarts=0", script="raise SystemExit(1)")
    assert bad.wait() == exits.FAILED
    assert list(tmp_path.glob("torchelastic_*")), "its error files are named in the block"


def test_run_path_runs_the_script_in_this_interpreter(start: Start) -> None:
    script = "import os; print('rank', os.environ['RANK'], __name__)"
    agent = start("--run-path", "--start-method", "fork", "--nproc-per-node=2", script=script)
    assert agent.wait() == 0, agent.said()
    assert sorted(agent.printed()) == ["rank 0 __main__", "rank 1 __main__"]
