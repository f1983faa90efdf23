"""The forecast of a recipe's model in main memory, for the checks before a run's start."""

from __future__ import annotations

from forge_env.config.recipe import RunConfig
from forge_env.job.needs import ModelMemory
from trainers.plan.forecast import Forecast
from trainers.plan.hardware import GPUS, Cluster
from trainers.plan.memory import BYTES, FLOAT32, GIB
from trainers.plan.speed import Workload


def model_memory(config: RunConfig) -> ModelMemory:
    """Forecast what the model takes in each process and on disk.

    Raises:
        UsageError: the model's shape is unknown: it is on the hub, and was never downloaded here.
    """
    forecast = Forecast(config, Workload.of(config), Cluster(1, next(iter(GPUS.values()))))
    held = {holder.name: holder.memory.peak / GIB for holder in forecast.holders if holder.room is None}
    trained = forecast.trained_parameters
    return ModelMemory(
        weights_gb=forecast.shape.parameters * FLOAT32 / GIB,
        published_gb=trained * BYTES[config.model.dtype] / GIB,
        saved_gb=3 * trained * FLOAT32 / GIB,
        trainer_gb=held.get("trainer", 0.0),
        generator_gb=held.get("generator", 0.0),
        reference_gb=held.get("reference", 0.0),
    )
