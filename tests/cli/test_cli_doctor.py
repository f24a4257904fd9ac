"""The doctor: what it measures on a real folder, and what it says of measurements."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from everstep.cli.probes import findings
from everstep.cli.probes.disk import (
    DiskMeasured,
    PlaceFound,
    fstype_of,
    look_at_place,
    measure_disk,
)
from everstep.cli.probes.machine import (
    ClockMeasured,
    Features,
    MemoryMeasured,
    SignalMasks,
    measure_clock,
    measure_memory,
    read_masks,
    try_features,
)
from everstep.cli.probes.pytorch import TorchMeasured, ask_torch

_DISK = DiskMeasured(
    folder="/data", fstype="ext4", free=10**12, total=2 * 10**12, inodes_free=10**6,
    inodes_total=10**7, fsync_median=0.001, fsync_worst=0.01, write_speed=1e9, direct=True,
)  # fmt: skip
_MEMORY = MemoryMeasured(free=32 * 10**9, total=64 * 10**9, whose="the limit", shm=8 * 10**9)


def _with(record: Any, **changes: object) -> Any:
    return msgspec.structs.replace(record, **changes)


def test_the_disk_is_measured_and_nothing_is_left(tmp_path: Path) -> None:
    measured = measure_disk(tmp_path / "not" / "there" / "yet")
    assert measured.folder == str(tmp_path)
    assert measured.fsync_median > 0
    assert measured.fsync_worst >= measured.fsync_median
    assert measured.write_speed > 0
    assert measured.free <= measured.total
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_is_not_there_yet_can_be_made_or_not(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.touch()
    for store in (file, file / "below" / "it"):
        found = findings.on_absent_store(str(store), look_at_place(store))
        assert (found.level, f"{file} is a file" in found.what) == ("fail", True)
        assert "not the script" in found.advice
    new = findings.on_absent_store("new", look_at_place(tmp_path / "new" / "store"))
    assert (new.level, new.advice) == ("ok", "")
    assert "does not exist yet" in new.what
    empty = findings.on_absent_store("empty", look_at_place(tmp_path))
    assert "holds no store yet" in empty.what
    place = look_at_place(tmp_path / "new")
    assert place == PlaceFound(str(tmp_path), False, "", True)
    closed = findings.on_absent_store("new", _with(place, writable=False))
    assert closed.level == "fail"
    assert f"may not write in {tmp_path}" in closed.what


def test_doctor_fails_for_a_file(
    cli_json: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstep.cli.doctor.ask_torch", lambda: TorchMeasured(None, "not asked"))
    file = tmp_path / "train.py"
    file.touch()
    code, diagnosis = cli_json("doctor", file)
    assert code == 1
    found = {finding["check"]: finding for finding in diagnosis["findings"]}
    assert f"{file} is a file" in found["store"]["what"]
    assert "filesystem" not in found


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_raises(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError):
        measure_disk(tmp_path)


def test_the_deepest_mount_decides_the_type() -> None:
    mounts = (
        "1 0 8:1 / / rw - ext4 /dev/sda rw\n"
        "2 1 0:2 / /mnt/my\\040disk rw shared:1 - xfs /dev/sdb rw\n"
        "3 1 0:3 / /mnt rw - nfs4 server:/x rw\n"
    )
    assert fstype_of(Path("/mnt/my disk/store"), mounts) == "xfs"
    assert fstype_of(Path("/mnt/other"), mounts) == "nfs4"
    assert fstype_of(Path("/mntx"), mounts) == "ext4"


@pytest.mark.parametrize(
    ("changes", "check", "level"),
    [
        ({}, findings.on_filesystem, "ok"),
        ({"fstype": "tmpfs"}, findings.on_filesystem, "fail"),
        ({"fstype": "overlay"}, findings.on_filesystem, "warn"),
        ({"fstype": "nfs4"}, findings.on_filesystem, "warn"),
        ({}, findings.on_fsync, "ok"),
        ({"fsync_median": 0.05}, findings.on_fsync, "warn"),
        ({}, findings.on_inodes, "ok"),
        ({"inodes_free": 3}, findings.on_inodes, "fail"),
        ({"inodes_total": 0, "inodes_free": 0}, findings.on_inodes, "ok"),
    ],
)
def test_findings_of_the_disk(changes: dict[str, object], check: Any, level: str) -> None:
    finding = check(_with(_DISK, **changes))
    assert finding.level == level
    assert (finding.advice == "") == (level == "ok")


@pytest.mark.parametrize(
    ("free", "newest", "level"),
    [(10**12, 10**9, "ok"), (10**9, 10**9, "warn"), (10**8, 10**9, "fail"), (10**8, 0, "warn")],
)
def test_space_is_judged_by_the_newest_checkpoint(free: int, newest: int, level: str) -> None:
    assert findings.on_space(_with(_DISK, free=free), newest, 3).level == level


def test_large_counts_can_be_read() -> None:
    assert findings.on_inodes(_DISK).what == "1,000,000 free of 10,000,000"


def test_slow_writes_say_how_long_a_checkpoint_takes() -> None:
    slow = findings.on_write_speed(_with(_DISK, write_speed=50e6), 10**9)
    assert slow.level == "warn"
    assert "takes 20.0 s" in slow.what
    assert findings.on_write_speed(_with(_DISK, direct=False), 0).level == "warn"
    assert findings.on_write_speed(_DISK, 0).level == "ok"


def test_memory_must_hold_two_snapshots() -> None:
    assert findings.on_memory(_MEMORY, 15 * 10**9).level == "ok"
    small = findings.on_memory(_MEMORY, 16 * 10**9)
    assert small.level == "fail"
    assert "32.1 GB" in small.advice
    assert findings.on_memory(_MEMORY, 0).level == "ok", "no checkpoint says how large one is"
    assert findings.on_shm(_with(_MEMORY, shm=64 << 20)).level == "warn"
    assert findings.on_shm(_with(_MEMORY, shm=None)).level == "warn"


def _tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_tightest_limit_counts(tmp_path: Path) -> None:
    root = _tree(
        tmp_path,
        {
            "proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 2000 kB\n",
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/memory.max": "1000000\n",
            "sys/fs/cgroup/a/memory.current": "300000\n",
        },
    )
    measured = measure_memory(root)
    assert (measured.free, measured.total, measured.shm) == (700000, 1000000, None)


def test_this_machine_is_measured() -> None:
    assert measure_memory().free > 0
    clock = measure_clock(0.01)
    assert clock.watched >= 0.01
    assert try_features().open_files > 0


def test_findings_of_clock_and_kernel() -> None:
    assert findings.on_clock(ClockMeasured(0.0, 0.2, True)).level == "ok"
    assert findings.on_clock(ClockMeasured(-3.0, 0.2, True)).level == "warn"
    assert findings.on_clock(ClockMeasured(0.0, 0.2, False)).level == "warn"
    good = Features(True, True, True, 65536)
    assert findings.on_features(good).level == "ok"
    assert findings.on_features(_with(good, open_files=256)).level == "warn"
    assert "pidfd" in findings.on_features(_with(good, pidfd=False)).what


def test_an_inherited_sigterm_that_is_ignored_is_found() -> None:
    asks = (
        "from everstep.cli.probes.machine import read_masks\n"
        "from everstep.cli.probes.findings import on_signals\n"
        "print(on_signals(read_masks()).level, *read_masks().ignored)"
    )

    def ignore() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    answer = subprocess.run(
        [sys.executable, "-c", asks], capture_output=True, text=True, preexec_fn=ignore, check=True
    )
    assert answer.stdout.split()[0] == "fail"
    assert "SIGTERM" in answer.stdout.split()


def test_blocked_signals_are_read_from_the_mask() -> None:
    masks = read_masks("SigBlk:\t0000000000004000\nSigIgn:\t0000000001001000\n")
    assert masks == SignalMasks(("SIGPIPE", "SIGXFSZ"), ("SIGTERM",))
    assert findings.on_signals(masks).level == "fail"


def test_torch_is_asked_in_another_process(tmp_path: Path) -> None:
    missing = tmp_path / "python"
    missing.write_text("#!/bin/sh\necho no module >&2\nexit 3\n")
    missing.chmod(0o755)
    assert ask_torch(str(missing)) == TorchMeasured(None, "import torch failed: no module")
    hanging = tmp_path / "slow"
    hanging.write_text("#!/bin/sh\nexec sleep 60\n")
    hanging.chmod(0o755)
    assert "more than 0.2 s" in ask_torch(str(hanging), timeout=0.2).problem


@pytest.mark.parametrize(
    ("torch", "level"),
    [
        (TorchMeasured("2.13", "", 1.0, True, True), "ok"),
        (TorchMeasured("2.13", "", 1.0, True, False), "warn"),
        (TorchMeasured("2.13", "", 1.0, False, False), "warn"),
        (TorchMeasured(None, "No module named torch"), "fail"),
    ],
)
def test_findings_of_torch(torch: TorchMeasured, level: str) -> None:
    assert findings.on_torch(torch).level == level


def test_doctor_end_to_end(cli_json: Any, toy_store: Path) -> None:
    code, diagnosis = cli_json("doctor", toy_store)
    found = {finding["check"]: finding for finding in diagnosis["findings"]}
    assert diagnosis["format"] == "everstep.doctor/1"
    assert {"store", "filesystem", "fsync", "write speed", "space", "inodes", "memory",
            "/dev/shm", "clock", "signals", "kernel", "torch"} == set(found)  # fmt: skip
    assert code == (0 if diagnosis["ok"] else 1)
    assert found["torch"]["level"] in ("ok", "warn")
    assert found["kernel"]["level"] in ("ok", "warn")
    assert sorted(p.name for p in toy_store.iterdir()) == ["everstep.json", "jobs"]


def test_the_command_line_never_loads_torch() -> None:
    check = (
        "import sys, everstep.cli as c\n"
        "from importlib import import_module\n"
        "for name in ('ls', 'show', 'verify', 'drill', 'doctor'):\n"
        "    import_module(f'everstep.cli.{name}')\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
