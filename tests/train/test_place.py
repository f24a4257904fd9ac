"""Where a worker stands, what it was told, and how SIGTERM is kept: without processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.core.settings import Settings
from everstep.errors import BadName, UsageError
from everstep.train.options import Options, effective
from everstep.train.place import Place, read_place
from everstep.train.run import attach
from everstep.train.stop import TermFlag, Terminated

TORCHRUN = {
    "RANK": "3", "LOCAL_RANK": "1", "GROUP_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "id", "TORCHELASTIC_RESTART_COUNT": "0", "MASTER_ADDR": "host",
    "MASTER_PORT": "29500",
}  # fmt: skip


def place(environment: dict[str, str], attempt: int = 0, nth: int = 0, process: str = "7") -> Place:
    settings = Settings(attempt=attempt)
    return read_place(environment, settings, process=process, ppid=5, nth=nth)


def test_plain_python_is_one_rank_and_each_process_a_start_of_its_own() -> None:
    found = place({})
    assert (found.rank, found.world, found.node, found.ranks_of_node) == (0, 1, 0, ((0,),))
    assert found.agent_pid == 0
    launches = {place({}).launch, place({}, process="8").launch, place({}, nth=1).launch}
    assert len(launches) == 3


def test_torchruns_workers_agree_on_their_start_and_only_they() -> None:
    found = place(TORCHRUN)
    assert (found.rank, found.local_rank, found.node) == (3, 1, 1)
    assert found.ranks_of_node == ((0, 1), (2, 3))
    assert found.nodes == 2
    assert found.node_of_rank == (0, 0, 1, 1)
    neighbour = place({**TORCHRUN, "RANK": "2", "LOCAL_RANK": "0"}, process="8")
    assert neighbour.launch == found.launch
    restarted = {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"}
    assert place(restarted).launch != found.launch
    assert place(TORCHRUN, nth=1).launch != found.launch


def test_torchruns_nodes_of_different_sizes_are_refused() -> None:
    with pytest.raises(UsageError, match="5 ranks cannot stand on nodes of 2 each"):
        place({**TORCHRUN, "WORLD_SIZE": "5"})


def test_an_everstep_agent_says_which_ranks_stand_where() -> None:
    settings = Settings(attempt=6, ranks="0-2,3-4", agent_pid=9)
    found = read_place({**TORCHRUN, "WORLD_SIZE": "5"}, settings, process="7", ppid=5)
    assert found.ranks_of_node == ((0, 1, 2), (3, 4))
    assert found.node_of_rank == (0, 0, 0, 1, 1)
    assert (found.launch, found.agent_pid) == ("attempt-6", 9)


def test_the_environment_goes_before_the_script_and_both_before_the_defaults() -> None:
    options = Options(store="theirs", job="theirs", checkpoint_every="2min", keep_last=9)
    told = {"EVERSTEP_JOB": "told", "EVERSTEP_KEEP_LAST": "4"}
    found = effective(options, told, ["train.py"])
    assert found.job == "told"
    assert found.keep_last == 4
    assert found.store == os.path.abspath("theirs")
    assert found.checkpoint_every == 120.0
    assert found.snapshot_every == Settings().snapshot_every


def test_a_store_url_stays_what_it_is_and_a_path_becomes_absolute() -> None:
    assert effective(Options(store="memory://x"), {}, ["t.py"]).store == "memory://x"
    assert effective(Options(), {}, ["t.py"]).store == os.path.abspath("everstep-store")


def test_the_default_job_is_the_script_with_its_arguments() -> None:
    names = [effective(Options(), {}, line).job for line in (["t.py"], ["t.py", "-x"], ["u.py"])]
    assert len(set(names)) == 3
    assert names[0].startswith("t-")
    assert effective(Options(), {}, ["t.py"]).job == names[0]


def test_bad_options_are_said_by_name() -> None:
    with pytest.raises(UsageError, match="snapshot_every"):
        Options(snapshot_every=-1)
    with pytest.raises(UsageError, match="inexact_data='maybe'"):
        Options(inexact_data="maybe")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="checkpoint_every='soon'"):
        effective(Options(checkpoint_every="soon"), {}, ["t.py"])
    with pytest.raises(BadName, match=r"\.\./up"):
        effective(Options(job="../up"), {}, ["t.py"])


@pytest.fixture
def handler() -> Iterator[list[int]]:
    """A handler of SIGTERM that notes what it was called with."""
    calls: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: calls.append(number))
    yield calls
    signal.signal(signal.SIGTERM, before)


def test_sigterm_is_kept_and_the_handler_that_was_there_is_called(handler: list[int]) -> None:
    flag = TermFlag()
    assert not flag.raised
    signal.raise_signal(signal.SIGTERM)
    assert flag.raised
    assert handler == [signal.SIGTERM]
    flag.close()
    signal.raise_signal(signal.SIGTERM)
    assert handler == [signal.SIGTERM] * 2


def test_a_handler_that_came_later_is_left_alone(handler: list[int], tmp_path: Path) -> None:
    flag = TermFlag()
    later: list[Path] = []
    signal.signal(signal.SIGTERM, lambda *_: later.append(tmp_path))
    flag.close()
    signal.raise_signal(signal.SIGTERM)
    assert (len(later), handler) == (1, [])


def test_before_the_first_step_sigterm_ends_the_wait_at_once(handler: list[int]) -> None:
    flag = TermFlag()
    with pytest.raises(Terminated), flag.at_once():
        signal.raise_signal(signal.SIGTERM)
    assert handler == [signal.SIGTERM]
    with pytest.raises(Terminated), flag.at_once():
        raise AssertionError("it came before, and what would be waited for is not begun")
    flag.close()


def test_two_flags_are_chained_and_closed_in_any_order(handler: list[int]) -> None:
    first, second = TermFlag(), TermFlag()
    first.close()
    signal.raise_signal(signal.SIGTERM)
    assert first.raised
    assert second.raised
    assert handler == [signal.SIGTERM]
    second.close()


def test_object_without_a_keyword_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"attach\(\) was given a PosixPath without a keyword"):
        attach(Path("model"))  # type: ignore[arg-type]
