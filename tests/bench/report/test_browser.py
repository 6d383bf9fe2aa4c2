"""The page in a browser, from its file: nothing is fetched, everything is drawn, and the table answers."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import made_results
import pytest

from gradwire.cli import main

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(CHROMIUM is None, reason="Debian's package chromium is not installed"),
]
GRAVE = ("serious", "critical")


@pytest.fixture(scope="module")
def page_file(tmp_path_factory) -> Path:
    """A page with all sections."""
    places = [(1, "none"), (2, "none"), (2, "100mbit")]
    results = made_results.rows(["none", "bf16-native", "int8", "powersgd"], ["ddp"], places, [0, 1])
    lost = {"status": "failed", "reason": "a reason without any space, " + "x" * 300, "val_ppl": None}
    folder = made_results.write(
        tmp_path_factory.mktemp("browser") / "demo", [*results[:-1], results[-1].model_copy(update=lost)]
    )
    other = made_results.write(folder.parent / "other", results)
    assert main(["report", "--results_dir", str(folder), "--compare_with", str(other)]) == 0
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[sync_api.Browser]:
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


class Opened:
    """The page in a window, and what it said and fetched."""

    def __init__(
        self, browser: sync_api.Browser, file: Path, width: int = 1440, scheme: str = "light", height: int = 900
    ) -> None:
        self.page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        self.said: list[str] = []
        self.fetched: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.fetched.append(request.url))
        self.page.goto(file.as_uri())

    def unfold(self) -> None:
        """Open what the sections fold."""
        self.page.evaluate(
            "document.querySelectorAll('section > details').forEach((details) => { details.open = true; })"
        )

    def column(self, number: int) -> list[str]:
        cells = self.page.locator("#table-cells tbody tr:not([hidden])").all()
        return [row.locator("th, td").nth(number).inner_text() for row in cells]


@pytest.fixture(scope="module")
def opened(browser, page_file) -> Opened:
    opened = Opened(browser, page_file)
    opened.unfold()
    return opened


def test_nothing_is_fetched_and_nothing_complains(opened, page_file):
    assert opened.fetched == [page_file.as_uri()]
    assert opened.said == []


def test_every_figure_is_drawn(opened):
    opened.unfold()
    figures = opened.page.locator("figure svg").all()
    assert len(figures) == opened.page.locator("figure").count() > 10
    for figure in figures:
        box = figure.bounding_box()
        assert box["width"] > 250
        assert box["height"] > 80
        assert figure.locator("path").count() > 10
    missing = """() => [...document.querySelectorAll("figure svg *")]
        .flatMap((element) => [...element.attributes].map((attribute) => attribute.value))
        .flatMap((value) => [...value.matchAll(/(?:url\\(|^)#([^)]+)\\)?/g)].map((found) => found[1]))
        .filter((id) => !document.getElementById(id))"""
    assert opened.page.evaluate(missing) == []


def test_sorting_goes_by_value_and_keeps_what_is_missing_below(opened):
    heading = opened.page.locator("#table-cells th", has_text="step ms")
    number = opened.page.locator("#table-cells thead th").all_inner_texts().index("step ms")
    heading.locator("button").click()
    up = [float(text.replace(",", "")) for text in opened.column(number)]
    assert up == sorted(up)
    assert heading.get_attribute("aria-sort") == "ascending"
    heading.locator("button").press("Enter")
    assert [float(text.replace(",", "")) for text in opened.column(number)] == up[::-1]
    assert heading.get_attribute("aria-sort") == "descending"
    ratio = opened.page.locator("#table-cells thead th").all_inner_texts().index("gradients ×")
    for _ in range(2):
        opened.page.locator("#table-cells thead th").nth(ratio).locator("button").click()
        shown = opened.column(ratio)
        assert shown[-4:] == ["–"] * 4
        assert "–" not in shown[:-4]


def test_the_filter_shows_rows_with_all_words(opened):
    opened.page.locator("#filter-cells").fill("100mbit INT8")
    assert (opened.column(0), opened.column(3)) == (["int8"], ["100mbit"])
    assert opened.page.locator("output").last.inner_text() == "1 of 12 rows"
    opened.page.locator("#filter-cells").fill("nothing such")
    assert opened.column(0) == []
    opened.page.locator("#filter-cells").fill("")
    assert len(opened.column(0)) == 12


def test_a_row_s_command_opens_by_keyboard(opened):
    summary = opened.page.locator("#table-cells tbody summary").first
    code = opened.page.locator("#table-cells tbody code").first
    assert not code.is_visible()
    summary.press("Enter")
    assert code.is_visible()
    assert code.inner_text().startswith("gradwire run results/demo/config.json -- --force")
    opened.page.locator("#table-cells tbody .copy").first.press("Enter")
    assert opened.page.evaluate("getSelection().toString()").startswith("gradwire run")
    summary.press("Enter")


@pytest.mark.parametrize(("width", "pinned"), [(390, 1), (1440, 4)])
def test_key_columns_stay_in_sight_while_the_table_scrolls(browser, page_file, width, pinned):
    """All that name a row, or the first alone where they would take more than half of the table's width."""
    opened = Opened(browser, page_file, width)
    opened.unfold()
    lefts = """() => {
        const table = document.querySelector("#table-cells");
        const rows = [table.tHead.rows[0], ...table.tBodies[0].rows].map((row) =>
            [...row.cells].slice(0, 6).map((cell) => Math.round(cell.getBoundingClientRect().left)));
        return [table.parentElement.scrollLeft, rows];
    }"""
    at, before = opened.page.evaluate(lefts)
    room = "(() => { const box = document.querySelector('#table-cells').parentElement; box.scrollLeft = 1e6; })()"
    opened.page.evaluate(room)
    scrolled, after = opened.page.evaluate(lefts)
    assert at == 0 and scrolled > 100
    for was, now in zip(before, after, strict=True):
        assert now[:pinned] == was[:pinned], "these stay"
        assert now[pinned:] == [pytest.approx(left - scrolled, abs=2) for left in was[pinned:]], "these move"
    titles = opened.page.locator("#table-cells thead th").all_inner_texts()
    assert titles[:4] == ["compressor", "strategy", "W", "link"]
    covered = """(pinned) => [...document.querySelectorAll("#table-cells tbody tr")].filter((row) => {
        row.scrollIntoView({block: "center"});
        const box = row.cells[pinned - 1].getBoundingClientRect();
        return !row.cells[pinned - 1].contains(document.elementFromPoint(box.left + 4, box.top + box.height / 2));
    }).length"""
    assert opened.page.evaluate(covered, pinned) == 0, "what scrolls passes below them"
    opened.page.close()


@pytest.mark.parametrize(("width", "height"), [(390, 844), (1440, 900)])
def test_the_answer_the_table_and_the_plot_are_on_the_first_screen(browser, tmp_path_factory, width, height):
    results = made_results.rows(["none", "bf16-native", "int8", "powersgd"], ["ddp"], [(2, "none"), (2, "100mbit")])
    folder = made_results.write(tmp_path_factory.mktemp("first") / "demo", results)
    assert main(["report", "--results_dir", str(folder)]) == 0
    opened = Opened(browser, folder / "report.html", width, height=height)
    assert re.match(r"int8: [\d.]+ times ", opened.page.locator(".answer strong").inner_text())
    for part in ("h1", ".answer", "#table-glance", "#answer figure svg"):
        box = opened.page.locator(part).bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width and box["y"] + box["height"] <= height, part
    opened.page.locator("#answer .tip").first.hover()
    assert re.search(r" %.*step time", opened.page.locator("#tip").inner_text())
    opened.page.close()


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (390, "light"), (1440, "dark"), (1440, "light")])
def test_the_page_fits_and_axe_finds_nothing_grave(browser, page_file, width, scheme):
    from axe_playwright_python.sync_playwright import Axe

    opened = Opened(browser, page_file, width, scheme)
    assert opened.page.evaluate("document.documentElement.scrollWidth") == width
    small = """() => [...document.querySelectorAll("main p, main dd, main li, main td, figure")].filter((element) => {
        const box = element.getBoundingClientRect();
        return box.width && !element.closest(".scroll") && (box.left < 0 || box.right > innerWidth + 1);
    }).length"""
    assert opened.page.evaluate(small) == 0
    letters = opened.page.evaluate(
        """() => [...document.querySelectorAll("figure svg text")].map((text) => text.getBoundingClientRect().height)"""
    )
    assert min(height for height in letters if height) > 6
    found = Axe().run(opened.page).response["violations"]
    assert [(one["id"], one["nodes"][0]["html"][:200]) for one in found if one["impact"] in GRAVE] == []
    opened.page.close()


def test_the_colours_follow_the_scheme(browser, page_file):
    found = []
    for scheme in ("dark", "light"):
        opened = Opened(browser, page_file, scheme=scheme)
        found.append(opened.page.evaluate("getComputedStyle(document.body).backgroundColor"))
        opened.page.close()
    assert found == ["rgb(20, 23, 28)", "rgb(255, 255, 255)"]
