"""The state of a run between two steps, and its checkpoints.

All ranks write them atomically, and they are verified before use.

``checkpoints/step<N>/`` holds ``rank<R>.pt`` (state of that rank only), ``state.pt`` (model and optimizer if they are
replicated; else each rank's shard in ``state<R>.pt``) and ``checkpoint.json`` (the run's identity and the SHA-256 of
every file). The files are written to ``step<N>.part``, which rank 0 renames when every rank has finished. Reading a
checkpoint never executes code from it.

A checkpoint of the same training under another strategy or on other ranks gives a run its model and optimizer; what
belongs to a rank is dropped.
"""

from __future__ import annotations

import os
import pickle
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradwire.base.errors import BadInput
from gradwire.base.files import read_json, sha256_file, write_json, write_with, writing
from gradwire.base.units import amount
from gradwire.bench.training import results
from gradwire.bench.training.build import Outcome, Parts
from gradwire.bench.training.monitor import trace_file
from gradwire.bench.training.settings import Settings
from gradwire.comm import parallel
from gradwire.comm.collectives import ops
from gradwire.comm.collectives.world import World
from gradwire.comm.parallel import optimizers
from gradwire.comm.topology import sharded_islands

MANIFEST = "checkpoint.json"


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
        self.identity = identity
        self.topology = {"strategy": settings.strategy, "world_size": world.world_size, "islands": settings.islands}
        self.trace = trace_file(settings.output_dir, world)
        self._origin = {"identity": identity, "source": settings.source()}
        self._task = None if settings.training.private else settings.task(data)  # its guarantee is of one topology
        self._folder = settings.output_dir / "checkpoints"
        self._settings, self._world, self._parts, self._outcome = settings, world, parts, outcome

    def resume(self) -> int:
        """Restore the newest checkpoint if the run shall resume, else discard all; return the first step to take.

        Which one, which are damaged and skipped, and what is dropped, is reported on standard error.

        Raises:
            BadInput: If the checkpoint is of another configuration or source, or, on another topology, of the last
                step.
        """
        _, optimizer, reducer, *_ = self._parts
        if not self._settings.resume:
            self._discard()
            if self._world.rank == 0:
                shutil.rmtree(self._settings.output_dir / results.MODELS, ignore_errors=True)  # of an earlier run
            return 0
        saved = self._newest()
        if saved is None:
            return 0
        self._outcome.moved_from = saved["moved_from"]
        if saved["topology"] != self.topology:
            return self._move(saved["topology"], saved["step"])
        self._outcome.rows = saved["rows"]
        set_generators(saved["generators"], self._world)
        if isinstance(optimizer, optimizers.Communicating):  # whose state holds the reducer's
            optimizer.load_rank_state(saved["optimizer"])
        elif reducer is not None:
            reducer.load_state_dict(saved["reducer"])
        if saved["trace"] is not None and not self.trace.exists():
            write_with(self.trace, lambda part: part.write_bytes(saved["trace"].numpy().tobytes()))
        return saved["step"]

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
        """Write a checkpoint after ``step`` steps.

        Raises:
            RunFault: If a file cannot be written; the partial checkpoint is removed.
        """
        model, optimizer, reducer, *_ = self._parts
        trace = self.trace
        rank_state = {"step": step, "rows": self._outcome.rows, "generators": generators(self._world)}
        rank_state |= {"topology": self.topology, "moved_from": self._outcome.moved_from}
        rank_state["trace"] = (
            torch.frombuffer(bytearray(trace.read_bytes()), dtype=torch.uint8) if trace.exists() else None
        )
        if isinstance(optimizer, optimizers.Communicating):
            rank_state["optimizer"] = optimizer.rank_state()
        elif reducer is not None:
            rank_state["reducer"] = reducer.state_dict()
        target = self._folder / f"step{step:08d}"
        part = target.with_name(f"{target.name}.part")
        if self._world.rank == 0:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        self._barrier()
        try:
            name = f"rank{self._world.rank}.pt"
            files = {name: _write(part / name, rank_state)}
            with optimizers.synchronized(optimizer):  # the rank's own parameters are in its own state
                name, state = self._state_name, parallel.checkpoint_state(model, optimizer)
                if name != "state.pt" or self._world.rank == 0:
                    files[name] = _write(part / name, parallel.own_part(state))
            files = {name: sha for rank in ops.gather_objects(files) for name, sha in rank.items()}
            if self._world.rank == 0:
                manifest = self._origin | {"task": self._task, "topology": self.topology, "step": step, "sha256": files}
                write_json(part / MANIFEST, manifest)
                shutil.rmtree(target, ignore_errors=True)  # a damaged checkpoint of the same step
                part.replace(target)
                self._prune(target)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        self._barrier()

    def _newest(self) -> dict[str, Any] | None:
        """Restore the model and the optimizer in place from the newest valid checkpoint.

        Returns:
            This rank's own state, that of rank 0 if the checkpoint has another topology, or None if there is no
            checkpoint to resume from.

        Raises:
            BadInput: If the newest valid checkpoint has another configuration or source.
        """
        restart = self._settings.restart
        if self._world.rank == 0:
            for part in self._folder.glob("step*.part"):  # left by a killed run
                shutil.rmtree(part)
        for name in reversed(self._agreed(self._names())):
            checkpoint = self._folder / name
            problems = [problem for problem in ops.gather_objects(self._problem(checkpoint)) if problem]
            if problems:
                self._note(f"{problems[0]}: the checkpoint is damaged and is skipped.")
                continue
            manifest = self._agreed(read_json(checkpoint / MANIFEST))
            difference = self._difference(manifest)
            if difference and (restart or not self._moves(manifest)):
                if restart:
                    self._note(f"{checkpoint} {difference}: starting over.")
                    break
                raise BadInput(
                    f"{checkpoint} {difference}; repeat that run, choose another --output_dir, or start over with "
                    "--restart."
                )
            self._note(f"resuming after step {int(name.removeprefix('step'))}, from {checkpoint}.")
            if difference:
                self._note(
                    f"{checkpoint} {difference}: its weights and optimizer state are kept; residuals, other states of "
                    "compressors, outer momentum, random generators, the order of the data, and the rows of its steps "
                    "are dropped."
                )
            return self._load(checkpoint, manifest)
        else:
            self._note(f"{self._folder} has no valid checkpoint to resume from: starting at step 0.")
        self._discard()
        return None

    def _discard(self) -> None:
        """Remove all checkpoints."""
        if self._world.rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._barrier()

    def _names(self) -> list[str]:
        """Names of the complete checkpoints, oldest first."""
        return sorted(path.name for path in self._folder.glob("step*") if path.suffix != ".part")

    @property
    def _state_name(self) -> str:
        return "state.pt" if parallel.replicated(self._parts.model) else f"state{self._world.rank}.pt"

    def _problem(self, checkpoint: Path) -> str | None:
        """The problem with this rank's files, or None."""
        try:
            manifest = read_json(checkpoint / MANIFEST)
            written, (rank_file, states) = manifest["sha256"], self._files(manifest)
        except (BadInput, KeyError, TypeError) as error:
            return f"{checkpoint / MANIFEST} cannot be read ({error})"
        for name in (rank_file, *states):
            path = checkpoint / name
            if name in written and not path.is_file():
                return f"{path} is missing"
            if name in written and sha256_file(path) != written[name]:
                return f"{path} does not match its SHA-256"
        return None

    def _files(self, manifest: Mapping[str, Any]) -> tuple[str, list[str]]:
        """The file of own state that this rank reads, and those of the model, of one island's ranks."""
        strategy, world, islands = (manifest["topology"][key] for key in ("strategy", "world_size", "islands"))
        if manifest["topology"] == self.topology:
            return f"rank{self._world.rank}.pt", [self._state_name]
        if "state.pt" in manifest["sha256"]:
            return "rank0.pt", ["state.pt"]
        return "rank0.pt", [f"state{rank}.pt" for rank in range(world // sharded_islands(strategy, islands))]

    def _moves(self, manifest: Mapping[str, Any]) -> bool:
        """Whether the checkpoint is of this training on another topology."""
        return manifest["topology"] != self.topology and manifest["task"] == self._task is not None

    def _difference(self, manifest: Mapping[str, Any]) -> str | None:
        """How the checkpoint differs from this run, or None."""
        if manifest["topology"] != self.topology:
            strategy, ranks, islands = (manifest["topology"][key] for key in ("strategy", "world_size", "islands"))
            return f"was written by strategy {strategy} on {amount(ranks, 'rank')} in {amount(islands, 'island')}"
        for name, value in self._origin.items():
            if manifest.get(name) != value:
                return "belongs to a run of another configuration" if name == "identity" else f"has another {name}"
        return None

    def _load(self, checkpoint: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
        model, optimizer, *_ = self._parts
        rank_file, states = self._files(manifest)
        state = parallel.checkpoint_state(model, optimizer)
        saved = [_read(checkpoint / name, "cpu", mmap=True) for name in states]
        if manifest["topology"] == self.topology:
            state = parallel.filled(state, saved[0])
        else:
            state = {
                key: parallel.joined(state[key], [shard[key] for shard in saved]) for key in ("model", "optimizer")
            }
        parallel.load_checkpoint_state(model, optimizer, state)
        return _read(checkpoint / rank_file, self._world.device)

    def _prune(self, newest: Path) -> None:
        """Keep ``keep`` checkpoints up to ``newest``; later ones are damaged: the run did not resume from them."""
        names = self._names()
        end = names.index(newest.name) + 1
        for name in names[: max(0, end - self._settings.training.keep_checkpoints)] + names[end:]:
            shutil.rmtree(self._folder / name)

    def _agreed(self, value: Any) -> Any:
        """Return rank 0's value on all ranks."""
        return ops.gather_objects(value)[0]

    def _barrier(self) -> None:
        ops.gather_objects(None)

    def _note(self, message: str) -> None:
        if self._world.rank == 0:
            print(f"gradwire train: NOTE: {message}", file=sys.stderr, flush=True)


def generators(world: World) -> dict[str, Tensor]:
    """The states of torch's global random generators on this rank, which dropout uses."""
    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state(world.device)} if world.device.type == "cuda" else {})


def set_generators(states: dict[str, Tensor], world: World) -> None:
    """Restore the states returned by `generators`."""
    torch.set_rng_state(states["cpu"].cpu())
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"].cpu(), world.device)


def _write(path: Path, value: dict[str, Any]) -> str:
    """Write tensors and plain data to ``path`` and return the file's SHA-256."""
    with writing(path), path.open("wb") as stream:
        torch.save(value, stream)
        stream.flush()
        os.fsync(stream.fileno())
    return sha256_file(path)


def _read(path: Path, device: Any, mmap: bool = False) -> dict[str, Any]:
    """Read a file written by `_write`, without executing code from it."""
    try:
        return torch.load(path, weights_only=True, map_location=device, mmap=mmap)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise BadInput(f"{path} cannot be read ({str(error).splitlines()[0]}); delete its folder.") from None
