"""What is sent to a cluster is what its published schemas allow; `make conformance` has them."""

from __future__ import annotations

import copy
from typing import Any

import kubernetes_validate as schemas
import pytest

from forge_env.sandbox import SandboxSpec
from sandboxes.kubernetes.pods import box_manifest, network_policy, pod_spec

VERSIONS = ("1.28", "1.34")


def pod() -> dict[str, Any]:
    further = {"nodeSelector": {"pool": "boxes"}, "imagePullSecrets": [{"name": "registry"}]}
    spec = pod_spec("i:1", SandboxSpec(), cpus=1.5, cpu_request=0.1, runtime_class="gvisor", further=further)
    return box_manifest("forge-env-1", spec, owned_by="a.b.c.1.2", network=False, group="")


@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_are_valid(version: str) -> None:
    for manifest in (pod(), network_policy()):
        schemas.validate(manifest, version, strict=True)
    wrong = copy.deepcopy(pod())
    wrong["spec"]["containers"][0]["imagee"] = "x"
    with pytest.raises(schemas.ValidationError):
        schemas.validate(wrong, version, strict=True)
