"""What a measurement means and what to do about it.

Owns: the thresholds and the advice. Never does: I/O. Called by: cli.doctor.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from everstep.cli.probes.disk import DiskMeasured, PlaceFound
from everstep.cli.probes.machine import ClockMeasured, Features, MemoryMeasured, SignalMasks
from everstep.cli.probes.pytorch import TorchMeasured
from everstep.cli.report import size
from everstep.keeper.memory import RESERVE

Level = Literal["ok", "warn", "fail"]

SLOW_FSYNC = 0.020
SLOW_WRITE = 100e6
LITTLE_SPACE = 1 << 30
FEW_INODES = 1000
SMALL_SHM = 1 << 30
CLOCK_JUMP = 0.050
FEW_FILES = 1024
SLOT_COPIES = 2
"""Snapshot slots of a rank; both are held in memory all the time."""
VOLATILE = frozenset({"tmpfs", "ramfs"})
LAGGING = frozenset({"nfs", "nfs4", "lustre", "fuse.sshfs", "cifs", "smb3"})


class Finding(msgspec.Struct, frozen=True):
    """One line of the doctor's report. ``advice`` is empty where nothing is to be done."""

    check: str
    level: Level
    what: str
    advice: str = ""
    facts: dict[str, object] = {}


def on_absent_store(store: str, place: PlaceFound) -> Finding:
    """Whether a store can be made where none is yet."""
    facts = msgspec.to_builtins(place)
    if place.file:
        what = f"no store can be made at {store}: {place.file} is a file"
        advice = "STORE is the folder of the checkpoints, not the script. Name a folder."
        return Finding("store", "fail", what, advice, facts)
    if not place.writable:
        what = f"no store can be made at {store}: this user may not write in {place.folder}"
        advice = "Give this user the right to write there, or say another --store."
        return Finding("store", "fail", what, advice, facts)
    yet = "holds no store yet" if place.there else "does not exist yet"
    return Finding("store", "ok", f"{store} {yet}; `everstep run` makes it", facts=facts)


def on_filesystem(disk: DiskMeasured) -> Finding:
    """Whether the store outlives the machine's restart and the container."""
    facts: dict[str, object] = {"folder": disk.folder, "type": disk.fstype}
    what = f"{disk.folder} is on {disk.fstype or 'an unknown file system'}"
    if disk.fstype in VOLATILE:
        advice = "It is memory: a restart of the machine loses every checkpoint. Use a disk."
        return Finding("filesystem", "fail", what, advice, facts)
    if disk.fstype == "overlay":
        advice = "A container's own layer goes away with the container. Mount a volume there."
        return Finding("filesystem", "warn", what, advice, facts)
    if disk.fstype in LAGGING:
        advice = "Other nodes may see new objects late; everstep waits, restores take longer."
        return Finding("filesystem", "warn", what, advice, facts)
    return Finding("filesystem", "ok", what, facts=facts)


def on_fsync(disk: DiskMeasured) -> Finding:
    """Whether making a small object durable is quick enough not to matter."""
    facts: dict[str, object] = {"median_s": disk.fsync_median, "worst_s": disk.fsync_worst}
    what = f"fsync of 4 KiB: median {_ms(disk.fsync_median)}, worst {_ms(disk.fsync_worst)}"
    if disk.fsync_median > SLOW_FSYNC:
        advice = "Each checkpoint waits for several of them. Use a disk of its own or a local one."
        return Finding("fsync", "warn", what, advice, facts)
    return Finding("fsync", "ok", what, facts=facts)


def on_write_speed(disk: DiskMeasured, newest: int) -> Finding:
    """Sequential write speed; ``newest`` is the size of the newest checkpoint, 0 for none."""
    facts: dict[str, object] = {"bytes_per_s": disk.write_speed, "direct": disk.direct}
    how = "O_DIRECT" if disk.direct else "through the page cache"
    what = f"sequential write ({how}): {size(int(disk.write_speed))}/s"
    if newest:
        what += (
            f", so the newest checkpoint ({size(newest)}) takes {newest / disk.write_speed:.1f} s"
        )
    if disk.write_speed < SLOW_WRITE:
        advice = "Durable checkpoints will lag. Use a faster disk or a longer --checkpoint-every."
        return Finding("write speed", "warn", what, advice, facts)
    if not disk.direct:
        advice = "Without O_DIRECT writes go through the page cache and cost training some time."
        return Finding("write speed", "warn", what, advice, facts)
    return Finding("write speed", "ok", what, facts=facts)


def on_space(disk: DiskMeasured, newest: int, keep_last: int) -> Finding:
    """Free space against the newest checkpoint (0: none yet) times what retention keeps."""
    facts: dict[str, object] = {"free": disk.free, "total": disk.total, "newest": newest}
    what = f"{size(disk.free)} free of {size(disk.total)}"
    if newest:
        what += f", newest checkpoint {size(newest)}"
    if disk.free < max(newest, 1):
        advice = "The next checkpoint does not fit. Free space, or move the store."
        return Finding("space", "fail", what, advice, facts)
    if disk.free < (2 * newest if newest else LITTLE_SPACE):
        advice = f"Retention keeps {keep_last} checkpoints and writes the next before it deletes."
        return Finding("space", "warn", what, advice, facts)
    return Finding("space", "ok", what, facts=facts)


def on_inodes(disk: DiskMeasured) -> Finding:
    """Free inodes; some file systems have no fixed number and report none."""
    facts: dict[str, object] = {"free": disk.inodes_free, "total": disk.inodes_total}
    if not disk.inodes_total:
        return Finding("inodes", "ok", "the file system has no fixed number", facts=facts)
    what = f"{disk.inodes_free:,} free of {disk.inodes_total:,}"
    if disk.inodes_free < FEW_INODES:
        advice = "Writing will fail with 'no space left' though there is space. Delete files."
        return Finding("inodes", "fail", what, advice, facts)
    return Finding("inodes", "ok", what, facts=facts)


def on_memory(memory: MemoryMeasured, newest: int) -> Finding:
    """Whether two snapshots fit; ``newest`` stands for the size of one, 0 where unknown."""
    facts = msgspec.to_builtins(memory)
    what = f"{size(memory.free)} free of {size(memory.total)} ({memory.whose})"
    needed = SLOT_COPIES * newest + RESERVE if newest else 0
    if memory.free < needed:
        advice = (
            f"Two snapshots need {size(needed)} beside the training itself. "
            "Raise the memory limit or use more nodes."
        )
        return Finding("memory", "fail", what, advice, facts)
    return Finding("memory", "ok", what, facts=facts)


def on_shm(memory: MemoryMeasured) -> Finding:
    """/dev/shm: everstep does not use it, loader workers do."""
    if memory.shm is None:
        return Finding(
            "/dev/shm", "warn", "not there", "DataLoader workers need it: mount a tmpfs."
        )
    facts: dict[str, object] = {"bytes": memory.shm}
    what = f"{size(memory.shm)} (DataLoader workers use it, everstep does not)"
    if memory.shm < SMALL_SHM:
        advice = "Loader workers may die with SIGBUS. Start the container with --shm-size=8g."
        return Finding("/dev/shm", "warn", what, advice, facts)
    return Finding("/dev/shm", "ok", what, facts=facts)


def on_clock(clock: ClockMeasured) -> Finding:
    """Whether the wall clock runs evenly and is kept in time by someone."""
    facts = msgspec.to_builtins(clock)
    if abs(clock.jump) > CLOCK_JUMP:
        what = f"the wall clock moved by {clock.jump:+.3f} s against the monotonic clock"
        advice = "Someone sets the clock. Leases allow for it; times in reports will be wrong."
        return Finding("clock", "warn", what, advice, facts)
    if clock.synchronized is False:
        advice = "With several nodes start an NTP client, so that reports of nodes can be compared."
        return Finding("clock", "warn", "even, but not synchronized", advice, facts)
    how = "synchronized" if clock.synchronized else "synchronization unknown"
    return Finding("clock", "ok", f"even, {how}", facts=facts)


def on_signals(masks: SignalMasks) -> Finding:
    """Whether SIGTERM and SIGCHLD reach what is started from here."""
    facts = msgspec.to_builtins(masks)
    if bad := [name for name in masks.ignored if name in ("SIGTERM", "SIGCHLD")]:
        advice = "A parent ignores them (trap ''?). A preemption or a dead child goes unnoticed."
        return Finding("signals", "fail", f"{', '.join(bad)} ignored", advice, facts)
    if bad := [name for name in masks.blocked if name in ("SIGTERM", "SIGCHLD")]:
        advice = "A parent blocks them. Start the job from a process that does not."
        return Finding("signals", "fail", f"{', '.join(bad)} blocked", advice, facts)
    return Finding("signals", "ok", "SIGTERM and SIGCHLD arrive", facts=facts)


def on_features(features: Features) -> Finding:
    """Whether the kernel gives what agent and keeper stand on."""
    facts = msgspec.to_builtins(features)
    missing = [name for name in ("pidfd", "memfd", "abstract_socket") if not facts[name]]
    if missing:
        advice = "everstep needs Linux >= 5.3 and a seccomp profile that allows these calls."
        return Finding("kernel", "fail", f"missing: {', '.join(missing)}", advice, facts)
    what = f"pidfd, memfd, abstract sockets; {features.open_files} open files allowed"
    if features.open_files < FEW_FILES:
        return Finding("kernel", "warn", what, "Raise it: `ulimit -n 65536`.", facts)
    return Finding("kernel", "ok", what, facts=facts)


def on_torch(torch: TorchMeasured) -> Finding:
    """Whether torch is there, and what of its private parts exactness rests on."""
    facts = msgspec.to_builtins(torch)
    if torch.version is None:
        advice = "Install torch for your accelerator (`pip install torch`) into this environment."
        return Finding("torch", "fail", torch.problem or "not installed", advice, facts)
    what = f"{torch.version}, import takes {torch.import_seconds:.1f} s"
    if not torch.distributed:
        advice = "This build has no torch.distributed: only single-process jobs will run."
        return Finding("torch", "warn", what, advice, facts)
    if not torch.bucket_rebuild:
        advice = "DDP's bucket order cannot be fixed here: exact resume is promised for 2 ranks."
        return Finding("torch", "warn", what, advice, facts)
    return Finding("torch", "ok", what + ", DDP buckets can be fixed", facts=facts)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
