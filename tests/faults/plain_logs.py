"""Merged logs as people have them: one text, no map of nodes. Invented, in the programs' forms."""

from __future__ import annotations

TABLE = """\
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
pretrain.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-03-11_14:02:51
  host      : tensor07
  rank      : 2 (local_rank: 2)
  exitcode  : {code} (pid: 5531)
  error_file: <N/A>
  traceback : {why}
============================================================
"""

CLOSING = (
    "W0311 14:02:51.100000 5500 torch/distributed/elastic/multiprocessing/api.py:900] Sending process "
    "5530 closing signal SIGTERM\n"
)

WITH_RANKS = (
    "[rank0]:[W311 14:00:00.1 ProcessGroupNCCL.cpp:4115] using GPU 0\n"
    "step 10 loss 5.1\n"
    "[rank2]: Traceback (most recent call last):\n"
    '[rank2]:   File "/scratch/u/pretrain.py", line 88, in <module>\n'
    "[rank2]:     main()\n"
    "step 11 loss 5.0\n"
    '[rank2]:   File "/scratch/u/pretrain.py", line 61, in main\n'
    "[rank2]:     opts[\"warm\"]\n"
    "[rank2]: KeyError: 'warm'\n" + CLOSING + TABLE.format(code=1, why="To enable traceback see: https://x")
)  # fmt: skip

WITHOUT_RANKS = (
    "Traceback (most recent call last):\n"
    '  File "pretrain.py", line 88, in <module>\n    main()\n'
    '  File "/scratch/u/lib/model.py", line 61, in main\n    opts["warm"]\n'
    "KeyError: 'warm'\n"
    "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: 1) local_rank: 2 (pid: 5531) of binary: /usr/bin/python\n"
    + TABLE.format(code=1, why="To enable traceback see: https://x")
)  # fmt: skip

KILLED = CLOSING + TABLE.format(code=-9, why="Signal 9 (SIGKILL) received by PID 5531")
CRASHED = CLOSING + TABLE.format(code=-11, why="Signal 11 (SIGSEGV) received by PID 5531")

JOURNAL = (
    "Mar 11 14:02:48 tensor07 kernel: python invoked oom-killer: gfp_mask=0x1100cca(GFP_HIGHUSER_MOVABLE), order=0, oom_score_adj=0\n"
    "Mar 11 14:02:48 tensor07 kernel: Mem-Info:\n"
    "Mar 11 14:02:48 tensor07 kernel: oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0-1,oom_memcg=/system.slice/job,task_memcg=/system.slice/job,task=python,pid=5531,uid=1000\n"
    "Mar 11 14:02:48 tensor07 kernel: Memory cgroup out of memory: Killed process 5531 (python) total-vm:91822kB, anon-rss:8182kB, file-rss:0kB, shmem-rss:0kB, UID:1000 pgtables:1kB oom_score_adj:0\n"
    + KILLED
)  # fmt: skip

SLURM_SEGV = (
    "3: step 100 loss 2.2\n2: step 100 loss 2.2\n1: step 100 loss 2.2\n"
    "srun: error: cn112: task 3: Segmentation fault (core dumped)\n"
    "srun: Terminating StepId=88123.0\n"
    "slurmstepd: error: *** STEP 88123.0 ON cn111 CANCELLED AT 2026-03-11T14:02:51 ***\n"
    "srun: error: cn111: tasks 0-2: Terminated\n"
)

SLURM_TIME = (
    "0: step 9000 loss 1.9\n1: step 9000 loss 1.9\n"
    "slurmstepd: error: *** JOB 88123 ON cn111 CANCELLED AT 2026-03-11T14:02:51 DUE TO TIME LIMIT ***\n"
    "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n"
    "srun: error: cn111: tasks 0-1: Terminated\n"
)

LABELLED = (
    "0: Traceback (most recent call last):\n"
    '0:   File "/w/t.py", line 7, in <module>\n'
    "1: Traceback (most recent call last):\n"
    '1:   File "/w/t.py", line 7, in <module>\n'
    "0:     import flashy\n1:     import flashy\n"
    "0: ModuleNotFoundError: No module named 'flashy'\n1: ModuleNotFoundError: No module named 'flashy'\n"
    "srun: error: cn111: tasks 0-1: Exited with exit code 1\n"
)

DMESG = (
    "[812.100000] nvidia-nvlink: Nvlink Core is being initialized, major device number 234\n"
    "[9001.551100] NVRM: GPU at PCI:0000:3b:00: GPU-8f1d2c33-1111-2222-3333-444455556666\n"
    "[9001.551133] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"
    "[9001.551200] NVRM: Xid (PCI:0000:3b:00): 154, pid='<unknown>', name=<unknown>, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)\n"
    "[9002.000000] NVRM: Xid (PCI:0000:5e:00): 45, pid=1200, name=python, Ch 00000008\n"
)

DESCRIBE = (
    "Name:             pretrain-worker-1\nStatus:           Failed\nContainers:\n  trainer:\n"
    "    State:          Terminated\n      Reason:       OOMKilled\n      Exit Code:    137\n"
    "Events:\n  Type     Reason     Age   From     Message\n"
    "  Normal   Pulled     10m   kubelet  Container image already present on machine\n"
)

DEEPSPEED = (
    "[2026-03-11 14:02:51,100] [INFO] [launch.py:315:sigkill_handler] Killing subprocess 5530\n"
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB\n"
    "[2026-03-11 14:02:52,100] [ERROR] [launch.py:325:sigkill_handler] ['/usr/bin/python', '-u', 'ds.py', '--local_rank=3'] exits with return code = 1\n"
)

HANG = "".join(
    f"[rank{r}]:[E311 14:02:5{r}.100 ProcessGroupNCCL.cpp:616] [Rank {r}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=55, OpType=ALLGATHER, NumelIn=2, NumelOut=16, Timeout(ms)=600000) ran for 600055 milliseconds before timing out.\n"
    f"[rank{r}]:[E311 14:02:5{r}.200 ProcessGroupNCCL.cpp:1785] [PG 0 (default_pg) Rank {r}] Exception (either an error or timeout) "
    "detected by watchdog at work: 55, last enqueued NCCL work: 58, last completed NCCL work: 54.\n"
    for r in (0, 1, 2)
) + (
    "[rank3]:[E311 14:02:56.200 ProcessGroupNCCL.cpp:1282] [PG 0 (default_pg) Rank 3] Observed flight recorder dump signal from another rank via TCPStore.\n"
    "[rank3]:[E311 14:02:56.300 ProcessGroupNCCL.cpp:1346] [PG 0 (default_pg) Rank 3] Received a dump signal due to a collective timeout from  rank 0 and we will try our best to dump the debug info. Last enqueued NCCL work: 54, last completed NCCL work: 54.This is most likely caused by incorrect usages of collectives\n"
)  # fmt: skip

HYDRA = (
    "[0] n0:135:135 [0] NCCL INFO Connected all rings\n[1] n2:225:225 [0] NCCL INFO Connected all rings\n"
    '[0] step 1\n[1] Traceback (most recent call last):\n[1]   File "/a/t.py", line 4, in f\n[1] IndexError: list index out of range\n'
)

LOGS: tuple[tuple[str, str, str, tuple[int, ...], str | None], ...] = (
    ("torchrun with ranks", WITH_RANKS, "USER_EXCEPTION", (2,), None),
    ("torchrun without ranks", WITHOUT_RANKS, "USER_EXCEPTION", (2,), None),
    ("killed, nobody knows by whom", KILLED, "UNKNOWN_ROOT", (), None),
    ("crashed", CRASHED, "NATIVE_CRASH", (2,), "tensor07"),
    ("journal with a memory kill", JOURNAL, "HOST_OOM_KILL", (2,), "tensor07"),
    ("srun with a crash", SLURM_SEGV, "NATIVE_CRASH", (3,), "cn112"),
    ("srun with a time limit", SLURM_TIME, "TIME_LIMIT", (), None),
    ("srun -l with a missing module", LABELLED, "USER_IMPORT", (), None),
    ("dmesg", DMESG, "XID_79", (), None),
    ("kubectl describe", DESCRIBE, "HOST_OOM_KILL", (), None),
    ("DeepSpeed's launcher", DEEPSPEED, "CUDA_OOM", (3,), None),
    ("ranks in brackets", HYDRA, "USER_EXCEPTION", (1,), None),
    ("a rank that did not join", HANG, "NCCL_WATCHDOG_TIMEOUT", (3,), None),
)
