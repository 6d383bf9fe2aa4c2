"""`load_results`; and that every number for a machine is the one that people read.

Of `rows/record.py`.
"""

from __future__ import annotations

import json

import made_results
import numpy as np
import pytest

from gradwire import load_results
from gradwire.base.errors import BadInput
from gradwire.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    rows = made_results.rows(["none", "int8"], ["ddp", "fsdp2"], [(2, "none"), (2, "100mbit")], [0, 1, 2])
    return made_results.write(tmp_path_factory.mktemp("results") / "demo", rows)


def test_results_are_a_frame_with_a_row_per_run(folder):
    frame = load_results(folder)
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert len(frame) == 24 and list(frame["run_name"]) == [line["run_name"] for line in lines]
    assert list(frame["all_bytes_ratio"]) == [line["all_bytes_ratio"] for line in lines]
    assert load_results(folder / "results.jsonl").equals(frame)


def test_all_bytes_count_parameters_and_gradients(folder):
    frame = load_results(folder)
    int8 = frame[frame["compressor"] == "int8"]
    for _, row in int8.iterrows():
        parameters = row["bytes_parameters_raw_total"]
        if row["strategy"] == "ddp":
            assert np.isnan(parameters) and row["all_bytes_ratio"] == pytest.approx(row["compression_ratio"])
            continue
        assert parameters > 0 and row["bytes_parameters_total"] == parameters
        expected = (row["bytes_raw_total"] + parameters) / (
            row["bytes_raw_total"] / row["compression_ratio"] + parameters
        )
        assert row["all_bytes_ratio"] == pytest.approx(expected) and expected < row["compression_ratio"] / 2
    assert (frame[frame["compressor"] == "none"]["all_bytes_ratio"] == 1).all()


def test_a_line_that_cannot_be_used_is_a_warning(folder, tmp_path):
    first = (folder / "results.jsonl").read_text().splitlines()[0]
    (tmp_path / "results.jsonl").write_text(first + "\n{\n")
    with pytest.warns(UserWarning, match="line 2 is left out"):
        assert len(load_results(tmp_path)) == 1
    with pytest.raises(BadInput, match="no results can be read"):
        load_results(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["compressors", "topk+int8"], lambda printed: [one["name"] for one in printed] == ["topk", "int8"]),
        (["compare", "FOLDER", "FOLDER"], lambda printed: printed["all_bytes_ratio"][0]["verdict"] == "equal"),
    ],
)
def test_commands_print_json(folder, words, found, capsys):
    assert main([str(folder) if word == "FOLDER" else word for word in [*words, "--json"]]) == 0
    assert found(json.loads(capsys.readouterr().out))


def test_predictions_are_json_too(tmp_path, capsys):
    methods = ("none", "int8")  # labels that are methods with a rate
    made_results.write(tmp_path, [row for row in made_results.rows() if row.compressor in methods])
    rates = str(made_results.ROOT / "benchmarks" / "codecs-cpu.json")
    words = ["predict", "--results_dir", str(tmp_path), "--world_size", "4", "--json", "--device", rates, "--bandwidth"]
    found = []
    for bandwidth in ("10mbit", "10gbit"):
        assert main([*words, bandwidth]) == 0
        printed = json.loads(capsys.readouterr().out)
        found.append({(one["strategy"], one["compressor"]): one["step_ms"] for one in printed})
    slow, fast = found
    assert set(slow) == {(strategy, label) for strategy in ("ddp", "fsdp2") for label in methods}
    assert all(fast[cell] < slow[cell] for cell in slow)
    assert slow["ddp", "int8"] < slow["ddp", "none"], "on a slow link fewer bytes are faster"
