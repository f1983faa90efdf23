"""The pages in a real browser: every view by mouse and by keyboard, in every width, light and dark; hostile runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from forge_env.view.report import write_report
from tests.forge_env.view.made import evaluation, hostile_run, training_run

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(300)]

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]
PATIENCE_MS = 60_000
"""For a page on a busy machine."""
expect.set_options(timeout=PATIENCE_MS)
VIEWS = {
    "runs": "/",
    "run": "/run/first",
    "trajectories": "/run/first/trajectories?kind=train&sort=-reward",
    "trajectory": "/run/first/t/train/train-5-1",
    "tokens": "/run/first/t/train/train-5-1?tab=tokens",
    "raw": "/run/first/t/train/train-5-1?tab=raw",
    "group": "/run/first/g?kind=train&group=5",
    "time": "/run/first/time",
    "evaluations": "/run/first/evaluations",
    "evaluation": "/run/eval-a",
    "compare": "/compare?runs=first,second",
    "compare evaluations": "/compare?runs=eval-a,eval-b",
    "hacked run": "/run/hacked",
    "found": "/run/first/trajectories?q=XS%20BY%203&step=2-9&since=2023-11-14T00:00",
    "recipe": "/run/first/recipe",
    "log": "/run/first/log",
    "page of nothing": "/run/bare",
    "list of nothing": "/run/bare/trajectories",
    "search without a match": "/run/first/trajectories?q=nothing%20like%20this",
    "runs without a match": "/?q=nothing",
    "no held-out scores": "/run/bare/evaluations",
    "hostile run": "/run/hostile",
    "hostile list": "/run/hostile/trajectories",
}
CONTRAST = """() => {
  const parse = (text) => { const found = text.match(/[\\d.]+/g).map(Number);
    return found.length > 3 ? found : [...found, 1]; };
  const light = ([r, g, b]) => {
    const part = (v) => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b); };
  const over = (top, below) => [0, 1, 2].map((n) => top[n] * top[3] + below[n] * (1 - top[3]));
  const behind = (element) => { const layers = [];
    for (let at = element; at; at = at.parentElement) {
      const paint = parse(getComputedStyle(at).backgroundColor); layers.push(paint); if (paint[3] === 1) break; }
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255]); };
  const bad = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (!node.data.trim() || !element.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
    if (element.closest("svg, script, style, .skip, button:disabled")) continue;
    const back = behind(element), ink = over(parse(getComputedStyle(element).color), back);
    const [one, two] = [light(ink), light(back)].sort((a, b) => b - a);
    const ratio = (one + 0.05) / (two + 0.05);
    if (ratio < 4.5) bad.push(`${ratio.toFixed(2)}: ${node.data.trim().slice(0, 40)}`);
  }
  return bad;
}"""


PAIRS = [
    *(("--on-series", f"--s{number}") for number in range(6)),  # names in time bars and on the timeline
    *((f"--s{number}", "--card") for number in range(6)),  # names of lines in a saved picture
    *(("--ink", f"--h{number}") for number in range(1, 7)),  # tokens
    ("--ink", "--w0"), ("--ink", "--w1"), ("--soft", "--card"), ("--ink", "--card"),  # waiting, axes
]  # fmt: skip
"""Colours of text, and what it stands on, that a walk through the elements doesn't find: in SVG, canvas, highlights."""
RATIO = """([one, two]) => {
  const pen = document.createElement("canvas").getContext("2d");
  const light = (name) => {
    pen.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    const parts = [1, 3, 5].map((at) => parseInt(pen.fillStyle.slice(at, at + 2), 16) / 255);
    const [r, g, b] = parts.map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const [high, low] = [light(one), light(two)].sort((a, b) => b - a);
  return (high + 0.05) / (low + 0.05);
}"""


@dataclass
class Site:
    """The pages of a folder, served by the command."""

    address: str
    root: Path

    @property
    def base(self) -> str:
        return self.address.partition("/?")[0]


@contextmanager
def served(root: Path, cache: Path) -> Iterator[Site]:
    command = [Path(sys.executable).with_name("forge-env"), "view", root, "--no-browser", "--port", "0"]
    environment = {**os.environ, "FORGE_ENV_CACHE": str(cache)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            assert " at http://127.0.0.1:" in said
            yield Site(said.rsplit(" at ", 1)[1].split()[0], root)
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    root = tmp_path_factory.mktemp("runs")
    training_run(root / "first")
    training_run(root / "second", start=0.8, end=0.1, seed=1)
    training_run(root / "hacked", hacked=True, seed=3)
    evaluation(root / "eval-a")
    evaluation(root / "eval-b", solved=0.95, seed=2)
    hostile_run(root / "hostile")
    training_run(root / "coding_rlvr-20261127-114233", steps=2, hacked=True)
    shutil.copytree(root / "eval-a", root / "eval-coding_rlvr-qwen3-8b-20261127-025911")
    (root / "bare").mkdir()
    (root / "bare" / "config.yaml").write_text("environment: {name: made}\ngrpo: {steps: 25}\n")
    with served(root, tmp_path_factory.mktemp("cache")) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=FLAGS)
        yield found
        found.close()


@dataclass
class Watched:
    """A tab, and everything about it that should not be."""

    page: Page
    base: str
    wrong: list[str] = field(default_factory=list)

    def goto(self, path: str) -> None:
        answer = self.page.goto(self.base + path)
        assert answer is not None
        assert answer.status < 500, path
        self.page.wait_for_selector("body[data-ready]")


@contextmanager
def tab(browser: Browser, site: Site, width: int = 1280, scheme: Any = "light") -> Iterator[Watched]:
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce"
    )
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    watched = Watched(page, site.base)
    page.on("console", lambda said: watched.wrong.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: watched.wrong.append(str(error)))
    page.on("dialog", lambda dialog: (watched.wrong.append(f"dialog {dialog.message}"), dialog.dismiss()))
    page.on(
        "request", lambda asked: None if asked.url.startswith((site.base, "blob:")) else watched.wrong.append(asked.url)
    )
    page.goto(site.address)
    try:
        yield watched
        assert watched.wrong == []
    finally:
        context.close()


CLIPPED = """() => [
  ...[...document.querySelectorAll(".scroll")].filter((box) => box.scrollWidth > box.clientWidth + 1)
    .map((box) => `columns cut: ${box.textContent.trim().slice(0, 40)}`),
  ...[...document.querySelectorAll("main *")].filter((one) => getComputedStyle(one).textOverflow === "ellipsis"
      && one.scrollWidth > one.clientWidth + 1 && one.checkVisibility() && !one.title)
    .map((one) => `text cut: ${one.textContent.trim().slice(0, 40)}`),
  ...[...document.querySelectorAll(".big")].filter((one) => !/[a-z]/.test(one.textContent)
      && !one.nextElementSibling?.matches(".measured")).map((one) => `no noun: ${one.textContent}`),
]"""
"""Columns beyond the window, texts cut without a way to read them, and figures as headlines without a noun."""
HOLES = """() => [...document.querySelectorAll(".cards")].filter((grid) => {
  const rows = {};
  for (const card of grid.children) (rows[card.offsetTop] ??= []).push(card.offsetWidth);
  const used = Object.values(rows).map((all) => all.reduce((sum, one) => sum + one, 14 * (all.length - 1)));
  return used.some((sum) => sum < grid.clientWidth - 2);
}).length"""
"""Number of groups of cards with a row that is not filled."""
WIDTHS = [(360, "dark"), (390, "light"), (768, "dark"), (1280, "light"), (1920, "dark")]


@pytest.mark.parametrize(("width", "scheme"), WIDTHS)
def test_every_view_fits_and_can_be_read(width: int, scheme: str, browser: Browser, site: Site) -> None:
    with tab(browser, site, width, scheme) as watched:
        for name, path in VIEWS.items():
            watched.goto(path)
            assert watched.page.evaluate("() => document.documentElement.scrollWidth") <= width, (
                f"{name} scrolls sideways"
            )
            assert watched.page.evaluate(CONTRAST) == [], name
            assert watched.page.evaluate("() => window.ran") is None, name
            assert watched.page.evaluate(HOLES) == 0, name
            if width > 360 and "hostile" not in name and name != "runs":
                assert watched.page.evaluate(CLIPPED) == [], name


@pytest.mark.parametrize("width", [390, 768, 1280, 1920])
def test_the_list_of_runs_shows_default_names_whole_and_every_score(width: int, browser: Browser, site: Site) -> None:
    with tab(browser, site, width) as watched:
        watched.goto("/?q=2026")
        page = watched.page
        assert page.evaluate(CLIPPED) == []
        assert page.locator("[data-row]").count() == 2
        for text in ("coding_rlvr-20261127-114233", "eval-coding_rlvr-qwen3-8b-20261127-025911"):
            box = page.get_by_role("link", name=text).bounding_box()
            assert box is not None
            assert 0 <= box["x"] <= box["x"] + box["width"] <= width
        score = page.locator("td", has_text="\u2192").bounding_box()
        assert score is not None
        assert score["x"] + score["width"] <= width
        expect(page.get_by_text("maximum reward, not solved")).to_be_visible()


def test_the_list_of_runs_is_sorted_and_searched(browser: Browser, site: Site) -> None:
    with tab(browser, site) as watched:
        page = watched.page
        watched.goto("/")
        for heading, sort in (("score", "-score"), ("score", "score"), ("run", "run")):
            page.locator(".runs th a", has_text=heading).first.click()
            page.wait_for_url(f"**sort={sort}")
            page.wait_for_selector("body[data-ready]")
        names = page.locator(".runs .name > a").all_text_contents()
        assert names == sorted(names)
        assert page.locator("th[aria-sort=ascending]").text_content() == "run \u2191"
        page.keyboard.press("/")
        page.keyboard.type("lossy eval-b")
        page.keyboard.press("Enter")
        page.wait_for_url("**q=lossy**")
        expect(page.locator("[data-row]")).to_have_count(1)
        assert "sort=run" in page.url, "a search keeps the order"
        page.get_by_role("searchbox").fill("nothing")
        page.get_by_role("button", name="Filter").click()
        expect(page.get_by_text("No run matches \u201cnothing\u201d.")).to_be_visible()
        page.get_by_role("link", name="clear").click()
        expect(page.get_by_role("link", name="first", exact=True)).to_be_visible()


SAYS = {
    "/": ["finished", "lossy", "stopped"],
    "/run/bare": ["No episode is recorded.", "stopped"],
    "/run/bare/log": ["This run has no run.log."],
    "/run/first/trajectories?q=nothing": ["No episode contains \u201cnothing\u201d."],
    "/run/first": ["of the trainer's time waiting for episodes"],
    "/run/eval-a": ["of a sample's time: other"],
    "/run/first/g?kind=train&group=2": ["reference: the ", "diverges here from the reference"],
    "/run/hacked": ["training reward"],
}
"""What pages say in words that are their own: states, empty pages, headlines, the reference of a group."""


def test_pages_say_what_they_show(browser: Browser, site: Site) -> None:
    with tab(browser, site) as watched:
        for path, texts in SAYS.items():
            watched.goto(path)
            for text in texts:
                expect(watched.page.locator("main").get_by_text(text).first).to_be_visible()
        watched.goto("/run/bare")
        expect(watched.page.get_by_role("heading", name="Curves")).to_be_hidden()


def test_focus_is_seen_on_every_control(browser: Browser, site: Site) -> None:
    outline = "() => { const { outlineStyle, outlineWidth } = getComputedStyle(document.activeElement); "
    outline += "return [document.activeElement.outerHTML.slice(0, 80), outlineStyle, parseFloat(outlineWidth)]; }"
    with tab(browser, site) as watched:
        for path in ("/", "/run/first", "/run/first/trajectories"):
            watched.goto(path)
            for _ in range(25):
                watched.page.keyboard.press("Tab")
                element, style, pixels = watched.page.evaluate(outline)
                assert style != "none", element
                assert pixels >= 1, element


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_in_charts_and_on_tokens_can_be_read(scheme: str, browser: Browser, site: Site) -> None:
    with tab(browser, site, scheme=scheme) as watched:
        watched.goto("/run/first/time")
        ratios = {pair: watched.page.evaluate(RATIO, list(pair)) for pair in PAIRS}
    assert {pair: ratio for pair, ratio in ratios.items() if ratio < 4.5} == {}


SIZES = [pytest.param(1280, "light", marks=pytest.mark.core), (360, "dark"), (2560, "dark")]


@pytest.mark.parametrize(("width", "scheme"), SIZES)
def test_a_person_finds_the_way_by_mouse(width: int, scheme: str, browser: Browser, site: Site) -> None:
    with tab(browser, site, width, scheme) as watched:
        page = watched.page
        page.get_by_role("link", name="first", exact=True).click()
        expect(page.get_by_role("heading", name="Did it learn?")).to_be_visible()
        page.wait_for_selector("[data-charts][data-drawn]")
        assert page.locator(".chart[data-chart=reward] canvas").count() == 1
        page.get_by_role("link", name="wrong answer").first.click()
        expect(page.locator("tbody tr").first).to_be_visible()
        page.get_by_label("order").select_option("tokens") if width < 480 else page.get_by_role(
            "link", name="tokens"
        ).click()
        page.wait_for_url("**sort=tokens**")
        page.wait_for_selector("body[data-ready]")
        page.locator(".chip", has_text="hit a limit").click()
        expect(page.get_by_text("No episode matches the filters.")).to_be_visible()
        page.go_back()
        page.get_by_role("link", name="clear").click()
        page.get_by_label("kind").select_option("train")
        page.wait_for_url("**kind=train**")
        page.wait_for_selector("body[data-ready]")
        page.get_by_role("searchbox").fill("Multiply each of xs by 3")
        page.get_by_role("button", name="Filter").click()
        page.locator("tbody tr a").first.click()
        expect(page.get_by_text("Multiply each of xs by 3")).to_be_visible()
        page.get_by_role("link", name="Tokens").click()
        page.wait_for_selector("[data-tokens][data-painted]")
        page.get_by_label("policy version").check()
        assert "colour=version" in page.url
        page.locator(".group a").first.click()
        expect(page.get_by_role("heading", name="Group ")).to_be_visible()
        page.get_by_role("link", name="Time").click()
        page.wait_for_selector("[data-timeline][data-drawn]")
        before = page.url
        page.locator("[data-timeline]").hover()
        page.mouse.wheel(0, -800)
        page.wait_for_url(lambda url: url != before)
        assert "from=" in page.url
        page.get_by_role("link", name="Held-out scores").first.click()
        expect(page.get_by_role("heading", name="Split eval", exact=True)).to_be_visible()


def test_a_step_leads_to_its_episodes_and_a_stretch_is_zoomed(browser: Browser, site: Site) -> None:
    with tab(browser, site) as watched:
        page = watched.page
        watched.goto("/run/first")
        page.wait_for_selector("[data-charts][data-drawn]")
        area = page.locator(".chart[data-chart=reward] .u-over")
        area.hover(position={"x": 250, "y": 60})
        page.mouse.down()
        area.hover(position={"x": 600, "y": 60})
        page.mouse.up()
        expect(page.locator("[data-zoom-out]")).to_be_visible()
        assert "zoom=" in page.url
        page.reload()
        expect(page.locator("[data-zoom-out]")).to_be_visible()
        page.locator("[data-zoom-out]").click()
        with page.expect_download() as saved:
            page.locator(".chart[data-chart=reward]").hover()
            page.locator(".chart[data-chart=reward] .save summary").click()
            page.get_by_role("button", name="PNG").first.click()
        assert saved.value.suggested_filename == "reward.png"
        area = page.locator(".chart[data-chart=reward] .u-over")
        area.click(position={"x": 450, "y": 60})
        page.wait_for_url("**/trajectories?**")
        expect(page.locator("tbody tr").first).to_be_visible()


def test_curves_are_smoothed_put_on_a_log_axis_folded_and_taken_away(browser: Browser, site: Site) -> None:
    with tab(browser, site) as watched:
        page = watched.page
        watched.goto("/run/first")
        page.wait_for_selector("[data-charts][data-drawn]")
        chart = page.locator(".chart[data-chart=reward]")
        picture = "(canvas) => canvas.toDataURL()"
        plain = chart.locator("canvas").evaluate(picture)
        page.locator("[data-smooth]").fill("0.8")
        smooth = chart.locator("canvas").evaluate(picture)
        page.locator("[data-log]").check()
        assert "smooth=0.8" in page.url
        assert "log=1" in page.url
        assert len({plain, smooth, chart.locator("canvas").evaluate(picture)}) == 3
        page.reload()
        page.wait_for_selector("[data-charts][data-drawn]")
        expect(page.locator("[data-log]")).to_be_checked()
        still = page.locator("details.fold", has_text="constant over the whole run")
        expect(still.get_by_text("Groups with signal: 0.8")).to_be_hidden()
        still.locator("summary").click()
        expect(still.get_by_text("Groups with signal: 0.8")).to_be_visible()
        for kind, begins in (("PNG", b"\x89PNG"), ("SVG", b"<svg "), ("CSV", b"step,")):
            with page.expect_download() as saved:
                chart.hover()
                if not chart.locator("details[open]").count():
                    chart.locator(".save summary").click()
                chart.get_by_role("button", name=kind).click()
            assert saved.value.suggested_filename == f"reward.{kind.lower()}"
            assert Path(saved.value.path()).read_bytes().startswith(begins)
        page.locator(".chart[data-chart='Entropy'] .u-over").hover(position={"x": 60, "y": 40})
        lines = page.locator(".chart .u-cursor-x:not(.u-off)").evaluate_all(
            "(all) => all.map((line) => line.style.transform)"
        )
        assert len(lines) > 8, "one cursor over all"
        assert all("translate" in line for line in lines)


@pytest.mark.parametrize(("width", "scheme"), SIZES)
def test_a_person_finds_the_way_by_keyboard(width: int, scheme: str, browser: Browser, site: Site) -> None:
    with tab(browser, site, width, scheme) as watched:
        page = watched.page
        watched.goto("/run/first/trajectories?kind=train")
        for key in ("j", "j", "k"):
            page.keyboard.press(key)
        expect(page.locator("tr.here")).to_have_count(1)
        page.keyboard.press("Enter")
        page.wait_for_url("**/t/train/**")
        first = page.url
        page.keyboard.press("]") if page.locator("a[rel=next]").count() else page.keyboard.press("[")
        page.wait_for_url(lambda url: url != first)
        page.wait_for_selector("body[data-ready]")
        page.keyboard.press("t")
        page.wait_for_url("**tab=tokens**")
        page.wait_for_selector("body[data-ready]")
        page.keyboard.press("g")
        page.wait_for_url("**/g?**")
        page.wait_for_selector("body[data-ready]")
        page.keyboard.press("u")
        page.wait_for_url("**/trajectories")
        page.wait_for_selector("body[data-ready]")
        page.keyboard.press("/")
        page.keyboard.type("xs by 2")
        page.keyboard.press("Enter")
        page.wait_for_url("**q=xs**")
        page.wait_for_selector("body[data-ready]")
        page.keyboard.press("?")
        expect(page.get_by_role("heading", name="Keys")).to_be_visible()
        page.keyboard.press("Escape")
        watched.goto("/")
        for key in ("j", "x", "j", "x", "c"):
            page.keyboard.press(key)
        page.wait_for_url("**/compare?**")


def test_nothing_in_a_hostile_run_is_executed(browser: Browser, site: Site) -> None:
    with tab(browser, site) as watched:
        page = watched.page
        watched.goto("/run/hostile/trajectories")
        rows = [row.get_attribute("data-row") for row in page.locator("[data-row]").all()]
        assert len(rows) > 20
        for row in rows:
            assert row is not None
            for query in ("", "?tab=tokens", "?tab=raw"):
                watched.goto(row + query)
                assert page.evaluate("() => window.ran") is None
                assert page.locator("main img, main iframe, main object, main script").count() == 0
        watched.goto("/run/hostile/trajectories?q=window.ran")
        watched.goto("/run/hostile/g?kind=train&group=0")
        watched.goto("/run/hostile/time")


def test_a_run_is_live_while_it_is_looked_at(browser: Browser, tmp_path: Path) -> None:
    run = training_run(tmp_path / "runs" / "first", steps=6)
    with served(tmp_path / "runs", tmp_path / "cache") as own, tab(browser, own) as watched:
        page = watched.page
        watched.goto("/run/first")
        expect(page.locator("[data-live-sign]")).to_be_visible()
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"schema": 1, "step": 7, "time": 99.0, "reward/mean": 0.99}) + "\n")
        expect(page.locator("[data-live=subtitle]")).to_contain_text("7 steps")


def test_an_evaluation_and_a_list_are_live_too(browser: Browser, tmp_path: Path) -> None:
    run = evaluation(tmp_path / "runs" / "eval-a", epochs=1)
    more = evaluation(tmp_path / "more", epochs=3).joinpath("trajectories", "eval.jsonl").read_bytes().splitlines(True)
    with served(tmp_path / "runs", tmp_path / "cache") as own, tab(browser, own) as watched:
        page = watched.page
        watched.goto("/run/eval-a")
        expect(page.locator("[data-live-sign]")).to_be_visible()
        expect(page.locator("[data-live=subtitle]")).to_contain_text("20 of 20 samples")
        with (run / "trajectories" / "eval.jsonl").open("ab") as file:
            file.writelines(more[20:40])
        expect(page.locator("[data-live=subtitle]")).to_contain_text("40 of 20 samples")
        watched.goto("/run/eval-a/trajectories")
        expect(page.locator("[data-live-sign]")).to_be_visible()
        with (run / "trajectories" / "eval.jsonl").open("ab") as file:
            file.writelines(more[40:])
        page.get_by_role("link", name="show new episodes").click()
        expect(page.locator("[data-live=total]")).to_have_text("60")


def test_news_are_asked_for_only_while_the_page_is_looked_at(browser: Browser, site: Site) -> None:
    hide = """(hidden) => { Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
      document.dispatchEvent(new Event("visibilitychange")); }"""
    with tab(browser, site) as watched:
        page = watched.page
        watched.goto("/run/first")
        expect(page.locator("[data-live-sign]")).to_be_visible()
        with page.expect_event("requestfailed", lambda asked: asked.url.endswith("/run/first/events")):
            page.evaluate(hide, True)
        expect(page.locator("[data-live-sign]")).to_be_hidden()
        with page.expect_request("**/run/first/events"):
            page.evaluate(hide, False)
        expect(page.locator("[data-live-sign]")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["first", "hacked", "eval-a", "hostile"])
def test_a_report_fits_every_width_and_can_be_read(
    name: str, scheme: Any, browser: Browser, site: Site, tmp_path: Path
) -> None:
    out = write_report(site.root / name, tmp_path / "report.html")
    own = Site(out.as_uri(), tmp_path)
    for width in (360, 1280, 2560):
        with tab(browser, own, width, scheme) as watched:
            page = watched.page
            page.locator("details").evaluate_all("(all) => all.forEach((one) => { one.open = true; })")
            assert page.evaluate("() => document.documentElement.scrollWidth") <= width, width
            assert page.evaluate(CONTRAST) == [], width
            assert page.evaluate("() => window.ran") is None
            if name in ("first", "hacked"):
                page.wait_for_selector("[data-charts][data-drawn]")
                page.locator("[data-log]").check()
                assert page.locator(".chart[data-chart=reward] canvas").count() == 1
                page.get_by_role("link", name="Time", exact=True).click()
                expect(page.get_by_role("heading", name="Where the time went")).to_be_in_viewport()


def test_eight_tabs_work_at_once(browser: Browser, site: Site) -> None:
    context = browser.new_context()
    context.set_default_timeout(PATIENCE_MS)
    pages = [context.new_page() for _ in range(8)]
    pages[0].goto(site.address)
    for page in pages:
        page.goto(f"{site.base}/run/first")
    for page in pages:
        page.bring_to_front()
        page.reload()
        page.wait_for_selector("[data-charts][data-drawn]")
    context.close()
