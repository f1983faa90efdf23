"""Run the trivial task in inspect_ai; `benchmarks.evaluation` starts this with an interpreter that has inspect_ai.

python evaluation_inspect_ai.py URL SAMPLES IN_FLIGHT
"""

import json
import sys
import tempfile
import time

from inspect_ai import Task, eval
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import get_model
from inspect_ai.scorer import match
from inspect_ai.solver import generate


def run(url: str, samples: int, in_flight: int) -> dict[str, float]:
    model = get_model("openai-api/mock/m", base_url=url, api_key="x")
    dataset = MemoryDataset([Sample(input="What is 2 + 2?", target="4", id=i) for i in range(1, samples + 1)])
    task = Task(dataset=dataset, solver=generate(), scorer=match())
    with tempfile.TemporaryDirectory() as folder:
        cpu, wall = time.process_time(), time.perf_counter()
        (log,) = eval(
            task, model=model, max_connections=in_flight, max_samples=in_flight, display="none", log_dir=folder
        )
        measured = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
    return {
        **measured,
        "score": log.results.scores[0].metrics["accuracy"].value,
        "samples": log.results.completed_samples,
    }


if __name__ == "__main__":
    run(sys.argv[1], 2, 2)  # triggers imports
    print(json.dumps(run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
