"""Build the documentation as a site that works without a server and without a network: build/docs/site/index.html.

python scripts/docs.py [FOLDER]

The pages lie as in the repository, so that a link means the same in both. Files of code and folders that a page links
to become pages, and `<!-- output: forge-env ... -->` becomes what that command prints. It fails, and names the page,
where a link, an anchor or a picture leads nowhere, or something is loaded from elsewhere.
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
PAGES = ("*.md", "docs/**/*.md", "apps/**/README.md", "environments/**/README.md")
PICTURES = ("docs/**/*.png", "docs/**/*.svg")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".sh": "bash"}


def stage(folder: Path) -> None:
    """Lay out what the site is built from."""
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
    """A page's text; the files of code that it links to are pages too."""

    def link(found: re.Match[str]) -> str:
        path = page.parent / found[1]
        if path.suffix in (".md", *{Path(picture).suffix for picture in PICTURES}) or not path.exists():
            return found[0]
        place = path.resolve().relative_to(ROOT)
        if path.is_dir():
            code = "\n".join(sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()))
        else:
            code = path.read_text()
        write(folder / f"{place}.md", f"# {place}\n\n`````{LANGUAGES.get(path.suffix, 'text')}\n{code}\n`````\n")
        return f"]({found[1]}.md)"

    return re.sub(r"\]\(([^)#:\s]+)\)", link, page.read_text())


def with_outputs(text: str) -> str:
    """A page's text, with what commands print."""

    def output(found: re.Match[str]) -> str:
        arguments = found[1].split()
        printed = StringIO()
        with redirect_stdout(printed), suppress(SystemExit):  # argparse ends so after a help text
            forge_env(arguments)
        return f"`````{'yaml' if arguments[0] == 'config' else 'text'}\n{printed.getvalue().strip()}\n`````"

    return re.sub(r"<!-- output: forge-env (.*) -->", output, text)


def warnings(output: str) -> Iterator[str]:
    """What Zensical warned of, without its pictures of whole lines; all of it where that is not why it failed."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", output)
    found = re.findall(r"^Warning: (.*)(?:\n.*\[ (.*?) \])?", plain, re.MULTILINE)
    yield from (f"{where}: {what}" if where else what for what, where in found)
    if not found:
        yield plain


class Links(HTMLParser):
    """What a built page links to and loads, and the names in it that others can link to."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.names: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """A tag."""
        has = dict(attrs)
        self.names.update(name for name in (has.get("id"), has.get("name") if tag == "a" else None) if name)
        target = has.get("href") if tag in ("a", "link") else has.get("src")
        if target is not None:
            (self.links if tag == "a" else self.loads).append(target)


def faults(site: Path) -> Iterator[str]:
    """What is wrong with a built site."""
    pages: dict[Path, Links] = {}
    for path in sorted(site.glob("**/*.html")):
        pages[path] = Links()
        pages[path].feed(path.read_text())
    for page, found in pages.items():
        if page.name == "404.html":  # served for any address: its links begin at the site's own
            continue
        for target in [*found.links, *found.loads]:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                if target in found.loads and parts.scheme != "data":
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
    """Pages of docs/ that nobody would find."""
    listed = re.findall(r'"([\w./-]+\.md)"', (SETTINGS / "zensical.toml").read_text())
    for path in sorted(ROOT.glob("docs/**/*.md")):
        if str(path.relative_to(ROOT)) not in listed:
            yield f"{path.relative_to(ROOT)}: not in the navigation (docs/site/zensical.toml)"


def copy(source: Path, target: Path) -> None:
    """A file with its folder."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def write(path: Path, text: str) -> None:
    """A file with its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def main() -> int:
    """Build the site."""
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
