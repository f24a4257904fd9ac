"""Whole incidents, invented: who is the root where many speak.

A scene is a map of nodes, signals as ``(source, rank, node, time, text or exit code)``, and what is
expected: class, action, root ranks, root node.
"""

from __future__ import annotations

from dataclasses import dataclass

from everstep.faults.records import Incident, Signal

TWO = {"h-a": (0, 1, 2, 3), "h-b": (4, 5, 6, 7)}
THREE = {"h-a": (0,), "h-b": (1,), "h-c": (2,)}
ONE = {"h-a": (0, 1, 2, 3)}
ADDRESSES = {"10.7.0.11": "h-a", "10.7.0.12": "h-b", "10.7.0.13": "h-c"}


@dataclass(frozen=True)
class Scene:
    name: str
    nodes: dict[str, tuple[int, ...]]
    signals: tuple[tuple[str, int | None, str | None, float | None, str | int], ...]
    fault: str
    action: str
    ranks: tuple[int, ...] = ()
    node: str | None = None

    def incident(self) -> Incident:
        return Incident(self.name, tuple(map(signal, self.signals)), self.nodes, ADDRESSES)


def signal(row: tuple[str, int | None, str | None, float | None, str | int]) -> Signal:
    source, rank, node, time, said = row
    if isinstance(said, int):
        text = f"pid {7000 + (rank or 0)}: " + (
            f"killed by signal {-said}" if said < 0 else f"exited with code {said}"
        )
        return Signal("exit", text, rank, node, time, exit_code=said)
    return Signal(source, said, rank, node, time)  # type: ignore[arg-type]


def tb(error: str, file: str = "/app/train.py", line: int = 91) -> str:
    return (
        "Traceback (most recent call last):\n"
        f'  File "{file}", line {line}, in step\n    y = f(x)\n{error}'
    )


def watchdog(rank: int, seq: int, queued: int, done: int) -> str:
    return (
        f"[rank{rank}]:[E1101 10:00:00.000000000 ProcessGroupNCCL.cpp:607] [Rank {rank}] Watchdog caught "
        f"collective operation timeout: WorkNCCL(SeqNum={seq}, OpType=ALLREDUCE, NumelIn=8, NumelOut=8, "
        "Timeout(ms)=600000) ran for 600012 milliseconds before timing out.\n"
        f"[rank{rank}]:[E1101 10:00:00.000000000 ProcessGroupNCCL.cpp:1664] [PG 0 Rank {rank}] Exception "
        f"(either an error or timeout) detected by watchdog at work: {seq}, last enqueued NCCL work: "
        f"{queued}, last completed NCCL work: {done}."
    )


def closed(peer: str) -> str:
    return (
        "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:268, remote process exited or "
        "there was a network error, NCCL version 2.20.5\nncclRemoteError: A call failed possibly due to "
        f"a network error or a remote process exiting prematurely.\nLast error:\nsocketProgress: "
        f"Connection closed by remote peer {peer}<41011>"
    )


def gloo(address: str) -> str:
    return (
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer "
        f"[{address}]:31022"
    )


def stack(*frames: str) -> str:
    return 'Thread 88 (active): "MainThread"\n' + "\n".join(f"    {frame}" for frame in frames)


WAITS = stack("all_reduce (torch/distributed/distributed_c10d.py:2501)", "step (/app/train.py:91)")

SCENES: tuple[Scene, ...] = (
    Scene("gloo names the dead peer", THREE, (
        ("log", 0, "h-a", 50.0, gloo("10.7.0.13")), ("log", 1, "h-b", 50.1, gloo("10.7.0.13")),
    ), "GLOO_CONN_CLOSED", "restart_in_place", (2,)),
    Scene("two of three name each other", THREE, (
        ("log", 0, "h-a", 50.0, gloo("10.7.0.12")), ("log", 1, "h-b", 50.1, gloo("10.7.0.11")),
    ), "UNKNOWN_ROOT", "restart_in_place"),
    Scene("a memory kill behind closed connections", THREE, (
        ("exit", 1, "h-b", 49.0, -9),
        ("kernel", None, "h-b", 48.9, "[1.000000] Memory cgroup out of memory: Killed process 7001 (python) total-vm:1kB, anon-rss:1kB"),
        ("log", 0, "h-a", 50.0, gloo("10.7.0.12")), ("log", 2, "h-c", 50.1, gloo("10.7.0.12")),
    ), "HOST_OOM_KILL", "restart_in_place", (1,), "h-b"),
    Scene("a kill without an author", THREE, (
        ("exit", 1, "h-b", 49.0, -9), ("agent", None, "h-b", 60.0, "no oom-kill in the kernel log"),
    ), "UNKNOWN_ROOT", "restart_in_place"),
    Scene("a kill of ours", THREE, (
        ("log", 0, "h-a", 40.0, tb("RuntimeError: bad token 7")), ("exit", 0, "h-a", 40.5, 1),
        ("agent", None, None, 41.0, "rank 0 failed: sent SIGKILL to ranks 1-2"),
        ("exit", 1, "h-b", 41.5, -9), ("exit", 2, "h-c", 41.5, -9),
    ), "USER_EXCEPTION", "stop", (0,)),
    Scene("one rank never joined", ONE, tuple(
        ("log", rank, "h-a", 700.0 + rank, watchdog(rank, 81, 81, 80)) for rank in (0, 1, 2)
    ) + (("log", 3, "h-a", 704.0, "[rank3]:[E1101 10:00:00.0 ProcessGroupNCCL.cpp:1300] [PG 0 Rank 3] Received a dump signal due to a collective timeout from  rank 0 and we will try our best to dump the debug info. Last enqueued NCCL work: 80, last completed NCCL work: 80."),
    ), "NCCL_WATCHDOG_TIMEOUT", "restart_in_place", (3,)),
    Scene("all wait in the same collective", ONE, tuple(
        ("log", rank, "h-a", 700.0 + rank, watchdog(rank, 81, 81, 80)) for rank in (0, 1, 2, 3)
    ), "UNKNOWN_ROOT", "restart_in_place"),
    Scene("a hang in the loader by stacks", ONE, (
        ("stack", 0, "h-a", 90.0, WAITS), ("stack", 1, "h-a", 90.0, WAITS), ("stack", 2, "h-a", 90.0, WAITS),
        ("stack", 3, "h-a", 90.0, stack("poll (multiprocessing/connection.py:440)", "get (multiprocessing/queues.py:113)", "_try_get_data (torch/utils/data/dataloader.py:1133)", "epoch (/app/train.py:60)")),
    ), "HANG_APP", "restart_in_place", (3,)),
    Scene("an Xid on the device of the failed rank", TWO, (
        ("gpu", None, "h-b", 0.0, "rank 6: GPU 0000:86:00.0 (local index 2)"),
        ("kernel", None, "h-b", 100.0, "NVRM: Xid (PCI:0000:86:00): 95, pid='<unknown>', name=<unknown>, Uncontained: LTC TAG"),
        ("log", 6, "h-b", 100.5, tb("torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered")),
        ("exit", 6, "h-b", 101.0, 1), ("log", 0, "h-a", 102.0, closed("h-b")),
    ), "XID_95", "restart_elsewhere", (6,), "h-b"),
    Scene("a clean traceback, an Xid 31 on another node", TWO, (
        ("kernel", None, "h-b", 100.0, "NVRM: Xid (PCI:0000:86:00): 31, pid=5, name=x, MMU Fault"),
        ("log", 1, "h-a", 99.0, tb("KeyError: 'labels'")), ("exit", 1, "h-a", 99.5, 1),
    ), "USER_EXCEPTION", "stop", (1,)),
    Scene("a fatal Xid on a node that did not fail", TWO, (
        ("kernel", None, "h-b", 130.0, "NVRM: Xid (PCI:0000:86:00): 79, pid=5, name=x, GPU has fallen off the bus."),
        ("log", 1, "h-a", 99.0, tb("KeyError: 'labels'")), ("exit", 1, "h-a", 99.5, 1),
    ), "USER_EXCEPTION", "stop", (1,)),
    Scene("an Xid of last week's kernel log", TWO, (
        ("kernel", None, "h-a", -90000.0, "NVRM: Xid (PCI:0000:86:00): 79, pid=5, name=x, GPU has fallen off the bus."),
        ("log", 1, "h-a", 99.0, tb("KeyError: 'labels'")), ("exit", 1, "h-a", 99.5, 1),
    ), "USER_EXCEPTION", "stop", (1,)),
    Scene("Xid 45 follows the end of the job", TWO, (
        ("log", 1, "h-a", 99.0, tb("ValueError: empty")), ("exit", 1, "h-a", 99.5, 1),
        ("kernel", None, "h-a", 100.0, "NVRM: Xid (PCI:0000:86:00): 45, pid=7001, name=python, Ch 00000010"),
    ), "USER_EXCEPTION", "stop", (1,)),
    Scene("Xid 43 alone while all go on", TWO, (
        ("kernel", None, "h-a", 100.0, "NVRM: Xid (PCI:0000:86:00): 43, pid=99, name=jupyter, Ch 00000010"),
        ("heartbeat", 0, "h-a", 110.0, "step=5 phase=forward last_beat_age_s=0.4 process=alive"),
    ), "XID_43_45", "continue"),
    Scene("an illegal access on one device", TWO, (
        ("gpu", None, "h-b", 0.0, "rank 5: GPU 0000:2a:00.0"),
        ("kernel", None, "h-b", 100.0, "NVRM: Xid (PCI:0000:2a:00): 31, pid=7005, name=python, MMU Fault: ENGINE GRAPHICS"),
        ("log", 5, "h-b", 100.2, tb("RuntimeError: CUDA error: an illegal memory access was encountered")),
        ("exit", 5, "h-b", 100.5, 1),
    ), "XID_31", "restart_in_place", (5,), "h-b"),
    Scene("an illegal access that followed the job to other nodes", TWO, (
        ("agent", None, None, 0.0, "attempt 2 failed on h-x: rank 5 CUDA error: an illegal memory access was encountered, Xid 31 on 0000:99:00"),
        ("kernel", None, "h-b", 100.0, "NVRM: Xid (PCI:0000:2a:00): 31, pid=7005, name=python, MMU Fault: ENGINE GRAPHICS"),
        ("log", 5, "h-b", 100.2, tb("RuntimeError: CUDA error: an illegal memory access was encountered")),
        ("exit", 5, "h-b", 100.5, 1),
    ), "ILLEGAL_ADDR_SW", "stop", (5,)),
    Scene("a switch took all devices", ONE, (
        ("kernel", None, "h-a", 10.0, "nvidia-nvswitch3: SXid (PCI:0000:c7:00.0): 20009, Fatal, Link 28 RX Short Error Rate"),
        ("kernel", None, "h-a", 10.2, "NVRM: Xid (PCI:0000:1b:00): 74, pid='<unknown>', name=<unknown>, NVLink: fatal error"),
        ("exit", 0, "h-a", 11.0, -6), ("exit", 1, "h-a", 11.0, -6),
    ), "NVSWITCH_FM", "restart_elsewhere", (), "h-a"),
    Scene("machine check, then the node is gone", TWO, (
        ("kernel", None, "h-b", 10.0, "mce: [Hardware Error]: CPU 1: Machine Check Exception: 5 Bank 4: be00000000800400"),
        ("kubernetes", None, "h-b", 60.0, "NodeNotReady: Kubelet stopped posting node status."),
        ("log", 0, "h-a", 30.0, closed("10.7.0.12")), ("log", 1, "h-a", 30.5, closed("10.7.0.12")),
    ), "CPU_MCE_DIMM", "restart_elsewhere", (4, 5, 6, 7), "h-b"),
    Scene("the node is gone and nothing says why", TWO, (
        ("kubernetes", None, "h-b", 60.0, "Ready Unknown NodeStatusUnknown Kubelet stopped posting node status."),
        ("log", 0, "h-a", 30.0, closed("10.7.0.12")), ("log", 1, "h-a", 30.5, closed("10.7.0.12")),
    ), "NODE_NOT_READY", "restart_elsewhere", (4, 5, 6, 7), "h-b"),
    Scene("a full disk on one rank's node", TWO, (
        ("log", 4, "h-b", 10.0, tb("OSError: [Errno 28] No space left on device")), ("exit", 4, "h-b", 10.4, 1),
        ("log", 0, "h-a", 11.0, closed("h-b")),
    ), "DISK_FULL", "restart_in_place", (4,)),
    Scene("a broken disk", TWO, (
        ("kernel", None, "h-b", 9.0, "blk_update_request: critical medium error, dev nvme1n1, sector 12 op 0x0:(READ)"),
        ("log", 6, "h-b", 10.0, tb("OSError: [Errno 5] Input/output error: '/local/a.bin'")), ("exit", 6, "h-b", 10.4, 1),
    ), "FS_READONLY_IO", "restart_elsewhere", (6,), "h-b"),
    Scene("the same error on all ranks", ONE, tuple(
        ("log", rank, "h-a", 5.0 + rank / 10, tb("TypeError: step() missing 1 required positional argument: 'y'"))
        for rank in range(4)
    ), "USER_EXCEPTION", "stop"),
    Scene("out of memory on one rank", ONE, (
        ("log", 2, "h-a", 5.0, tb("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.")),
        ("exit", 2, "h-a", 5.5, 1), ("log", 0, "h-a", 6.0, closed("h-a")),
    ), "CUDA_OOM", "restart_in_place", (2,)),
    Scene("a pod is evicted for memory of its node", THREE, (
        ("kubernetes", 1, "h-b", 10.0, "Warning  Evicted  kubelet  The node was low on resource: memory."),
        ("exit", 1, "h-b", 11.0, 137), ("log", 0, "h-a", 12.0, gloo("10.7.0.12")),
    ), "EVICTED_NODE_PRESSURE", "restart_elsewhere", (1,), "h-b"),
    Scene("preempted", THREE, (
        ("kubernetes", None, "h-b", 10.0, "conditions: type: DisruptionTarget status: True reason: PreemptionByScheduler message: 'default-scheduler: preempting to accommodate a higher priority pod'"),
        ("exit", 1, "h-b", 11.0, 143), ("log", 0, "h-a", 12.0, gloo("10.7.0.12")),
    ), "PREEMPTED", "wait_and_retry", (1,), "h-b"),
    Scene("spot reclaimed", TWO, (
        ("agent", None, "h-b", 10.0, "instance metadata: spot/instance-action terminate at 12:04"),
        ("exit", 4, "h-b", 130.0, -15), ("log", 0, "h-a", 131.0, closed("h-b")),
    ), "SPOT_RECLAIM_MAINT", "restart_elsewhere", (4, 5, 6, 7), "h-b"),
    Scene("SIGTERM from outside", THREE, (
        ("exit", 1, "h-b", 11.0, 143), ("log", 0, "h-a", 12.0, gloo("10.7.0.12")),
    ), "SIGTERM_EXTERNAL", "restart_in_place", (1,), "h-b"),
    Scene("a card in every failing pair is one incident only", TWO, (
        ("log", 4, "h-b", 11.0, "h-b:1:2 [0] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer 10.7.0.11<40119> with status=12 opcode=0 len=0 vendor err 129 (Recv)"),
    ), "IB_CQE_ERR", "restart_in_place"),
    Scene("a port went down", TWO, (
        ("kernel", None, "h-b", 10.0, "mlx5_core 0000:0c:00.0 ib2: Link down"),
        ("log", 5, "h-b", 12.0, "h-b:1:2 [1] NCCL WARN NET/IB : Got completion from peer 10.7.0.11<40119> with status=12 opcode=0 len=0 vendor err 129"),
        ("exit", 5, "h-b", 13.0, -6),
    ), "IB_LINK_DOWN", "restart_elsewhere", (5,), "h-b"),
    Scene("a save failed in the background", ONE, (
        ("log", 1, "h-a", 50.0, "ERROR async checkpoint write failed: PytorchStreamWriter failed writing file data/3: file write failed"),
        ("heartbeat", 1, "h-a", 90.0, "step=71 phase=forward last_beat_age_s=0.3 process=alive"),
        ("heartbeat", 0, "h-a", 90.0, "step=71 phase=forward last_beat_age_s=0.3 process=alive"),
    ), "CKPT_SAVE_FAIL", "continue"),
    Scene("the loss jumps and comes back", ONE, (
        ("log", 0, "h-a", 50.0, "step 100 loss 2.01\nstep 110 loss 5.90\nstep 120 loss 2.40\nstep 130 loss 2.02"),
    ), "LOSS_SPIKE", "continue"),
    Scene("one device computes otherwise", TWO, (
        ("agent", None, None, 50.0, "replay of step 77: rank 6 differs in grad norm (1.31 instead of 1.02), all others bit-identical"),
    ), "SDC", "rollback", (6,), "h-b"),
    Scene("a clock is wrong and training goes on", TWO, (
        ("agent", None, "h-b", 50.0, "clock skew of h-b against h-a: 71.2 s"),
        ("heartbeat", 4, "h-b", 60.0, "step=71 phase=forward last_beat_age_s=0.3 process=alive"),
    ), "CLOCK_SKEW", "continue"),
    Scene("shm is full in the loader", ONE, (
        ("exit", 1, "h-a", 11.0, -7),
    ), "SIGBUS_SHM", "stop", (1,), "h-a"),
    Scene("refused on all ranks of one node", TWO, tuple(
        ("log", rank, "h-b", 5.0, tb("PermissionError: [Errno 13] Permission denied: '/out/x'")) for rank in (4, 5, 6, 7)
    ) + (("heartbeat", 0, "h-a", 9.0, "step=0 phase=init last_beat_age_s=3.0 process=alive"),),
       "PERMISSION", "restart_elsewhere", (4, 5, 6, 7), "h-b"),
    Scene("first cause of a chain", ONE, (
        ("log", 0, "h-a", 5.0, tb("FileNotFoundError: [Errno 2] No such file or directory: '/d/x.bin'")
         + "\n\nDuring handling of the above exception, another exception occurred:\n\n" + tb("RuntimeError: cannot open shard")),
        ("exit", 0, "h-a", 6.0, 1),
    ), "DATA_MISSING", "stop", (0,)),
    Scene("nested traceback of a loader's worker", ONE, (
        ("log", 2, "h-a", 5.0, 'Traceback (most recent call last):\n  File "/app/t.py", line 3, in f\n    for b in dl:\nValueError: Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n  File "/opt/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py", line 351, in _worker_loop\n    data = fetcher.fetch(index)\n  File "/app/ds.py", line 8, in __getitem__\n    raise ValueError("x")\nValueError: x'),
        ("exit", 2, "h-a", 6.0, 1),
    ), "USER_EXCEPTION", "stop", (2,)),
)  # fmt: skip
