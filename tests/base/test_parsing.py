"""Files that users write: YAML and JSON."""

from __future__ import annotations

import pytest

from gradwire.base.files import read_yaml


@pytest.mark.parametrize(("name", "text"), [("c.yaml", "name: é\n"), ("c.json", '{"name": "é"}')])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_byte_order_mark_is_no_text(name, text, encoding, tmp_path):
    (tmp_path / name).write_bytes(text.encode(encoding))
    assert read_yaml(tmp_path / name) == {"name": "é"}
