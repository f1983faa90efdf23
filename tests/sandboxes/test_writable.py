"""Writable folders of an image: what the image has in them is there for every user, whatever the last one did."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_env.errors import SandboxUnavailableError, UsageError
from forge_env.sandbox import SandboxSpec, open_engine
from forge_env.sandbox.dockerfile import with_base
from forge_env.sandbox.spec import WORK

from .conftest import require

DOCKERFILE = """\
FROM ubuntu:24.04 AS first
RUN mkdir /made && echo made > /made/file
FROM --platform=linux/amd64 ubuntu:24.04
COPY --from=first /made /app/made
COPY secret /root/secret
RUN chmod 600 /root/secret && ln -s made/file /app/link && mkdir /app/empty && mkfifo /app/pipe
"""


@pytest.fixture
def image(tmp_path: Path) -> str:
    (tmp_path / "Dockerfile").write_text(DOCKERFILE)
    (tmp_path / "secret").write_text("s")
    return str(tmp_path)


def write_dockerfile(folder: str, text: str) -> None:
    Path(folder, "Dockerfile").write_text(text)


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_every_user_finds_them_as_the_image_has_them(image: str) -> None:
    require("docker")
    spec = SandboxSpec(image, base="python", writable=("/app", "/root"))
    look = "cd /app; find . | sort; cat link /root/secret; stat -c %a /root/secret made/file"
    spoil = (
        "echo other! > /app/made/file; rm -rf /app/empty; chmod 0 /app/made; ln -sfn /etc /app/link; echo x > /root/n"
    )
    async with open_engine("docker", concurrency=1, warm=0) as engine:
        assert (await engine.build(spec)).startswith("forge-env/writable:")
        for _ in range(3):
            async with engine.session(spec) as sandbox:
                seen = (await sandbox.exec(["sh", "-c", look])).stdout.split()
                assert seen == [".", "./empty", "./link", "./made", "./made/file", "made", "s600", "644"]
                assert (await sandbox.exec(["sh", "-c", spoil])).ok
        assert engine.stats()["started"] == 1, "one box served them all"


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_what_cant_be_built_names_the_line_of_the_dockerfile(image: str) -> None:
    require("docker")
    async with open_engine("docker", concurrency=1, warm=0) as engine:
        write_dockerfile(image, "FROM ubuntu:24.04\nWORKDIR /app\nRUN no-such-program --now\n")
        with pytest.raises(SandboxUnavailableError, match="could not be built: `RUN no-such-program --now`"):
            await engine.build(SandboxSpec(image, base="python"))
        write_dockerfile(image, "FROM no.registry.invalid/none:1\n")
        with pytest.raises(SandboxUnavailableError, match=r"(?s)could not be built: `FROM no.*base="):
            await engine.build(SandboxSpec(image))
        with pytest.raises(UsageError, match="has no Dockerfile"):
            await engine.build(SandboxSpec(base="python"))


async def test_the_local_engine_makes_them_where_it_can() -> None:
    require("local")
    async with open_engine("local", concurrency=1, warm=0) as engine:
        with pytest.raises(UsageError, match="can't create /var/deep: its parent is read-only"):
            await engine.acquire(SandboxSpec(writable=("/var/deep",)))
        async with engine.session(SandboxSpec(writable=("/new/deep", "/root"))) as sandbox:
            assert (await sandbox.exec(["touch", "/new/deep/x", "/root/x"])).ok
            assert not (await sandbox.exec(["touch", "/new/x"])).ok
            code = "import os\ndef names(): return os.listdir('/root')"
            tests = "import os\nfrom solution import names\n"
            tests += "def test(): assert names() == ['x'] and os.listdir('/root') == []  # the judge sees none of it\n"
            judged = await sandbox.run_tests(code, tests)
            assert judged.passed, judged.failures


@pytest.mark.parametrize(
    ("folders", "why"),
    [
        ("/app", "is a single string"),
        (["app"], "is not an absolute path"),
        (["/app/"], "is not a folder"),
        (["/a/../b"], "is not a folder"),
        (["/"], "is not a folder"),
        (["/usr"], "never writable"),
        (["/usr/bin/x"], "never writable"),
        (["/etc"], "never writable"),
        (["/opt"], "never writable"),
        (["/proc/self"], "never writable"),
        ([f"{WORK}/x"], f"is in '{WORK}'"),
        (["/app", "/app/x"], "'/app/x' is in '/app'"),
    ],
)
def test_folders_that_cant_be_writable(folders: object, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        SandboxSpec(writable=folders)  # type: ignore[arg-type]


def test_the_base_takes_the_place_of_every_foreign_image() -> None:
    text = "ARG V=1\nfrom python:3 as a\nFROM a\nFROM scratch\n FROM x/y:1 AS b\nCOPY --from=a / /\nFROM b"
    assert with_base(text, "own") == text.replace("python:3", "own").replace("x/y:1", "own")
