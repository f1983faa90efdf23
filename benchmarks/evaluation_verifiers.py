"""Run the trivial task in verifiers (below 0.2); `benchmarks.evaluation` starts this with an interpreter that has it.

python evaluation_verifiers.py URL SAMPLES IN_FLIGHT
"""

import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import verifiers as vf
from datasets import Dataset
from verifiers.types import ClientConfig


def right(completion, answer) -> float:
    return float(completion[-1]["content"].strip() == answer)


def run(url: str, samples: int, in_flight: int) -> dict[str, float]:
    os.environ["MOCK_KEY"] = "x"
    dataset = Dataset.from_list([{"question": "What is 2 + 2?", "answer": "4"}] * samples)
    env = vf.SingleTurnEnv(eval_dataset=dataset, rubric=vf.Rubric(funcs=[right]))
    client = ClientConfig(api_key_var="MOCK_KEY", api_base_url=url)
    with tempfile.TemporaryDirectory() as folder:
        cpu, wall = time.process_time(), time.perf_counter()
        out = asyncio.run(
            env.evaluate(
                client,
                "m",
                num_examples=samples,
                max_concurrent=in_flight,
                results_path=Path(folder),
                save_results=True,
            )
        )
        measured = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
    rewards = [item["reward"] for item in out["outputs"]]
    return {**measured, "score": sum(rewards) / len(rewards), "samples": len(rewards)}


if __name__ == "__main__":
    run(sys.argv[1], 2, 2)  # triggers imports
    print(json.dumps(run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
