"""The documentation: it builds strictly, loads nothing from a network, and a link that leads nowhere is an error."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from statistics import mean
from urllib.parse import unquote, urlsplit

import made_results
import pytest

from gradwire import cli
from gradwire.bench.config import Experiment
from gradwire.bench.report.rows.record import Result
from gradwire.comm.compressors import available

pytest.importorskip("mkdocs", reason="`make docs` installs what builds the documentation")

from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort, MkDocsException

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.full
CONTROLS = {"none", "zero"}  # compressors without a paper


class Loaded(HTMLParser):
    """The files that a browser loads for a page, and the page's ids."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "img", "iframe", "source"):
            self.found.append(given.get("src") or "")
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preconnect", "preload"):
            self.found.append(given.get("href") or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder))
    config.plugins.on_startup(command="build", dirty=False)
    build(config)
    return folder


def test_nothing_is_loaded_from_a_network(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 25
    remote = {(page.name, url) for page in pages for url in Loaded(page).found if re.match(r"(https?:)?//", url)}
    assert remote == set()
    styles = "".join(file.read_text(encoding="utf-8") for file in site.rglob("*.css"))
    assert not re.search(r"url\([\"']?(https?:)?//", styles)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="Debian's package chromium is not installed")
def test_the_search_works_from_files(site):
    with pytest.importorskip("playwright.sync_api").sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page, complaints = browser.new_page(), []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto((site / "how-to" / "configure.html").as_uri())  # not at the root: paths are relative
        page.locator("input[name=query]").click()
        page.keyboard.type("powersgd", delay=50)
        page.locator(".md-search-result__item").first.wait_for()
        found = page.locator(".md-search-result__link").first.evaluate("link => link.href")
        browser.close()
    assert complaints == []
    assert Path(unquote(urlsplit(found).path)).is_file()


def test_the_reference_is_complete(site):
    commands, configuration, compressors, python, results = (
        (site / "reference" / f"{name}.html").read_text(encoding="utf-8")
        for name in ("commands", "configuration", "compressors", "python", "results")
    )
    assert all(
        f'id="{name.replace(" ", "-")}"' in commands and f"usage: gradwire {name}" in commands for name in cli.COMMANDS
    )
    assert all(f"<code>{key}</code>" in configuration for key in Experiment.model_fields)
    assert all(f'href="compressors/{name}.html"' in compressors for name in available())
    listed = re.findall(r'href="(python/\w+.html|rooms/\w+.html)"', python)
    assert listed[0] == "python/compress_gradients.html"
    assert len(listed) > 15 and all('class="doc ' in (site / "reference" / page).read_text() for page in listed)
    assert all(f"<code>{field}</code>" in results for field in Result.model_fields)


def test_every_compressor_names_its_paper(site):
    pages = {name: site / "reference" / "compressors" / f"{name}.html" for name in available()}
    articles = {
        name: page.read_text().partition("<article")[2].partition("</article")[0] for name, page in pages.items()
    }
    assert {name for name, text in articles.items() if not re.search(r"(19|20)\d\d|arXiv:\d{4}", text)} <= CONTROLS


def test_links_out_of_docs_lead_to_pages_and_copies(site):
    page = (site / "evidence.html").read_text(encoding="utf-8")
    assert 'href="benchmarks/links.html"' in page
    assert 'href="source/src/gradwire/bench/trace/trace.py.txt"' in page
    assert (site / "source/src/gradwire/bench/trace/trace.py.txt").read_bytes() == (
        ROOT / "src/gradwire/bench/trace/trace.py"
    ).read_bytes()


def test_example_reports_are_of_the_committed_records(site):
    """Records with a baseline have a page, which warns of times where runs may have shared a machine."""
    listed = set(re.findall(r'href="([\w-]+)\.html"', (site / "reports" / "index.html").read_text(encoding="utf-8")))
    files = {file.stem: file.read_text(encoding="utf-8") for file in (ROOT / "benchmarks").glob("*.jsonl")}
    made = {file.stem for file in (site / "reports").glob("*.html")} - {"index"}
    assert made == {name for name, text in files.items() if '"compressor": "none"' in text} and made <= listed
    page = (site / "reports" / "quality.html").read_text(encoding="utf-8")
    rows = [json.loads(row) for row in files["quality"].splitlines()]
    for size in {row["world_size"] for row in rows}:
        ppl = mean(row["val_ppl"] for row in rows if row["compressor"] == "none" and row["world_size"] == size)
        values = [float(value) for value in re.findall(r'data-value="([\d.]+)">' + f"{ppl:.2f}<", page)]
        assert pytest.approx(ppl) in values, f"{size} ranks"
    assert f"{len(rows)} ok" in page
    assert "times shared" in page and "<h1>What does compression take away, at which ratio?</h1>" in page


def test_a_report_of_links_needs_its_records_only(tmp_path):
    """As committed records become a page: perplexity over step time, with the experiment's question."""
    spec = importlib.util.spec_from_file_location("reports", ROOT / "docs" / "_site" / "reports.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    made_results.write(tmp_path, made_results.rows(seeds=(0,)))
    page = hook.report((tmp_path / "results.jsonl").rename(tmp_path / "links.jsonl"))
    assert '<figure id="figure-quality-time' in page and "<h1>Where does compression pay?</h1>" in page
    assert "times shared" not in page, "the experiment is timed: one run at a time"
    assert str(tmp_path.parent) not in page


def built(folder: Path, link: str) -> None:
    """Build a repository with one page, which has one link."""
    hook = folder / "docs" / "_site" / "links.py"
    hook.parent.mkdir(parents=True)
    shutil.copy(ROOT / "docs" / "_site" / "links.py", hook)
    (folder / "here.py").touch()
    (folder / "docs" / "index.md").write_text(f"# Start\n\n[x]({link})\n")
    settings = ["site_name: x", "strict: true", f"hooks: [{hook}]", "exclude_docs: _site/", "plugins: []"]
    (folder / "mkdocs.yml").write_text("\n".join([*settings, "validation: {anchors: warn}"]))
    config = load_config(str(folder / "mkdocs.yml"))
    config.plugins.on_startup(command="build", dirty=False)
    build(config)


@pytest.mark.parametrize("link", ["index.md#start", "../here.py"])
def test_a_link_that_leads_somewhere_is_none(tmp_path, link):
    built(tmp_path, link)


@pytest.mark.parametrize("link", ["nowhere.md", "index.md#nowhere", "../nowhere.py"])
def test_a_link_that_leads_nowhere_is_an_error(tmp_path, link):
    with pytest.raises((Abort, MkDocsException)):
        built(tmp_path, link)


def test_reasons_that_the_source_names_are_decisions():
    decisions = (ROOT / "docs/decisions.md").read_text(encoding="utf-8")
    titles = {title.rstrip(".,") for title in re.findall(r"^\*\*([^*]+)\*\*", decisions, re.MULTILINE)}
    sources = (file.read_text(encoding="utf-8") for file in (ROOT / "src").rglob("*.py"))
    named = {
        title for text in sources for title in re.findall(r'# Why: docs/decisions\.md, "(.+)"\.$', text, re.MULTILINE)
    }
    assert len(named) > 40 and named <= titles
