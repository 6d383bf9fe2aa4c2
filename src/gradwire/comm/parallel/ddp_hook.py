"""A communication hook for DDP with torch's own semantics: a pair of a state and a function, and nothing to finish.

It fits `DistributedDataParallel.register_comm_hook(state, hook)` (PyTorch, "DDP Communication Hooks"), Lightning's
``DDPStrategy(ddp_comm_state=state, ddp_comm_hook=hook)``, and a model that Accelerate has prepared.
"""

# No `annotations` import: DDP rejects annotations of its hook's arguments that are strings.
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.base.errors import RunFault
from gradwire.comm.collectives import Layout, Reducer
from gradwire.comm.collectives.reducer import check_options
from gradwire.comm.compressors import as_compressor
from gradwire.comm.compressors.base import Compressor
from gradwire.comm.parallel.agreement import check_agreement, parameters_of
from gradwire.comm.parallel.names import trainable
from gradwire.comm.parallel.strategy import check_gradients, check_has_values, check_unprepared


class DDPHookState:
    """The state of `ddp_hook`'s function: the reducer, and the buckets of the present backward pass.

    Args:
        shapes: Names and shapes of the trainable parameters, by the parameter's ``id``.
        make: Builds the reducer, and checks that the ranks agree; called at the first reduction, as a process group
            must exist.
    """

    def __init__(self, shapes: dict[int, tuple[str, tuple[int, ...]]], make: Callable[[], Reducer]) -> None:
        self._shapes = shapes
        self._make = make
        self._reducer: Reducer | None = None
        self._layout = Layout(1, 0, ())  # of the parameters that DDP reduces; from the first pass on
        self._gradients: dict[str, Tensor] = {}
        self._waiting: list[tuple[torch.futures.Future[Tensor], Tensor]] = []

    @property
    def reducer(self) -> Reducer:
        """The reducer; ``reducer.traffic`` counts the bytes. It needs a process group."""
        if self._reducer is None:
            reducer = self._make()
            reducer.prepare("all_reduce", sum(torch.Size(shape).numel() for _, shape in self._shapes.values()))
            self._reducer = reducer
        return self._reducer

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals, states and generators, as `Reducer.state_dict`."""
        return self.reducer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set what `state_dict` returned on this rank; a resumed run then equals an uninterrupted one."""
        self.reducer.load_state_dict(state)
        self.reducer.codec.check_names({name for name, _ in self._shapes.values()})

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Take a bucket; with the last one reduce them all, so that the result does not depend on DDP's bucket plan."""
        reducer, buffer = self.reducer, bucket.buffer()
        if bucket.index() == 0:  # an exception may have interrupted the previous pass
            self._waiting.clear()
            self._gradients.clear()
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if id(parameter) not in self._shapes:
                raise RunFault("DDP reduces a parameter that the model did not have, or was frozen, at ddp_hook.")
            self._gradients[self._shapes[id(parameter)][0]] = gradient
        devices = None if buffer.device.type == "cpu" else [buffer.device]
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        self._waiting.append((future, buffer))
        if bucket.is_last():
            layout = self._layout_of(reducer.world)
            layout.unpack(reducer.all_reduce(layout.pack(self._gradients), layout), self._gradients)
            reducer.finish()
            for waiting, reduced in self._waiting:
                waiting.set_result(reduced)
            self._waiting.clear()
            self._gradients.clear()
        return future

    def _layout_of(self, world: int) -> Layout:
        """The layout of the gradients, in the model's order; DDP may ignore some of the parameters."""
        if self._layout.parameters.keys() != self._gradients.keys():
            self._layout = Layout.dim0([each for each in self._shapes.values() if each[0] in self._gradients], world)
        return self._layout


def reduce_bucket(state: DDPHookState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The hook: DDP calls it with each bucket of a backward pass that synchronizes."""
    return state.reduce(bucket)


def ddp_hook(
    model: nn.Module, compressor: Compressor | str | Mapping[str, Any], **options: Any
) -> tuple[DDPHookState, Callable[[DDPHookState, dist.GradBucket], torch.futures.Future[Tensor]]]:
    """Return ``(state, hook)`` that compress the gradients of DDP.

    Every backward pass that synchronizes is one step; there is no `finish` to call. A NaN or infinity passes on to the
    gradients of all ranks, as with torch's own hooks, unless ``nonfinite="raise"`` is given.

    Args:
        model: The model, before or after DDP wraps it; names and order of its trainable parameters are read now.
        compressor: A compressor, its name, or a mapping of its ``method`` and options.
        options: Those of `Reducer`, such as ``error_feedback=True``.

    Returns:
        The state, whose ``state_dict`` belongs in a checkpoint, and the function.

    Raises:
        BadInput: If the compressor or an option is unknown or invalid, `wrap` has prepared the model, it is on the meta
            device, or its gradients are sparse or complex; at the first backward pass, if ranks differ.
    """
    options = {"nonfinite": "propagate", **options}
    chosen = as_compressor(compressor)
    check_options(chosen, **options)
    check_unprepared(model, DistributedDataParallel)
    check_has_values(model)
    check_gradients(model)
    shapes = {id(each): (name, tuple(each.shape)) for name, each in trainable(model).items()}
    parameters = parameters_of(model)  # not the model: the state would keep DDP alive, and DDP the state

    def make() -> Reducer:
        reducer = Reducer(chosen, **options)
        check_agreement(reducer.group, reducer, parameters)
        return reducer

    return DDPHookState(shapes, make), reduce_bucket
