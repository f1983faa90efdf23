"""`openenv validate` with its own provider: a package that `forge-env new` has made, built and run by Docker."""

from __future__ import annotations

import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Any

import docker
import pytest
from packaging.requirements import Requirement

import forge_env as fe
from forge_env.cli.main import main
from forge_env.sandbox.dockerfile import with_base
from sandboxes.images.build import ensure_image
from tests.sandboxes.conftest import require

WHY = "NOT RUN: openenv is not installed (`make conformance` makes an environment for it)"
validation = pytest.importorskip("openenv.validation", reason=WHY)
pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(900)]
NEEDED = ("forge-env[openenv]", "pip", "setuptools")
SITE = f"/usr/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
ROOT = Path(fe.__file__).parents[1]
COMMANDS = "for n in pip forge_env; do printf '#!/bin/sh\\nexec python3 -m %s \"$@\"\\n' $n > /usr/local/bin/$n; done"


def distributions(names: tuple[str, ...]) -> Iterator[Distribution]:
    """Packages that are installed here, with all that they require."""
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [Requirement(name) for name in names]
    while waiting:
        wanted = waiting.pop()
        if (key := (wanted.name.lower(), frozenset(wanted.extras))) in seen:
            continue
        seen.add(key)
        yield (found := distribution(wanted.name))
        for requirement in map(Requirement, found.requires or ()):
            extras = ("", *wanted.extras)
            if not requirement.marker or any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(requirement)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An image that has all that a package index would give, so that none is needed."""
    folder = tmp_path_factory.mktemp("image")
    for found in distributions(NEEDED):
        for file in (found.files or ()) if found.name != "forge-env" else ():
            source = Path(str(file.locate()))
            if file.parts[0] != ".." and file.suffix != ".pyc" and not file.name.startswith("__editable__"):
                (folder / "site" / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, folder / "site" / file)
    own = distribution("forge-env")  # of a checkout: its code is not among its files
    about = folder / f"site/forge_env-{own.version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(own.read_text("METADATA") or own.read_text("PKG-INFO") or "")
    for name in ("forge_env", "environments", "sandboxes"):
        shutil.copytree(ROOT / name, folder / "site" / name, ignore=shutil.ignore_patterns("__pycache__"))
    with closing(docker.from_env()) as client:
        base = ensure_image(client)  # this machine's own Python
        made = f"mkdir -p /usr/local/bin; {COMMANDS}; cd /usr/local/bin; mv forge_env forge-env; chmod 755 *"
        (folder / "Dockerfile").write_text(
            f"FROM {base}\nCOPY site {SITE}\nRUN {made}; python3 -m compileall -q {SITE} || true\n"
            "ENV PYTHONPATH= PIP_NO_INDEX=1 PIP_NO_BUILD_ISOLATION=0 PATH=/usr/local/bin:/usr/bin:/bin\n"
        )
        tag = f"forge-env/openenv-test:{secrets.token_hex(8)}"
        client.images.build(path=str(folder), rm=True, tag=tag)
        yield tag
        client.images.remove(tag, force=True)


@pytest.mark.parametrize(("kind", "network"), [("tools", "public"), ("single", "no-network")])
def test_docker_provider_builds_and_plays_a_new_package(image: str, kind: str, network: str, tmp_path: Path) -> None:
    from openenv.validation.providers.docker import DockerValidationProvider

    require("docker")
    assert main(["new", "my_env", "--kind", kind, "--openenv", "--dir", str(tmp_path)]) == 0
    package = tmp_path / "my_env"
    for name, old, new in (
        ("Dockerfile", None, image),
        ("openenv.yaml", "mode: public", f"mode: {network}"),
    ):
        text = (package / name).read_text()
        (package / name).write_text(with_base(text, new) if old is None else text.replace(old, new))
    provider: Any = DockerValidationProvider()
    provider.helper_image = image  # its own is one of a registry's; any Python does
    report = validation.run_validation(package, max_level=validation.Level.SEMANTIC, provider=provider)
    found = {result.check_id: result for result in report.results}
    for check in (
        *("static.manifest", "runtime.startup", "runtime.network_policy", "runtime.reward_well_formed"),
        *("runtime.observation_schema", "runtime.state_contract"),
    ):
        assert found[check].status.value == "pass", found[check]
    assert {result.check_id for result in report.results if result.status.value in ("fail", "error")} == set()
    built = found["runtime.startup"].measured["image_ref"]
    subprocess.run(["docker", "rmi", "-f", built], check=True, capture_output=True)
