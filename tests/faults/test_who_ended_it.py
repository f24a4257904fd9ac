"""What ended a rank, and what was only said: lines of other processes, errors that were survived,
words of a kernel in a program's mouth, source in a traceback, and ends without a word (F1, F2)."""

from __future__ import annotations

import pytest
from classify_scenes import closed, gloo, tb, watchdog

from everstep.faults.catalog import load
from everstep.faults.fingerprint import fingerprint
from everstep.faults.judge import judge
from everstep.faults.records import UNKNOWN, Incident, Signal, Verdict

ONE = {"a": (0, 1)}
TWO = {"a": (0, 1), "b": (2, 3)}
CLEAN = tb("ValueError: bad shape")
CUDA = tb("torch.AcceleratorError: CUDA error: unspecified launch failure")
PEER = tb(gloo("127.0.0.1"))


def out(rank: int, time: float, text: str, node: str = "a") -> Signal:
    return Signal("log", text, rank, node, time)


def end(rank: int, time: float, code: int, node: str = "a", *, ours: bool = False) -> Signal:
    how = f"killed by signal {-code}" if code < 0 else f"exited with code {code}"
    said = f"rank {rank} (pid {4000 + rank}): {how}"
    return Signal("exit", said, rank, node, time, exit_code=code, ours=ours)


def beat(rank: int, time: float, age: float, step: int = 17, phase: str = "step") -> Signal:
    text = f"step={step} phase={phase} last_beat_age_s={age:.2f}"
    return Signal("heartbeat", text, rank, "a", time)


def stopped(rank: int, time: float, age: float) -> Signal:
    """A beat of a rank that its program's teardown moved since its last step."""
    text = f"step=17 phase=ending last_beat_age_s=0.1 last_step_age_s={age:.2f}"
    return Signal("heartbeat", text, rank, "a", time)


def kernel(text: str, time: float, node: str = "a") -> Signal:
    return Signal("kernel", text, None, node, time)


def verdict_of(*signals: Signal, nodes: dict[str, tuple[int, ...]] = ONE) -> Verdict:
    return judge(Incident("x", signals, nodes), load())


def root(verdict: Verdict) -> tuple[str, tuple[int, ...], str | None]:
    return verdict.fault, verdict.root_ranks, verdict.root_node


def why_not(verdict: Verdict, part: str) -> str:
    return next(item.why for item in verdict.discarded if part in item.text)


FAILED = (out(1, 500.0, CLEAN), end(1, 500.2, 1), end(0, 501.0, -9, ours=True))
BUG = ("USER_EXCEPTION", (1,), None)

OTHERS = (
    "python[9629]: segfault at 0 ip 00007f7b1c585ad8 sp 00007ffdae802f48 error 4 in libc.so.6[167ad8]",
    "chrome[9629]: segfault at 0 ip 00007f7b1c585ad8 sp 00007ffdae802f48 error 4 in libc.so.6[167ad8]",
    "traps: firefox[9629] general protection fault ip:7f sp:7f error:0 in libc.so",
    "traps: python[9629] trap invalid opcode ip:7f12 sp:7ffc error:0 in libtorch_cpu.so[7f12+1000]",
    "Out of memory: Killed process 9629 (mysqld) total-vm:123kB, anon-rss:100kB",
    "Memory cgroup out of memory: Killed process 9629 (python3) total-vm:123kB, anon-rss:100kB",
    "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=x,mems_allowed=0,oom_memcg=/o,task_memcg=/o,task=python,pid=9629,uid=0",
    "NVRM: Xid (PCI:0000:3b:00): 79, pid=9629, GPU has fallen off the bus.",
    "NVRM: Xid (PCI:0000:3b:00): 94, pid=9629, Contained: ECC error",
    "NVRM: Xid (PCI:0000:3b:00): 48, pid=9629, name=python, Double Bit ECC Error",
)  # fmt: skip


@pytest.mark.parametrize("time", [100.0, 499.5, 501.5])
@pytest.mark.parametrize("text", OTHERS, ids=lambda text: text[:38])
def test_f1_a_kernel_line_of_a_process_that_is_no_worker_blames_nobody(
    text: str, time: float
) -> None:
    verdict = verdict_of(*FAILED, kernel(text, time))
    assert root(verdict) == BUG
    assert "no worker of this attempt" in why_not(verdict, text[:30])


@pytest.mark.parametrize(
    "text",
    [
        "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",
        "blk_update_request: I/O error, dev sdb, sector 12345",
        "mce: [Hardware Error]: CPU 3: Machine Check Exception: 5 Bank 4: be00000000800400",
        "Memory cgroup stats: oom_kill 3",
        "eth3: Link is Down",
        "mlx5_core 0000:0c:00.0: Link down",
    ],
)  # fmt: skip
def test_a_kernel_line_long_before_a_clean_exception_is_not_its_root(text: str) -> None:
    assert root(verdict_of(*FAILED, kernel(text, 100.0))) == BUG


def test_a_kernel_line_just_before_it_is_or_one_of_the_same_device() -> None:
    lost = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."
    assert root(verdict_of(*FAILED, kernel(lost, 490.0))) == ("XID_79", (1,), "a")
    place = Signal("gpu", "rank 1: GPU 0000:3b:00", 1, "a", 0.0)
    other = Signal("gpu", "rank 0: GPU 0000:3b:00", 0, "a", 0.0)
    assert root(verdict_of(*FAILED, place, kernel(lost, 300.0))) == ("XID_79", (1,), "a")
    assert root(verdict_of(*FAILED, other, kernel(lost, 499.0))) == BUG
    pid = lost.replace("79,", "79, pid=4001,")
    assert root(verdict_of(*FAILED, kernel(pid, 499.0))) == ("XID_79", (1,), "a")
    assert root(verdict_of(*FAILED, kernel(pid.replace("4001", "4000"), 499.0))) == BUG


def test_a_link_counts_where_communication_failed() -> None:
    down = kernel("mlx5_core 0000:0c:00.0: Link down", 495.0)
    peers = [Signal("log", tb(closed("10.0.0.1")), r, "b", 500.0) for r in (2, 3)]
    ended = [end(r, 501.0, 1, "b") for r in (2, 3)]
    assert root(verdict_of(*peers, *ended, down, nodes=TWO)) == ("IB_LINK_DOWN", (0, 1), "a")
    assert root(verdict_of(*FAILED, down, nodes=TWO)) == BUG


def test_memory_kill_of_a_worker_is_found_by_its_number_and_in_a_container_by_its_end() -> None:
    killed = end(1, 500.0, -9)
    own = kernel("Memory cgroup out of memory: Killed process 4001 (trainer) total-vm:1kB", 499.9)
    assert root(verdict_of(killed, own)) == ("HOST_OOM_KILL", (1,), "a")
    hosts = kernel(
        "Memory cgroup out of memory: Killed process 88812 (python3) total-vm:1kB", 499.9
    )
    assert root(verdict_of(killed, hosts)) == ("HOST_OOM_KILL", (1,), "a")
    counted = kernel(
        "memory.events: oom_kill 3 (+1): a process of the cgroup /job was killed", 500.3
    )
    assert root(verdict_of(killed, counted)) == ("HOST_OOM_KILL", (1,), "a")
    for text, time in (("88812 (mysqld)", 499.9), ("88812 (python3)", 100.0)):
        other = kernel(f"Out of memory: Killed process {text} total-vm:1kB", time)
        assert root(verdict_of(killed, other)) == (UNKNOWN, (), None)
    pool = "concurrent.futures.process.BrokenProcessPool: A process in the pool was terminated abruptly"
    for error in ("EOFError", pool):
        gone = (out(1, 500.0, tb(error)), end(1, 500.2, 1))
        assert root(verdict_of(*gone, hosts)) == ("HOST_OOM_KILL", (1,), "a")
        assert root(verdict_of(*gone, counted))[::2] == ("HOST_OOM_KILL", "a")
    loader = tb("RuntimeError: DataLoader worker (pid 52) is killed by signal: Killed.")
    assert root(verdict_of(out(1, 500.0, loader), end(1, 500.2, 1), hosts))[0] == "HOST_OOM_KILL"


def test_a_crash_that_the_kernel_tells_of_is_of_the_rank_that_crashed() -> None:
    text = "python[{}]: segfault at 0 ip 00007f7b1c585ad8 sp 00007ffdae802f48 error 4 in libc.so.6"
    crashed = end(1, 500.0, -11)
    for pid in (4001, 77123):  # of the host, or of a container
        assert root(verdict_of(crashed, kernel(text.format(pid), 499.9)))[:2] == (
            "NATIVE_CRASH",
            (1,),
        )
    verdict = verdict_of(crashed, out(0, 500.5, PEER), kernel(text.format(9), 20.0))
    assert root(verdict)[:2] == ("NATIVE_CRASH", (1,))


def test_a_number_of_the_host_does_not_hide_a_lost_device_in_a_container() -> None:
    xid = kernel("NVRM: Xid (PCI:0000:3b:00): 79, pid=88812, GPU has fallen off the bus.", 499.0)
    failed = (out(1, 500.0, CUDA), end(1, 500.5, 1))
    assert root(verdict_of(*failed, xid)) == ("XID_79", (1,), "a")
    assert root(verdict_of(end(1, 500.0, -6), xid)) == ("XID_79", (1,), "a")


@pytest.mark.parametrize("steps", ["heartbeat", "output"])
def test_a_device_with_which_steps_were_made_for_minutes_did_not_fail(steps: str) -> None:
    lost = kernel("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", 100.0)
    shows = (
        [beat(1, 500.0, 0.3)] if steps == "heartbeat"
        else [out(0, float(t), f"step {t} loss 0.1") for t in range(101, 400, 50)]
    )  # fmt: skip
    verdict = verdict_of(end(1, 500.0, -9), lost, *shows)
    assert root(verdict) == (UNKNOWN, (), None)
    assert "made steps" in why_not(verdict, "Xid")
    assert root(verdict_of(end(1, 130.0, -6), lost, beat(1, 130.0, 29.5))) == ("XID_79", (1,), "a")


CAUGHT = out(0, 100.0, tb("FileNotFoundError: [Errno 2] No such file or directory: '/optional'"))


def test_f1_a_rank_that_finished_a_step_after_its_error_did_not_end_of_it() -> None:
    killed = (end(1, 140.0, -9), out(0, 140.2, PEER), end(0, 142.0, -9, ours=True))
    verdict = verdict_of(CAUGHT, *killed, beat(0, 142.0, 2.1), beat(1, 142.0, 2.1))
    assert root(verdict) == ("GLOO_CONN_CLOSED", (1,), None)
    assert verdict.message == "rank 1 was killed by SIGKILL, and nothing says by whom"
    assert verdict.frame == ""
    assert "finished a step" in why_not(verdict, "FileNotFoundError")
    silent = (end(0, 140.0, 1), out(1, 140.2, PEER), beat(0, 140.5, 0.6), beat(1, 140.5, 0.6))
    assert root(verdict_of(CAUGHT, *silent)) == ("GLOO_CONN_CLOSED", (0,), None)


def test_the_age_of_the_last_step_counts_and_not_that_of_a_phase_since() -> None:
    ended = (out(1, 139.9, "please give --data"), end(1, 140.0, 1))
    peer = (out(0, 140.2, PEER), end(0, 143.0, 1))
    beats = (stopped(0, 143.0, 3.3), stopped(1, 143.0, 3.3))
    verdict = verdict_of(CAUGHT, *ended, *peer, *beats)
    assert root(verdict) == ("GLOO_CONN_CLOSED", (1,), None)
    assert verdict.message.endswith("please give --data")
    late = (out(1, 500.0, CLEAN), end(1, 503.0, 1), stopped(1, 503.0, 3.2))
    assert root(verdict_of(*late)) == BUG


def test_an_error_after_the_last_step_is_its_end_however_long_the_process_took_to_go() -> None:
    peers = (
        out(1, 700.0, watchdog(1, 12, 12, 11)),
        end(1, 700.5, -6),
        end(0, 701.0, -9, ours=True),
    )
    beats = (beat(0, 701.0, 601.5), beat(1, 701.0, 601.4))
    assert root(verdict_of(CAUGHT, *peers, *beats))[:2] == ("DATA_MISSING", (0,))
    assert root(verdict_of(CAUGHT, *peers))[:2] == ("DATA_MISSING", (0,))
    # What came with the same burst as the step's last line has the time of that line.
    # All were killed by somebody else, long after.
    killed = (end(0, 700.0, -9), end(1, 700.0, -9))
    assert root(verdict_of(CAUGHT, *killed, *beats))[:2] == ("DATA_MISSING", (0,))
    burst = (out(1, 500.0, "step 17 loss 0.1\n" + CLEAN), end(1, 500.4, 1), beat(1, 500.5, 0.3))
    assert root(verdict_of(*burst))[:2] == ("USER_EXCEPTION", (1,))
    # Another phase that began after the error is no step.
    saves = (out(1, 500.0, CLEAN), end(1, 503.0, 1), beat(1, 503.0, 0.5, phase="save"))
    assert root(verdict_of(*saves))[:2] == ("USER_EXCEPTION", (1,))


@pytest.mark.parametrize(
    ("code", "name"), [(-9, "SIGKILL"), (-11, "NATIVE_CRASH"), (7, "exit code 7")]
)
def test_an_end_that_no_exception_makes_is_not_of_an_error_before_it(code: int, name: str) -> None:
    verdict = verdict_of(CAUGHT, end(0, 400.2, code))
    assert name in (verdict.fault, *verdict.message.split(", ")) or name in verdict.message
    assert verdict.fault != "DATA_MISSING"
    assert root(verdict_of(CAUGHT, end(0, 100.4, code)))[0] in ("DATA_MISSING", "NATIVE_CRASH")
    assert root(verdict_of(CAUGHT, end(0, 400.2, 1))) == ("DATA_MISSING", (0,), None)


@pytest.mark.parametrize("code", [1, 7, -9])
def test_an_error_before_further_lines_of_steps_was_survived(code: int) -> None:
    later = [out(0, float(t), f"step {t}: loss 0.1, lr 1e-4") for t in range(110, 400, 40)]
    verdict = verdict_of(CAUGHT, *later, end(0, 400.2, code))
    assert root(verdict) == (UNKNOWN, (), None)
    assert "further steps" in why_not(verdict, "FileNotFoundError")
    teardown = out(0, 130.0, "saved an emergency checkpoint at step 12")
    assert root(verdict_of(CAUGHT, teardown, end(0, 131.0, 1)))[:2] == ("DATA_MISSING", (0,))


def test_what_a_rank_said_minutes_before_another_one_ended_is_not_the_root() -> None:
    for said in (
        CAUGHT,
        out(0, 100.0, "sample: RuntimeError: CUDA error: an illegal memory access"),
    ):
        assert root(verdict_of(said, end(1, 400.2, -9))) == (UNKNOWN, (), None)
    assert root(verdict_of(CAUGHT, out(1, 399.0, CLEAN), end(1, 400.0, 1))) == BUG


def test_a_bare_line_does_not_take_the_place_of_a_traceback_that_ended_a_rank() -> None:
    said = out(0, 499.0, "sample: OSError: [Errno 28] No space left on device: '/x'")
    assert root(verdict_of(said, *FAILED)) == BUG
    before = out(0, 490.0, tb("OSError: [Errno 28] No space left on device: '/x'"))
    assert root(verdict_of(before, *FAILED)) == BUG
    same = out(0, 499.0, tb("OSError: [Errno 28] No space left on device: '/x'"))
    assert root(verdict_of(same, *FAILED))[:2] == ("DISK_FULL", (0,))


PRINTED = (
    "generated: NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",
    "NVRM: Xid (PCI:0000:3b:00): 79, pid=4000, GPU has fallen off the bus.",
    "Out of memory: Killed process 4242 (python3) total-vm:1kB",
    "slurmstepd: error: *** JOB 123 ON n1 CANCELLED AT 2024-01-01T00:00:00 DUE TO TIME LIMIT ***",
    "python[4000]: segfault at 0 ip 00007f7b1c585ad8 sp 00007ffdae802f48 error 4 in libc.so.6",
    "kernel: EXT4-fs error (device sda1): ext4_find_entry:1463: inode #2: reading directory lblock 0",
    "mlx5_core 0000:0c:00.0: Link down",
    "Taint manager: deleting pod ns/p-0 of node a: NodeNotReady",
)  # fmt: skip


@pytest.mark.parametrize("text", PRINTED, ids=lambda text: text[:30])
def test_f1_a_programs_output_is_no_word_of_a_kernel_or_a_scheduler(text: str) -> None:
    assert root(verdict_of(out(0, 499.0, text), *FAILED)) == BUG
    assert root(verdict_of(out(0, 499.0, text), end(1, 500.0, -9))) == (UNKNOWN, (), None)


def test_in_a_merged_log_such_lines_count_as_before() -> None:
    text = (
        "[rank0]: "
        + CLEAN.replace("\n", "\n[rank0]: ")
        + "\n"
        + PRINTED[1].replace("pid=4000, ", "")
    )
    assert judge(Incident("x", (Signal("log", text),)), load()).fault == "XID_79"
    service = Signal("log", PRINTED[3], None, None, 499.0)
    assert verdict_of(service, end(1, 500.0, -9)).fault == "TIME_LIMIT"


@pytest.mark.parametrize(
    "source",
    [
        'raise ValueError("bad shape")  # avoid CUDA out of memory',
        'check("No space left on device", errno.ENOSPC)',
        'log.error("NCCL WARN Call to connect failed : Connection refused")',
        'assert "Segmentation fault (core dumped)" not in text',
        'raise MemoryError("host")',
    ],
)
def test_the_source_in_a_traceback_is_no_evidence(source: str) -> None:
    frames = f'  File "/w/train.py", line 4, in f\n    {source}\n    ^^^^^^^^\n'
    text = f"Traceback (most recent call last):\n{frames}ValueError: bad shape"
    assert root(verdict_of(out(1, 500.0, text), end(1, 500.2, 1))) == BUG
    ranked = "\n".join(f"[rank1]: {line}" for line in text.split("\n"))
    assert judge(Incident("x", (Signal("log", ranked),), ONE), load()).fault == "USER_EXCEPTION"
    group = "".join(f"  | {line}\n" for line in text.split("\n")[:-1]) + "  | ValueError: bad shape"
    assert root(verdict_of(out(1, 500.0, group), end(1, 500.2, 1))) == BUG


def test_the_exceptions_of_a_group_are_evidence() -> None:
    text = (
        "  + Exception Group Traceback (most recent call last):\n"
        '  |   File "/w/train.py", line 4, in f\n  |     run()\n'
        "  | ExceptionGroup: 1 failed (1 sub-exception)\n"
        "  +-+---------------- 1 ----------------\n"
        "    | Traceback (most recent call last):\n"
        '    |   File "/w/train.py", line 9, in g\n    |     y = f(x)\n'
        "    | torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    )
    assert verdict_of(out(1, 500.0, text), end(1, 500.2, 1)).fault == "CUDA_OOM"


LOST = Signal("agent", "the agent of node b has shown no life for 12 s", None, "b")


@pytest.mark.parametrize("time", [None, 512.0])
def test_a_lost_node_goes_before_the_errors_of_its_peers(time: float | None) -> None:
    lost = Signal("agent", LOST.text, None, "b", time)
    peers = [out(rank, 500.0, tb(gloo("10.0.0.2"))) for rank in (0, 1)]
    ended = [end(0, 501.0, 1), end(1, 502.0, -9, ours=True)]
    beats = [beat(0, 502.0, 2.5), beat(1, 502.0, 2.5)]
    for seen in ((*peers, *ended), (*ended,), (*peers, *ended, *beats), ()):
        verdict = verdict_of(lost, *seen, nodes=TWO)
        assert root(verdict) == ("NODE_NOT_READY", (2, 3), "b")
        assert verdict.action == "restart_elsewhere"
        assert not {0, 1} & set(verdict.root_ranks)
    assert verdict_of(lost, *peers, *ended, nodes=TWO).victim_ranks == (0, 1)


def test_a_rank_that_leaves_with_a_message_is_the_root_in_its_own_words() -> None:
    left = (out(1, 500.0, "please give --data"), end(1, 500.1, 1))
    warning = out(1, 500.05, "everstep 20:59:26 warning: left at step 37; the newest is of step 3")
    peer = (out(0, 500.2, PEER), end(0, 500.3, 1))
    verdict = verdict_of(*left, warning, *peer)
    assert root(verdict) == ("GLOO_CONN_CLOSED", (1,), None)
    assert verdict.message == "rank 1 ended with exit code 1; its last words: please give --data"
    assert (verdict.frame, verdict.victim_ranks) == ("", (0,))
    assert [item.role for item in verdict.evidence] == ["root", "victim"]
    silent = verdict_of(out(1, 500.0, "step 12 loss 0.5"), end(1, 500.1, 1), *peer)
    assert silent.message == "rank 1 ended with exit code 1 without a word of why"


def test_an_end_without_a_word_is_told_in_words_and_stays_one_failure() -> None:
    plain = verdict_of(end(1, 500.0, -9), end(0, 502.0, -9, ours=True))
    assert root(plain) == (UNKNOWN, (), None)
    assert plain.message == "rank 1 was killed by SIGKILL, and nothing says by whom"
    assert [(item.rank, item.role) for item in plain.evidence] == [(1, "noise"), (0, "victim")]
    assert "SIGKILL" in plain.evidence[0].why
    other = verdict_of(end(0, 90.0, -9), end(1, 90.2, -9))
    assert fingerprint(other).key == fingerprint(plain).key
    code = verdict_of(end(0, 500.0, 7))
    assert code.message == "rank 0 ended with exit code 7 without a word of why"
    assert fingerprint(code).key != fingerprint(plain).key
    assert verdict_of(end(1, 500.0, -9), CAUGHT, beat(0, 500.0, 0.1)).discarded
    assert verdict_of(beat(0, 500.0, 0.1)).message == "nothing that was seen names a cause"


@pytest.mark.parametrize("name", ["train_gpt", "dp0:train", "uvicorn", "python3"])
def test_in_a_container_a_process_that_ended_at_that_moment_may_be_called_anything(
    name: str,
) -> None:
    """And one that is called anything and ended at another moment is none of the job's."""
    line = f"Memory cgroup out of memory: Killed process 99321 ({name}) total-vm:9kB, anon-rss:8kB"
    killed = (end(1, 500.1, -9), end(0, 501.0, -9, ours=True))
    assert root(verdict_of(kernel(line, 500.0), *killed))[:2] == ("HOST_OOM_KILL", (1,))
    if not name.startswith("python"):
        assert root(verdict_of(kernel(line, 490.0), *killed))[:2] == (UNKNOWN, ())
