"""Every stack with every kind of compression, against the same program without gradwire: the table of ``stacks.md``.

A cell is how far training ends from the same program alone, relative to the distance that it moves the parameters (the
largest of all ranks); the bytes of what is compressed, relative to float32; and ``=`` if a run that resumes in its
middle equals an unbroken one to the last bit. W ranks have samples of their own. Tensor parallelism and pipelines have
twice as many processes. torchtitan has to be in ``.titan``, where ``make .titan/.ready`` installs it.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from gradwire import DiLoCo, compress_gradients
from gradwire.base.errors import BadInput

ROOT = Path(__file__).parents[1]
sys.path += map(str, (ROOT / "tests" / "helpers", ROOT / "tests" / "titan", ROOT / ".titan"))
import stacks  # noqa: E402
from world import Pool, World  # noqa: E402

STEPS, RESUMED = 4, 3  # a round of local updates has two steps
stacks.WIDTH, stacks.HIDDEN = 180, 128  # larger than in tests: small messages of four ranks are gathered


class Job(NamedTuple):
    """A training: parts of a model with an optimizer, a step of it, and further objects with a state."""

    parts: Sequence[nn.Module]
    optimizer: Any
    step: Callable[[Any, int], None]
    others: Sequence[Any] = ()


def job_of(model: nn.Module, backward: Callable[[int], None], rate: float = 0.1) -> Job:
    """SGD with a forward and a backward pass."""

    def step(optimizer: Any, number: int) -> None:
        backward(number)
        optimizer.step()
        optimizer.zero_grad()

    return Job([model], torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9), step)


def on_mesh(build: Callable[[int], tuple[nn.Module, int]], processes: int, rate: float = 0.1) -> Job:
    """A stack of `tests/helpers/stacks.py`."""
    model, sample = build(processes)
    return job_of(model, lambda number: stacks.loss_of(model, sample, number).backward(), rate)


def pipeline(processes: int) -> Job:
    """Two stages, each sharded over its data-parallel ranks."""
    mesh, model = stacks.mesh_of(2, processes // 2, names="pp dp"), stacks.net()
    data, number = mesh["dp"], mesh["pp"].get_local_rank()
    layers = {"0": model.blocks[0]} if number == 0 else {"1": model.blocks[1], "head": model.head}
    part = nn.Sequential()
    for name, layer in layers.items():
        part.add_module(name, stacks.fully_shard(layer, mesh=data))
    stacks.fully_shard(part, mesh=data)
    stage = PipelineStage(part, number, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, n_microbatches=2, loss_fn=lambda output, _: output.square().mean())

    def backward(number: int) -> None:
        inputs = stacks.inputs(data.get_local_rank(), number)
        schedule.step(inputs) if stage.is_first else schedule.step(target=inputs)

    return job_of(part, backward)


def torchtitan(processes: int, model: str = "llama3", parameters: str = "float32", **degrees: int) -> Job:
    """A trainer of torchtitan with a debug model, its AdamW and the type in which FSDP2 gathers parameters."""
    import on_cpu

    stacks.forget_groups()
    config = on_cpu.config(model, "", STEPS, **degrees)
    config.training.mixed_precision_param = parameters
    trainer = on_cpu.Trainer(config)

    def step(optimizer: Any, number: int) -> None:
        trainer.optimizers, trainer.dataloader.batches, trainer.step = optimizer, number, number + 1
        trainer.train_step(trainer.batch_generator(trainer.dataloader))

    return Job(trainer.model_parts, trainer.optimizers, step, [trainer.lr_schedulers])


STACKS: dict[str, tuple[Callable[[int], Job], int]] = {  # and processes of each of W
    "DDP": (partial(on_mesh, stacks.data_parallel), 1),
    "FSDP2": (partial(on_mesh, stacks.flat), 1),
    "HSDP, 2 islands": (partial(on_mesh, lambda ranks: stacks.hsdp(ranks, 2)), 1),
    "TP × FSDP2": (partial(on_mesh, stacks.tensor_fsdp), 2),
    "TP × DDP": (partial(on_mesh, stacks.tensor_ddp), 2),
    "experts × FSDP2": (partial(on_mesh, stacks.experts, rate=0.01), 1),
    "pipeline × FSDP2": (pipeline, 2),
    "torchtitan: FSDP2": (torchtitan, 1),
    "torchtitan: HSDP, bfloat16": (partial(torchtitan, parameters="bfloat16", data_parallel_replicate=2), 1),
    "torchtitan: TP × FSDP2": (partial(torchtitan, tensor_parallel=2), 2),
    "torchtitan: pipeline × FSDP2": (partial(torchtitan, pipeline_parallel=2), 2),
    "torchtitan: experts × FSDP2": (partial(torchtitan, model="qwen3", expert_parallel=2), 1),
}


def gradients(job: Job, compressor: Any, **options: Any) -> tuple[Any, list[Any]]:
    """Compress gradients; an optimizer and what has traffic."""
    options["optimizer"] = job.optimizer
    return job.optimizer, [compress_gradients(part, compressor, **options) for part in job.parts]


def rounds(job: Job) -> tuple[Any, list[Any]]:
    """Local updates; an optimizer, which has traffic."""
    optimizer = DiLoCo(job.optimizer, job.parts[0], sync_every=2, compressor="onebit")
    return optimizer, [optimizer]


CASES: dict[str, Callable[[Job], tuple[Any, list[Any]]]] = {
    "alone": lambda job: (job.optimizer, []),
    "none": partial(gradients, compressor="none"),
    "int8": partial(gradients, compressor="int8"),
    "topk, EF": partial(gradients, compressor={"method": "topk", "density": 0.25}, error_feedback=True),
    "int4, int4-diff": partial(gradients, compressor={"method": "int8", "num_bits": 4}, parameters="int4-diff"),
    "DiLoCo, onebit": rounds,
}


def parameters_of(job: Job) -> list[torch.Tensor]:
    """This rank's parameters, from the optimizer: torch's TP × DDP takes those that are split from the model."""
    return [parameter for group in job.optimizer.param_groups for parameter in group["params"]]


def tensors_of(job: Job) -> list[torch.Tensor]:
    """This rank's parameters and buffers."""
    return [*parameters_of(job), *(buffer for part in job.parts for buffer in part.buffers())]


def values_of(job: Job) -> torch.Tensor:
    """All parameters of this rank, whole where they are DTensors."""
    named = stacks.values((str(number), parameter) for number, parameter in enumerate(parameters_of(job)))
    return torch.cat([value.flatten() for value in named.values()])


def traffic_of(counted: list[Any]) -> tuple[int, int]:
    """Bytes sent, and those of float32: of gradients, and of parameters where they are compressed."""
    parts = [each.traffic for each in counted]
    parts += [part.details["parameters"] for part in parts if "parameters" in part.details]
    return sum(part["sent"] for part in parts), sum(part["raw"] for part in parts)


class Cell(NamedTuple):
    """A rank's parameters before and after, its bytes, sent and of float32, and whether a resumed run ends so."""

    start: torch.Tensor
    end: torch.Tensor
    sent: int
    raw: int
    equal: bool


def cell(rank: int, processes: int, group: Any, stack: str, case: str) -> Cell | str:
    """Train in a rank, and from the state of the middle in new objects too; the message of a refusal."""
    make = partial(STACKS[stack][0], processes)
    job, again = make(), make()
    try:
        (optimizer, counted), resumed = CASES[case](job), CASES[case](again)
    except BadInput as refusal:
        return str(refusal)
    start, before = values_of(job), traffic_of(counted)  # a replica of parameters is sent once, when it is made
    for number in range(STEPS):
        if number == RESUMED:
            resume(job, (optimizer, *counted), again, (resumed[0], *resumed[1]))
        job.step(optimizer, number)
    for number in range(RESUMED, STEPS):
        again.step(resumed[0], number)
    sent, raw = (after - earlier for after, earlier in zip(traffic_of(counted), before, strict=True))
    return Cell(start, values_of(job), sent, raw, torch.equal(values_of(job), values_of(again)))


def resume(job: Job, states: Sequence[Any], again: Job, others: Sequence[Any]) -> None:
    """Load the tensors and states of a job in another one."""
    with torch.no_grad():
        for to, tensor in zip(tensors_of(again), tensors_of(job), strict=True):
            to.copy_(tensor)
    for there, here in zip((*again.others, *others), (*job.others, *states), strict=True):
        there.load_state_dict(copy.deepcopy(here.state_dict()))


def shown(cells: Sequence[Cell | str], alone: Sequence[Cell], none: int, refusals: list[str]) -> str:
    """A case of all ranks; ``none`` is the bytes of float32's gradients in as many steps."""
    if isinstance(cells[0], str):
        if cells[0] not in refusals:
            refusals.append(cells[0])
        return f"refused ({refusals.index(cells[0]) + 1})"
    apart = [
        (cell.end - exact.end).norm() / (exact.start - exact.end).norm()
        for cell, exact in zip(cells, alone, strict=True)
    ]
    share = sum(cell.sent for cell in cells) / max(none, sum(cell.raw for cell in cells))
    return f"{max(apart):.2g} · {share:.1%} · {'=' if all(cell.equal for cell in cells) else '≠'}"


def main() -> None:
    """Print each row of the table, then the refusals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stacks", nargs="+", choices=STACKS, default=[*STACKS], metavar="STACK")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    args = parser.parse_args()
    pool, refusals = Pool(2 * max(args.ranks), timeout=3600), list[str]()
    columns = ["stack", "W", *[*CASES][1:]]
    print(f"| {' | '.join(columns)} |\n|:--|{'--:|' * (len(columns) - 1)}")
    for stack, ranks in product(args.stacks, args.ranks):
        world = World(pool, ranks * STACKS[stack][1])  # a group for each cell: idle ones cost time
        alone, *cases = (world.run(cell, stack, case) for case in CASES)
        none = sum(each.raw for each in cases[0])
        print(
            f"| {stack} | {ranks} | {' | '.join(shown(cells, alone, none, refusals) for cells in cases)} |", flush=True
        )
    print("", *(f"{number}. {refusal}" for number, refusal in enumerate(refusals, 1)), sep="\n")
    pool.stop()


if __name__ == "__main__":
    main()
