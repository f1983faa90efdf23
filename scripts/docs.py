"""Build the documentation as a site that works without a server and without a network: build/docs/site/index.html.

python scripts/docs.py [FOLDER]

The site mirrors the layout of the repository, so relative links work in both. Code files and folders that a page
links to become pages, and `<!-- output: forge-env ... -->` is replaced by the output of that command. The build fails
and names the page if a link, anchor or picture is missing, or if a page loads anything from another site.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from urllib.parse import unquote, urlsplit

from forge_env.cli.main import main as forge_env

ROOT = Path(__file__).parents[1]
SETTINGS = ROOT / "docs" / "site"
PAGES = ("*.md", "docs/**/*.md", "apps/**/README.md", "environments/**/README.md", "skills/**/*.md")
PICTURES = ("docs/**/*.png", "docs/**/*.svg")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".sh": "bash"}


def stage(folder: Path) -> None:
    """Copy the sources of the site into a folder."""
    for pattern in PICTURES:
        for path in ROOT.glob(pattern):
            copy(path, folder / path.relative_to(ROOT))
    copy(ROOT / "forge_env" / "view" / "static" / "icon.svg", folder / "icon.svg")
    for path in SETTINGS.iterdir():
        copy(path, folder / path.name)
    for pattern in PAGES:
        for path in ROOT.glob(pattern):
            write(folder / path.relative_to(ROOT), with_outputs(with_code(path, folder)))


def with_code(page: Path, folder: Path) -> str:
    """Return a page's text, and write a page for each code file or folder that it links to."""

    def link(found: re.Match[str]) -> str:
        path = page.parent / found[1]
        if path.suffix in (".md", *{Path(picture).suffix for picture in PICTURES}) or not path.exists():
            return found[0]
        relative = path.resolve().relative_to(ROOT)
        if path.is_dir():
            code = "\n".join(sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()))
        else:
            code = path.read_text()
        write(folder / f"{relative}.md", f"# {relative}\n\n`````{LANGUAGES.get(path.suffix, 'text')}\n{code}\n`````\n")
        return f"]({found[1]}.md)"

    return re.sub(r"\]\(([^)#:\s]+)\)", link, page.read_text())


def with_outputs(text: str) -> str:
    """Replace the output placeholders of a page by the commands' output."""

    def output(found: re.Match[str]) -> str:
        arguments = found[1].split()
        printed = StringIO()
        with redirect_stdout(printed), suppress(SystemExit):  # argparse exits after printing a help text
            forge_env(arguments)
        return f"`````{'yaml' if arguments[0] == 'config' else 'text'}\n{printed.getvalue().strip()}\n`````"

    return re.sub(r"<!-- output: forge-env (.*) -->", output, text)


def warnings(output: str) -> Iterator[str]:
    """Zensical's warnings without its source excerpts; the whole output if it has no warnings."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", output)
    messages = re.findall(r"^Warning: (.*)(?:\n.*\[ (.*?) \])?", plain, re.MULTILINE)
    yield from (f"{location}: {message}" if location else message for message, location in messages)
    if not messages:
        yield plain


class Links(HTMLParser):
    """Links and loaded resources of a built page, and its anchors."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.names: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the anchor, link or resource of a tag."""
        has = dict(attrs)
        self.names.update(name for name in (has.get("id"), has.get("name") if tag == "a" else None) if name)
        target = has.get("href") if tag in ("a", "link") else has.get("src")
        if target is not None:
            (self.links if tag == "a" else self.loads).append(target)


def faults(site: Path) -> Iterator[str]:
    """Broken links and external resources of a built site."""
    pages: dict[Path, Links] = {}
    for path in sorted(site.glob("**/*.html")):
        pages[path] = Links()
        pages[path].feed(path.read_text())
    for page, parsed in pages.items():
        if page.name == "404.html":  # served at any address, so its links are absolute
            continue
        for target in [*parsed.links, *parsed.loads]:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                if target in parsed.loads and parts.scheme != "data":
                    yield f"{page.relative_to(site)}: loads {target}"
                continue
            path = Path(os.path.normpath(page.parent / unquote(parts.path))) if parts.path else page
            if not path.is_file():
                yield f"{page.relative_to(site)}: {target} leads nowhere"
            elif parts.fragment and path in pages and unquote(parts.fragment) not in {*pages[path].names, "__skip"}:
                yield f"{page.relative_to(site)}: {target} names no part of that page"
    for path in site.glob("**/*.css"):
        for target in re.findall(r"(?:url\(|@import )[\"']?((?:https?:)?//[^\"')]+)", path.read_text()):
            yield f"{path.relative_to(site)}: loads {target}"


def not_in_navigation() -> Iterator[str]:
    """Pages of docs/ that are missing from the navigation."""
    listed = re.findall(r'"([\w./-]+\.md)"', (SETTINGS / "zensical.toml").read_text())
    for path in sorted(ROOT.glob("docs/**/*.md")):
        if str(path.relative_to(ROOT)) not in listed:
            yield f"{path.relative_to(ROOT)}: not in the navigation (docs/site/zensical.toml)"


def copy(source: Path, target: Path) -> None:
    """Copy a file, creating the target's folder."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def write(path: Path, text: str) -> None:
    """Write a file, creating its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def main() -> int:
    """Build the site; return 1 if it has faults, 2 if its packages are missing."""
    zensical = Path(sys.executable).with_name("zensical")
    if not zensical.exists():
        print("docs: the packages of the site are missing: make setup STACK=cpu", file=sys.stderr)
        return 2
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "docs").resolve()
    for part in ("pages", "site"):
        shutil.rmtree(folder / part, ignore_errors=True)
    os.environ |= {"COLUMNS": "88", "NO_COLOR": "1"}
    stage(folder / "pages")
    shutil.move(folder / "pages" / "zensical.toml", folder / "zensical.toml")
    built = subprocess.run(
        [zensical, "build", "--strict"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    if built.returncode:
        print(*warnings(built.stdout + built.stderr), sep="\n")
    wrong = list(faults(folder / "site"))
    for line in [*wrong, *not_in_navigation()]:
        print(line)
    if built.returncode or wrong:
        return 1
    print(folder / "site" / "index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
