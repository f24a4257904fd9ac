"""Further whole incidents, invented: every class with what its evidence may change."""

from __future__ import annotations

from classify_scenes import ONE, THREE, TWO, WAITS, Scene, closed, gloo, stack, tb, watchdog

FOUR = {"h-a": (0, 1), "h-b": (2, 3), "h-c": (4, 5), "h-d": (6, 7)}
CUDA = "torch.AcceleratorError: CUDA error: "
ALIVE = tuple(
    (
        "heartbeat",
        rank,
        "h-a" if rank < 4 else "h-b",
        500.0,
        "step=900 phase=forward last_beat_age_s=0.4 process=alive",
    )
    for rank in range(8)
)


def beat(
    rank: int, node: str, step: int, phase: str, age: float, time: float = 900.0
) -> tuple[str, int, str, float, str]:
    return (
        "heartbeat",
        rank,
        node,
        time,
        f"step={step} phase={phase} last_beat_age_s={age} process=alive",
    )


def broken_store(rank: int, host: str) -> str:
    return (
        f"[rank{rank}]:[W301 10:00:00.1 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=71, addr=[h-x]:51{rank:03d}, "
        f"remote=[{host}]:29500): failed to recv, got 0 bytes"
    )


STRESS: tuple[Scene, ...] = (
    # program
    Scene("an exception in the loader's worker", ONE, (
        ("log", 2, "h-a", 40.0, tb("ValueError: Caught ValueError in DataLoader worker process 3.\nOriginal Traceback (most recent call last):\n  File \"/app/data.py\", line 40, in __getitem__\n    raise ValueError('bad label -1')\nValueError: bad label -1")),
        ("exit", 2, "h-a", 41.0, 1), ("log", 0, "h-a", 60.0, closed("h-a")), ("log", 1, "h-a", 60.0, closed("h-a")),
    ), "USER_EXCEPTION", "stop", (2,)),
    Scene("an exception before watchdogs of another node", TWO, (
        ("log", 6, "h-b", 40.0, tb("KeyError: 'labels'")), ("exit", 6, "h-b", 41.0, 1),
        ("log", 0, "h-a", 641.0, watchdog(0, 7, 7, 6)), ("log", 1, "h-a", 641.0, watchdog(1, 7, 7, 6)), ("exit", 0, "h-a", 643.0, -6),
    ), "USER_EXCEPTION", "stop", (6,)),
    Scene("one assertion on all ranks", TWO, tuple(("log", r, "h-a" if r < 4 else "h-b", 10.0, tb("AssertionError: vocab 50257 is not padded")) for r in range(8)), "USER_ASSERT", "stop"),
    Scene("assertion after which the others lose the peer", THREE, (
        ("log", 1, "h-b", 30.0, tb("AssertionError")), ("log", 0, "h-a", 31.0, closed("10.7.0.12")), ("log", 2, "h-c", 31.0, closed("10.7.0.12")),
    ), "USER_ASSERT", "stop", (1,)),
    Scene("a library is missing in the image", ONE, tuple(("log", r, "h-a", 2.0, tb("ImportError: libnccl.so.2: cannot open shared object file: No such file or directory")) for r in range(4)), "USER_IMPORT", "stop"),
    Scene("checkpoint of another width", ONE, tuple(("log", r, "h-a", 9.0, tb("RuntimeError: Error(s) in loading state_dict for Net:\n\tsize mismatch for fc.weight: copying a param with shape torch.Size([10, 64]) from checkpoint, the shape in current model is torch.Size([20, 64]).")) for r in range(4)), "USER_SHAPE_KEY", "stop"),
    Scene("a key the optimizer state lacks on one rank", TWO, (
        ("log", 5, "h-b", 9.0, tb("KeyError: 'model.layers.3.weight'")), ("exit", 5, "h-b", 10.0, 1), ("log", 0, "h-a", 11.0, closed("h-b")),
    ), "USER_SHAPE_KEY", "stop", (5,)),
    Scene("an option nobody knows", ONE, tuple(("exit", r, "h-a", 3.0, 2) for r in range(4)) + tuple(("log", r, "h-a", 2.5, "usage: t.py [-h] [--lr LR]\nt.py: error: unrecognized arguments: --warmup 10") for r in range(4)), "CONFIG_INVALID", "stop"),
    Scene("one rank has a launch setting the others do not", TWO, (
        ("log", 3, "h-a", 3.0, tb("ValueError: Error initializing torch.distributed using env:// rendezvous: environment variable RANK expected, but not set")), ("exit", 3, "h-a", 3.5, 1),
    ), "CONFIG_INVALID", "stop", (3,)),
    Scene("memory of the device on one rank, late", TWO, (
        ("log", 6, "h-b", 8000.0, "step 7712 loss 2.1\n" + tb("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.10 GiB. GPU 2 has a total capacity of 79.11 GiB of which 1.02 GiB is free.")), ("exit", 6, "h-b", 8001.0, 1),
        ("log", 0, "h-a", 8601.0, watchdog(0, 70, 70, 69)),
    ), "CUDA_OOM", "restart_in_place", (6,)),
    Scene("memory of the device on all ranks", ONE, tuple(("log", r, "h-a", 20.0, tb("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.10 GiB.")) for r in range(4)), "CUDA_OOM", "stop"),
    Scene("device memory, caught and retried, then a real error", ONE, (
        ("log", 1, "h-a", 20.0, "WARNING CUDA out of memory caught, retrying with half of the batch"), ("log", 1, "h-a", 30.0, tb("TypeError: can only concatenate str")), ("exit", 1, "h-a", 31.0, 1),
    ), "USER_EXCEPTION", "stop", (1,)),
    Scene("nan on all ranks", ONE, tuple(("log", r, "h-a", 30.0 + r / 10, "step 71 loss nan\n" + tb("RuntimeError: loss is nan at step 71")) for r in range(4)), "NAN_INF", "rollback"),
    Scene("gradient norm is infinite and the run ends itself", ONE, (
        ("log", 0, "h-a", 30.0, tb("RuntimeError: The total norm of order 2.0 for gradients from `parameters` is non-finite, so it cannot be clipped.")), ("exit", 0, "h-a", 31.0, 1),
    ), "NAN_INF", "rollback"),
    Scene("a spike that comes back", TWO, (
        ("log", 0, "h-a", 400.0, "\n".join(f"step {s} loss {v}" for s, v in ((100, 2.11), (110, 2.10), (120, 2.09), (130, 5.9), (140, 2.12), (150, 2.08)))),
    ) + ALIVE, "LOSS_SPIKE", "continue"),
    Scene("a list of data that is nowhere", TWO, tuple(("log", r, "h-a" if r < 4 else "h-b", 9.0, tb("FileNotFoundError: [Errno 2] No such file or directory: '/lake/v9/index.json'")) for r in range(8)), "DATA_MISSING", "stop"),
    Scene("a damaged record on one rank", TWO, (
        ("log", 4, "h-b", 300.0, tb("zlib.error: Error -3 while decompressing data: incorrect data check")), ("exit", 4, "h-b", 301.0, 1), ("log", 0, "h-a", 302.0, closed("h-b")),
    ), "DATA_CORRUPT", "restart_in_place", (4,)),
    Scene("the same record again", TWO, (
        ("agent", None, None, 0.0, "attempt 1 ended at step 812 on rank 2 with ArrowInvalid; restarted on h-c and h-d"),
        ("log", 4, "h-b", 300.0, "step 812 loss 2\n" + tb("pyarrow.lib.ArrowInvalid: Corrupted row group 3")), ("exit", 4, "h-b", 301.0, 1),
    ), "DATA_CORRUPT", "stop", (4,)),
    # checkpoints and storage
    Scene("newest checkpoint is cut on all ranks", ONE, tuple(("log", r, "h-a", 15.0, tb("RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory")) for r in range(4)), "CKPT_CORRUPT", "rollback"),
    Scene("one shard cannot be read", TWO, (
        ("log", 7, "h-b", 15.0, tb("safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer")), ("exit", 7, "h-b", 15.5, 1),
        ("log", 0, "h-a", 16.0, closed("h-b")),
    ), "CKPT_CORRUPT", "rollback", (7,)),
    Scene("a background save fails, training goes on", TWO, (
        ("log", 0, "h-a", 480.0, "ERROR async checkpoint writer: save of step 800 failed: timed out"),
    ) + ALIVE, "CKPT_SAVE_FAIL", "continue"),
    Scene("a save ends the run", ONE, (
        ("log", 0, "h-a", 480.0, tb("RuntimeError: [enforce fail at inline_container.cc:778] . PytorchStreamWriter failed writing file data/4: file write failed")), ("exit", 0, "h-a", 481.0, 1), ("log", 1, "h-a", 490.0, closed("h-a")),
    ), "CKPT_SAVE_FAIL", "restart_in_place", (0,)),
    Scene("the disk of one node is full", TWO, (
        ("log", 6, "h-b", 480.0, tb("OSError: [Errno 28] No space left on device: '/scratch/cache/x'")), ("exit", 6, "h-b", 481.0, 1), ("log", 0, "h-a", 490.0, closed("h-b")),
    ), "DISK_FULL", "restart_in_place", (6,)),
    Scene("read-only after a broken disk", TWO, (
        ("kernel", None, "h-b", 470.0, "[1.0] EXT4-fs (nvme0n1p1): Remounting filesystem read-only"),
        ("log", 6, "h-b", 480.0, tb("OSError: [Errno 30] Read-only file system: '/scratch/log'")), ("exit", 6, "h-b", 481.0, 1),
    ), "FS_READONLY_IO", "restart_elsewhere", (6,), "h-b"),
    Scene("stale on all nodes", TWO, tuple(("log", r, "h-a" if r < 4 else "h-b", 80.0, tb("OSError: [Errno 116] Stale file handle: '/mnt/c'")) for r in range(8)), "STALE_MOUNT", "wait_and_retry"),
    Scene("fuse is gone on one node", TWO, tuple(("log", r, "h-b", 80.0, tb("OSError: [Errno 107] Transport endpoint is not connected: '/mnt/blob'")) for r in range(4, 8)) + ALIVE[:4],
        "STALE_MOUNT", "restart_elsewhere", (4, 5, 6, 7), "h-b"),
    Scene("reads that do not return", TWO, (
        ("log", 5, "h-b", 900.0, tb("botocore.exceptions.ReadTimeoutError: Read timeout on endpoint URL: \"https://b.s3.amazonaws.com/k\"")), ("exit", 5, "h-b", 901.0, 1),
    ), "STORAGE_STALL", "wait_and_retry", (5,)),
    Scene("rate limit on all ranks", TWO, tuple(("log", r, "h-a" if r < 4 else "h-b", 80.0, tb("botocore.exceptions.ClientError: An error occurred (SlowDown) when calling the GetObject operation (reached max retries: 4): Please reduce your request rate.")) for r in range(8)), "OBJ_THROTTLE", "wait_and_retry"),
    Scene("no right to the bucket", TWO, tuple(("log", r, "h-a" if r < 4 else "h-b", 8.0, tb("botocore.exceptions.ClientError: An error occurred (AccessDenied) when calling the GetObject operation: Access Denied")) for r in range(8)), "OBJ_DENIED", "stop"),
    Scene("a token that ran out after hours", TWO, (
        ("log", 0, "h-a", 43000.0, "checkpoint 8000 uploaded"), ("log", 0, "h-a", 44000.0, tb("botocore.exceptions.ClientError: An error occurred (ExpiredToken) when calling the PutObject operation: The provided token has expired.")), ("exit", 0, "h-a", 44001.0, 1),
    ), "OBJ_DENIED", "restart_in_place", (0,)),
    # crashes
    Scene("a crash in native code", TWO, (
        ("exit", 5, "h-b", 80.0, -11), ("log", 0, "h-a", 81.0, closed("10.7.0.12")), ("log", 1, "h-a", 81.0, closed("10.7.0.12")),
    ), "NATIVE_CRASH", "restart_in_place", (5,), "h-b"),
    Scene("a crash seen through a shell", ONE, (("exit", 2, "h-a", 80.0, 139), ("exit", 1, "h-a", 84.0, 143), ("agent", None, None, 81.0, "rank 2 failed: sent SIGTERM to ranks 0-1 and 3")), "NATIVE_CRASH", "restart_in_place", (2,), "h-a"),
    Scene("shared memory is too small", ONE, (
        ("log", 1, "h-a", 30.0, "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm)."),
        ("log", 1, "h-a", 30.5, tb("RuntimeError: DataLoader worker (pid 881) is killed by signal: Bus error.")), ("exit", 1, "h-a", 31.0, 1),
    ), "SIGBUS_SHM", "stop", (1,), "h-a"),
    Scene("an assertion on a device", ONE, (
        ("log", 3, "h-a", 30.0, "/aten/src/ATen/native/cuda/Indexing.cu:1289: indexSelectLargeIndex: block: [4,0,0], thread: [9,0,0] Assertion `srcIndex < srcSelectDimSize` failed.\n" + tb(CUDA + "device-side assert triggered")),
        ("log", 0, "h-a", 40.0, watchdog(0, 3, 3, 2)), ("exit", 3, "h-a", 31.0, -6),
    ), "DEVICE_ASSERT", "stop", (3,)),
    Scene("limits of open files", TWO, tuple(("log", r, "h-a" if r < 4 else "h-b", 80.0, tb("OSError: [Errno 24] Too many open files: '/d'")) for r in range(8)), "PROC_LIMITS", "stop"),
    # communication
    Scene("a rank issued one collective less", ONE, tuple(("log", r, "h-a", 700.0, watchdog(r, 31, 33, 30)) for r in (0, 2, 3)) + (
        ("log", 1, "h-a", 702.0, "[rank1]:[E301 10:00:00.1 ProcessGroupNCCL.cpp:1800] [PG ID 0 PG GUID 0(default_pg) Rank 1] Observed flight recorder dump signal from another rank via TCPStore.\n[rank1]:[E301 10:00:00.2 ProcessGroupNCCL.cpp:1865] [PG ID 0 PG GUID 0(default_pg) Rank 1] Received a dump signal due to a collective timeout from  rank 0 and we will try our best to dump the debug info. Last enqueued NCCL work: 30, last completed NCCL work: 30."),
    ), "NCCL_WATCHDOG_TIMEOUT", "restart_in_place", (1,)),
    Scene("the flight recorder misses two ranks", TWO, (
        ("log", 0, "h-a", 700.0, watchdog(0, 31, 31, 30)), ("agent", None, None, 720.0, "flight recorder: pg 0 seq 31 all_reduce: missing ranks [6, 7]"),
    ), "NCCL_WATCHDOG_TIMEOUT", "restart_in_place", (6, 7)),
    Scene("everybody waits with equal numbers", TWO, tuple(("log", r, "h-a" if r < 4 else "h-b", 700.0, watchdog(r, 5, 5, 4)) for r in range(8)), "UNKNOWN_ROOT", "restart_in_place"),
    Scene("peers name a node that says nothing", THREE, (("log", 0, "h-a", 50.0, closed("10.7.0.13")), ("log", 1, "h-b", 50.5, closed("10.7.0.13"))), "NCCL_REMOTE_ERROR", "restart_in_place", (2,)),
    Scene("the debug wrapper finds another operation", ONE, tuple(("log", r, "h-a", 60.0, tb(f"RuntimeError: Detected mismatch between collectives on ranks. Rank {r} is running collective: CollectiveFingerPrint(SequenceNumber=12, OpType=ALLREDUCE, TensorShape=[8], TensorDtypes=Float), but Rank 2 is running collective: CollectiveFingerPrint(SequenceNumber=12, OpType=BROADCAST, TensorShape=[8], TensorDtypes=Float).")) for r in (0, 1, 3)) + (
        ("log", 2, "h-a", 60.0, tb("RuntimeError: Detected mismatch between collectives on ranks. Rank 2 is running collective: CollectiveFingerPrint(SequenceNumber=12, OpType=BROADCAST, TensorShape=[8], TensorDtypes=Float), but Rank 0 is running collective: CollectiveFingerPrint(SequenceNumber=12, OpType=ALLREDUCE, TensorShape=[8], TensorDtypes=Float).")),
    ), "COLLECTIVE_MISMATCH", "stop", (2,)),
    Scene("store gone with an exception on its host", TWO, tuple(("log", r, "h-b", 90.0, broken_store(r, "h-a")) for r in range(4, 8)) + (
        ("log", 0, "h-a", 88.0, tb("ZeroDivisionError: division by zero")), ("exit", 0, "h-a", 89.0, 1),
    ), "USER_EXCEPTION", "stop", (0,)),
    Scene("the store's noise after the end", ONE, tuple(("log", r, "h-a", 100.0, "training finished\n" + broken_store(r, "h-a")) for r in (1, 2, 3)) + tuple(("exit", r, "h-a", 101.0, 0) for r in range(4)), "STORE_LOST", "continue"),
    Scene("gloo waits for one", THREE, (
        ("log", 0, "h-a", 1900.0, tb("RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete")),
        ("log", 1, "h-b", 1901.0, gloo("10.7.0.11")),
        beat(0, "h-a", 70, "all_reduce", 1800.0, 1890.0), beat(1, "h-b", 70, "all_reduce", 1800.0, 1890.0), beat(2, "h-c", 69, "data", 1801.0, 1890.0),
    ), "GLOO_TIMEOUT", "restart_in_place", (2,)),
    Scene("a barrier names the ranks", ONE, (
        ("log", 0, "h-a", 90.0, "[rank0]: RuntimeError: [Rank 0]: Ranks 2, 3 failed to pass monitoredBarrier in 30000 ms"),
    ), "GLOO_TIMEOUT", "restart_in_place", (2, 3)),
    Scene("watchdogs that are stuck, one cannot take the lock", ONE, tuple(
        ("log", r, "h-a", 900.0 + r, f"[rank{r}]:[E301 10:00:00.1 ProcessGroupNCCL.cpp:1432] [PG 0 (default_pg) Rank {r}] ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring enqueued collectives." + (" Could not acquire GIL within 300 ms on exit, possible GIL induced hang" if r == 1 else "")) for r in range(4)
    ), "NCCL_HEARTBEAT", "restart_in_place", (1,)),
    Scene("an agent is absent", FOUR, (
        ("log", None, "h-a", 600.0, "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError"), ("log", None, "h-b", 600.5, "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError"),
        ("agent", None, None, 601.0, "rendezvous lm round 1: joined h-a h-b h-d, absent h-c"),
    ), "RDZV_TIMEOUT", "wait_and_retry", (), "h-c"),
    Scene("a pod that found no place behind a rendezvous timeout", FOUR, (
        ("log", None, "h-a", 600.0, "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError"),
        ("kubernetes", None, None, 300.0, "Warning  FailedScheduling  default-scheduler  0/9 nodes are available: 9 Insufficient nvidia.com/gpu."),
    ), "UNSCHEDULABLE_QUOTA", "wait_and_retry"),
    # GPUs
    Scene("a GPU off the bus behind closed connections", TWO, (
        ("gpu", None, "h-b", 0.0, "rank 6: GPU 0000:5d:00.0"), ("kernel", None, "h-b", 49.0, "[1.0] NVRM: Xid (PCI:0000:5d:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."),
        ("log", 0, "h-a", 50.0, closed("10.7.0.12")), ("log", 1, "h-a", 50.0, closed("10.7.0.12")), ("exit", 6, "h-b", 50.0, -6),
    ), "XID_79", "restart_elsewhere", (6,), "h-b"),
    Scene("contained error of one rank", ONE, (
        ("kernel", None, "h-a", 49.0, "[1.0] NVRM: Xid (PCI:0000:5d:00): 94, pid=7002, name=python, Contained: SM (0x1). RST: No, D-RST: No"),
        ("log", 2, "h-a", 49.5, tb(CUDA + "uncorrectable ECC error encountered")), ("exit", 2, "h-a", 50.0, 1),
    ), "XID_94", "restart_in_place", (2,), "h-a"),
    Scene("AMD device hangs", ONE, (
        ("kernel", None, "h-a", 49.0, "[1.0] amdgpu 0000:c3:00.0: amdgpu: ring comp_1.0.0 timeout, signaled seq=4, emitted seq=6\n[1.1] amdgpu 0000:c3:00.0: amdgpu: GPU reset begin!"),
        ("gpu", None, "h-a", 0.0, "rank 1: GPU 0000:c3:00.0"), ("exit", 1, "h-a", 50.0, -6), ("log", 0, "h-a", 60.0, closed("h-a")),
    ), "XID_109_119_120", "restart_elsewhere", (1,), "h-a"),
    Scene("Xid 43 follows an exception", ONE, (
        ("log", 2, "h-a", 48.0, tb("IndexError: list index out of range")), ("exit", 2, "h-a", 49.0, 1),
        ("kernel", None, "h-a", 49.2, "[1.0] NVRM: Xid (PCI:0000:5d:00): 43, pid=7002, name=python, Ch 00000008"),
    ), "USER_EXCEPTION", "stop", (2,)),
    Scene("a remapped row while training goes on", TWO, (("kernel", None, "h-a", 490.0, "[1.0] NVRM: Xid (PCI:0000:5d:00): 63, pid='<unknown>', name=<unknown>, Row Remapper: New row marked for remapping, reset gpu to activate."),) + ALIVE, "XID_63_64", "continue"),
    Scene("the switch fails", TWO, (
        ("kernel", None, "h-b", 49.0, "[1.0] nvidia-nvswitch2: SXid (PCI:0000:07:00.0): 20034, Fatal, Link 28 LTSSM Fault Up"),
        ("log", 5, "h-b", 50.0, tb(CUDA + "unspecified launch failure")), ("log", 6, "h-b", 50.0, tb(CUDA + "unspecified launch failure")),
    ), "NVSWITCH_FM", "restart_elsewhere", (), "h-b"),
    Scene("a device is missing after the restart", TWO, (
        ("agent", None, "h-b", 4.0, "nvidia-smi: 3 of 4 GPUs listed"), ("log", 7, "h-b", 5.0, tb(CUDA + "invalid device ordinal")), ("exit", 7, "h-b", 6.0, 1),
    ), "GPU_LOST", "restart_elsewhere", (7,), "h-b"),
    Scene("heat slows one rank", TWO, (
        ("gpu", 6, "h-b", 900.0, "GPU 0000:5d:00.0 rank 6: HW Thermal Slowdown Active, temperature 93 C, SM 720 MHz"),
    ) + tuple(("steptime", r, "h-a" if r < 4 else "h-b", 900.0, f"window=500 steps mean_step_s=2.0 compute_s={1.9 if r == 6 else 0.9} wait_s={0.02 if r == 6 else 1.0}") for r in range(8)), "GPU_THERMAL", "restart_elsewhere", (6,), "h-b"),
    Scene("a replica with another checksum", ONE, (("agent", None, None, 90.0, "parameter checksum at step 400: rank 0=9f31aa02 rank 1=9f31aa02 rank 2=77b0c1d3 rank 3=9f31aa02"),), "SDC", "rollback", (2,), "h-a"),
    # host
    Scene("killed for the memory of its cgroup", TWO, (
        ("exit", 5, "h-b", 80.0, 137), ("kernel", None, "h-b", 79.9, "[1.0] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=a,mems_allowed=0,oom_memcg=/a,task_memcg=/a,task=python,pid=7005,uid=0\n[1.1] Memory cgroup out of memory: Killed process 7005 (python) total-vm:1kB"),
        ("log", 0, "h-a", 81.0, closed("10.7.0.12")),
    ), "HOST_OOM_KILL", "restart_in_place", (5,), "h-b"),
    Scene("machine check behind timeouts", TWO, (
        ("kernel", None, "h-b", 79.9, "[1.0] mce: [Hardware Error]: CPU 4: Machine Check Exception: 5 Bank 0: be00000000800400\n[1.1] Kernel panic - not syncing: Fatal machine check"),
        ("log", 0, "h-a", 680.0, watchdog(0, 4, 4, 3)),
    ), "CPU_MCE_DIMM", "restart_elsewhere", (4, 5, 6, 7), "h-b"),
    Scene("a fatal PCIe error", TWO, (
        ("kernel", None, "h-b", 79.9, "[1.0] pcieport 0000:5d:00.0: AER: Uncorrected (Fatal) error received: 0000:5e:00.0\n[1.1] NVRM: Xid (PCI:0000:5e:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."),
        ("gpu", None, "h-b", 0.0, "rank 5: GPU 0000:5e:00.0"), ("exit", 5, "h-b", 80.0, -6),
    ), "PCIE_AER", "restart_elsewhere", (5,), "h-b"),
    Scene("a lockup of the kernel", TWO, (
        ("kernel", None, "h-b", 300.0, "[1.0] watchdog: BUG: soft lockup - CPU#11 stuck for 26s! [kworker/11:1:900]"), ("log", 0, "h-a", 880.0, watchdog(0, 4, 4, 3)),
    ), "KERNEL_HANG", "restart_elsewhere", (4, 5, 6, 7), "h-b"),
    Scene("evicted for disk", TWO, (
        ("kubernetes", None, "h-b", 80.0, "Status: Failed Reason: Evicted Message: The node was low on resource: ephemeral-storage."), ("exit", 4, "h-b", 81.0, 137), ("log", 0, "h-a", 82.0, closed("10.7.0.12")),
    ), "EVICTED_NODE_PRESSURE", "restart_elsewhere", (4, 5, 6, 7), "h-b"),
    Scene("the node is gone", TWO, (
        ("kubernetes", None, "h-b", 140.0, "Warning  NodeNotReady  node-controller  Node is not ready\nready: Unknown, reason: NodeStatusUnknown, message: Kubelet stopped posting node status."), ("log", 0, "h-a", 700.0, watchdog(0, 4, 4, 3)),
    ), "NODE_NOT_READY", "restart_elsewhere", (4, 5, 6, 7), "h-b"),
    # scheduler
    Scene("time is up", TWO, (("slurm", None, None, 80.0, "slurmstepd: error: *** JOB 77 ON h-a CANCELLED AT 2026-03-01T10:00:00 DUE TO TIME LIMIT ***"),) + tuple(("exit", r, "h-a" if r < 4 else "h-b", 81.0, -15) for r in range(8)), "TIME_LIMIT", "wait_and_retry"),
    Scene("a step is cancelled", TWO, (("slurm", None, None, 80.0, "slurmstepd: error: *** STEP 77.0 ON h-a CANCELLED AT 2026-03-01T10:00:00 ***"),) + tuple(("exit", r, "h-a" if r < 4 else "h-b", 81.0, -15) for r in range(8)), "USER_CANCEL", "stop"),
    Scene("a step that ends since one task failed", TWO, (
        ("exit", 3, "h-a", 79.0, 1), ("log", 3, "h-a", 78.9, tb("ValueError: x")), ("slurm", None, None, 80.0, "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\nslurmstepd: error: *** STEP 77.0 ON h-a CANCELLED AT 2026-03-01T10:00:00 ***"),
    ) + tuple(("exit", r, "h-a" if r < 4 else "h-b", 81.0, -15) for r in (0, 1, 2, 4, 5, 6, 7)), "USER_EXCEPTION", "stop", (3,)),
    Scene("a task failed without a word, and the step was ended", TWO, (
        ("exit", 3, "h-a", 79.0, 1), ("slurm", None, None, 80.0, "slurmstepd: error: *** STEP 77.0 ON h-a CANCELLED AT 2026-03-01T10:00:00 ***"),
    ) + tuple(("exit", r, "h-a" if r < 4 else "h-b", 81.0, -15) for r in (0, 1, 2, 4, 5, 6, 7)), "UNKNOWN_ROOT", "restart_in_place"),
    Scene("taken for a higher priority", TWO, (
        ("kubernetes", 4, "h-b", 80.0, "type: DisruptionTarget status: \"True\" reason: PreemptionByScheduler message: default-scheduler: preempting to accommodate a higher priority pod"), ("exit", 4, "h-b", 110.0, 143), ("log", 0, "h-a", 111.0, closed("10.7.0.12")),
    ), "PREEMPTED", "wait_and_retry", (4,), "h-b"),
    Scene("a notice of the cloud", TWO, (
        ("agent", None, "h-b", 60.0, "metadata: spot interruption notice: action terminate at 180 s"), ("exit", 4, "h-b", 181.0, -15), ("log", 0, "h-a", 182.0, closed("10.7.0.12")),
    ), "SPOT_RECLAIM_MAINT", "restart_elsewhere", (4, 5, 6, 7), "h-b"),
    Scene("a signal from outside", ONE, (("exit", 1, "h-a", 60.0, 143), ("log", 0, "h-a", 61.0, closed("h-a"))), "SIGTERM_EXTERNAL", "restart_in_place", (1,), "h-a"),
    Scene("the registry is down", FOUR, (("kubernetes", None, "h-c", 60.0, "Warning  Failed  kubelet  Failed to pull image \"reg.lan/lm:1\": rpc error: code = Unavailable desc = 503 Service Unavailable"),), "IMAGE_PULL", "wait_and_retry", (4, 5)),
    Scene("a secret is absent", FOUR, (("kubernetes", None, None, 60.0, "state: waiting: reason: CreateContainerConfigError message: secret \"hub\" not found"),), "CONTAINER_CREATE", "stop"),
    Scene("the control plane is away, training goes on", TWO, (("agent", None, None, 490.0, "API server does not answer since 40 s: dial tcp 10.0.0.1:6443: i/o timeout"),) + ALIVE, "CONTROL_PLANE_LOST", "continue"),
    # hangs
    Scene("one rank stands in the loader", TWO, tuple(("stack", r, "h-a" if r < 4 else "h-b", 900.0, WAITS) for r in (0, 1, 2, 3, 4, 6, 7)) + (
        ("stack", 5, "h-b", 900.0, stack("wait (threading.py:320)", "get (queue.py:171)", "_next_data (torch/utils/data/dataloader.py:1283)", "step (/app/train.py:60)")),
    ), "HANG_APP", "restart_in_place", (5,)),
    Scene("one rank stands in a read of the file system", TWO, tuple(("stack", r, "h-a" if r < 4 else "h-b", 900.0, WAITS) for r in (0, 1, 2, 3, 4, 6, 7)) + (
        ("stack", 5, "h-b", 900.0, stack("nfs_wait_bit_killable (nfs)", "read (/app/data.py:60)")),
    ), "STORAGE_STALL", "wait_and_retry", (5,)),
    Scene("a slow link", TWO, (("agent", None, None, 900.0, "node h-b mlx5_1: out_of_sequence +512331, roce_slow_restart +91002; busbw 41 GB/s of expected 180 GB/s"),) + ALIVE, "ROCE_ECMP_SLOW", "continue"),
    Scene("a port flaps", TWO, (("kernel", None, "h-b", 490.0, "[1.0] mlx5_core 0000:0c:00.0 ens1: Link down\n[3.0] mlx5_core 0000:0c:00.0 ens1: Link up"),) + ALIVE, "IB_LINK_DOWN", "continue"),
    Scene("a port stays down", TWO, (
        ("kernel", None, "h-b", 490.0, "[1.0] mlx5_core 0000:0c:00.0 ens1: Link down"), ("log", 5, "h-b", 495.0, "h-b:7005:99 [1] NCCL WARN NET/IB : Got completion from peer 10.7.0.11<4413> with status=12 opcode=0 len=0 vendor err 129 (Send)"),
        ("exit", 5, "h-b", 496.0, 1),
    ), "IB_LINK_DOWN", "restart_elsewhere", (5,), "h-b"),
)  # fmt: skip
