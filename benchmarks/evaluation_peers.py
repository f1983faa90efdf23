"""Run the trivial task in another framework; `evaluation` and `start` start this with an interpreter that has it.

python evaluation_peers.py inspect_ai|verifiers URL SAMPLES IN_FLIGHT
"""

import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path


def inspect_ai(url, samples, in_flight, folder):
    from inspect_ai import Task, eval
    from inspect_ai.dataset import MemoryDataset, Sample
    from inspect_ai.model import get_model
    from inspect_ai.scorer import match
    from inspect_ai.solver import generate

    model = get_model("openai-api/mock/m", base_url=url, api_key="x")
    dataset = MemoryDataset([Sample(input="What is 2 + 2?", target="4", id=i) for i in range(1, samples + 1)])
    task = Task(dataset=dataset, solver=generate(), scorer=match())
    limits = {"max_connections": in_flight, "max_samples": in_flight}
    yield
    (log,) = eval(task, model=model, display="none", log_dir=folder, **limits)
    yield log.results.scores[0].metrics["accuracy"].value, log.results.completed_samples


def right(completion, answer) -> float:
    return float(completion[-1]["content"].strip() == answer)


def verifiers(url, samples, in_flight, folder):
    import verifiers as vf  # below 0.2
    from datasets import Dataset
    from verifiers.types import ClientConfig

    os.environ["MOCK_KEY"] = "x"
    dataset = Dataset.from_list([{"question": "What is 2 + 2?", "answer": "4"}] * samples)
    env = vf.SingleTurnEnv(eval_dataset=dataset, rubric=vf.Rubric(funcs=[right]))
    client = ClientConfig(api_key_var="MOCK_KEY", api_base_url=url)
    saved = {"results_path": Path(folder), "save_results": True}
    yield
    out = asyncio.run(env.evaluate(client, "m", num_examples=samples, max_concurrent=in_flight, **saved))
    rewards = [item["reward"] for item in out["outputs"]]
    yield sum(rewards) / len(rewards), len(rewards)


def run(way, *arguments) -> dict[str, float]:
    """Return CPU and wall seconds of a way after its first `yield`, the score and the number of samples."""
    with tempfile.TemporaryDirectory() as folder:
        steps = way(*arguments, folder)
        next(steps)
        cpu, wall = time.process_time(), time.perf_counter()
        score, samples = next(steps)
        return {
            "cpu": time.process_time() - cpu,
            "wall": time.perf_counter() - wall,
            "score": score,
            "samples": samples,
        }


if __name__ == "__main__":
    way = {"inspect_ai": inspect_ai, "verifiers": verifiers}[sys.argv[1]]
    run(way, sys.argv[2], 2, 2)  # triggers imports
    print(json.dumps(run(way, sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
