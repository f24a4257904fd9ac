"""Text that speaks of faults and is none: nobody is stopped or blamed for it."""

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


@pytest.mark.parametrize("text", HARMLESS, ids=lambda text: text[:40])
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
