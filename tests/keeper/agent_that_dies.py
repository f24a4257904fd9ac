"""An agent with one worker, for tests that kill it: prints the worker's pid and waits.

A line on its standard input lets it end as an agent does whose workers have ended.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

from keeper_fakes import Agent, Place

from everstep.keeper.wire import WorkersEnded, WorkersStarted


def main(folder: str) -> None:
    place = Place(Path(folder))
    agent = Agent(place)
    agent.begin(1, ((0,),))
    worker = subprocess.Popen(
        [sys.executable, "-c", "import threading; threading.Event().wait(60)"],
        start_new_session=True,
        stdout=subprocess.DEVNULL,
    )
    agent.link.send(WorkersStarted({0: worker.pid}))
    print(worker.pid, flush=True)
    if sys.stdin.readline():
        worker.kill()
        worker.wait()
        agent.link.send(WorkersEnded(1))
        agent.leave()
        return
    threading.Event().wait(60)


if __name__ == "__main__":
    main(sys.argv[1])
