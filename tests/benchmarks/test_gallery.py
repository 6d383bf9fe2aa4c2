"""The pictures of the documentation's first page are those of the records: `benchmarks/gallery.py` draws them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMES = {"tradeoff", "steps", "nearest", "provenance"}


def test_pictures_are_those_of_the_records(tmp_path):
    spec = importlib.util.spec_from_file_location("gallery", ROOT / "benchmarks" / "gallery.py")
    gallery = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gallery)
    gallery.main([str(tmp_path)])
    drawn = {file.stem: file.read_text(encoding="utf-8") for file in tmp_path.iterdir()}
    assert drawn.keys() == NAMES
    for name, picture in drawn.items():
        assert picture == (ROOT / "docs" / "images" / f"{name}.svg").read_text(encoding="utf-8"), name
