"""Further incidents, invented: variants in which the evidence changes what a class does by default."""

from __future__ import annotations

from classify_scenes import ONE, THREE, TWO, WAITS, Scene, closed, gloo, stack, tb, watchdog

BEATS = tuple(
    (
        "heartbeat",
        rank,
        "h-a" if rank < 4 else "h-b",
        90.0,
        "step=71 phase=forward last_beat_age_s=0.3 process=alive",
    )
    for rank in (0, 4)
)
CUDA = "torch.AcceleratorError: CUDA error: "

MORE: tuple[Scene, ...] = (
    Scene("import fails on one node", TWO, tuple(
        ("log", r, "h-b", 3.0, tb("ModuleNotFoundError: No module named 'flash_attn'")) for r in (4, 5, 6, 7)
    ) + BEATS[:1], "USER_IMPORT", "restart_elsewhere", (4, 5, 6, 7), "h-b"),
    Scene("nan stops the run", ONE, (
        ("log", 0, "h-a", 50.0, "step 811 loss nan grad_norm nan"),
        ("log", 0, "h-a", 50.1, tb("RuntimeError: non-finite loss at step 811")), ("exit", 0, "h-a", 51.0, 1),
    ), "NAN_INF", "rollback"),
    Scene("a record cannot be decoded, first time", ONE, (
        ("log", 2, "h-a", 50.0, tb("PIL.UnidentifiedImageError: cannot identify image file '/d/1.jpg'")), ("exit", 2, "h-a", 51.0, 1),
    ), "DATA_CORRUPT", "restart_in_place", (2,)),
    Scene("refused everywhere", ONE, tuple(
        ("log", r, "h-a", 3.0, tb("PermissionError: [Errno 13] Permission denied: '/out'")) for r in range(4)
    ), "PERMISSION", "stop"),
    Scene("illegal instruction", ONE, (
        ("exit", 1, "h-a", 9.0, -4), ("kernel", None, "h-a", 9.0, "traps: python3[7001] trap invalid opcode ip:7f1 sp:7ffd error:0 in libfbgemm.so"),
        ("log", 0, "h-a", 10.0, closed("h-a")),
    ), "NATIVE_CRASH", "restart_in_place", (1,), "h-a"),
    Scene("assert on the device of all ranks", ONE, tuple(
        ("log", r, "h-a", 3.0, "../aten/src/ATen/native/cuda/Loss.cu:242: nll_loss_forward_reduce_cuda_kernel_2d: block: [0,0,0], thread: [3,0,0] Assertion `t >= 0 && t < n_classes` failed.\n" + tb(CUDA + "device-side assert triggered")) for r in range(4)
    ), "DEVICE_ASSERT", "stop"),
    Scene("illegal access on two devices", TWO, (
        ("kernel", None, "h-a", 10.0, "NVRM: Xid (PCI:0000:1b:00): 31, pid=7001, name=python, MMU Fault"),
        ("kernel", None, "h-b", 10.0, "NVRM: Xid (PCI:0000:2a:00): 31, pid=7005, name=python, MMU Fault"),
        ("log", 1, "h-a", 10.1, tb(CUDA + "an illegal memory access was encountered")), ("exit", 1, "h-a", 11.0, 1),
        ("log", 5, "h-b", 10.1, tb(CUDA + "an illegal memory access was encountered")), ("exit", 5, "h-b", 11.0, 1),
    ), "ILLEGAL_ADDR_SW", "stop", (1, 5)),
    Scene("deleted by a person", THREE, (
        ("kubernetes", None, None, 10.0, "audit: user=ada verb=delete resource=pytorchjobs name=lm-1"),
        ("exit", 0, "h-a", 12.0, 143), ("exit", 1, "h-b", 12.0, 143), ("exit", 2, "h-c", 12.0, 143),
    ), "USER_CANCEL", "stop"),
    Scene("the job's deadline", THREE, (
        ("kubernetes", None, None, 10.0, "Warning  DeadlineExceeded  job-controller  Job was active longer than specified deadline"),
        ("exit", 0, "h-a", 12.0, 143), ("exit", 1, "h-b", 12.0, 143),
    ), "TIME_LIMIT", "wait_and_retry"),
    Scene("the store's host is gone", TWO, tuple(
        ("log", r, "h-b" if r > 3 else "h-a", 10.0 + r, f"[rank{r}]:[W1106 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=8, addr=[h-b]:3, remote=[h-a]:29500): failed to recv, got 0 bytes") for r in (1, 4, 5)
    ), "STORE_LOST", "restart_in_place"),
    Scene("a port of an older attempt", ONE, (
        ("log", 0, "h-a", 2.0, tb("torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use")),
        ("exit", 0, "h-a", 3.0, 1),
    ), "PORT_IN_USE", "restart_in_place", (0,), "h-a"),
    Scene("an abort does not return", ONE, (
        ("stack", 1, "h-a", 90.0, stack("pthread_cond_wait (libpthread.so)", "ncclCommAbort (libnccl.so.2)", "_abort (torch/distributed/distributed_c10d.py:2001)")),
        ("exit", 1, "h-a", 95.0, -9), ("agent", None, "h-a", 94.0, "sent SIGKILL to rank 1"),
    ), "ABORT_HANG", "restart_in_place", (1,)),
    Scene("contained error again on the same GPU", ONE, (
        ("agent", None, "h-a", 0.0, "history h-a GPU 0000:47:00: Xid 94 in job vit-2 (1 day ago) and job asr-1 (3 h ago)"),
        ("kernel", None, "h-a", 100.0, "NVRM: Xid (PCI:0000:47:00): 94, pid=7002, name=python, Contained: SM (0x1). RST: No, D-RST: No"),
        ("exit", 2, "h-a", 101.0, 1),
    ), "XID_94", "restart_elsewhere", (2,), "h-a"),
    Scene("GSP times out", ONE, (
        ("gpu", None, "h-a", 0.0, "rank 3: GPU 0000:47:00.0"),
        ("kernel", None, "h-a", 100.0, "NVRM: Xid (PCI:0000:47:00): 119, pid=99, name=nvidia-smi, Timeout after 6s of waiting for RPC response from GPU2 GSP!"),
        ("log", 0, "h-a", 701.0, watchdog(0, 5, 5, 4)),
    ), "XID_109_119_120", "restart_elsewhere", (3,), "h-a"),
    Scene("corrected memory errors while training goes on", TWO, (
        ("kernel", None, "h-a", 50.0, "EDAC MC0: 12 CE memory read error on CPU_SrcID#0_MC#0_Chan#0_DIMM#0"), *BEATS,
    ), "CPU_MCE_DIMM", "continue"),
    Scene("corrected PCIe errors while training goes on", TWO, (
        ("kernel", None, "h-a", 50.0, "pcieport 0000:5d:00.0: AER: Corrected error received: 0000:5d:00.0"), *BEATS,
    ), "PCIE_AER", "continue"),
    Scene("uncorrected DIMM error kills a rank", TWO, (
        ("kernel", None, "h-b", 50.0, "Memory failure: 0x19ab: Killing python:7006 due to hardware memory corruption"),
        ("exit", 6, "h-b", 50.2, -7), ("log", 0, "h-a", 51.0, closed("h-b")),
    ), "CPU_MCE_DIMM", "restart_elsewhere", (4, 5, 6, 7), "h-b"),
    Scene("oops on a node", TWO, (
        ("kernel", None, "h-b", 50.0, "BUG: kernel NULL pointer dereference, address: 0000000000000018\nOops: 0002 [#1] PREEMPT SMP NOPTI"),
        ("log", 0, "h-a", 60.0, closed("10.7.0.12")),
    ), "KERNEL_HANG", "restart_elsewhere", (4, 5, 6, 7), "h-b"),
    Scene("no inodes", TWO, (
        ("log", 4, "h-b", 10.0, tb("OSError: [Errno 28] No space left on device: '/scratch/a'")), ("exit", 4, "h-b", 11.0, 1),
        ("agent", None, "h-b", 12.0, "df -i /scratch: 100 % of inodes used"),
    ), "DISK_FULL", "restart_in_place", (4,)),
    Scene("threads run out on all ranks", ONE, tuple(
        ("log", r, "h-a", 10.0, tb("RuntimeError: can't start new thread")) for r in range(4)
    ), "PROC_LIMITS", "stop"),
    Scene("evicted for its disk", THREE, (
        ("kubernetes", 2, "h-c", 10.0, "Status: Failed\nReason: Evicted\nMessage: The node was low on resource: ephemeral-storage."),
        ("log", 0, "h-a", 11.0, gloo("10.7.0.13")),
    ), "EVICTED_NODE_PRESSURE", "restart_elsewhere", (2,), "h-c"),
    Scene("a node is drained by Slurm", TWO, (
        ("slurm", None, "h-b", 10.0, "scontrol: update node h-b state=drain reason=firmware"),
        ("exit", 4, "h-b", 40.0, -15), ("exit", 5, "h-b", 40.0, -15), ("log", 0, "h-a", 41.0, closed("h-b")),
    ), "API_EVICT_DRAIN", "restart_elsewhere", (4, 5, 6, 7), "h-b"),
    Scene("preempted by the provider", TWO, (
        ("agent", None, "h-b", 10.0, "GET http://metadata.google.internal/computeMetadata/v1/instance/preempted -> TRUE"),
        ("exit", 4, "h-b", 40.0, -15), ("log", 0, "h-a", 41.0, closed("h-b")),
    ), "SPOT_RECLAIM_MAINT", "restart_elsewhere", (4, 5, 6, 7), "h-b"),
    Scene("an image that is nowhere", TWO, (
        ("kubernetes", None, None, 5.0, "Warning  Failed  kubelet  Failed to pull image \"r.io/t:9\": rpc error: code = NotFound desc = failed to pull and unpack image \"r.io/t:9\": r.io/t:9: not found"),
        ("kubernetes", None, None, 9.0, "Warning  Failed  kubelet  Error: ErrImagePull"),
    ), "IMAGE_PULL", "stop"),
    Scene("a command that is not there", ONE, (
        ("kubernetes", None, "h-a", 5.0, "Error: failed to create containerd task: OCI runtime create failed: runc create failed: exec: \"torchrunn\": executable file not found in $PATH: unknown"),
    ), "CONTAINER_CREATE", "stop"),
    Scene("a save hangs on its file system", ONE, (
        ("stack", 0, "h-a", 90.0, stack("fsync (<built-in>:0)", "save (/app/ckpt.py:50)", "main (/app/train.py:9)")),
        ("stack", 1, "h-a", 90.0, WAITS), ("stack", 2, "h-a", 90.0, WAITS), ("stack", 3, "h-a", 90.0, WAITS),
    ), "STORAGE_STALL", "wait_and_retry", (0,)),
    Scene("throttled on one rank", TWO, (
        ("log", 5, "h-b", 10.0, tb("botocore.exceptions.ClientError: An error occurred (SlowDown) when calling the PutObject operation: Please reduce your request rate.")),
        ("exit", 5, "h-b", 11.0, 1), ("log", 0, "h-a", 12.0, closed("h-b")),
    ), "OBJ_THROTTLE", "wait_and_retry"),
    Scene("Lustre evicts a client", TWO, (
        ("kernel", None, "h-b", 9.0, "LustreError: 167-0: lustre-OST0003-osc-ffff: This client was evicted by lustre-OST0003; in progress operations using this service will fail."),
        ("log", 4, "h-b", 10.0, tb("OSError: [Errno 108] Cannot send after transport endpoint shutdown: '/lustre/a'")), ("exit", 4, "h-b", 11.0, 1),
    ), "STALE_MOUNT", "wait_and_retry", (4,), "h-b"),
    Scene("the same native crash on all ranks", ONE, tuple(("exit", r, "h-a", 9.0 + r / 10, -11) for r in range(4)),
          "NATIVE_CRASH", "restart_in_place"),
    Scene("an agent is absent, its node is not ready", THREE, (
        ("log", None, "h-a", 600.0, "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError"),
        ("agent", None, None, 601.0, "rendezvous j round 0: joined h-a h-b, absent h-c"),
        ("kubernetes", None, "h-c", 300.0, "Normal  NodeNotReady  node-controller  Node h-c status is now: NodeNotReady"),
    ), "NODE_NOT_READY", "restart_elsewhere", (2,), "h-c"),
    Scene("an interrupted terminal", ONE, tuple(
        ("log", r, "h-a", 50.0, tb("KeyboardInterrupt")) for r in range(4)
    ) + tuple(("exit", r, "h-a", 51.0, -2) for r in range(4)), "USER_CANCEL", "stop"),
    Scene("two user errors at once", TWO, (
        ("log", 1, "h-a", 50.0, tb("ValueError: a")), ("exit", 1, "h-a", 51.0, 1),
        ("log", 5, "h-b", 50.1, tb("ValueError: a")), ("exit", 5, "h-b", 51.0, 1),
    ), "USER_EXCEPTION", "stop", (1, 5)),
    Scene("survivors fail after the first", TWO, (
        ("log", 1, "h-a", 50.0, tb("IndexError: list index out of range")), ("exit", 1, "h-a", 51.0, 1),
        ("log", 5, "h-b", 55.0, tb("RuntimeError: peer lost, giving up")), ("exit", 5, "h-b", 56.0, 1),
    ), "USER_EXCEPTION", "stop", (1,)),
    Scene("watchdog of a finished run", ONE, (
        ("log", 0, "h-a", 50.0, "Training completed. final checkpoint saved"), ("exit", 0, "h-a", 51.0, 0),
        ("log", 2, "h-a", 700.0, watchdog(2, 9, 9, 8)), ("exit", 2, "h-a", 701.0, -6),
    ), "NCCL_WATCHDOG_TIMEOUT", "continue"),
    Scene("SIGABRT without a word", ONE, (("exit", 2, "h-a", 51.0, -6),), "UNKNOWN_ROOT", "restart_in_place"),
    Scene("code 1 without a word, peers name it", THREE, (
        ("exit", 1, "h-b", 49.9, 1), ("log", 0, "h-a", 50.0, gloo("10.7.0.12")), ("log", 2, "h-c", 50.1, gloo("10.7.0.12")),
    ), "GLOO_CONN_CLOSED", "restart_in_place", (1,)),
    Scene("two Xids on two nodes at once", TWO, (
        ("kernel", None, "h-a", 50.0, "NVRM: Xid (PCI:0000:1b:00): 79, pid=1, name=x, GPU has fallen off the bus."),
        ("kernel", None, "h-b", 50.5, "NVRM: Xid (PCI:0000:1b:00): 48, pid=1, name=x, An uncorrectable double bit error (DBE)"),
        ("exit", 1, "h-a", 51.0, -6), ("exit", 5, "h-b", 51.0, -6),
    ), "UNKNOWN_ROOT", "restart_in_place"),
)  # fmt: skip

SKEWED = (
    ("log", None, "h-a", 40.0, "chronyd[7]: System clock wrong by 300.10 seconds"),
    ("log", 1, "h-a", 50.0, tb("RuntimeError: no peer left")), ("exit", 1, "h-a", 51.0, 1),
    ("log", 5, "h-b", 340.0, tb("KeyError: 'a'")), ("exit", 5, "h-b", 341.0, 1),
)  # fmt: skip

LATER: tuple[Scene, ...] = (
    Scene("a wrong clock orders nothing, peers name the other node", TWO, (
        *SKEWED, ("log", 0, "h-a", 49.0, closed("10.7.0.12")),
    ), "USER_EXCEPTION", "stop", (5,)),
    Scene("a wrong clock orders nothing, nobody is named", TWO, SKEWED, "UNKNOWN_ROOT", "restart_in_place"),
    Scene("the store's host has one rank", THREE, (
        ("log", 1, "h-b", 50.0, "[W TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=8, addr=[h-b]:3, remote=[h-a]:29500): failed to recv, got 0 bytes"),
        ("log", 2, "h-c", 50.0, "[W TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=8, addr=[h-c]:3, remote=[h-a]:29500): failed to recv, got 0 bytes"),
    ), "STORE_LOST", "restart_in_place", (0,)),
    Scene("one stack, and heartbeats of the others", ONE, (
        ("stack", 2, "h-a", 90.0, stack("read (/app/loader.py:8)", "next (/app/train.py:60)")),
        ("heartbeat", 2, "h-a", 90.0, "step=4 phase=data last_beat_age_s=300.0 process=alive"),
        ("heartbeat", 0, "h-a", 90.0, "step=4 phase=all_reduce last_beat_age_s=299.0 process=alive"),
        ("heartbeat", 1, "h-a", 90.0, "step=4 phase=all_reduce last_beat_age_s=299.0 process=alive"),
    ), "HANG_APP", "restart_in_place", (2,)),
    Scene("cordoned while training goes on", TWO, (
        ("kubernetes", None, "h-b", 50.0, "node.Spec.unschedulable: true"), *BEATS,
    ), "API_EVICT_DRAIN", "continue"),
    Scene("not ready for a moment", TWO, (
        ("kubernetes", None, "h-b", 50.0, "Normal  NodeNotReady  node-controller  Node h-b status is now: NodeNotReady"),
        ("kubernetes", None, "h-b", 70.0, "Normal  NodeReady  kubelet  Node h-b status is now: NodeReady"), *BEATS,
    ), "NODE_NOT_READY", "continue"),
    Scene("groups of their own numbers are no mismatch", ONE, tuple(
        ("log", r, "h-a", 700.0, f"[rank{r}]:[E1 ProcessGroupNCCL.cpp:655] [Rank {r}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType={op}, NumelIn=4, NumelOut=4, Timeout(ms)=600000) ran for 600041 milliseconds before timing out.\n[rank{r}]:[E1 ProcessGroupNCCL.cpp:2299] [PG ID {pg} PG GUID {pg}(mesh) Rank {r}]  failure detected by watchdog at work sequence id: 9 PG status: last enqueued work: 9, last completed work: 8")
        for r, op, pg in ((0, "ALLREDUCE", 1), (1, "ALLREDUCE", 1), (2, "BROADCAST", 2), (3, "BROADCAST", 2))
    ), "UNKNOWN_ROOT", "restart_in_place"),
    Scene("ranks that are one work ahead are not culprits", ONE, tuple(
        ("log", r, "h-a", 700.0, watchdog(r, 81, queued, 80)) for r, queued in ((0, 83), (1, 83), (2, 83), (3, 82))
    ), "UNKNOWN_ROOT", "restart_in_place"),
    Scene("out of memory twice at the same step", ONE, (
        ("agent", None, None, 0.0, "attempt 1 failed: rank 2 torch.OutOfMemoryError: CUDA out of memory at step 70"),
        ("log", 2, "h-a", 50.0, "step 70\n" + tb("torch.OutOfMemoryError: CUDA out of memory.")), ("exit", 2, "h-a", 51.0, 1),
    ), "CUDA_OOM", "stop", (2,)),
    Scene("another record than last time", ONE, (
        ("agent", None, None, 0.0, "attempt 1 failed: rank 0 tarfile.ReadError, shard part-01.tar"),
        ("log", 2, "h-a", 50.0, "reading part-77.tar\n" + tb("tarfile.ReadError: unexpected end of data")), ("exit", 2, "h-a", 51.0, 1),
    ), "DATA_CORRUPT", "restart_in_place", (2,)),
)  # fmt: skip
MORE = MORE + LATER

LAST: tuple[Scene, ...] = (
    Scene("heat that slows nobody", TWO, (
        ("gpu", None, "h-b", 80.0, "GPU 2: SW Thermal Slowdown : Active"), *BEATS,
    ), "GPU_THERMAL", "continue"),
    Scene("a port that goes down twice", TWO, (
        ("log", 4, "h-b", 40.0, "NCCL WARN NET/IB : mlx5_1:1 Got async event : port error\nNCCL WARN NET/IB : mlx5_1:1 Got async event : port active\nNCCL WARN NET/IB : mlx5_1:1 Got async event : port error"),
        *BEATS,
    ), "IB_LINK_DOWN", "restart_elsewhere", (4,), "h-b"),
    Scene("a bus error while there is room", ONE, (
        ("exit", 1, "h-a", 9.0, -7), ("agent", None, "h-a", 10.0, "df /dev/shm: size 64G used 2G"),
    ), "NATIVE_CRASH", "restart_in_place", (1,)),
    Scene("more than any node has", ONE, (
        ("kubernetes", None, None, 9.0, "Warning  FailedScheduling  default-scheduler  0/4 nodes are available: 4 Insufficient nvidia.com/gpu."),
        ("kubernetes", None, None, 9.0, "request nvidia.com/gpu: 16; allocatable nvidia.com/gpu per node: 8"),
    ), "UNSCHEDULABLE_QUOTA", "stop"),
    Scene("more than the quota will ever give", ONE, (
        ("kubernetes", None, None, 9.0, "pods \"w-0\" is forbidden: exceeded quota: q, requested: requests.nvidia.com/gpu=8, used: requests.nvidia.com/gpu=0, limited: requests.nvidia.com/gpu=4"),
    ), "UNSCHEDULABLE_QUOTA", "stop"),
    Scene("NaN three times", ONE, (
        ("agent", None, None, 0.0, "attempt 1: NaN at step 70, rolled back to 60\nattempt 2: NaN at step 70, rolled back to 40"),
        ("log", 0, "h-a", 50.0, "step 70 loss nan"), ("exit", 0, "h-a", 51.0, 1),
    ), "NAN_INF", "stop"),
)  # fmt: skip
MORE = MORE + LAST
