"""Links of the documents lead somewhere, in the repository and on the site that `make docs` builds."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import unicodedata
from functools import cache
from pathlib import Path

import pytest

from benchmarks.__main__ import NAMES as BENCHMARKS
from forge_env.cli.main import COMMANDS, build_parser
from scripts.docs import faults

ROOT = Path(__file__).parents[1]
PAGES = [
    *ROOT.glob("*.md"),
    *(page for room in ("docs", "apps", "environments") for page in ROOT.glob(f"{room}/**/*.md")),
]
FENCED = re.compile(r"^(`{3,}).*?^\1", re.MULTILINE | re.DOTALL)
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
FOLDERS = "forge_env|environments|sandboxes|trainers|apps|tests|benchmarks|scripts"


@cache
def prose(page: Path) -> str:
    """A page without its code."""
    return FENCED.sub("", page.read_text())


@cache
def anchors(page: Path) -> set[str]:
    """Of a page's headings, those that are the same where the repository is browsed and on the site."""
    found = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\">", prose(page)))
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
        browsed = re.sub(r"[^\w\s-]", "", text).replace(" ", "-")
        plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
        if browsed == re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain)):
            found.add(browsed)
    return found


def test_there_are_pages() -> None:
    assert len(PAGES) > 60
    assert "exact-resume" not in anchors(ROOT / "README.md")
    assert "what-you-see" in anchors(ROOT / "README.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{target} leads nowhere"
        assert not anchor or anchor in anchors(file), f"{target}: there is no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(rf"`((?:{FOLDERS})/[\w/]+\.py)`", page.read_text())
    assert not [name for name in named if not (ROOT / name).is_file()]


TYPED = re.compile(r"(?:\w+=\S+ )*((?:forge-env|make|python -m benchmarks) \w.*)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_that_a_page_names_exist(page: Path) -> None:
    for code in re.findall(r"`([^`\n]+)`", prose(page)):
        if found := TYPED.match(code):
            words = found[1].replace("python -m ", "").split()
            known = {"forge-env": {*COMMANDS, "COMMAND"}, "make": TARGETS, "benchmarks": BENCHMARKS}[words[0]]
            assert words[1] in known, code


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_that_a_page_shows_are_understood(page: Path) -> None:
    blocks = re.findall(r"^```(?:sh|bash)?\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    for line in [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]:
        found = TYPED.match(line)
        if found and not re.search(r" [\[|]", found[1]):  # what may be left out, or goes to another program
            words = shlex.split(found[1], comments=True)
            if words[0] == "make":
                assert words[1] in TARGETS, line
            elif words[0] == "python":
                assert words[3] in BENCHMARKS, line
            else:
                args, rest = build_parser(words[1]).parse_known_args(words[1:])
                assert args.parser.takes_keys or not rest, line


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("docs")
    built = subprocess.run(
        [sys.executable, "scripts/docs.py", str(folder)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder / "site"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_site_is_whole(site: Path) -> None:
    page = (site / "docs" / "reference" / "environment.html").read_text()
    assert 'id="forge_env.registry.make"' in page
    assert "fields of its <code>config_class</code>" in page  # of its docstring
    assert "usage: forge-env train" in (site / "docs" / "reference" / "commands.html").read_text()
    assert (site / "trainers" / "algorithms" / "grpo.py.html").is_file()  # the page on the architecture links to it


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.timeout(400)
def test_the_site_works_as_files_and_asks_nobody(site: Path) -> None:
    from playwright.sync_api import sync_playwright

    asked, wrong = [], []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 360, "height": 900})
        page.set_default_timeout(60_000)
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        for path in ("docs/benchmarks.html", "docs/reference/environment.html", "index.html"):
            page.goto((site / path).as_uri())
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), path
        page.keyboard.press("Control+k")
        page.get_by_placeholder("Search").fill("rubric")
        page.get_by_text(re.compile(r"\d+ results")).wait_for()
        assert page.get_by_placeholder("Search").input_value() == "rubric"
        browser.close()
    assert not wrong
    assert not [address for address in asked if not address.startswith(("file:", "data:", "blob:", "about:"))]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('<a href="nowhere.html">', "index.html: nowhere.html leads nowhere"),
        ('<img src="nowhere.png">', "index.html: nowhere.png leads nowhere"),
        ('<a href="#nothing">', "index.html: #nothing names no part of that page"),
        ('<a href="page.html#nothing">', "index.html: page.html#nothing names no part of that page"),
        ('<script src="https://example.com/x.js">', "index.html: loads https://example.com/x.js"),
        ('<link href="//example.com/x.css">', "index.html: loads //example.com/x.css"),
        ('<a id="here" href="https://example.com"><a href="#here"><a href="page.html#there">', ""),
    ],
)
def test_what_is_wrong_with_a_site_is_named(tmp_path: Path, body: str, said: str) -> None:
    (tmp_path / "index.html").write_text(body)
    (tmp_path / "page.html").write_text('<h2 id="there">')
    assert "\n".join(faults(tmp_path)) == said
