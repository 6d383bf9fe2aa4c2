"""Predictions of a description against computations by hand, and what the command refuses.

Of `tables/described.py`, `codecs/rates.py`.
"""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

import gradwire
from gradwire.base.errors import BadInput
from gradwire.bench.codecs import rates
from gradwire.bench.codecs.rates import NUMEL_62M, TENSORS_62M, Rate, Rates
from gradwire.bench.config import Cell
from gradwire.bench.report.tables import described
from gradwire.bench.report.tables.described import Evidence, evidence, line_of, nearest
from gradwire.bench.statistics import description
from gradwire.bench.statistics.cost_model import Islands, Place
from gradwire.bench.statistics.description import CELLS, Constants, Description, shapes_of_size
from gradwire.cli import main

ROOT = Path(__file__).parents[3]
RATE, LATE = 1e6, 0.013  # bits per second, seconds
ENCODE, DECODE = 2e-7, 3e-7  # seconds per element
STARTUP, HOST, FACTORS = 7e-3, 3e-7, {"all_reduce": 1.3, "all_gather": 1.4, "all_to_all": 1.5, "reduce_scatter": 2.1}
SHAPES = {(30, 7): 1, (11,): 2}  # 232 elements
NUMEL, COMPUTED = 232, 0.011
KNOWN = [("int8", {}, Rate(ENCODE, DECODE)), ("bf16", {}, Rate(1e-8, 5e-8)), ("onebit", {}, Rate(4e-7, 1e-7))]
FIXED = Constants(STARTUP, HOST, FACTORS, hidden=0.3, codecs=1.7)


@pytest.fixture(autouse=True)
def one_set_of_constants(monkeypatch):
    """The typical constants, and others that change one thing each."""
    worse, better = FIXED._replace(startup=0.1, in_turn=True), FIXED._replace(codecs=1.0)
    monkeypatch.setitem(description.BACKENDS, "cpu", (FIXED, better, worse))


def described_as(strategy="ddp", world=4, islands=None):
    place = Place(world, RATE, LATE, islands or Islands())
    return Description(SHAPES, 22, COMPUTED, strategy, place, Rates("a device", "cpu", KNOWN))


def expected(cell, **where):
    (one,) = described_as(**where).expect([Cell.parse("cell", cell)], [Cell.parse("none", {})])
    return one


def sending(op, nbytes, messages):
    """Seconds of a collective under the law."""
    return STARTUP + nbytes * math.hypot(HOST, 8 * FACTORS[op] / RATE) + messages * LATE


def test_computation_hides_what_travels_and_no_call():
    """A link so fast that all bytes arrive during the backward pass: the calls of the exchange are left."""
    described = replace(described_as(), compute=1.0, place=Place(4, 1e12, 0.0, Islands()))
    (one,) = described.expect([Cell.parse("cell", {"method": "int8", "algorithm": "exchange"})], [])
    assert one.exposed.typical == pytest.approx(STARTUP, rel=1e-12)


def test_an_exchange_by_hand():
    """Rows of 8, 8, 8 and 6 by 7 elements; vectors of 3, 3, 3 and 2: a byte each, and a scale of 4 bytes per shard."""
    one = expected({"method": "int8", "algorithm": "exchange"})
    whole = 3 * (8 * 7 + 4) + 6 * 7 + 4 + 2 * (3 * (3 + 4) + 2 + 4)
    sent = 2 * 3 * whole / 4  # both phases, to three others
    coding = 1.7 * NUMEL * (ENCODE * (1 + 1 / 4) + DECODE * 2)
    hidden = 0.3 * 2 / 3 * COMPUTED
    communication = sending("all_to_all", sent, 2)
    assert one.bytes == sent
    assert one.step.typical == pytest.approx(COMPUTED + coding + communication - hidden, rel=1e-12)
    assert one.exposed.typical == pytest.approx(communication - hidden, rel=1e-12)
    assert one.step.low == pytest.approx(one.step.typical - coding * 0.7 / 1.7, rel=1e-12)
    assert one.step.high == pytest.approx(one.step.typical + 0.1 - STARTUP + 4 * LATE, rel=1e-12), (
        "six messages in turn"
    )
    float32 = COMPUTED + sending("all_reduce", 2 * 3 * 4 * NUMEL / 4, 6) - hidden
    assert one.gains["none"].typical == pytest.approx(float32 / one.step.typical, rel=1e-12)


@pytest.mark.parametrize(
    ("cell", "strategy", "encoded", "decoded"),
    [
        ({"method": "int8", "algorithm": "exchange"}, "ddp", 1 + 1 / 4, 2),
        ({"method": "int8", "algorithm": "gather"}, "ddp", 1, 4),
        ({"method": "int8"}, "fsdp2", 1, 1),
        ({"method": "int8", "algorithm": "exchange", "error_feedback": True}, "ddp", 1 + 1 / 4, 3),
    ],
)
def test_what_four_ranks_encode_and_decode(cell, strategy, encoded, decoded):
    device = Rates("a device", "cpu", [("int8", {}, Rate(ENCODE, DECODE, 6e-5))])
    place = replace(described_as(strategy), rates=device)
    (row,) = place.expect([Cell.parse("cell", cell)], [])
    coding = 1.7 * (NUMEL * (encoded * ENCODE + decoded * DECODE) + 3 * 6e-5)  # of three tensors
    assert row.step.typical - row.exposed.typical == pytest.approx(COMPUTED + coding, rel=1e-12)


def test_a_cast_that_the_backend_adds_up_is_encoded_and_decoded_once():
    row = expected({"method": "bf16", "algorithm": "native"})
    assert row.bytes == 2 * 3 * 2 * NUMEL / 4
    assert row.step.typical - row.exposed.typical == pytest.approx(COMPUTED + 1.7 * NUMEL * (1e-8 + 5e-8), rel=1e-12)


def test_a_break_even_rate_is_where_both_steps_are_equal():
    rates = Rates("a device", "cpu", [("int8", {}, Rate(4e-7, 6e-7))])
    cells = [Cell.parse("cell", {"method": "int8", "algorithm": "exchange"})], [Cell.parse("none", {})]

    def at(rate):
        (one,) = Description(SHAPES, 22, COMPUTED, "ddp", Place(4, rate, 0.0, Islands()), rates).expect(*cells)
        return one

    rate = at(RATE).below["none"].typical
    assert at(rate).gains["none"].typical == pytest.approx(1, rel=1e-4)
    assert at(rate / 2).gains["none"].typical > 1.001
    assert at(rate * 2).gains["none"].typical < 0.999


def test_local_updates_send_once_in_a_round_and_hide_nothing():
    cell = {"method": "int8", "algorithm": "exchange", "comm_optimizer": "diloco", "H": 5, "outer_momentum": 0.9}
    one, every = expected(cell), expected({"method": "int8", "algorithm": "exchange"})
    coding = 1.7 * NUMEL * (ENCODE * (1 + 1 / 4) + DECODE * 3) / 5  # with its error feedback
    assert one.bytes == every.bytes / 5
    communication = (sending("all_to_all", every.bytes, 2)) / 5
    assert one.step.typical == pytest.approx(COMPUTED + coding + communication, rel=1e-12)
    assert one.memory == 3 * 4 * NUMEL, "residuals, anchors and momenta"


def test_a_fragment_hides_behind_the_steps_of_its_delay():
    cell = {"method": "int8", "algorithm": "exchange", "comm_optimizer": "diloco", "H": 6}
    one, blocking = expected(cell | {"streaming": {"fragments": 2, "delay": 1}}), expected(cell)
    assert one.bytes == blocking.bytes
    communication = one.bytes * math.hypot(HOST, 8 * 1.5 / RATE) + (STARTUP + 2 * LATE) / 3
    assert one.exposed.typical == pytest.approx(communication - 0.3 * COMPUTED / 3, rel=1e-12)


def test_sharded_parameters_are_gathered_twice_and_those_outside_blocks_once():
    one = expected({"method": "none"}, strategy="fsdp2")
    gradients, parameters = 3 * 4 * NUMEL / 4, 3 * 4 * (22 + 2 * (NUMEL - 22)) / 4
    assert one.bytes == gradients + parameters
    communication = sending("reduce_scatter", gradients, 3) + sending("all_gather", parameters, 3)
    assert one.step.typical == pytest.approx(COMPUTED + communication - 0.3 * 2 / 3 * COMPUTED, rel=1e-12)
    differences = expected({"method": "int8", "param_compress": "int4-diff"}, strategy="fsdp2")
    assert differences.memory == 4 * NUMEL, "a replica"
    assert differences.bytes < one.bytes / 3
    hooked = Cell.parse("cell", {"method": "int8", "param_compress": "int8"})
    outside, inside = (replace(described_as("fsdp2"), outside=outside).gathered(hooked, 4) for outside in (22, 0))
    assert outside.bytes / inside.bytes == pytest.approx((22 + 2 * (NUMEL - 22)) / (2 * NUMEL), rel=1e-12)


def test_islands_reduce_shards_over_their_cable():
    """Two islands of three ranks: each reduces its shard with one other, and three share a cable."""
    islands = Islands(2, 5e6, 0.001)
    one = expected({"method": "none"}, strategy="hsdp", world=6, islands=islands)
    shard = 10 * 7 + 2 * 4  # rows and elements of the longest
    between, inside = 4 * shard, 2 * 4 * NUMEL / 3
    gathered = 2 * 4 * (22 + 2 * (NUMEL - 22)) / 3
    assert one.bytes == pytest.approx(between + inside + gathered, rel=1e-12)
    wire = between * math.hypot(HOST, 8 * 1.3 * 3 / RATE) + 2 * LATE
    wire += inside * math.hypot(HOST, 8 * 2.1 / 5e6) + gathered * math.hypot(HOST, 8 * 1.4 / 5e6) + 2 * 2 * 0.001
    assert one.exposed.typical == pytest.approx(3 * STARTUP + wire - 0.3 * 2 / 3 * COMPUTED, rel=1e-12)


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        ({"method": "int8", "inside": {"method": "bf16"}}, "inside islands have no closed form"),
        ({"method": "threshold", "threshold": 0.1}, "depend on the data"),
    ],
)
def test_bytes_that_are_unknown_are_refused(cell, reason):
    with pytest.raises(BadInput, match=f"the bytes of cell {reason}, and cannot be predicted: leave it out"):
        expected(cell, strategy="hsdp", islands=Islands(2))


def test_a_round_between_islands_hides_only_what_goes_inside_them():
    """The backward pass hides 0.3 of its 2/3 of a step, or what there is to hide: not the message of a round."""
    cell = {"method": "int8", "algorithm": "exchange", "comm_optimizer": "diloco", "H": 5}
    inside, gathered = 2 * 4 * NUMEL / 3, 2 * 4 * (22 + 2 * (NUMEL - 22)) / 3
    for rate in (5e6, 5e9):
        one = expected(cell, strategy="hsdp", world=6, islands=Islands(2, rate, 0.001))
        within = inside * math.hypot(HOST, 8 * 2.1 / rate) + gathered * math.hypot(HOST, 8 * 1.4 / rate)
        between = one.between * math.hypot(HOST, 8 * 1.5 * 3 / RATE) + (STARTUP + 2 * LATE) / 5
        hidden = min(within, 0.3 * 2 / 3 * COMPUTED)
        startups = 2 * STARTUP / 5 + 2 * 2 * 0.001
        assert one.exposed.typical == pytest.approx(within - hidden + between + startups, rel=1e-12)
        assert one.bytes == pytest.approx(one.between + inside + gathered, rel=1e-12)
        assert one.between < inside / 30
    flat = expected(cell)
    assert flat.between == flat.bytes


def test_a_number_of_parameters_becomes_matrices_of_a_usual_width():
    shapes = shapes_of_size(6_738_415_616)  # Llama 2, whose width is 4,096
    ((width, height),) = (shape for shape in shapes if len(shape) == 2)
    assert width == height == pytest.approx(4096, rel=0.02)
    assert sum(count * math.prod(shape) for shape, count in shapes.items()) == 6_738_415_616


def test_files_of_rates(tmp_path):
    record = {
        "method": "int8",
        "options": {"num_bits": 4},
        "error": None,
        "encode_ms": [1.0, 3.0, 2.0],
        "decode_ms": [5.0],
    }
    machine = {"device": "a core", "kind": "cpu"}
    found = {
        "schema_version": 3,
        "environment": machine,
        "shape": [4, 5],
        "records": [record, {**record, "error": "no"}],
    }
    (tmp_path / "codecs.json").write_text(json.dumps(found))
    read = rates.rates_of(str(tmp_path / "codecs.json"), [])
    assert read.of("int8", {"num_bits": 4, "block": 64}) == Rate(1e-4, 2.5e-4)
    assert read.of("int8", {}) is None
    two = read._replace(known=[*read.known, ("int8", {}, Rate(7.0, 8.0))])
    assert two.of("int8", {"num_bits": 4, "block": 64}) == Rate(1e-4, 2.5e-4), "that of the most options"
    assert two.of("int8", {"block": 64}) == Rate(7.0, 8.0)
    row = {"name": "int4 alone", "ms": 9.0, "host_ms": 3.0, "kernels_ms": 8.0}
    (tmp_path / "reduction.json").write_text(json.dumps({"part": "reduction", "rows": [row, {"name": "step, int4"}]}))
    read = rates.rates_of(str(tmp_path / "reduction.json"), [])
    element = 8e-3 / NUMEL_62M / 4
    assert (read.kind, read.of("int8", {"num_bits": 4})) == ("cuda", Rate(element, element, 3e-3 / TENSORS_62M))


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"schema_version": 2},
        {"schema_version": 3},
        {"schema_version": 3, "environment": {"device": "a core", "kind": "cpu"}, "shape": [4, 5], "records": []},
        {"part": "reduction"},
        {"part": "reduction", "rows": []},
        {"part": "reduction", "rows": [{"name": "int8 alone"}]},
    ],
)
def test_a_file_without_rates(content, tmp_path):
    (tmp_path / "rates.json").write_text(json.dumps(content))
    with pytest.raises(BadInput, match=r"--device .*rates\.json: it is no file of .* schema version 3"):
        rates.rates_of(str(tmp_path / "rates.json"), [])


def test_codecs_are_timed_once_each_and_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(rates, "NUMEL", {"cpu": 2**14})
    monkeypatch.setattr(rates, "SECONDS", 1e-4)
    asked = [("powersgd", {"rank": 3}), ("sketch", {}), ("powersgd", {"rank": 3})]
    first = rates.rates_of("cpu", asked)
    assert "timing 2 codecs" in capsys.readouterr().err
    assert [(method, options) for method, options, _ in first.known] == [("powersgd", {"rank": 3}), ("sketch", {})]
    assert all(second > 0 for _, _, rate in first.known for second in rate)
    assert rates.rates_of("cpu", asked[::-1]) == first, "which is kept, whatever the order"
    assert capsys.readouterr().err == ""


def test_the_nearest_record_has_the_most_seeds():
    cell = Cell.parse("int4", CELLS["int4"])
    options = {"method": "int8", "num_bits": 4, "block": 64}
    known = [
        Evidence(options, 1_000_000, 2, 3, (1.0, 0.5, 2.0), "a"),
        Evidence(options, 1_000_000, 8, 1, (2.0, None, None), "b"),
        Evidence(options, 1_000_000, 8, 2, (3.0, -1.0, 4.0), "c"),
        Evidence({"method": "int8"}, 1_100_000, 8, 4, (0.0, 0.0, 0.0), "d"),
    ]
    assert str(nearest(cell, 1.2e6, 8, known)) == "+3.0 % [-1.0, +4.0], 2 seeds, 1 M, W = 8"
    assert nearest(Cell.parse("int8", {"block": 32}), 1e6, 8, known) is None


def test_the_records_are_those_of_benchmarks():
    spec = importlib.util.spec_from_file_location("evidence", ROOT / "benchmarks" / "evidence.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert [record for name in script.FILES for record in script.records(name)] == json.loads(
        described.RECORDS.read_text()
    )
    options = {"method": "int8", "num_bits": 4, "block": 64}
    (one,) = (record for record in evidence() if record.cell == options and record.parameters == 4_240_896)
    assert (one.seeds, *one.percent) == (4, 0.51, 0.13, 1.03)  # benchmarks/quality.md


def test_lines_to_type():
    lines = {label: line_of(Cell.parse(label, CELLS[label])) for label in CELLS}
    assert lines["int8"] == 'gw.compress_gradients(model, "int8")'
    assert lines["int4-diff-int4-ef"] == (
        'gw.compress_gradients(model, {"method": "int8", "num_bits": 4}, error_feedback=True, parameters="int4-diff")'
    )
    assert lines["diloco-30-int4"] == (
        '{method: "int8", num_bits: 4, block: 64, error_feedback: True, comm_optimizer: "diloco", H: 30, '
        "outer_lr: 1.0, outer_momentum: 0.0}"
    )


ASKED = "--world_size 4 --bandwidth 20mbit --latency 10ms"
MODEL = "--parameters 250000 --step_ms 12"


@pytest.fixture
def device(tmp_path):
    """A file of rates of the methods that are compared."""
    timed = {"error": None, "encode_ms": [1.0], "decode_ms": [1.0], "options": {}}
    names = ("none", "int8", "bf16", "onebit", "powersgd", "topk+int8")
    found = {"schema_version": 3, "environment": {"device": "a core", "kind": "cpu"}, "shape": [1000, 1000]}
    path = tmp_path / "rates.json"
    path.write_text(json.dumps(found | {"records": [timed | {"method": name} for name in names]}))
    return ["--device", str(path)]


def test_the_command_prints_a_ranked_table(device, capsys):
    assert main(["predict", *MODEL.split(), *ASKED.split(), *device]) == 0
    said, named = capsys.readouterr()
    assert max(len(line) for line in said.splitlines() if "rates.json" not in line) <= 100
    assert "# 0.25 M parameters, ddp, W = 4, 20mbit and 10ms per message" in said
    table = gradwire.predict(
        parameters=250_000, step_ms=12, world_size=4, bandwidth="20mbit", latency="10ms", device=device[1]
    )
    lines = [line.split("|") for line in said.splitlines() if line.startswith("| ")]
    assert [line[1].strip() for line in lines[1 : 1 + len(table)]] == list(table["compressor"])
    assert set(CELLS) - set(table["compressor"]) == {"int8-params8", "int4-diff-int4-ef"}
    assert named == "gradwire predict: left out int8-params8, int4-diff-int4-ef: not for strategy ddp.\n"
    assert list(table["step_ms"]) == sorted(table["step_ms"])
    assert (table["step_ms_low"] <= table["step_ms"]).all() and (table["step_ms"] <= table["step_ms_high"]).all()
    none = table.set_index("compressor").loc["none"]
    assert (none["times_none"], none["line"]) == (1, "as it is")
    assert none["step_ms"] - none["exposed_ms"] == pytest.approx(12, rel=1e-12)
    bf16 = table.set_index("compressor").loc["bf16-native"]
    assert list(table["times_bf16"] * table["step_ms"]) == pytest.approx([bf16["step_ms"]] * len(table), rel=1e-12)
    known = table.set_index("compressor")["perplexity"].dropna()
    good = [label for label, text in known.items() if float(text.split(" %")[0]) <= 1]
    assert f"in its nearest record: `{good[0]}`." in " ".join(said.split())
    assert main(["predict", *MODEL.split(), *ASKED.split(), *device, "--json"]) == 0
    assert [one["step_ms"] for one in json.loads(capsys.readouterr().out)] == list(table["step_ms"])


def test_a_cell_that_is_named_twice_is_predicted_once(device, capsys):
    assert main(["predict", *MODEL.split(), *ASKED.split(), *device, "--cells", "int8", "none", "int8", "--json"]) == 0
    said, named = capsys.readouterr()
    assert sorted(one["compressor"] for one in json.loads(said)) == ["int8", "none"] and not named


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--parameters 1e6 --world_size 4 --bandwidth 1gbit",
            "describe the model by --parameters (or --model) and --step_ms",
        ),
        (f"{MODEL} --world_size 4 --bandwidth 1g", "invalid rate '1g'"),
        (f"{MODEL} --world_size 4 --bandwidth 1gbit --latency 3", "invalid time '3'"),
        (f"{MODEL} --world_size 4 --bandwidth 1gbit --islands 8", "8 islands do not divide 4 ranks"),
        (f"{MODEL} --world_size 4 --bandwidth 1gbit --strategy hsdp", "strategy hsdp has islands of several ranks"),
        (f"{MODEL} {ASKED} --strategy hsdp --islands 4", "add --islands N, below --world_size"),
        (f"{MODEL} --world_size 4 --bandwidth 1gbit --inside nvlink", "add --islands N"),
        (f"{MODEL} --model tiny --vocab_size 1024 {ASKED}", "--parameters 250000 contradicts --model tiny"),
        (f"{MODEL} {ASKED} --device absent.json", "absent.json"),
        (f"{MODEL} {ASKED} --cells onebit_adam --strategy fsdp2", "comm_optimizer onebit_adam needs each rank's whole"),
        (f"{MODEL} {ASKED} --cells itn8", "Did you mean 'int8'"),
        (f"{MODEL} {ASKED} --cells {{", "is not valid JSON"),
        (f"--parameters 0 --step_ms 1 {ASKED}", "--parameters is 0.0; it must be at least 1"),
        (f"--parameters 1e6 --step_ms 0 {ASKED}", "--step_ms is 0.0; it must be above 0"),
    ],
)
def test_what_cannot_be_described_is_bad_input(words, message, capsys):
    assert main(["predict", *words.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
