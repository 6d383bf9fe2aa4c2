"""The experiment as data: grids, cells, flags and the messages for what is wrong.

Of `config/cell.py`, `config/file.py`, `config/grid.py`, `config/values.py`, `bench/grads_run.py`.
"""

import argparse
import itertools
import json
from pathlib import Path
from typing import get_args

import pytest
from data_samples import tokenize_words, values, write_corpus
from pydantic import BaseModel, ValidationError

from gradwire import cli
from gradwire.base.errors import BadInput
from gradwire.base.strict import add_flags, from_flags, to_flags
from gradwire.bench import grads_run
from gradwire.bench.command import parser_of
from gradwire.bench.config import (
    Cell,
    Dataset,
    Experiment,
    Gradients,
    Grid,
    Training,
    check,
    experiment,
    json_schema,
    read,
)
from gradwire.comm.compressors import build
from gradwire.comm.reduction import ENCODINGS, ParamCompress, Schedule

ROOT = Path(__file__).parents[3]
SMALL = {"name": "small", "compressors": {"none": {}, "int8": {}}, "grid": {"seeds": [0, 1]}}


def test_the_committed_schema_is_current():
    committed = json.loads((ROOT / "workflow/schemas/config.schema.json").read_text())
    assert committed == json_schema(), "run `make schema`"


@pytest.mark.parametrize(
    "path", [ROOT / "config.yaml", *sorted((ROOT / "configs").glob("*.yaml"))], ids=lambda p: p.stem
)
def test_the_experiments_that_come_with_gradwire_are_valid(path, tmp_path, monkeypatch):
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2/vocab.json").write_text('{"a": 0, "b": 1}')
    (tmp_path / "gpt2/merges.txt").write_text("#version: 0.2")
    monkeypatch.chdir(tmp_path)
    assert check(read(path)).runs()


def test_the_default_experiment_is_the_grid_that_was_promised():
    made = experiment(read(ROOT / "config.yaml"))
    runs = made.runs()
    seeds: dict[tuple[str, str, str], set[int]] = {}
    for run in runs:
        seeds.setdefault((run.strategy, run.link, run.compressor), set()).add(run.seed)
    compared = [label for label in made.compressors if label != "int4-all"]
    assert all(seeds["ddp", "none", label] == {0, 1, 2} for label in compared)
    assert all(seeds["fsdp2", "none", label] == {0, 1, 2} for label in ("none", "int4-all"))
    assert {label for _, link, label in seeds if link == "20mbit"} == {*made.compressors} - {"muon"}
    assert all(made.training_of(run).evaluate == (run.link == "none") for run in runs)
    assert [run.compressor for run in runs if run.world_size == 1] == ["none"]
    assert len(runs) == len(set(runs)) == 36


def test_the_experiment_on_gpus_has_every_compressor_on_one_to_eight_with_three_seeds():
    made = experiment(read(ROOT / "configs/gpus.yaml"))
    assert (made.training.device, made.model_text) == ("cuda", "62m")
    places: dict[tuple[str, str], set[tuple[int, int]]] = {}
    for run in made.runs():
        places.setdefault((run.strategy, run.compressor), set()).add((run.world_size, run.seed))
    several = {*itertools.product((2, 4, 8), (0, 1, 2))}
    assert {label for _, label in places} == {*made.compressors} > {"none", "int8", "int4", "local-adamw"}
    alone = {*itertools.product((1,), (0, 1, 2))}  # nothing is sent there, whatever the compressor
    assert all(found == several | (alone if label == "none" else set()) for (_, label), found in places.items())
    assert {strategy for strategy, label in places if label == "none"} == {strategy for strategy, _ in places}


DDP = {"strategies": ["ddp"]}
LINKED = {"seeds": [0], "links": ["20mbit"], "steps": 17}


def test_runs_for_times_only_are_short_dense_in_the_warm_up_alone_and_not_evaluated():
    cell = {"comm_optimizer": "onebit_adam", "dense_steps": 9}
    made = experiment({**SMALL, "compressors": {"none": {}, "onebit": cell}, "grid": [DDP, {**DDP, **LINKED}]})
    (long,) = [run for run in made.runs() if run.compressor == "onebit" and run.link == "none"]
    (short,) = [run for run in made.runs() if run.compressor == "onebit" and run.link == "20mbit"]
    assert made.training_of(long) == made.training
    assert made.training_of(short) == Training(steps=17, eval_every=0, evaluate=False)
    assert [made.cell_of(run).reduction.dense_steps for run in (long, short)] == [9, made.training.warmup_steps - 1]


@pytest.mark.parametrize(
    ("grids", "words"),
    [
        ([{"links": ["20mbit"]}, LINKED], "two products ask for fsdp2/none/ws2/20mbit/seed0, with another `steps`"),
        ([{}, {**LINKED, "steps": 60}], "give fewer than the 60 of `training`"),
        (
            [{"compressors": ["none"]}, LINKED],
            "the runs of int8 have 17 steps, and no run of all 60 gives their perplexity",
        ),
        ([{}, {**LINKED, "steps": 7}], "no step of 7 is left to time"),
    ],
)
def test_runs_for_times_only_that_cannot_be_are_refused(grids, words):
    with pytest.raises(BadInput) as refused:
        experiment({**SMALL, "grid": grids})
    assert words in str(refused.value)


def test_a_union_of_grids_holds_a_shared_run_once():
    both = {**SMALL, "grid": [{"seeds": [0, 1]}, {"seeds": [1, 2], "compressors": ["none"]}]}
    assert len(experiment(both).runs()) == 2 * 2 + 1


def test_a_product_may_be_simulated():
    ddp = {"strategies": ["ddp"], "compressors": ["int8"]}
    made = experiment({**SMALL, "grid": [{**ddp, "world_sizes": [8, 64], "simulated": True}, ddp]})
    assert {run.world_size for run in made.simulated()} == {8, 64}
    assert sorted(run.world_size for run in made.runs()) == [2, 8, 64]


def test_runs_go_seed_by_seed_with_a_baseline_first_and_last():
    grid = {"strategies": ["ddp", "fsdp2"], "seeds": [0, 1, 2], "compressors": "all"}
    runs = experiment({"name": "x", "compressors": {"none": {}, "fp16": {}, "int8": {}}, "grid": grid}).runs()
    assert [run.seed for run in runs] == sorted(run.seed for run in runs)
    orders = []
    for seed in (0, 1, 2):
        of_seed = [run for run in runs if run.seed == seed]
        assert of_seed[0].compressor == of_seed[-1].compressor == "none"
        orders.append([run._replace(seed=0) for run in of_seed])
    assert len({tuple(order) for order in orders}) > 1, "each seed draws its own order"


def test_links_make_an_experiment_timed_unless_it_says_otherwise():
    linked = {**SMALL, "grid": [{"links": ["none", "100mbit"]}]}
    assert [experiment(given).timed for given in (SMALL, linked)] == [False, True]
    assert experiment({**SMALL, "timing": True}).timed
    assert not experiment({**linked, "timing": False}).timed
    assert not experiment({**linked, "exclude": [{"links": ["100mbit"], "reason": "too slow"}]}).timed


def test_excluded_runs_keep_their_reason():
    made = experiment({**SMALL, "exclude": [{"compressors": ["int8"], "seeds": [1], "reason": "too slow"}]})
    left_out = [run for run in made.asked() if made.excluded(run)]
    assert [(run.compressor, run.seed) for run in left_out] == [("int8", 1)]
    assert made.excluded(left_out[0]) == "too slow"
    assert left_out[0] not in made.runs()


def test_flags_give_the_same_settings_back():
    training = Training(steps=17, lr=0.00025, profile=False, device="cpu", gradient_checkpointing=True)
    parser = argparse.ArgumentParser()
    add_flags(parser, Training)
    assert from_flags(Training, parser.parse_args(to_flags(training))) == training


def test_a_cell_is_hooked_unless_it_is_plain_none():
    assert not Cell.parse("none", {}).hooked
    assert Cell.parse("exchange", {"method": "none", "algorithm": "exchange"}).hooked
    assert Cell.parse("int8", {}).hooked


def test_a_schedule_is_read_from_yaml_and_json_alike():
    mapping = {"method": "int8", "num_bits": 2, "schedule": {"num_bits": {5: 8, 20: 4}}}
    cell = Cell.parse("falling", mapping)
    assert Cell.parse("falling", json.loads(json.dumps(cell.flat()))) == cell
    schedule = Schedule(build(cell.method, **cell.options), cell.reduction.schedule)
    assert [schedule.at(step).num_bits for step in (0, 4, 5, 19, 20, 900)] == [2, 2, 8, 8, 4, 4]


def test_a_cell_gives_back_the_mapping_it_was_read_from():
    mapping = {"method": "int8", "block": 64, "dense_steps": 3, "exempt": {"max_ndim": 1}, "inside": {"method": "fp8"}}
    mapping |= {"param_compress": "bf16"}
    assert Cell.parse("mine", mapping).flat() == mapping


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        ({"method": "int8", "dens_steps": 3}, ["Did you mean 'dense_steps'"]),
        ({"method": "int8", "block": "64"}, ["block", "'64'", "integer"]),
        ({"method": "int8", "dense_steps": "3"}, ["dense_steps", '"3"', "integer"]),
        ({"method": "int8", "second": "encode"}, ["second 'encode'", "Did you mean 'encoded'", "encoded, float32"]),
        ({"method": "int8", "exempt": {"max_nume": 3}}, ["key in reduction.exempt 'max_nume'", "'max_numel'"]),
        ({"method": "int8", "schedule": {"num_bit": {0: 4}}}, ["in the schedule, 'num_bit'", "'num_bits'"]),
        ({"method": "int8", "schedule": {"num_bits": {0: 8, 9: 5}}}, ["num_bits", "is 5", "2"]),
        ({"method": "int8", "schedule": {"num_bits": {-1: 4}}}, ["num_bits", "from step 0"]),
        ({"method": "int8", "schedule": {"num_bits": {"soon": 4}}}, ["schedule.num_bits.soon", "integer"]),
        ({"method": "int8", "schedule": {"num_bits": {}}}, ["at least one value"]),
        ({"method": "int8", "schedule": {"num_bits": {5: 8, "5": 4}}}, ["schedule.num_bits", "a step is given twice"]),
        ({"method": "int8+bf16"}, ["a chain is sparsifier+quantizer", "int8 is a quantizer"]),
        ({"method": "int8+bf16+fp16"}, ["a chain has two members"]),
        (["int8"], ["expected a mapping", '["int8"]']),
        (None, ["expected a mapping"]),
    ],
)
def test_a_bad_cell_is_reported_in_one_message(mapping, words):
    with pytest.raises(BadInput) as refused:
        Cell.parse("int8x", mapping)
    assert "\n" not in str(refused.value)
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"grid": []}, ["grid is empty"]),
        ({"dataset": {"source": "json"}}, ["data_path"]),
        ({"gradients": {"dim": 0}}, ["gradients.dim", "got 0"]),
        ({"gradients": {"dim": [16, 0]}}, ["gradients.dim.1", "greater than or equal to 1"]),
        ({"gradients": {"dim": []}}, ["gradients.dim", "at least 1 item"]),
        ({"gradients": {"compressors": ["int7"]}}, ["gradients.compressors 'int7'", "Did you mean 'int8'"]),
        ({"gradients": {"world_sizes": [2, 3]}}, ["gradients.world_sizes '3'", "Available: 2"]),
        ({"gradients": {"seeds": []}}, ["gradients: selects none of the 4 runs of the grid"]),
        ({"gradients": {"seeds": [1]}, "exclude": [{"seeds": [1], "reason": "-"}]}, ["gradients: `exclude` removes"]),
        ({"exclude": [{"compressors": ["none1"], "reason": "-"}]}, ["exclude.0.compressors 'none1'", "mean 'none'"]),
        ({"exclude": [{"links": ["3mbit"], "reason": "-"}]}, ["exclude.0.links '3mbit'", "Available: none"]),
        (
            {"training": {"global_batch_size": 7}},
            ["global_batch_size 7", "2 ranks x 1 micro-batch:", "a multiple of 2"],
        ),
        (
            {"training": {"global_batch_size": 10, "grad_accum_steps": 5}, "grid": [{"world_sizes": [1, 4, 2]}]},
            ["global_batch_size 10", "4 ranks x 5 micro-batches:", "a multiple of 20"],
        ),
        ({"grid": {"simulated": True}}, ["simulated ranks", "fsdp2 shards", "naive, bucket or ddp"]),
        ({"grid": {"simulated": True, "strategies": ["ddp"]}, "timing": True}, ["no times", "timing: false"]),
        ({"grid": {"simulated": True, "strategies": ["ddp"], "steps": 12}}, ["`steps`", "simulated runs have none"]),
        (
            {"grid": {"simulated": True, "strategies": ["ddp"], "links": ["3mbit"]}, "timing": False},
            ["simulated ranks share a process", "3mbit"],
        ),
        (
            {"grid": [{"strategies": ["ddp"], "simulated": True}, {"strategies": ["ddp"], "seeds": [1, 0]}]},
            ["two products ask for ddp/none/ws2/none/seed0, with another `steps` or `simulated`"],
        ),
    ],
)
def test_a_bad_experiment_is_reported_in_one_message(change, words):
    with pytest.raises(BadInput) as refused:
        experiment({**SMALL, **change})
    assert "\n" not in str(refused.value)
    for word in words:
        assert word in str(refused.value)


REFUSED = {
    "a key twice": ("name: a\ngrid: {seeds: [0]}\nname: b", "line 3: the key 'name' is given twice"),
    "a key twice, below": ("compressors:\n  none: {}\n  int8: {block: 64, block: 128}", "line 3: the key 'block'"),
    "a step twice": ("schedule: {num_bits: {5: 8, 0x5: 4}}", "the key 5 is given twice"),
    "nested too deeply": ("[" * 600, "nests too deeply"),
    "no YAML": ("a: [1", "expected ',' or ']'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_yaml_that_loses_a_value_is_refused(case, tmp_path):
    text, words = REFUSED[case]
    path = tmp_path / "experiment.yaml"
    path.write_text(text)
    for reader in (read, lambda path: grads_run.read(path, {})):
        with pytest.raises(BadInput) as refused:
            reader(path)
        assert str(path) in str(refused.value) and words in str(refused.value) and "\n" not in str(refused.value)


def test_json_with_a_key_twice_is_refused_and_anchors_are_followed(tmp_path):
    path = tmp_path / "experiment.json"
    path.write_text(json.dumps(SMALL)[:-1] + ',\t"name": "other"}')
    with pytest.raises(BadInput, match=r"experiment\.json .* the key 'name' is given twice"):
        read(path)
    path = tmp_path / "experiment.yaml"
    path.write_text(
        "name: x\ncompressors:\n  a: &a {method: int8, block: 64}\n  b: &b {<<: *a, block: 128}\n"
        "  c: {<<: *b, num_bits: 4}\n  d: *a\ngrid: {seeds: [0]}"
    )
    cells = experiment(read(path)).cells()
    assert [cell.options.get("block") for cell in cells.values()] == [64, 128, 128, 64]
    assert (cells["c"].options["num_bits"], cells["c"].method) == (4, "int8")


def test_a_cell_says_how_parameters_travel():
    cell = Cell.parse("small", {"method": "topk", "density": 0.1, "param_compress": "int8"})
    assert cell.param_compress == "int8" and cell.methods == ["topk", "int8"] and cell.hooked
    assert Cell.parse("small", cell.flat()) == cell
    assert not Cell.parse("none", {"param_compress": "bf16"}).hooked
    assert "param_compress" not in Cell.parse("none", {}).flat()
    with pytest.raises(BadInput, match=r"unknown option of int8 'param_compres'\. Did you mean 'param_compress'"):
        Cell.parse("int8", {"param_compres": "int8"})
    for name, method in (("int4", "int8"), ("int4-diff", "int8"), ("fp8", "fp8")):
        assert Cell.parse("none", {"param_compress": name}).methods == ["none", method]
    assert set(get_args(ParamCompress)) == {"none", *ENCODINGS}
    known = "bf16, fp8, int4, int4-diff, int8, none"
    with pytest.raises(BadInput, match=rf"unknown value of param_compress 'int5'.* Available: {known}"):
        Cell.parse("int8", {"param_compress": "int5"})


def test_a_cell_has_its_own_learning_rate():
    cell = Cell.parse("slow", {"method": "none", "lr": 1e-3})
    assert Cell.parse("slow", cell.flat()) == cell
    assert (cell.lr, cell.hooked) == (1e-3, False)
    assert "lr" not in Cell.parse("none", {}).flat()
    with pytest.raises(BadInput, match="cell 'none': lr"):
        Cell.parse("none", {"lr": 0})
    with pytest.raises(BadInput, match="`inside` takes a method, its options and the reducer's"):
        Cell.parse("int8", {"inside": {"method": "int8", "lr": 0.1}})


def test_a_cell_has_its_own_decay_of_second_moments():
    cell = Cell.parse("slow", {"method": "int8", "beta2": 0.99})
    assert Cell.parse("slow", cell.flat()) == cell
    replaced, kept = cell.applied_to(Training()), Cell.parse("int8", {}).applied_to(Training(beta2=0.9))
    assert (replaced.beta2, kept.beta2) == (0.99, 0.9)


def test_a_cell_has_its_own_precision():
    cells = {
        "none": {},
        "mixed": {"method": "none", "precision": "bf16"},
        "exact": {"method": "none", "precision": "fp32"},
    }
    given = {"name": "x", "compressors": cells, "grid": {}}
    for whole in ("fp32", "bf16"):
        made = experiment({**given, "training": {"precision": whole}})
        parsed = {label: Cell.parse(label, cell.flat()) for label, cell in made.cells().items()}
        assert parsed == made.cells() and not parsed["mixed"].hooked
        found = {label: cell.applied_to(made.training).precision for label, cell in parsed.items()}
        assert found == {"none": whole, "mixed": "bf16", "exact": "fp32"}
    with pytest.raises(BadInput, match=r"cell 'none': unknown value of precision 'bf61'. Did you mean 'bf16'"):
        Cell.parse("none", {"precision": "bf61"})
    with pytest.raises(BadInput, match="cell 'mixed': precision bf16 is not that of the float32 gradients"):
        experiment({**given, "training": {"dp_max_grad_norm": 1.0}})


def test_parameters_travel_compressed_under_fsdp2_only():
    wide = {**SMALL, "compressors": {"small": {"method": "none", "param_compress": "int8"}}}
    assert experiment({**wide, "grid": {"strategies": ["fsdp2"]}}).runs()
    with pytest.raises(BadInput, match=r"cell 'small': param_compress is 'int8', and only strategies fsdp2 .* not ddp"):
        experiment({**wide, "grid": {"strategies": ["fsdp2", "ddp"]}})
    without = {"strategies": ["ddp"], "reason": "replicas gather nothing"}
    assert experiment({**wide, "grid": {"strategies": ["fsdp2", "ddp"]}, "exclude": [without]}).runs()


# Flags whose defaults are not those of the configuration's field of this name, and why.
OTHERWISE = {
    ("grads validate", "recompute"): 0,  # files alone need neither the model nor the data
    ("grads less", "dim"): 8192,  # LESS's own
    ("grads score", "save_interval"): 1024,  # a score is four bytes, a row many more
    ("grads collect", "strategy"): "ddp",  # whole weights on every rank, unless they are too large
    ("grads less", "strategy"): "ddp",
    ("norms", "strategy"): "ddp",
    ("norms", "batch_size"): 16,  # what fits into memory, no matter of training
    ("perplexity", "batch_size"): 32,
    ("predict", "strategy"): "ddp",  # of a described model, which is none of an experiment
    ("predict", "vocab_size"): 32_000,
    ("run", "profile"): "default",  # Snakemake's, not whether steps are profiled
}
GRID = {
    "strategy": "strategies",
    "seed": "seeds",
    "link": "links",
    "islands": "islands",
}  # flags that are one value of a list


def defaults_of(*models: type[BaseModel]) -> dict[str, object]:
    return {
        name: field.get_default(call_default_factory=True)
        for model in models
        for name, field in model.model_fields.items()
        if not field.is_required()
    }


def flag_defaults() -> dict[tuple[str, str], object]:
    """The default of each command's each flag, where it has one."""
    found = {}
    for name in cli.COMMANDS:
        parser = parser_of(name)
        found |= {(name, action.dest): action.default for action in parser._actions if not action.required}
    return {key: default for key, default in found.items() if default is not None}


def test_a_flag_has_the_default_of_the_configurations_field_of_its_name():
    fields = defaults_of(Dataset, Training, Gradients, Experiment)
    of_grid = defaults_of(Grid)
    fields |= {flag: of_grid[name][0] for flag, name in GRID.items()}
    compared = {key: fields[key[1]] for key in flag_defaults() if key[1] in fields}
    differing = {key: default for key, default in flag_defaults().items() if compared.get(key, default) != default}
    assert {"val_fraction", "save_interval", "strategy", "link", "lr"} <= {flag for _, flag in compared}
    assert differing == OTHERWISE


@pytest.mark.parametrize("field", ["vocab_size", "max_length", "val_fraction"])
def test_the_configuration_and_tokenize_refuse_the_same_sizes(field, tmp_path, capsys):
    corpus = write_corpus(tmp_path / "corpus.json", values(9))
    smallest = {"vocab_size": 258, "max_length": 3, "val_fraction": 0.3}[field]
    Dataset(**{field: smallest})
    assert cli.main(tokenize_words(corpus, tmp_path / "out", **{field: smallest})) == 0
    too_small = smallest - 1 if field != "val_fraction" else 0
    with pytest.raises(ValidationError, match=field):
        Dataset(**{field: too_small})
    assert cli.main(tokenize_words(corpus, tmp_path / "other", **{field: too_small})) == 2
    assert f"--{field} is {too_small}" in capsys.readouterr().err
