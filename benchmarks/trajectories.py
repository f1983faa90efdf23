"""Measure trajectories on disk: bytes per token, and the cost of a write to the event loop.

Every turn has 1,000 tokens, half observed and half sampled, of English text (Python's reference). Times are processor
time: of the event loop's thread to hand over an episode of 50 turns, and of all threads until it is on disk.
Log-probabilities are stored exactly. Apart from their magnitude their bits are random, so they can't be compressed much
below 4 bytes each, 5.3 as text. `messages alone` is plain text, written in the event loop's thread. Aim: at most 12
bytes a token, written outside the event loop.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

from benchmarks.frame import main, spread, table
from forge_env.config import load_config
from forge_env.policy import NO_TOKENS, Reply
from forge_env.run import Run, RunFolder
from forge_env.trajectory import Trajectory, Turn, read_trajectories
from forge_env.types import Message

TOKENS = 500
"""Observed tokens per turn, and also sampled tokens per turn."""
TURNS = 50


def tokenizer() -> Tekkenizer:
    import mistral_common

    return Tekkenizer.from_file(Path(mistral_common.__file__).parent / "data" / "tekken_240911.json")


def episode(vocabulary: Tekkenizer, ids: list[int], rng: np.random.Generator) -> Trajectory:
    """Make an episode with text from a random position in `ids`."""
    start = int(rng.integers(0, len(ids) - 2 * TOKENS * TURNS))
    played, before = Trajectory("e", "env", "task", reward=1.0), NO_TOKENS
    for turn in range(TURNS):
        position = start + 2 * TOKENS * turn
        observed, sampled = ids[position : position + TOKENS], ids[position + TOKENS : position + 2 * TOKENS]
        sure = rng.random(TOKENS) < 0.5  # half of the tokens have a probability near 1
        logprobs = -np.where(sure, rng.exponential(0.001, TOKENS), rng.exponential(1.0, TOKENS))
        message = Message(role="assistant", content=vocabulary.decode(sampled))
        reply = Reply(message, [*before, *observed], sampled, logprobs, np.full(TOKENS, turn // 10))
        before = reply.follow(before)
        played.turns.append(Turn([Message(role="user", content=vocabulary.decode(observed))], reply))
    return played


def messages(played: Trajectory) -> dict[str, Any]:
    """Return the record without tokens."""
    turns = [Turn(turn.observation, Reply(turn.message)) for turn in played.turns]
    return replace(played, turns=turns).to_dict()


def written(folder: Path, played: Trajectory) -> tuple[float, float, float, float]:
    """Return bytes per token, and milliseconds of the event loop's thread, of all threads, and of reading it back."""
    run = Run(load_config("coding_rlvr", ["logging.timeline=false", "logging.trajectories=all"]), RunFolder(folder))
    run.folder.create()
    run.trajectory(Trajectory("warm", "env", "task"), "warm")  # starts the writer thread
    loop_time, total_time = time.thread_time(), time.process_time()
    run.trajectory(played, "train")
    loop_time = time.thread_time() - loop_time
    run.close()
    total_time = time.process_time() - total_time
    file, reading = folder / "trajectories" / "train.jsonl", time.process_time()
    assert list(read_trajectories(file)) == [played]
    reading = time.process_time() - reading
    return file.stat().st_size / (2 * TOKENS * TURNS), 1e3 * loop_time, 1e3 * total_time, 1e3 * reading


def dumped(folder: Path, played: Trajectory) -> tuple[float, float, float, float]:
    """Return bytes per token, and milliseconds like `written`, of the messages, written in the event loop's thread."""
    file = folder / "messages.jsonl"
    started = time.thread_time()
    file.write_bytes(json.dumps(messages(played), separators=(",", ":"), ensure_ascii=False).encode() + b"\n")
    loop_time = time.thread_time() - started
    reading = time.process_time()
    json.loads(file.read_bytes())
    reading = time.process_time() - reading
    return file.stat().st_size / (2 * TOKENS * TURNS), 1e3 * loop_time, 1e3 * loop_time, 1e3 * reading


def measure(args: argparse.Namespace) -> list[str]:
    vocabulary, rng = tokenizer(), np.random.default_rng(0)
    ids = vocabulary.encode("\n".join(topics[name] for name in sorted(topics)), bos=False, eos=False)
    ways: dict[str, list[tuple[float, float, float, float]]] = {"episode": [], "messages alone": []}
    with tempfile.TemporaryDirectory() as name:
        for number in range(args.repeats):
            folder = Path(name, str(number))
            played = episode(vocabulary, ids, rng)
            ways["episode"].append(written(folder, played))
            ways["messages alone"].append(dumped(folder, played))
    columns = [f"{TURNS} turns of 1,000 tokens", "bytes a token", "event loop, ms", "all threads, ms", "to read, ms"]
    rows = [(way, *map(spread, zip(*taken, strict=True))) for way, taken in ways.items()]
    return table(columns, rows)


if __name__ == "__main__":
    main("Trajectories on disk", measure, repeats=9)
