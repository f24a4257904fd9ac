"""Text that speaks of faults and is none, or of an earlier attempt's: nobody is stopped for it."""

from __future__ import annotations

import pytest
from classify_scenes import Scene, tb

from everstep.faults.catalog import load
from everstep.faults.judge import judge
from everstep.faults.read import log
from everstep.faults.records import UNKNOWN, Incident, Signal

HARMLESS = (
    "2026-03-11 14:00:01 WARNING urllib3.connectionpool: Retrying (Retry(total=4)) after connection broken by 'ReadTimeoutError(\"x\")': /bucket/part-1",
    "DEBUG botocore.retryhandler: retry needed, retryable exception caught: SlowDown",
    "[W socket.cpp:663] [c10d] The client socket has failed to connect to [localhost]:29500 (errno: 99 - Cannot assign requested address).",
    "Could not load dynamic library 'libnvinfer.so.7'; dlerror: libnvinfer.so.7: cannot open shared object file: No such file or directory",
    "gpu-1:12:90 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.",
    "Exception ignored in: <function _MultiProcessingDataLoaderIter.__del__ at 0x7f>\nTraceback (most recent call last):\n  File \"/x/dataloader.py\", line 1604, in __del__\n    self._shutdown_workers()\nAssertionError: can only test a child process",
    "args: Namespace(nan_guard=True, on_oom='retry', invalid_option_policy='warn', kill_on_bad_exit=1)",
    "INFO: if you see CUDA out of memory, lower --batch-size",
    "WARNING: 2 invalid arguments were ignored",
    "resumed after OSError: attempt succeeded",
    "nvidia-smi: HW Slowdown : Not Active, ECC errors 0",
    "INFO checkpoint: 0 corrupt shards, all digests match",
    "INFO found spot capacity; node pool ends with -a",
)  # fmt: skip

SCARY = (
    "INFO: NCCL_DEBUG=WARN TORCH_NCCL_ASYNC_ERROR_HANDLING=1 TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=600",
    "Config: {'on_nan': 'skip', 'oom_policy': 'halve', 'timeout_s': 1800, 'max_retries': 5, 'retry_on': ['ConnectionError', 'ReadTimeout', 'SlowDown']}",
    "  preemption_signal: SIGUSR1\n  requeue_on_preemption: true\n  spot: true",
    "[2026-03-01 10:00:00] WARNING retrying upload of checkpoint step 100 (attempt 2/5): ReadTimeoutError",
    "[2026-03-01 10:00:05] INFO upload of checkpoint step 100 succeeded after 2 attempts",
    "tests/test_oom.py::test_cuda_out_of_memory_is_caught PASSED",
    "tests/test_nan.py::test_loss_nan_raises PASSED",
    "PASSED tests/test_ckpt.py::test_truncated_checkpoint_raises_UnpicklingError",
    "nvidia-smi: GPU 0: ECC errors: 0, retired pages: 0, row remap failures: No",
    "dcgmi health: GPU 3: Healthy. No XID errors in the last 24 h",
    "Node conditions: MemoryPressure=False DiskPressure=False PIDPressure=False Ready=True",
    "conditions: type: DiskPressure status: \"False\" reason: KubeletHasNoDiskPressure",
    "resuming: no checkpoint found in /ckpt, starting from scratch",
    "Warning: file /data/x.json does not exist, using defaults",
    "OSError handled: [Errno 2] No such file or directory: '/tmp/lock' (ignored)",
    "Loss scaler reducing loss scale to 16384.0 after inf gradient",
    "grad_norm=inf at step 3 (skipped, fp16 warm-up)",
    "eval: best_loss=inf -> 2.31",
    "UserWarning: CUDA initialization: The NVIDIA driver on your system is too old (found version 11040). Proceeding on CPU.",
    "This script will raise ValueError if the batch is empty.",
    "def forward(self): raise NotImplementedError('abstract')",
    "# if you get 'CUDA out of memory', reduce --batch_size; for 'Address already in use' change --master_port",
    "help: --on-oom {stop,retry}  what to do on CUDA out of memory",
    "[W] TCPStore: connection to master not yet established, retrying in 1 s",
    "[W301 10:00:00.1 socket.cpp:755] [c10d] The client socket cannot be initialized to connect to [h]:29500 (errno: 97 - Address family not supported by protocol).",
    "[rank0]:[W301 10:00:00.1 ProcessGroupNCCL.cpp:1250] Warning: WARNING: process group has NOT been destroyed before we destruct ProcessGroupNCCL. On normal program exit, the application should call destroy_process_group",
    "W0301 10:00:00.1 torch/distributed/run.py:793] Setting OMP_NUM_THREADS environment variable for each process to be 1 in default, to avoid your system being overloaded",
    "NCCL INFO NET/IB : No device found.",
    "NCCL INFO Failed to open libibverbs.so[.1]",
    "NCCL INFO comm 0x5 rank 3 nranks 8 - Abort COMPLETE",
    "NCCL INFO misc/socket.cc:47 -> 3",
    "[W] Unable to load tokenizer fast version, falling back to slow",
    "ImportError: cannot import name 'x' (optional), continuing without it",
    "flash_attn not installed (No module named 'flash_attn'); using sdpa",
    "kubelet: liveness probe failed: timeout, restarting sidecar metrics-exporter",
    "other job 812 on this node: CUDA out of memory",
    "systemd[1]: nvidia-persistenced.service: Deactivated successfully.",
    "EXT4-fs (sda1): re-mounted. Opts: errors=remount-ro",
    "AER: Corrected error received: 0000:5e:00.0",
    "mce: CPU0: Thermal monitoring enabled (TM1)",
    "Preemption notice handler installed; polling http://169.254.169.254/latest/meta-data/spot/instance-action (404 = no notice)",
    "slurm: job 77 time limit is 24:00:00, 3 h left",
    "wandb: ERROR Error while calling W&B API: 502 Bad Gateway, retrying",
    "wandb: Network error (ReadTimeout), entering retry loop.",
    "[Errno 32] Broken pipe ignored in atexit",
    "Skipping corrupt sample 1182 (PIL.UnidentifiedImageError)",
    "Found 3 truncated images, skipping them",
    "dataset filtered: 12 records with JSONDecodeError dropped",
    "gpu temperature 61 C, no thermal throttling",
    "health check passed: disk 41 % used, inodes 3 % used, no read-only mounts",
    "Scheduler: priority=high preemptible=false deadline=none",
    "[deepspeed] [INFO] [stage3.py] CPU adam: no overflow, clip 1.0",
    "loss 2.31 grad_norm 0.9 nan_count 0 inf_count 0 skipped 0",
    "docs: see https://pytorch.org/docs/stable/elastic/errors.html for ChildFailedError",
    "RuntimeWarning: invalid value encountered in divide",
    "FutureWarning: torch.load with weights_only=False: may unpickle arbitrary code (UnpicklingError in a future release)",
    "segfault handler registered (faulthandler)",
    "Registered signal handlers for SIGTERM, SIGINT",
    "cgroup memory limit 64 GiB, oom_kill 0",
    "memory.events: low 0 high 12 max 0 oom 0 oom_kill 0",
)  # fmt: skip


@pytest.mark.parametrize("text", HARMLESS + SCARY, ids=lambda text: text[:40])
def test_harmless_text(text: str) -> None:
    verdict = judge(log("x", f"step 1 loss 2.1\n{text}\nstep 2 loss 2.0\n".encode()), load())
    assert verdict.fault == UNKNOWN or verdict.action == "continue", verdict
    assert not verdict.root_ranks


def test_caught_exception_of_a_rank_that_ended_well() -> None:
    signals = (
        Signal("log", tb("ValueError: odd sample"), 1, "h-a", 5.0),
        Signal("exit", "pid 8: exited with code 0", 1, "h-a", 90.0, exit_code=0),
    )
    verdict = judge(Incident("x", signals, {"h-a": (0, 1)}), load())
    assert verdict.action != "stop"
    assert not verdict.root_ranks


def test_error_of_the_program_behind_a_retry_is_found() -> None:
    text = "WARNING Retrying after ReadTimeoutError\n" + tb("KeyError: 'x'")
    assert judge(log("x", text.encode()), load()).fault == "USER_EXCEPTION"


def test_logs_of_json_objects() -> None:
    line = '{"log":"[rank1]: ValueError: x\\n","stream":"stderr","time":"2026-03-11T00:00:00Z"}'
    verdict = judge(log("x", line.encode()), load())
    assert (verdict.fault, verdict.root_ranks) == ("USER_EXCEPTION", (1,))


def test_several_nodes_of_one_pod_blame_the_pod() -> None:
    gone = "NodeNotReady: Kubelet stopped posting node status."
    nodes = {"n-1": (0, 1), "n-2": (2, 3), "n-3": (4, 5)}
    incident = Incident(
        "x",
        (
            Signal("kubernetes", gone, None, "n-1", 10.0),
            Signal("kubernetes", gone, None, "n-2", 200.0),
        ),
        nodes,
        pods={"n-1": "rack-a", "n-2": "rack-a", "n-3": "rack-b"},
    )
    verdict = judge(incident, load())
    assert (verdict.root_domain, verdict.root_node) == ("pod", None)
    assert verdict.root_ranks == (0, 1, 2, 3)


def test_f1_a_tie_blames_nobody() -> None:
    scene = Scene("tie", {"h-a": (0,), "h-b": (1,)}, (("exit", 1, "h-b", 9.0, -9),), UNKNOWN, "")
    verdict = judge(scene.incident(), load())
    assert (verdict.fault, verdict.domain, verdict.root_ranks, verdict.root_node) == (
        UNKNOWN, "unknown", (), None,
    )  # fmt: skip


STEPS = "".join(f"step {step} loss 2.1\n" for step in range(10, 20))


def test_an_error_that_its_rank_went_on_after_ended_nothing() -> None:
    """Its own output tells of further steps, and nobody tells of an end."""
    text = "step 1 loss 2.2\n" + tb("ValueError: odd sample") + "\n"
    assert judge(log("x", text.encode()), load()).fault == "USER_EXCEPTION"
    assert judge(log("x", (text + STEPS).encode()), load()).fault == UNKNOWN
    again = text + STEPS + tb("KeyError: 'x'")
    assert judge(log("x", again.encode()), load()).message == "KeyError: 'x'"


def test_what_is_raised_while_something_ignored_is_handled_is_ignored_too() -> None:
    deeper = "\n\nDuring handling of the above exception, another exception occurred:\n\n" + tb(
        "RuntimeError: cannot close the file"
    )
    ignored = "Exception ignored in: <function Loader.__del__ at 0x7f>\n" + tb("KeyError: 'x'")
    assert judge(log("x", (ignored + deeper).encode()), load()).fault == UNKNOWN
    raised = judge(log("x", (tb("KeyError: 'x'") + deeper).encode()), load())
    assert raised.fault == "USER_EXCEPTION"


RESTARTS = (
    "[2026-03-01 10:00:00,100] torch.distributed.elastic.agent.server.api: [INFO] [default] Worker group FAILED. 2/3 attempts left; will restart worker group",
    "INFO:torch.distributed.elastic.agent.server.api:[default] Starting worker group",
    "attempt 1 ended: rank 2 ended with code 1; restarting",
    "everstep 10:00:00 decided: restart on the same nodes as attempt 2, because a restart may help",
)


@pytest.mark.parametrize("mark", RESTARTS)
def test_f1_the_failure_of_an_earlier_attempt_is_not_blamed_for_the_last(mark: str) -> None:
    first = "[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.\n"
    second = "[rank1]: step 4 loss 2\n[rank1]: KeyError: 'labels'\n"
    verdict = judge(log("x", f"{first}{mark}\n{second}".encode()), load())
    assert (verdict.fault, verdict.root_ranks) == ("USER_EXCEPTION", (1,))
    only = judge(log("x", f"{first}{mark}\n[rank1]: step 4 loss 2\n".encode()), load())
    assert (only.fault, only.root_ranks) == ("CUDA_OOM", (2,))
