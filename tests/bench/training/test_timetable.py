"""Which steps of a run warm up, are profiled and are timed; and that nothing compiles in any of them.

Of `bench/steps.py`.
"""

from __future__ import annotations

import gc
import json
from collections import Counter
from pathlib import Path

import pytest
from numba.core.registry import CPUDispatcher as Dispatcher
from samples import BUILDS
from small_runs import run, words

from gradwire.base.files import read_yaml
from gradwire.bench.config import Training
from gradwire.bench.steps import weights
from gradwire.bench.training.loop import timetable
from gradwire.bench.training.step import Stepper
from gradwire.comm.parallel.optimizers.diloco import Rounds

ROUNDS = ["end" if Rounds(5, 20).ends(step) else "local" for step in range(20)]
STREAMED = [{4: "sends", 1: "receives"}.get(step % 5, "local") for step in range(30)]


@pytest.mark.parametrize(
    ("kinds", "options", "first", "profiled"),
    [
        (["alike"] * 9, {}, 3, range(3, 6)),
        (["alike"] * 9, {"warmup_steps": 0}, 0, range(3)),
        (["dense"] * 12 + ["alike"] * 8, {}, 13, range(13, 16)),
        (ROUNDS, {}, 5, range(7, 10)),  # the last local step of the second round, and its end
        (ROUNDS, {"warmup_steps": 9}, 9, range(12, 15)),
        (ROUNDS, {"profile_steps": 3}, 5, range(6, 10)),
        (STREAMED, {}, 5, range(8, 12)),  # from a message to its arrival takes three steps
        ([*ROUNDS[:9], "end"], {}, 3, range(3, 6)),  # its second round has no end but the last: it profiles the first
    ],
    ids=["alike", "no warm-up", "dense", "rounds", "late", "more", "streaming", "short"],
)
def test_each_kind_of_steps_is_taken_once_then_profiled_and_timed(kinds, options, first, profiled):
    training = Training(**{"steps": len(kinds), "profile_steps": 2, **options})
    plan = timetable(training, kinds)
    assert (plan.first, plan.profiled, plan.lacking) == (first, profiled, ())
    recorded = set(kinds[profiled.start + 1 : profiled.stop])
    timed = {kind for step, kind in enumerate(kinds) if step >= first and step not in profiled}
    assert recorded == timed
    assert timetable(training.model_copy(update={"profile": False}), kinds).profiled == range(first, first)


def test_a_run_that_is_too_short_says_what_it_lacks():
    plan = timetable(Training(steps=8, profile_steps=2), ["local"] * 5 + ["end"] + ["local"] * 2)
    assert (plan.first, plan.profiled, plan.lacking) == (3, range(3, 6), ("end", "local"))


def test_a_kind_has_the_weight_of_its_steps_among_all():
    assert weights(["local", "end"], ROUNDS) == pytest.approx([0.8, 0.2])
    assert weights(["end", "local", "local"], ROUNDS) == pytest.approx([0.2, 0.4, 0.4])
    assert weights(["local"], ROUNDS) == [1], "a kind that was not measured is left out"
    assert weights(["alike", "dense"], ["dense"] * 3 + ["alike"] * 2) == [1, 0]
    assert weights(["dense"], ["dense"] * 3) == [1]


LOCAL = {"method": "int8", "comm_optimizer": "diloco", "H": 4}
COMMUNICATING = {
    "rounds": (LOCAL, {"local": 9, "end of round": 4}),
    "growing": (LOCAL | {"H": {0: 1, 2: 5}}, {"local": 8, "end of round": 5}),
    "streaming": (
        LOCAL | {"streaming": {"fragments": 1, "delay": 2}},
        {"local": 7, "sends": 3, "receives": 2, "last": 1},
    ),
    "onebit_adam": (
        {"method": "onebit", "comm_optimizer": "onebit_adam", "dense_steps": 2},
        {"dense": 2, "alike": 11},
    ),
}


@pytest.mark.parametrize(("cell", "kinds"), COMMUNICATING.values(), ids=COMMUNICATING)
def test_steps_of_a_kind_send_as_many_bytes(world, shards, tmp_path, cell, kinds):
    given = {"strategy": "ddp", "comm_config_json": json.dumps(cell), "steps": 13, "eval_every": 0}
    (rows, _), _ = world(2).run(run, words(shards, tmp_path, "--no-evaluate", **given))
    assert Counter(row["kind"] for row in rows) == kinds
    sent = {kind: {row["bytes_sent"] for row in rows if row["kind"] == kind} for kind in kinds}
    silent = {"local", "receives"} if "streaming" in cell else {"local"}
    assert all(len(of) == 1 and (of == {0}) is (kind in silent) for kind, of in sent.items()), sent


def compiled_in_steps(rank: int, world_size: int, group: object, arguments: list[str]) -> tuple[list[str], int]:
    """The kernels that a run compiles, or takes from the disk, from its first step on; and how many before."""
    gc.unfreeze()  # what earlier calls in this process have made is an object like others
    for kernel in kernels():
        kernel._reset_overloads()
    taken, before = Stepper.take, Counter[str]()

    def take(stepper, step):
        if step == 0:
            before.update(signatures())
        return taken(stepper, step)

    Stepper.take = take
    try:
        run(rank, world_size, group, arguments)
    finally:
        Stepper.take = taken
    return sorted((signatures() - before).elements()), before.total()


def kernels() -> list[Dispatcher]:
    """The kernels of this process."""
    return [kernel for kernel in gc.get_objects() if isinstance(kernel, Dispatcher)]


def signatures() -> Counter[str]:
    """How many signatures of each kernel are compiled."""
    return Counter(
        {f"{kernel.__module__}.{kernel.py_func.__qualname__}": len(kernel.overloads) for kernel in kernels()}
    )


LATE = {  # encodings that begin late, or in some steps only
    "momenta": ("ddp", {"method": "onebit", "comm_optimizer": "onebit_adam", "dense_steps": 3}),
    "replayed": (
        "ddp",
        {"method": "onebit", "comm_optimizer": "diloco", "H": 3, "embeddings": {"method": "int8", "num_bits": 4}},
    ),
    "parameters": (
        "fsdp2",
        {
            "method": "terngrad",
            "dense_steps": 2,
            "residual_dtype": "int8",
            "error_feedback": True,
            "param_compress": "fp8",
        },
    ),
}


def check_nothing_compiles(world, shards: Path, folder: Path, strategy: str, cell: dict, steps: int) -> int:
    """Run a cell; return the number of its kernels."""
    given = {"strategy": strategy, "comm_config_json": json.dumps(cell), "steps": steps, "eval_every": 2}
    ranks = world(2).run(compiled_in_steps, words(shards, folder, **given))
    assert [late for late, _ in ranks] == [[], []]
    return ranks[0][1]


@pytest.mark.parametrize(
    ("strategy", "cell"),
    [pytest.param(*case, marks=[pytest.mark.sweep] * (name == "momenta")) for name, case in LATE.items()],
    ids=LATE,
)
def test_no_kernel_compiles_in_a_step(world, shards, tmp_path, strategy, cell):
    assert check_nothing_compiles(world, shards, tmp_path, strategy, cell, steps=5) > 0


EXPERIMENT = read_yaml(Path(__file__).parents[3] / "config.yaml")["compressors"]
ENCODED = {
    label: cell for label, cell in EXPERIMENT.items() if {*cell} & {"method", "comm_optimizer"} or label == "int8"
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", [*ENCODED, *(f"{name} {options}" for name, options in BUILDS)])
def test_no_kernel_of_any_method_compiles_in_a_step(world, shards, tmp_path, name):
    methods = {f"{name} {options}": {"method": name, "dense_steps": 2, **options} for name, options in BUILDS}
    cell = (ENCODED | methods)[name]
    strategy = "fsdp2" if "param_compress" in cell else "ddp"
    check_nothing_compiles(world, shards, tmp_path, strategy, {"method": name, **cell}, steps=14)
