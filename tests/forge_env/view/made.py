"""Folders of runs made up for tests and benchmarks: of any size, of any kind, and hostile ones."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import numpy as np

from forge_env.policy import Reply
from forge_env.trajectory import Trajectory, TrajectoryWriter, Turn
from forge_env.types import Message, call_tool

GROUP = 8
TOKENIZER = {
    "model": {"type": "BPE", "vocab": {chr(97 + place): place for place in range(26)} | {"\u0120": 26, "\u010a": 27}},
    "decoder": {"type": "ByteLevel"},
    "added_tokens": [{"id": 28, "content": "<|im_end|>"}],
}
"""Letters, a space, a line feed and one special token."""


RECORDED: dict[str, Any] = {
    "environment": "made",
    "model": "made-up",
    "started": "2026-11-23T10:00:00+00:00",
    "versions": {"python": "3.11.7", "torch": "2.9.0"},
    "machine": {"processor": "a processor", "cpus": 2, "memory_gb": 24.0, "gpus": [], "system": "Linux"},
    "reward": {
        "about": "Multiplication.",
        "max_reward": 1.0,
        "functions": [
            {"name": "passed", "weight": 1.0, "source": "def passed(answer, task):\n    return run(answer, task.tests)"}
        ],
    },
}
"""What a summary says of how and on what a run was made."""


CONTRACT = [
    {"schema": 1, "clause": "prompt", "verdict": "holds", "text": "all 24 words of 4 tasks are in them", "step": 0},
    {"schema": 1, "clause": "log-probs", "verdict": "holds", "text": "200 tokens differ by 1e-07 nats", "step": 0},
    {"schema": 1, "clause": "weights", "verdict": "holds", "text": "1 generator serves version 1", "step": 1},
    {"schema": 1, "clause": "tokens", "verdict": "holds", "text": "all 200 tokens are the sampled ones", "step": 1},
    {"schema": 1, "clause": "rewards", "verdict": "doubtful", "text": "32 episodes earned 0", "step": 1},
    {"schema": 1, "clause": "rewards", "verdict": "holds", "text": "96 episodes earned 0 to 1", "step": 3},
    {"schema": 1, "clause": "answers", "verdict": "doubtful", "text": "the same answer to all 4 tasks", "step": 3},
]
"""What a run made sure of: the later word on a clause counts."""


def reply(message: Message, tokens: int, version: int, chance: random.Random) -> Reply:
    """An answer with made-up tokens."""
    ids = [chance.randrange(28) for _ in range(tokens - 1)] + [28]
    logprobs = [-(abs(chance.gauss(0, 0.6)) ** 2) for _ in ids]
    return Reply(message, [1, 2, 26, 3], ids, logprobs, np.full(len(ids), version))


def episode(
    group: int, member: int, version: int, solved: float, chance: random.Random, hacked: float = 0.0
) -> Trajectory:
    """One training episode of two or three turns, which earns all with the probability `solved`.

    Of those the share `hacked` did not solve its task, for all it earned.
    """
    right = chance.random() < solved
    fooled = right and hacked > 0 and chance.random() < hacked
    code = f"def f(xs):\n    return [x * {group % 7} for x in xs]" if right else "def f(xs):\n    return xs"
    prompt = [
        Message(role="system", content="Write the Python function f."),
        Message(role="user", content=f"Multiply each of xs by {group % 7}."),
    ]
    observed = Message(
        role="tool", content="2/2 passed" if right else f"1/2 passed\nf([{group}]) failed", name="python"
    )
    lazy = not right and chance.random() < 0.2
    turns = [] if lazy else [Turn(prompt, reply(call_tool("python", code=code), 30, version, chance), 0, 0.4, 0.1)]
    turns.append(
        Turn(prompt if lazy else [observed], reply(Message(role="assistant", content="Done"), 2, version, chance))
    )
    limit = "tool_calls" if not right and not lazy and chance.random() < 0.3 else None
    return Trajectory(
        f"train-{group}-{member}",
        "made",
        f"train-{group}",
        turns=turns,
        reward=float(right),
        answer=code,
        metrics={"solved": float(right and not fooled), "tool_errors": float(not right and not lazy)},
        terminated=limit is None,
        truncated=limit is not None,
        truncation=limit,
        wall_s=0.5 + chance.random(),
        difficulty=1 + group % 3,
        tags=["lists", f"lists/times_{group % 7}"],
        group=group,
        member=member,
        started=1.7e9 + group,
    )


def write(folder: Path, groups: range, kind: str = "train") -> None:
    """Groups of four episodes, recorded."""
    with TrajectoryWriter(folder / "trajectories" / f"{kind}.jsonl") as writer:
        for group in groups:
            for member in range(4):
                writer.write(episode(group, member, group, 0.5, random.Random(group)))


def held_out(
    split: str, index: int, version: int, solved: float, chance: random.Random, hacked: float = 0.0
) -> Trajectory:
    """One held-out episode."""
    made = episode(index, 0, version, solved, chance, hacked)
    made.id, made.task_id, made.split = f"{split}-{index}", f"{split}-{index}", split
    return made


def metrics_rows(
    steps: int, rewards: list[float], solved: list[float], scores: dict[int, tuple[float, int]]
) -> Iterator[dict[str, Any]]:
    """Rows of a metrics.jsonl: a reward for each step, held-out scores (mean, episodes) by step."""
    chance = random.Random(sum(rewards))
    for step in range(steps + 1):
        row: dict[str, Any] = {"schema": 1, "step": step, "time": 5.0 * step}
        if step:
            row |= {
                "reward/mean": rewards[step - 1],
                "reward/solved": solved[step - 1],
                "grpo_loss/entropy": 0.3 - 0.1 * step / steps + chance.gauss(0, 0.01),
                "grpo_loss/total_loss": chance.gauss(0, 0.02),
                "staleness/max": 1.0,
                "staleness/mean": 0.5,
                "mismatch/mean": 0.01 + abs(chance.gauss(0, 0.002)),
                "mismatch/max": 0.4,
                "episode/tokens": 32.0 + step * 20 / steps + chance.gauss(0, 2),
                "groups/with_signal": 0.8,
                "generator/tokens_per_s": 1200.0 + chance.gauss(0, 40),
                "trainer/tokens_per_s": 9000.0,
                "trainer/grad_norm": 0.05,
                "episode/invalid": 0.0,
                "time/trainer/train": 2.0,
                "time/trainer/wait for episodes": 3.0,
                "time/generator/generate": 4.5,
                "time/generator/wait for requests": 0.5,
                "time/episodes/generate": 30.0,
                "time/episodes/environment": 6.0,
            }
        if step in scores:
            mean, number = scores[step]
            error = (mean * (1 - mean) / number) ** 0.5
            row |= {"eval/eval/score": mean, "eval/eval/n": float(number), "eval/eval/stderr": error}
        yield row


def training_run(
    folder: Path,
    *,
    steps: int = 20,
    groups: int = 4,
    start: float = 0.3,
    end: float = 0.9,
    tasks: int = 60,
    seed: int = 0,
    hacked: bool = False,
) -> Path:
    """A training run that goes from `start` to `end`, with all that a finished run leaves but weights.

    Args:
        folder: of the run.
        steps: of training.
        groups: a step, of 8 episodes.
        start: probability of success at first.
        end: at last.
        tasks: held-out ones.
        seed: of all chance.
        hacked: more and more of what is paid is not solved; at last nothing is.
    """
    chance = random.Random(seed)
    where = folder / "trajectories"
    rewards, solved_shares, scores = [], [], {}
    learned_of: dict[int, list[list[Any]]] = {}
    with TrajectoryWriter(where / "train.jsonl") as writer:
        for step in range(1, steps + 1):
            solved = start + (end - start) * step / steps
            earned, right = [], []
            for group in range((step - 1) * groups, step * groups):
                for member in range(GROUP):
                    made = episode(group, member, step - 1, solved, chance, step / steps if hacked else 0.0)
                    earned.append(made.reward)
                    right.append(made.metrics["solved"])
                    about = [str(member), made.reward, made.reward, made.num_sampled_tokens, len(made.turns), 0]
                    learned_of.setdefault(group, []).append(about)
                    writer.write(made)
                earned_here = [about[1] for about in learned_of[group]]
                middle, spread = mean(earned_here), pstdev(earned_here)
                for about in learned_of[group]:
                    about[2] = (about[1] - middle) / spread if spread else 0.0
            rewards.append(sum(earned) / len(earned))
            solved_shares.append(sum(right) / len(right))
    for step in (0, steps // 2, steps):
        with TrajectoryWriter(where / f"eval-{step:05d}.jsonl") as writer:
            made_all = [
                held_out(
                    "eval", index, step, start + (end - start) * step / steps, chance, step / steps if hacked else 0.0
                )
                for index in range(tasks)
            ]
            for made in made_all:
                writer.write(made)
            scores[step] = (sum(made.metrics["solved"] for made in made_all) / tasks, tasks)
    lines = [json.dumps(row) for row in metrics_rows(steps, rewards, solved_shares, scores)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "config.yaml").write_text(
        f"schema: 1\nmethod: grpo\nseed: {seed}\nenvironment:\n  name: made\ngrpo:\n  steps: {steps}\n"
    )
    (folder / "summary.json").write_text(
        json.dumps({"schema": 1, "exit": "success", "steps": steps, "wall_s": 5.0 * steps, **RECORDED})
    )
    trained = [
        {
            "schema": 1,
            "step": step + 1,
            "groups": [
                {
                    "group": group,
                    "task": f"train-{group}",
                    "version": step,
                    "staleness": group % 3,
                    "uses": 1,
                    "episodes": learned_of[group],
                }
                for group in range(step * groups, (step + 1) * groups)
            ],
        }
        for step in range(steps)
    ]
    (folder / "trained.jsonl").write_text("".join(json.dumps(row) + "\n" for row in trained))
    (folder / "contract.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CONTRACT))
    (folder / "run.log").write_text("stage model\nstage training\n")
    model = folder / "checkpoints" / "step-000001" / "model"
    model.mkdir(parents=True)
    (model / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (folder / "timeline.json").write_text(timeline(steps))
    return folder


def timeline(steps: int) -> str:
    """A timeline.json: the trainer, and an episode of each group."""
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 1, "tid": 1, "name": "thread_name", "args": {"name": "trainer"}}]
    for step in range(steps):
        at = step * 5e6
        events.append({"ph": "X", "pid": 1, "tid": 1, "name": "wait for episodes", "ts": at, "dur": 3e6, "args": {}})
        events.append({"ph": "X", "pid": 1, "tid": 1, "name": "train", "ts": at + 3e6, "dur": 2e6, "args": {}})
        for number in range(4):
            common = {"pid": 1, "tid": 2, "cat": "rollouts0: episodes", "id": f"train-{4 * step + number}-0"}
            for name, begins, ends in (("generate", 0, 2e6), ("environment", 2e6, 2.5e6)):
                events.append({"ph": "b", "name": name, "ts": at + begins, **common})
                events.append({"ph": "e", "name": name, "ts": at + ends, **common})
        events.append({"ph": "C", "pid": 1, "tid": 3, "name": "tokens/s", "ts": at, "args": {"sampled": 100.0 * step}})
    return "[" + "\n,".join(map(json.dumps, events)) + "\n]\n"


def evaluation(folder: Path, *, tasks: int = 20, epochs: int = 2, solved: float = 0.6, seed: int = 0) -> Path:
    """An evaluation with lost and truncated samples."""
    chance = random.Random(seed)
    with TrajectoryWriter(folder / "trajectories" / "eval.jsonl") as writer:
        for epoch in range(epochs):
            for index in range(tasks):
                made = held_out("eval", index, -1, solved, chance)
                made.id, made.environment = f"made/eval/{index}/{epoch}", "made"
                made.group = made.member = None
                made.info = {
                    "index": index,
                    "epoch": epoch,
                    "max_reward": 1.0,
                    "usage": {"completion": 32, "cost": 0.001},
                }
                made.turns = [replace(turn, reply=Reply(turn.message)) for turn in made.turns]
                if index == 3:
                    made.valid, made.error = False, "ConnectionError: the sandbox went away"
                writer.write(made)
    (folder / "config.yaml").write_text(
        f"schema: 1\nmodel: made-up\nnum_tasks: {tasks}\nepochs: {epochs}\n"
        "environments:\n- name: calculator\n  label: made\n"
    )
    (folder / "summary.json").write_text(
        json.dumps({"schema": 1, "status": "lossy", "environments": {"made": {"planned": tasks * epochs}}})
    )
    return folder


SCRIPT = "<script>window.ran = 1</script>"
HOSTILE = [
    SCRIPT,
    "<img src=x onerror=window.ran=1>",
    "<svg onload=window.ran=1><a href='javascript:window.ran=1'>x</a></svg>",
    "![beacon](http://192.0.2.1/beacon.png) [link](http://192.0.2.1/)",
    "\x1b]0;title\x07\x1b[31m red \x00 \u202eevil\u202c \ufeff\u200b \r hidden",
    "\ud800 half a pair \udfff",
    "{{ 7 * 7 }} {% raw %} ${7*7} #{7*7}",
    "a" + "\u0301" * 20_000,
    "\n" * 30_000,
    "\u202e" * 50_000,
    "'\"><b>quoted</b>\"'",
]
"""Texts that want to be more than text."""


def hostile_run(folder: Path) -> Path:
    """A run whose every text is an attack, whose records are damaged, and whose metrics are no figures."""
    where = folder / "trajectories"
    where.mkdir(parents=True)
    with TrajectoryWriter(where / "train.jsonl") as writer:
        for number, text in enumerate(HOSTILE):
            spoken = Message(
                role="assistant", content=text, tool_calls=call_tool(text[:100] or "x", code=text).tool_calls
            )
            spoken.reasoning_content = text[:2000]
            seen = [
                Message(role="user", content=text),
                Message(role="tool", content=f"```html\n{text}\n```", name=text[:50]),
            ]
            for member in range(2):
                writer.write(
                    Trajectory(
                        f"{text[:40]}/../{number}-{member}",
                        text[:30],
                        text[:60],
                        split=text[:20],
                        answer=text,
                        turns=[Turn(seen, Reply(spoken, [1, 2], [3, 4, 28], [-1.0, -2.0, -0.5], [0, 1, 1]))],
                        final_observation=[Message(role="tool", content=text)],
                        reward=float(member),
                        metrics={text[:30]: 1.0},
                        tags=[text[:30]],
                        truncated=not member,
                        truncation=text[:30] if not member else None,
                        group=number,
                        member=member,
                        wall_s=1.0,
                        difficulty=number,
                    )
                )
        writer.write(Trajectory("lost", "made", "t", valid=False, error=f"{SCRIPT}: gone"))
    with (where / "train.jsonl").open("ab") as file:
        file.write(b'{"schema": 2, "id": "half')
        file.write(
            b'\n{"id": "nan", "environment": "e", "task_id": "t", "reward": NaN, "turns": [], "metrics": {"a": NaN}}\n'
        )
        file.write(b'[1, 2]\n\xff\xfe\x00\n{"schema": 99}\n' + b"[" * 100_000 + b"\n")
        file.write(b'{"id": "' + b"x" * 10_000_000 + b'"}\n')
        file.write(b'{"id": "last", "half": ')
    (folder / "metrics.jsonl").write_text(
        '{"schema": 1, "step": 1, "reward/mean": NaN, "<b>x</b>": 1e999, "time/<i>/w": 3}\nnot json\n{"step": "x"}\n'
        '{"schema": 1, "step": 2, "reward/mean": 0.5, "reward/=cmd()": 1.0}\n{"schema": 77, "step": 3}\n'
        '{"step": 4, "rew'
    )
    (folder / "config.yaml").write_text(f'name: "{SCRIPT}"\nenvironment: 3\nmodel: [1]\ngrpo: x\nseed: {{}}\n')
    odd = {
        "machine": {"gpus": 5},
        "versions": {SCRIPT: [1]},
        "reward": {"about": SCRIPT, "functions": [1, {"source": 3}]},
    }
    (folder / "summary.json").write_text(
        json.dumps({"exit": SCRIPT, "error": "\x1b[31m" + SCRIPT, "wall_s": "long", **odd})
    )
    (folder / "contract.jsonl").write_bytes(
        b'\xff{"clause": 3}\n[1]\n' + b"[" * 100_000 + b"\n"
        + json.dumps({"schema": 1, "clause": "rewards", "verdict": "broken", "text": SCRIPT, "step": 1}).encode()
    )  # fmt: skip
    (folder / "run.log").write_bytes(b"\x1b]0;x\x07" + SCRIPT.encode() + b"\xff\xfe\n" * 1000)
    (folder / "timeline.json").write_text(
        '[{"ph":"X","tid":1,"name":"<b>","ts":1e400,"dur":1}\n,{"ph":"b"}\n,nonsense\n,[]\n'
    )
    return folder
