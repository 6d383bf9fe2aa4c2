"""The pictures of the report in ``docs/images``, of the committed records: ``python benchmarks/report_pictures.py``.

The pictures of the first screen keep their halves from before the page began with its findings.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import made_results

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs/images"
SCHEMES = ("light", "dark")
GAP = 8  # pixels between the parts of a picture


def main() -> None:
    """Write the pictures."""
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        quality, links = (report(Path(temporary), name) for name in ("quality", "time-to-loss"))
        wide = [screen(browser, quality, 1440, 900, scheme).resize((792, 495), Image.LANCZOS) for scheme in SCHEMES]
        beside("first-screen-1440", [(0, 495 + GAP), (792 + GAP, 495 + GAP)], wide)
        narrow = [screen(browser, quality, 390, 844, scheme) for scheme in SCHEMES]
        beside("first-screen-390", [(2 * (390 + GAP), 0), (3 * (390 + GAP), 0)], narrow)
        save("report", screen(browser, links, 1440, 1010, "light", "pareto"))
        browser.close()


def report(parent: Path, name: str) -> Path:
    """The page of an experiment's committed records."""
    folder = made_results.committed(parent / name, name)
    subprocess.run([sys.executable, "-m", "gradwire", "report", "--results_dir", str(folder)], cwd=ROOT, check=True)
    return folder / "report.html"


def screen(browser: Any, page: Path, width: int, height: int, scheme: str, section: str = "") -> Image.Image:
    """What a window shows of a page, from its start or from a section on."""
    opened = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    opened.goto(f"{page.as_uri()}#{section}")
    return Image.open(BytesIO(opened.screenshot())).convert("RGB")


def beside(name: str, places: list[tuple[int, int]], parts: list[Image.Image]) -> None:
    """Replace the parts of a picture that show the page as it is now."""
    whole = Image.open(IMAGES / f"{name}.png").convert("RGB")
    for place, part in zip(places, parts, strict=True):
        whole.paste(part, place)
    save(name, whole)


def save(name: str, picture: Image.Image) -> None:
    """Write a picture with a palette: a third of the size."""
    picture.quantize(256, dither=Image.Dither.NONE).save(IMAGES / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
