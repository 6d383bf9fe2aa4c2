"""The state of a run between two steps, and its checkpoints."""

from __future__ import annotations

import shutil
from typing import Any

import torch
from torch import Tensor

from gradwire.base.errors import BadInput
from gradwire.base.files import write_with
from gradwire.bench.training import results
from gradwire.bench.training.build import Parts
from gradwire.bench.training.checkpoint import Checkpoints
from gradwire.bench.training.outcome import Outcome
from gradwire.bench.training.profiling import trace_file
from gradwire.bench.training.settings import Settings
from gradwire.comm.collectives.world import World
from gradwire.comm.parallel import optimizers


class RunState:
    """Saves and restores a run's model, optimizer, reducer, rows, random generators and trace; both are collective.

    Args:
        settings: The run.
        identity: ``Settings.identity``; checkpoints with another identity are rejected, except for one of the same
            training on another topology.
        data: The digest of the shards.
        world: The process group and this rank's position in it.
        parts: The run's parts.
        outcome: The run's results so far.
    """

    def __init__(
        self, settings: Settings, identity: str, data: str, world: World, parts: Parts, outcome: Outcome
    ) -> None:
        origin = {"identity": identity, "source": settings.source()}
        task = None if settings.training.private else settings.task(data)  # its guarantee is of one topology
        self.topology = {
            "strategy": settings.strategy,
            "world_size": world.world_size,
            "islands": settings.islands,
        }
        self.identity = identity
        keep = settings.training.keep_checkpoints
        self._checkpoints = Checkpoints(settings.output_dir, origin, task, self.topology, world, keep)
        self._settings, self._world, self._parts, self._outcome = settings, world, parts, outcome
        self.trace = trace_file(settings.output_dir, world)

    def resume(self) -> int:
        """Restore the newest checkpoint if the run shall resume, else discard all; return the first step to take.

        Raises:
            BadInput: If the checkpoint is of another configuration or source, or, on another topology, of the last
                step.
        """
        model, optimizer, reducer, *_ = self._parts
        if not self._settings.resume:
            self._checkpoints.discard()
            if self._world.rank == 0:
                shutil.rmtree(self._settings.output_dir / results.MODELS, ignore_errors=True)  # of an earlier run
            return 0
        own = self._checkpoints.resume(model, optimizer, restart=self._settings.restart)
        if own is None:
            return 0
        self._outcome.moved_from = own["moved_from"]
        if own["topology"] != self.topology:
            return self._move(own["topology"], own["step"])
        self._outcome.rows = own["rows"]
        set_generators(own["generators"], self._world)
        if isinstance(optimizer, optimizers.Communicating):  # whose state holds the reducer's
            optimizer.load_rank_state(own["optimizer"])
        elif reducer is not None:
            reducer.load_state_dict(own["reducer"])
        if own["trace"] is not None and not self.trace.exists():
            write_with(self.trace, lambda part: part.write_bytes(own["trace"].numpy().tobytes()))
        return own["step"]

    def _move(self, topology: dict[str, Any], step: int) -> int:
        """Go on at ``step`` with the model and the optimizer of another topology."""
        if step == self._settings.training.steps:
            raise BadInput(
                f"the newest checkpoint of {self._settings.output_dir} is of the last step, {step}, on another "
                "topology: nothing is left to train. Resume with its own strategy and ranks."
            )
        _, optimizer, reducer, *_ = self._parts
        self._outcome.moved_from.append({"step": step, **topology})
        if reducer is not None:
            reducer.begin(step)
        if isinstance(optimizer, optimizers.Communicating):
            optimizer.restart()
        return step

    def save(self, step: int) -> None:
        """Write a checkpoint after ``step`` steps."""
        model, optimizer, reducer, *_ = self._parts
        trace = self.trace
        own = {"step": step, "rows": self._outcome.rows, "generators": generators(self._world)}
        own |= {"topology": self.topology, "moved_from": self._outcome.moved_from}
        own["trace"] = torch.frombuffer(bytearray(trace.read_bytes()), dtype=torch.uint8) if trace.exists() else None
        if isinstance(optimizer, optimizers.Communicating):
            own["optimizer"] = optimizer.rank_state()
        elif reducer is not None:
            own["reducer"] = reducer.state_dict()
        self._checkpoints.save(step, model, optimizer, own)


def generators(world: World) -> dict[str, Tensor]:
    """The states of torch's global random generators on this rank, which dropout uses."""
    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state(world.device)} if world.device.type == "cuda" else {})


def set_generators(states: dict[str, Tensor], world: World) -> None:
    """Restore the states returned by `generators`."""
    torch.set_rng_state(states["cpu"].cpu())
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"].cpu(), world.device)
