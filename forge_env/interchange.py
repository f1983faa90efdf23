"""Export of episodes to other tools: ATIF (the Agent Trajectory Interchange Format) and inspect_ai logs."""

from __future__ import annotations

import json
import statistics
import zipfile
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from forge_env.policy import Reply
from forge_env.trajectory import Trajectory, Turn
from forge_env.types import Message, ToolCall

ATIF = "ATIF-v1.8"
INSPECT = 2
"""Version of inspect_ai's log format."""
_STOPS = {"length": "max_tokens", "content_filter": "content_filter"}


# ---
# ATIF: one document per episode. Conversations after the first are its sub-agents.


def atif(trajectory: Trajectory, model: str = "") -> dict[str, Any]:
    """Convert an episode to an ATIF document, JSON-ready.

    Prompt tokens are only counted; sampled tokens are included with their log-probabilities.
    """
    seats: dict[str, list[Turn]] = {}
    for turn in trajectory.turns:
        seats.setdefault(turn.seat, []).append(turn)
    last = trajectory.turns[-1].seat if trajectory.turns else ""
    documents = []
    for seat, turns in (seats or {"": []}).items():
        final = trajectory.final_observation if seat == last else []
        documents.append(_document(seat or trajectory.id, turns, final, model))
    first, *others = documents
    return {
        **first,
        "session_id": trajectory.id,
        "trajectory_id": trajectory.id,
        "extra": {
            "environment": trajectory.environment,
            "task_id": trajectory.task_id,
            "split": trajectory.split,
            "reward": trajectory.reward,
            "metrics": trajectory.metrics,
            "truncation": trajectory.truncation,
            "error": trajectory.error,
            "info": trajectory.info,
        },
        **({"subagent_trajectories": others} if others else {}),
    }


def _document(name: str, turns: list[Turn], final: list[Message], model: str) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    for turn in turns:
        _observe(steps, turn.observation)
        steps.append({"source": "agent", **_said(turn.message), "metrics": _metrics(turn.reply), "llm_call_count": 1})
    _observe(steps, final)
    numbered = [{"step_id": number, **step} for number, step in enumerate(steps, start=1)]
    agent = {"name": "forge-env", "version": version("forge-env"), **({"model_name": model} if model else {})}
    total = {
        "total_prompt_tokens": sum(turn.reply.prompt_length for turn in turns),
        "total_completion_tokens": sum(len(turn.reply.token_ids) for turn in turns),
        "total_steps": len(steps),
    }
    return {
        "schema_version": ATIF,
        "trajectory_id": name,
        "agent": agent,
        "steps": numbered,
        "final_metrics": {**total, "extra": {"reward": sum(turn.reward for turn in turns)}},
    }


def _observe(steps: list[dict[str, Any]], observation: list[Message]) -> None:
    """Append an observation to the steps; a tool's answer is added to the step that called it."""
    for message in observation:
        if message.role == "assistant":  # part of a history that a program resent
            steps.append({"source": "agent", **_said(message), "is_copied_context": True})
        elif message.role == "tool" and steps and steps[-1]["source"] == "agent":
            calls = {call["tool_call_id"] for call in steps[-1].get("tool_calls", ())}
            known = {"source_call_id": message.tool_call_id} if message.tool_call_id in calls else {}
            results = steps[-1].setdefault("observation", {"results": []})["results"]
            results.append({**known, "content": message.content})
        else:
            steps.append({"source": "system" if message.role == "system" else "user", "message": message.content})


def _said(message: Message) -> dict[str, Any]:
    fields: dict[str, Any] = {"message": message.content}
    if message.reasoning_content:
        fields["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        fields["tool_calls"] = [
            {"tool_call_id": call.id, "function_name": call.function.name, "arguments": _arguments(call)}
            for call in message.tool_calls
        ]
    return fields


def _arguments(call: ToolCall) -> dict[str, Any]:
    """Arguments of a call as an object; if they are not a JSON object, their text is wrapped in one."""
    try:
        parsed = json.loads(call.function.arguments)
    except (ValueError, RecursionError):
        parsed = None
    return parsed if isinstance(parsed, dict) else {"arguments": call.function.arguments}


def _metrics(reply: Reply) -> dict[str, Any]:
    if not reply.has_tokens:
        usage = reply.metadata.get("usage") or {}
        counts = {"prompt_tokens": usage.get("prompt_tokens"), "completion_tokens": usage.get("completion_tokens")}
        return {name: value for name, value in counts.items() if isinstance(value, int)}
    return {
        "prompt_tokens": reply.prompt_length,
        "completion_tokens": len(reply.token_ids),
        "completion_token_ids": [int(token) for token in reply.token_ids],
        "logprobs": [float(value) for value in reply.logprobs],
    }


# ---
# inspect_ai: one log per evaluation, a zip file with a header and a file for each sample.


def write_inspect(trajectories: Iterable[Trajectory], path: Path, *, model: str = "", created: float = 0.0) -> int:
    """Write a log that `inspect_ai.log.read_eval_log` reads; return the number of samples.

    Args:
        trajectories: from an evaluation; for equal ids, the last one is used.
        created: time of the evaluation, in seconds since the epoch.
    """
    episodes = {episode.id: episode for episode in trajectories}
    epochs: dict[tuple[str, str], int] = {}
    samples = []
    for episode in episodes.values():
        key = (episode.environment, episode.task_id)
        epochs[key] = epochs.get(key, 0) + 1
        samples.append(_sample(episode, epochs[key], model or "unknown"))
    valid = [episode.reward for episode in episodes.values() if episode.valid]
    metrics: dict[str, float] = {}
    if valid:
        metrics["mean"] = statistics.fmean(valid)
    if len(valid) > 1:
        metrics["stderr"] = statistics.stdev(valid) / len(valid) ** 0.5
    named = {name: {"name": name, "value": value} for name, value in metrics.items()}
    when = datetime.fromtimestamp(created, UTC).isoformat()
    environments = sorted({episode.environment for episode in episodes.values()})
    header = {
        "version": INSPECT,
        "status": "success",
        "eval": {
            "created": when,
            "task": "+".join(environments) or "none",
            "dataset": {"name": "+".join(environments), "samples": len(epochs)},
            "model": model or "unknown",
            "config": {"epochs": max(epochs.values(), default=1)},
            "packages": {"forge-env": version("forge-env")},
        },
        "results": {
            "total_samples": len(samples),
            "completed_samples": len(valid),
            "scores": [{"name": "reward", "scorer": "reward", "metrics": named}],
        },
        "stats": {"started_at": when, "completed_at": when},
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as log:
        for number, sample in enumerate(samples):
            log.writestr(f"samples/{number}_epoch_{sample['epoch']}.json", json.dumps(sample))
        log.writestr("header.json", json.dumps(header))
    return len(samples)


def _sample(episode: Trajectory, epoch: int, model: str) -> dict[str, Any]:
    opening = episode.turns[0].observation if episode.turns else episode.final_observation
    used = episode.info.get("usage", {})
    prompt = used.get("prompt") or sum(turn.reply.prompt_length for turn in episode.turns)
    sampled = used.get("completion") or episode.num_sampled_tokens
    last = episode.turns[-1].reply if episode.turns else None
    error = episode.error or "lost"
    return {
        "id": f"{episode.environment}/{episode.task_id}" if episode.environment else episode.task_id,
        "epoch": epoch,
        "input": [_chat(message) for message in opening],
        "target": "",
        "messages": [_chat(message) for message in episode.messages],
        "output": {
            "model": model,
            "choices": [] if last is None else [{"message": _chat(last.message), "stop_reason": _stop(last)}],
        },
        "scores": {"reward": {"value": episode.reward, "answer": episode.answer, "metadata": episode.metrics}},
        "metadata": {"split": episode.split, "truncation": episode.truncation, "tags": episode.tags},
        "model_usage": {
            model: {"input_tokens": prompt, "output_tokens": sampled, "total_tokens": prompt + sampled},
        },
        "total_time": episode.wall_s,
        "working_time": max(0.0, episode.wall_s - episode.waited_s),
        "uuid": episode.id,
        **({} if episode.valid else {"error": {"message": error, "traceback": error, "traceback_ansi": error}}),
    }


def _stop(reply: Reply) -> str:
    return _STOPS.get(reply.stop_reason, "tool_calls" if reply.message.tool_calls else "stop")


def _chat(message: Message) -> dict[str, Any]:
    """Convert a message to inspect_ai's format."""
    content: Any = message.content
    if message.reasoning_content:
        thought = {"type": "reasoning", "reasoning": message.reasoning_content}
        content = [thought, {"type": "text", "text": message.content}]
    chat: dict[str, Any] = {"role": message.role, "content": content}
    if message.tool_calls:
        chat["tool_calls"] = [
            {"id": call.id, "function": call.function.name, "arguments": _arguments(call), "type": "function"}
            for call in message.tool_calls
        ]
    if message.role == "tool":
        chat |= {"tool_call_id": message.tool_call_id, "function": message.name}
    return chat
