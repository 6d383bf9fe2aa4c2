"""Files that users write: YAML and JSON."""

from __future__ import annotations

import pytest

from gradwire.base.files import parse_yaml, read_yaml


@pytest.mark.parametrize(("name", "text"), [("c.yaml", "name: é\n"), ("c.json", '{"name": "é"}')])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_byte_order_mark_is_no_text(name, text, encoding, tmp_path):
    (tmp_path / name).write_bytes(text.encode(encoding))
    assert read_yaml(tmp_path / name) == {"name": "é"}


def test_a_key_that_a_merge_brings_may_be_given_again():
    text = """
base: &base {lr: 1, steps: 2}
outer: {inner: &x {<<: *base, lr: 3}}
later: {<<: *x, steps: 4}
"""
    assert parse_yaml(text)["later"] == {"lr": 3, "steps": 4}
    assert parse_yaml(text)["outer"]["inner"] == {"lr": 3, "steps": 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "line 3: the key 'a' is given twice"),
        ("a: {b: {c: 1, c: 2}}", "line 1: the key 'c' is given twice"),
        (
            "a:\n  b: {c: 1\nd: 2\n",
            "line 3, column 2: expected ',' or '}', .*, while parsing a flow mapping .* line 2$",
        ),
        ("a:\n\tb: 1\n", r"line 2, column 1: found character '\\t' that cannot start any token$"),
        ("!!map [a]", "expected a mapping node"),
        ("a: [", "line 1"),
    ],
)
def test_yaml_that_says_two_things_or_none_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_yaml(text)
