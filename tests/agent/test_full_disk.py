"""Folders for logs and evidence that are full or gone: told once, and training goes on."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from forked import Start

from everstep.core import exits

NO_ROOM = """
import os
from everstep.core.stacks import file_of_rank
os.symlink("/dev/full", f"{os.environ['EVERSTEP_STACKS']}/{file_of_rank(0, 'answers')}.new")
"""

TRAINS = """
import torch, everstep
model = torch.nn.Linear(2, 2)
run = everstep.attach(model=model)
run.restore()
for _ in range(3):
    run.step_end()
run.close()
print(f"trained to {run.step}")
"""

LOSES_ITS_LOGS = """
import os, shutil, sys
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    shutil.rmtree({logs!r})
    open({logs!r}, "w").close()
    sys.exit(3)
print("error file:", repr(os.environ["TORCHELASTIC_ERROR_FILE"]))
"""


def test_a_worker_trains_though_there_is_no_room_for_its_answers(start: Start) -> None:
    """F5."""
    agent = start(script=NO_ROOM + TRAINS)
    assert agent.wait() == 0
    assert agent.printed() == ["trained to 3"]
    assert agent.said().count("cannot be asked where it stands: [Errno 28]") == 1


def test_a_job_trains_though_its_state_folder_cannot_be_made(start: Start, tmp_path: Path) -> None:
    """F5: what is not written is said, once for all attempts; history goes into the store."""
    (tmp_path / "file").touch()
    once = "import os, sys; sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')"
    agent = start(script=once, EVERSTEP_STATE_DIR=str(tmp_path / "file" / "state"))
    assert agent.wait() == 0
    said = agent.said()
    assert said.count("the keeper runs without a log: ") == 1
    assert said.count("workers cannot be asked where they stand: ") == 1
    assert "Not a directory" in said
    assert ", log " not in said
    assert "attempt 2: " in said
    assert not agent.events("history.offline"), "that is the store's"


def test_workers_start_though_their_log_folder_is_gone(start: Start, tmp_path: Path) -> None:
    logs = str(tmp_path / "logs")
    script = LOSES_ITS_LOGS.format(logs=logs)
    agent = start("--log-dir", logs, "--redirects", "3", script=script)
    assert agent.wait() == 0
    assert agent.printed() == ["error file: ''"]
    assert agent.said().count("workers get no files for logs and errors: ") == 1


def test_no_room_for_any_log_is_a_clear_refusal(start: Start, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    agent = start("--log-dir", str(tmp_path / "file" / "logs"), script="raise SystemExit(0)")
    assert agent.wait() == exits.USAGE
    assert "TMPDIR or --log-dir" in agent.said() or "cannot be used" in agent.said()
    assert "Traceback" not in agent.said()


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["full", "ro"])
def test_a_job_trains_with_its_state_and_temporary_folders_on_a_full_or_read_only_disk(
    tmp_path: Path, job_environment: dict[str, str], mode: str
) -> None:
    """On a small disk of its own, which only root or a namespace of one's own may mount."""
    script = tmp_path / "script.py"
    script.write_text(TRAINS)
    disk = tmp_path / "disk"
    disk.mkdir()
    spoil = "dd if=/dev/zero of=$0/fill bs=4k 2>/dev/null" if mode == "full" else (
        "mount -o remount,ro $0"
    )  # fmt: skip
    steps = f"mount -t tmpfs -o size=256k none $0 && mkdir $0/state $0/tmp; {spoil}; exec $1 $2"
    line = [sys.executable, "-m", "everstep.cli", "run", "--json", str(script)]
    shell = ["unshare", "-Urm", "sh", "-c", steps.replace("$1 $2", '"$@"'), str(disk), *line]
    if subprocess.run(["unshare", "-Urm", "true"], check=False).returncode:
        pytest.skip("no namespaces here")
    places = {"EVERSTEP_STATE_DIR": f"{disk}/state", "TMPDIR": f"{disk}/tmp"}
    ended = subprocess.run(
        shell, env=job_environment | places, cwd=tmp_path, capture_output=True, text=True,
        check=False, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "trained to 3" in ended.stderr
    assert ended.stderr.count("workers cannot be asked where they stand: ") == 1
    assert ("No space left" if mode == "full" else "Read-only") in ended.stderr


def test_a_rank_whose_files_may_not_grow_says_so_and_lives_on(tmp_path: Path) -> None:
    code = f"""
import json, os, signal
from everstep.train.stacks import answer
first = answer({str(tmp_path)!r}, 0)
print(json.dumps([first, answer("/not/there", 0), sorted(os.listdir({str(tmp_path)!r}))]))
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
    )  # fmt: skip
    why, gone, left = json.loads(ended.stdout)
    assert "File too large" in why
    assert gone == ""
    assert not [name for name in left if "answers" in name], "nothing asks what does not answer"
