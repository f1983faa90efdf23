"""A small finished run, as `Run` writes it, for commands that read one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forge_env.config import RunConfig
from forge_env.policy import Reply
from forge_env.run import Run, RunFolder
from forge_env.run.metrics import JSONLMetrics
from forge_env.run.outcome import write_summary
from forge_env.trajectory import Trajectory, Turn
from forge_env.types import FunctionCall, Message, ToolCall

STEPS, GROUPS, MEMBERS = 10, 4, 4
HOSTILE = (
    "<script>alert(1)</script> \x1b]0;title\x07 live\u202elive \ud800 [a](http://x.y) ![b](http://x.y/b.png) $x$ ```"
)


def played(group: int, member: int, version: int, reward: float, said: str = "It is 2.", **changes: Any) -> Trajectory:
    """A training episode."""
    call = ToolCall(id="call_0", function=FunctionCall(name="python", arguments='{"code": "x = 1\\nx + 1"}'))
    turns = [
        Turn(
            [Message(role="user", content="What is 1 + 1?")],
            Reply(Message(role="assistant", tool_calls=[call]), [1] * 9, [2] * 4, [-0.5] * 4, [version] * 4),
            generate_s=0.5,
            step_s=0.25,
            calls_s=[0.21],
        ),
        Turn(
            [Message(role="tool", content=f"2 {said}", tool_call_id="call_0", name="python")],
            Reply(Message(role="assistant", content=said), [3], [4] * 4, [-0.5] * 4, [version] * 4, continues=13),
        ),
    ]
    figures: dict[str, Any] = {
        "turns": turns,
        "reward": reward,
        "metrics": {"solved": reward},
        "terminated": True,
        "wall_s": 1.0,
        "group": group,
        "member": member,
        "started": 1.8e9,
    }
    return Trajectory(f"train-{group}-{member}", "sums", f"train-{group % 8}", **{**figures, **changes})


def make_run(root: Path, said: str = "It is 2.") -> RunFolder:
    """A run that learned: rewards rise, failures get rarer; its agents say `said`."""
    folder = RunFolder(root)
    folder.create()
    config = RunConfig.model_validate({"environment": {"name": "coding_rlvr"}})
    run = Run(config, folder)
    run.loggers.append(JSONLMetrics(folder.metrics, lambda: 60.0))
    folder.config.write_text("schema: 1\nenvironment: {name: coding_rlvr}\nmodel: {path: tiny}\n")
    run.evaluation(0, "eval", 0.4, 64, 0.03)
    for step in range(1, STEPS + 1):
        groups = []
        for group in range((step - 1) * GROUPS, step * GROUPS):
            rewards = [float(member * STEPS < step * MEMBERS) for member in range(MEMBERS)]
            for member, reward in enumerate(rewards):
                limit = {"truncated": True, "truncation": "tool_calls"} if not reward and member % 2 else {}
                run.trajectory(played(group, member, step - 1, reward, said, **limit), "train")
            mean = sum(rewards) / MEMBERS
            episodes = [[str(member), own, own - mean, 8, 2, 0] for member, own in enumerate(rewards)]
            about = {"group": group, "task": f"train-{group % 8}", "version": step - 1, "staleness": 0, "uses": 1}
            groups.append({**about, "episodes": episodes})
        run.trained(step, groups)
        times = {"time/trainer/train": 1.0, "time/trainer/wait for episodes": 3.0, "time/generator/generate": 4.0}
        speeds = {"generator/tokens_per_s": 900.0, "trainer/tokens_per_s": 4000.0, "mismatch/max": 0.5}
        run.log(step, {"reward/mean": mean, "mismatch/mean": 0.01, **speeds, **times})
    run.not_trained(400, "dropped")
    run.evaluation(STEPS, "eval", 0.8, 64, 0.03, {STEPS: 300, STEPS + 1: 100})
    run.facts = {"started": "2026-01-01T00:00:00+00:00", "model": "tiny", "versions": {"python": "3.11"}}
    write_summary(run, "success", "", 60.0)
    run.close()
    folder.release()
    return folder
