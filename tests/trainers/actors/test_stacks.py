"""What a process is at that does not answer: its stack, or that it was stopped."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("monarch")

from tests.trainers.actors.signals import stop
from trainers.actors.remote import result
from trainers.actors.stacks import WAITS, in_words, look_at_processes
from trainers.loop.stack import prepare_controller

IDLE = """Thread 0x1 (most recent call first):
  File "{stdlib}/selectors.py", line 468 in select
  File "{stdlib}/asyncio/base_events.py", line 1884 in _run_once
"""
WAITING = """
Thread 0x2 (most recent call first):
  File "{stdlib}/threading.py", line 320 in wait
  File "/src/trainers/engine.py", line 12 in take
  File "/src/trainers/engine.py", line 40 in serve
  File "{stdlib}/threading.py", line 982 in run
"""
BUSY = """
Current thread 0x3 (most recent call first):
  File "/src/env.py", line 7 in solve
  File "{stdlib}/asyncio/events.py", line 80 in _run
"""


@pytest.mark.parametrize(
    ("stacks", "words"),
    [
        ("", WAITS),
        (IDLE, WAITS),
        (IDLE + WAITING, "waits in take (engine.py:12) < serve (engine.py:40)"),
        (IDLE + BUSY + WAITING, "is in solve (env.py:7)"),
    ],
    ids=["none", "idle", "waiting", "busy"],
)
def test_the_thread_that_says_most_is_shown(stacks: str, words: str) -> None:
    assert in_words(stacks.replace("{stdlib}", os.path.dirname(os.__file__))) == words


@pytest.mark.slow
@pytest.mark.stack
async def test_a_process_that_does_not_answer_is_named_with_its_stack() -> None:
    """Whether it holds its event loop up or is stopped; one that only waits to be called is told apart."""
    prepare_controller()
    from tests.trainers.actors.stuck import Stuck
    from trainers.actors.processes import survive_deaths

    survive_deaths()
    actors = [await Stuck.options(mesh_name=name).as_actor() for name in ("idle", "held", "stopped")]
    try:
        idle, held, stopped = [(await result(actor.process_id.call_one())) for actor in actors]
        held_up = actors[1].hold_up.call_one()
        stop(stopped)
        while "count_sheep" not in str(found := {each.pid: each for each in await look_at_processes()}):
            pass  # until the call has arrived
        assert found[idle].name.startswith("idle")
        assert found[idle].doing == WAITS
        assert "run_forever" in found[idle].stacks
        assert found[held].name.startswith("held")
        assert found[held].doing.startswith("is in count_sheep (stuck.py:")
        assert found[stopped].name.startswith("stopped")
        assert "is stopped, by SIGSTOP" in found[stopped].doing
        del held_up
    finally:
        for actor in actors:
            await Stuck.shutdown(actor, dead=actor is not actors[0])
