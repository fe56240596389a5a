"""The process that forks the workers is killed, and so is a worker: each of them is back. So is a
worker where no process may fork.
"""

from __future__ import annotations

import os
import signal

import psutil
import pytest
from workplace import ENDLESS, SLOW_S, Workplace


def _template(place: Workplace, other_than: int = 0) -> psutil.Process | None:
    agent = psutil.Process(place.pid("agent-0"))
    children = [each for each in agent.children() if each.pid != other_than]
    found = [each for each in children if "daemons.template" in each.cmdline()]
    return found[0] if found else None


@pytest.mark.long
def test_a_worker_is_forked_again_after_its_template_and_itself_were_killed(
    place: Workplace,
) -> None:
    place.task(pause_s=SLOW_S)
    place.job(stop=ENDLESS, workers=2)
    place.start()
    agent, first = place.pid("agent-0"), _template(place)
    assert first is not None
    worker = place.pid("worker-1")
    assert psutil.Process(worker).ppid() == agent, "not the template: it may die"
    first.kill()
    place.until("there is another template", lambda: _template(place, first.pid))
    assert psutil.pid_exists(worker)
    os.kill(worker, signal.SIGKILL)
    place.until("it is back", lambda: place.daemon("worker-1").get("incarnation") == 2)
    place.until_state("running")
    assert any("SIGKILL" in text for text in place.events("exit")), "its exit status is known"
    place.until("no orphan is left as a zombie", lambda: _zombies(agent) == [])
    assert place.dlctl("stop").code == 0
    place.nothing_left()


THREADED = """import threading

threading.Thread(target=threading.Event().wait, daemon=True, name="profiler").start()
"""


def test_where_a_thread_runs_workers_are_started_without_a_template_and_that_is_said_once(
    place: Workplace,
) -> None:
    (place.path / "sitecustomize.py").write_text(THREADED)
    place.env["PYTHONPATH"] = os.pathsep.join([str(place.path), place.env["PYTHONPATH"]])
    place.env["PYTHONNOUSERSITE"] = "1"  # So that all are started, and none is forked for the test.
    place.task(pause_s=SLOW_S)
    place.job(stop=ENDLESS, workers=2)
    place.start()
    place.until_step(10)
    assert _template(place) is None
    os.kill(place.pid("worker-1"), signal.SIGKILL)
    place.until("it is back", lambda: place.daemon("worker-1").get("incarnation") == 2)
    place.until_state("running")
    step = place.run()["step"]
    place.until_step(step + 10)
    said = place.dlctl("logs", "agent-0", "--level", "warning").out.splitlines()
    (line,) = [each for each in said if "workers are started without a template" in each]
    assert "a thread runs" in line
    assert place.dlctl("stop").code == 0
    place.nothing_left()


def _zombies(agent: int) -> list[psutil.Process]:
    children = psutil.Process(agent).children()
    return [each for each in children if each.status() == psutil.STATUS_ZOMBIE]
