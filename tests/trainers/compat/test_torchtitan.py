"""What `trainers.compat.torchtitan` assumes about TorchTitan."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.trainers.compat.sources import parameters, source
from trainers.compat import torchtitan as compat

if compat.PACKAGE.installed is None:
    pytest.skip("TorchTitan is not installed", allow_module_level=True)

CONTAINER = "torchtitan.components.optimizer.optimizer:OptimizersContainer"
LORA = "torchtitan.components.lora:_get_lora_cls"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("torchtitan.tools.utils", "device_type, device_module = get_device_info()"),
        ("torchtitan.models.common.attention", "= torch.compile("),
        (f"{CONTAINER}.__init__", "optimizer = self._resolve_optimizer_factory(opt_name)(opt_param_groups, "),
        (f"{CONTAINER}._build_param_groups", "{'params': params, 'param_names': param_names, "),
        (LORA, "self._lora_scaling = config.alpha / config.rank"),
        (LORA, "return base_out + self._lora_scaling * lora_out"),
    ],
)
def test_torchtitan_uses_the_names_as_assumed(path: str, text: str) -> None:
    assert text in source(path)


def test_names_of_optimizers_are_resolved_by_a_function_of_the_name() -> None:
    assert parameters(f"{CONTAINER}._resolve_optimizer_factory") == ["name"]


def test_no_other_module_has_the_device_that_is_replaced() -> None:
    spec = find_spec("torchtitan")
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    modules = {
        ".".join(file.relative_to(folder.parent).with_suffix("").parts)
        for file in folder.rglob("*.py")
        if "experiments" not in file.parts and "import" in (text := file.read_text()) and "device_type" in text
        for line in text.splitlines()
        if line.startswith("from torchtitan.tools.utils import") and "device_type" in line
    }
    unused = {"torchtitan.components.metrics", "torchtitan.models.common.token_dispatcher"}
    assert modules - unused == {path.partition(":")[0] for path in compat.ON_CPU} - {"torchtitan.tools.utils"}
