"""A hook of MkDocs: pages and files of the repository outside of docs/ that the documentation links to.

`benchmarks/*.md` become pages. A link to any other file of the repository leads to a copy of that file in the site, so
that it works without a network, and one to a file that does not exist is an error, as for pages.
"""

from __future__ import annotations

import os.path
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\(([^)\s#:]+)(#[^)\s]*)?\)")  # of a file; one with a scheme has a colon


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of benchmarks/, and every file that is linked to."""
    for page in sorted((ROOT / "benchmarks").glob("*.md")):
        files.append(File.generated(config, f"benchmarks/{page.name}", content=page.read_text(encoding="utf-8")))
    for file in list(files.documentation_pages()):
        for target, _ in LINK.findall(file.content_string):
            outside = outside_of_docs(file.src_uri, target)
            if outside and outside.suffix != ".md" and files.get_file_from_path(copy_of(outside)) is None:
                if not (ROOT / outside).is_file():
                    raise PluginError(f"{file.src_uri} links to {target}, but there is no file {outside}.")
                files.append(File.generated(config, copy_of(outside), abs_src_path=str(ROOT / outside)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the links at where those pages and files are in the site."""

    def moved(match: re.Match[str]) -> str:
        target, anchor = match[1], match[2] or ""
        outside = outside_of_docs(page.file.src_uri, target)
        if outside is None:
            return match[0]
        where = in_site(outside)
        return f"]({os.path.relpath(where, PurePosixPath(page.file.src_uri).parent)}{anchor})"

    return LINK.sub(moved, markdown)


def outside_of_docs(source: str, target: str) -> PurePosixPath | None:
    """The file of the repository that a page's link leads to, from the repository's root; None for a page of docs/."""
    home = PurePosixPath(source) if source.startswith("benchmarks/") else PurePosixPath("docs", source)
    path = PurePosixPath(os.path.normpath(home.parent / target))
    return None if path.is_relative_to("docs") and home.is_relative_to("docs") else path


def in_site(path: PurePosixPath) -> str:
    """Where a file of the repository is in the site."""
    if path.is_relative_to("docs"):
        return str(path.relative_to("docs"))
    return str(path) if path.suffix == ".md" else copy_of(path)


def copy_of(path: PurePosixPath) -> str:
    """Where the site has a copy of a source file; as text, which a browser shows."""
    return f"source/{path}.txt"
