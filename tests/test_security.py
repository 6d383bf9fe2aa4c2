"""Text from a configuration or the data reaches no shell, no other folder, and no unpickler."""

from __future__ import annotations

import ast
import json

import pytest
from data_samples import values
from snakemakes import SMALL, Checkout

from gradwire.base.errors import BadInput
from gradwire.base.source_digest import PACKAGE
from gradwire.bench.config import experiment

NASTY = [
    "; rm -rf x",
    "a b",
    "a'b",
    'a"b',
    "$(touch x)",
    "`touch x`",
    "ü",
    "../x",
    "..",
    "/x",
    "-x",
    "a\nb",
    "a{b}",
    "",
]


@pytest.mark.parametrize("name", NASTY)
@pytest.mark.parametrize("place", ["name", "label", "link"])
def test_names_that_become_folders_are_checked(place, name):
    change = {
        "name": {"name": name},
        "label": {"compressors": {name: {"method": "int8"}}},
        "link": {"grid": {"links": [name]}},
    }[place]
    with pytest.raises(BadInput, match=r"must be (made of|a rate)|String should"):
        experiment({**SMALL, "gradients": None, **change})


@pytest.mark.full
def test_paths_and_ids_reach_a_shell_as_they_are(tmp_path):
    """The data's path, its documents' ids and a tokenizer's folder hold what a shell would run or split."""
    folder = tmp_path / "here"
    folder.mkdir()
    checkout = Checkout(folder)
    corpus = folder / 'it\'s; touch pwned $(touch pwned2) `touch pwned3` {x} "ü" .json'
    ids = [*NASTY[:-1], "{x}", "%s"]
    documents = [{**value, "id": f"{ids[i % len(ids)]} {i}"} for i, value in enumerate(values(60))]
    corpus.write_text(json.dumps(documents))
    dataset = {**SMALL["dataset"], "source": "json", "data_path": corpus.name}
    checkout.configure({**SMALL, "dataset": dataset, "gradients": None})
    done = checkout.snakemake("--until", "shards")
    assert done.returncode == 0, done.stdout + done.stderr
    assert list((folder / "results/data").glob("*/*/*/shards/complete"))
    assert not {path.name for path in tmp_path.rglob("*")} & {"pwned", "pwned2", "pwned3", "x"}
    for path in (folder / "results").rglob("*"):
        assert not path.stat().st_mode & 0o002, f"{path} is world-writable"


def test_nothing_is_unpickled_but_by_torch_with_weights_only_and_by_the_reader_of_strings():
    """`torch.load` says so at each call; `pickle` is read by the one unpickler that looks nothing up."""
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            called = ast.unparse(node.func)
            if called == "torch.load":
                given = {word.arg: ast.unparse(word.value) for word in node.keywords}
                assert given.get("weights_only") == "True", f"{file}:{node.lineno}"
            assert called not in ("pickle.load", "pickle.loads", "dcp.load", "os.system"), f"{file}:{node.lineno}"
            assert "shell=True" not in ast.unparse(node), f"{file}:{node.lineno}"
