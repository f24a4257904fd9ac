"""torch's flight recorder: dumps that torch itself has written, read by torch's own analyzer."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import wait_for

from everstep.agent.watch import flight
from everstep.agent.watch.flight import Flight, analysed, variables
from everstep.core.stacks import file_of_rank
from everstep.faults.collective import stuck_in
from everstep.faults.lines import lines_of
from everstep.faults.records import Signal


def record(folder: Path) -> None:
    """Two ranks of a real group; rank 1 does not come to the last collective."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Forked, so that torch need not be imported twice.
    forked = multiprocessing.get_context("fork")
    ranks = [forked.Process(target=issues, args=(rank, port, folder)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [0, 0]


def issues(rank: int, port: int, folder: Path) -> None:
    from torch._C import _distributed_c10d as c10d

    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
    for _ in range(3):
        dist.all_reduce(torch.ones(3))
    if rank == 0:
        dist.all_reduce(torch.ones(4), async_op=True)
    (folder / f"{rank}.flight").write_bytes(c10d._dump_fr_trace(True, False, False))
    (folder / f"done-{rank}").touch()
    wait_for((folder / f"done-{1 - rank}").exists)
    os._exit(0)


def recorded_by_torch() -> bool:
    from torch._C import _distributed_c10d as c10d

    return hasattr(c10d, "_dump_fr_trace")


@pytest.mark.skipif(not recorded_by_torch(), reason="this torch records no flight")
def test_torchs_own_analyzer_names_the_rank_that_did_not_join(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path)
    recorder = Flight(tmp_path, (0, 1), time.monotonic(), {})
    signals = recorder.dump(time.monotonic() + 1.0)
    assert any("missing ranks: {1}" in signal.text for signal in signals)
    stuck = stuck_in(line for n, s in enumerate(signals) for line in lines_of(s, n, {}))
    assert stuck.culprits(2)[0] == {1}
    # The counts alone say it, too: the analyzer needs the dumps of all ranks, which are on nodes.
    alone = [signal for signal in signals if signal.rank is not None]
    stuck = stuck_in(line for n, s in enumerate(alone) for line in lines_of(s, n, {}))
    assert (stuck.waiting, stuck.idle) == ({0}, {1})
    one = Flight(tmp_path, (0,), time.monotonic(), {}).dump(time.monotonic())
    assert not any("missing" in signal.text for signal in one), "the other node's dump is not here"
    assert capfd.readouterr() == ("", "")


def dump(kind: str = "all_reduce", **more: object) -> dict[str, Any]:
    entry = {
        "process_group": ("0", "default_pg"), "profiling_name": f"nccl:{kind}", "record_id": 0,
        "collective_seq_id": 1, "p2p_seq_id": 0, "op_id": 1, "is_p2p": False, "frames": [],
        "input_sizes": [[4]], "output_sizes": [[4]], "input_dtypes": ["Float"],
        "output_dtypes": ["Float"], "state": "scheduled", "pg_id": 0, "retired": False,
        "time_created_ns": 1, "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
    }  # fmt: skip
    group = {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}
    return {
        "version": "2.10", "pg_config": {"0": group},
        "pg_status": {"0": {"last_enqueued_collective": 1, "last_completed_collective": 0}},
        "entries": [entry], **more,
    }  # fmt: skip


def test_calls_that_do_not_match_are_told() -> None:
    (told,) = analysed({0: dump(), 1: dump("broadcast")})
    assert "do not match" in told
    assert "COLLECTIVE_TYPE_MISMATCH" in told


def test_what_the_analyzer_cannot_read_is_nothing(tmp_path: Path) -> None:
    assert analysed({0: dump(), 1: dump("an operation of tomorrow")}) == []
    assert analysed({0: dump(), 1: dump(version="1.0")}) == []
    bad = [b"", b"\x80", b"\x80\x02", pickle.dumps(dump(), protocol=5)]
    bad += [pickle.dumps(value, protocol=2) for value in ([1], print, {"version": 1})]
    for number, data in enumerate(bad):
        (tmp_path / file_of_rank(number, "flight")).write_bytes(data)
    ranks = tuple(range(len(bad)))
    assert Flight(tmp_path, ranks, 0.0, {}).dump(time.monotonic()) == []


def test_nccls_watchdog_is_asked_by_its_pipe_where_a_rank_does_not_answer(tmp_path: Path) -> None:
    """The pipe and the file are torch's own interface; the watchdog is played here."""
    environment = {
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(tmp_path / "pipe-"),
        "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "nccl-"),
    }
    os.mkfifo(tmp_path / "pipe-3.pipe")
    reader = os.open(tmp_path / "pipe-3.pipe", os.O_RDONLY | os.O_NONBLOCK)

    def watchdog() -> None:
        os.set_blocking(reader, True)
        assert os.read(reader, 1)
        (tmp_path / "nccl-3").write_bytes(pickle.dumps(dump(), protocol=2))

    recorder = Flight(tmp_path, (3, 4), time.monotonic(), environment)
    writer = os.open(tmp_path / "pipe-3.pipe", os.O_WRONLY)  # so that the reader waits
    thread = threading.Thread(target=watchdog)
    thread.start()
    signals = recorder.dump(time.monotonic() + 10.0)
    thread.join()
    os.close(writer)
    os.close(reader)
    assert [signal.rank for signal in signals] == [3]
    assert "last enqueued work: 1, last completed work: 0" in signals[0].text


def test_what_the_user_has_set_for_nccl_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight, "is_nccl_available", lambda: True)
    ours = variables(tmp_path, {})
    assert set(ours) == {
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_FR_DUMP_TEMP_FILE",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    }  # fmt: skip
    theirs = {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/somewhere/else-"}
    assert set(variables(tmp_path, theirs)) == {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE"}
    monkeypatch.setattr(flight, "is_nccl_available", lambda: False)
    assert variables(tmp_path, {}) == {}


def test_signals_of_a_recorder_are_of_the_form_that_is_judged() -> None:
    (text,) = flight._statuses(5, dump())
    (line,) = lines_of(Signal("agent", text, rank=5), 0, {})
    assert stuck_in([line]).queued == {("0", 5): 1}
