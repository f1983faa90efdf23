"""Generate a few instances from installed packages: `python -m environments.swe_bench.small FOLDER`.

Each instance is the source of a package with one mistake, which the patch reverts. The repositories and `small.jsonl`
are written into the folder. The same package versions give the same commits.
"""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files, version
from pathlib import Path

from forge_env.errors import UsageError

FILE = "small.jsonl"
_GIT = {
    **dict.fromkeys(("GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME"), "small"),
    **dict.fromkeys(("GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL"), "small@localhost"),
    **dict.fromkeys(("GIT_AUTHOR_DATE", "GIT_COMMITTER_DATE"), "2026-01-01T00:00:00Z"),
    **dict.fromkeys(("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"), os.devnull),
}


@dataclass(frozen=True, slots=True)
class Mutation:
    """A mistake that replaces `right` by `wrong`; a case is a test's name, its line, and whether it then fails."""

    package: str
    path: str
    right: str
    wrong: str
    report: str
    imports: str
    cases: tuple[tuple[str, str, bool], ...]


MUTATIONS = (
    Mutation(
        "packaging",
        "packaging/utils.py",
        '    while "--" in value:\n        value = value.replace("--", "-")\n',
        "",
        "canonicalize_name('zope..interface') gives 'zope--interface': runs of separators should become one dash.",
        "from packaging.utils import canonicalize_name",
        (
            ("one", "self.assertEqual(canonicalize_name('Oslo.Concurrency'), 'oslo-concurrency')", False),
            ("run", "self.assertEqual(canonicalize_name('zope..interface'), 'zope-interface')", True),
            ("mixed", "self.assertEqual(canonicalize_name('a_.-b'), 'a-b')", True),
        ),
    ),
    Mutation(
        "docstring-parser",
        "docstring_parser/google.py",
        "type_name = type_name[:-10]",
        "type_name = type_name[:-9]",
        "In a Google docstring, `x (int, optional): ...` gives the type 'int,' instead of 'int'.",
        "from docstring_parser import google",
        (
            (
                "optional",
                "self.assertEqual(google.parse('A\\n\\nArgs:\\n  x (int, optional): it').params[0].type_name, 'int')",
                True,
            ),
            (
                "plain",
                "self.assertEqual(google.parse('A\\n\\nArgs:\\n  x (str): it').params[0].type_name, 'str')",
                False,
            ),
        ),
    ),
    Mutation(
        "h11",
        "h11/_util.py",
        "error_status_hint: int = 400",
        "error_status_hint: int = 500",
        "A ProtocolError that is raised without a hint should suggest status 400: the peer is at fault.",
        "from h11 import LocalProtocolError, RemoteProtocolError",
        (
            ("default", "self.assertEqual(RemoteProtocolError('bad').error_status_hint, 400)", True),
            ("given", "self.assertEqual(LocalProtocolError('bad', 431).error_status_hint, 431)", False),
        ),
    ),
)


def make(folder: Path) -> Path:
    """Write repositories and instances; return the path of the instances file.

    Raises:
        UsageError: a package is missing, or its version has a different source.
    """
    lines = [json.dumps(_instance(mutation, folder / "repositories")) for mutation in MUTATIONS]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text("\n".join(lines) + "\n")
    return folder / FILE


def _instance(mutation: Mutation, repositories: Path) -> dict[str, object]:
    name = mutation.package
    texts = _source(name)
    good = texts.get(mutation.path, "")
    if good.count(mutation.right) != 1:
        raise UsageError(f"{name} {version(name)} is not the version that the small set was made for")
    bad = good.replace(mutation.right, mutation.wrong)
    repository = repositories / f"small__{name}"
    commit = _commit(repository, {**texts, mutation.path: bad})
    test_path = f"tests/test_{name.replace('-', '_')}_{mutation.cases[0][0]}.py"
    methods = "".join(f"\n    def test_{case}(self):\n        {line}\n" for case, line, _ in mutation.cases)
    tests = f"import unittest\n\n{mutation.imports}\n\n\nclass Tests(unittest.TestCase):{methods}"
    lists: dict[bool, list[str]] = {True: [], False: []}
    for case, _, fails in mutation.cases:
        lists[fails].append(f"{test_path}::Tests::test_{case}")
    return {
        "instance_id": f"small__{name}-1",
        "repo": f"small/{name}",
        "base_commit": commit,
        "problem_statement": mutation.report,
        "hints_text": "",
        "version": version(name),
        "patch": _diff(mutation.path, bad, good),
        "test_patch": _diff(test_path, "", tests),
        "FAIL_TO_PASS": json.dumps(lists[True]),
        "PASS_TO_PASS": json.dumps(lists[False]),
    }


def _source(package: str) -> dict[str, str]:
    """The installed Python files of a package."""
    try:
        listed = files(package) or []
    except PackageNotFoundError as error:
        raise UsageError(f"the package {package} is not installed", fix=f"pip install {package}") from error
    paths = [path for path in listed if path.suffix == ".py" and ".." not in path.parts]
    return {path.as_posix(): Path(str(path.locate())).read_text() for path in paths}


def _commit(repository: Path, texts: dict[str, str]) -> str:
    """Create a repository with one commit; return the commit's hash."""
    for path, text in texts.items():
        target = repository / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def git(*words: str) -> str:
        command = ["git", "-C", str(repository), *words]
        done = subprocess.run(command, env={**os.environ, **_GIT}, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "--quiet", "--initial-branch=main")
    git("add", "--all", "--force")
    git("commit", "--quiet", "--message", "the package as it is, with a mistake")
    return git("rev-parse", "HEAD")


def _diff(path: str, before: str, after: str) -> str:
    """A patch in Git's format."""
    old = f"a/{path}" if before else "/dev/null"
    lines = difflib.unified_diff(before.splitlines(True), after.splitlines(True), old, f"b/{path}")
    mode = "" if before else "new file mode 100644\n"
    return f"diff --git a/{path} b/{path}\n{mode}{''.join(lines)}"


if __name__ == "__main__":
    print(make(Path(sys.argv[1])))
