"""Job files against what Kubernetes publishes, and against SkyPilot itself; `make conformance` has both."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import sky
import yaml
from sky.utils.schemas import get_task_schema

from forge_env.config.finding import load_config
from forge_env.job.files import Hosts, Request, job_files

REQUEST = Request(
    "my-run", load_config("coding_rlvr/qwen3_0_6b"), Hosts(2, 1, 8, 64), "forge-env:1", "H100", ("HF_TOKEN",)
)


@pytest.mark.parametrize("version", ["1.28", "1.34"])
def test_kubernetes_knows_every_field(version: str) -> None:
    found = [
        manifest
        for file in job_files("kubernetes", REQUEST)
        if file.name != "recipe.yaml"
        for manifest in yaml.safe_load_all(file.text)
    ]
    assert len(found) == 9
    for manifest in found:
        kubernetes_validate.validate(manifest, version, strict=True)


def test_skypilot_reads_the_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = job_files("skypilot", REQUEST)[1].text
    jsonschema.validate(yaml.safe_load(text), get_task_schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**yaml.safe_load(text), "num_nodez": 2}, get_task_schema())
    monkeypatch.chdir(tmp_path)
    task = sky.Task.from_yaml_config(yaml.safe_load(text), secrets_overrides=[("HF_TOKEN", "x")])
    (resources,) = task.resources
    assert (task.num_nodes, resources.accelerators) == (2, {"H100": 1})
