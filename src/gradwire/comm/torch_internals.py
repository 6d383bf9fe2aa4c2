"""Every access to what torch keeps private; no other file of this floor reads an underscore of torch.

`tests/comm/test_torch_internals.py` names what is missing in a new version of torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from datetime import timedelta
from types import FrameType, FunctionType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable, profiler
from torch.nn.modules.batchnorm import _NormBase as NormWithStatistics
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradwire.base.errors import BadInput

if TYPE_CHECKING:  # a second to import, and not needed by all of the floor
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

__all__ = ["NormWithStatistics", "ParameterGroup"]

FIRST_BUCKET_BYTES: int = dist._DEFAULT_FIRST_BUCKET_BYTES
"""The size of DDP's first bucket, below which torch.compile refuses the size of the others."""

# --- autograd and modules ---


def backward_id() -> int:
    """Return autograd's number of the backward pass that this thread runs; -1 outside of one."""
    return torch._C._current_graph_task_id()


def computes_gradients() -> bool:
    """Whether this thread runs a node of a backward pass, and not what autograd calls at its end."""
    return torch._C._current_autograd_node() is not None


def at_end_of_backward(call: Callable[[], object]) -> None:
    """Call a function once at the end of the backward pass that this thread runs; DDP and FSDP do the same."""
    Variable._execution_engine.queue_callback(call)


def version_of(tensor: Tensor) -> int:
    """Return autograd's count of the changes of a tensor in place."""
    return tensor._version


def post_accumulate_hooks(parameter: nn.Parameter) -> bool:
    """Whether a parameter has hooks that read its gradient as soon as it is complete."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def compile_held(model: nn.Module, held: nn.Module) -> None:
    """Compile the module that ``torch.compile``'s ``model`` holds in place, as its own `Module.compile` would."""
    held._compiled_call_impl = model.dynamo_ctx(held._call_impl)  # type: ignore[operator]


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether an optimizer's ``step`` calls hooks; that of a wrapper which never ran `Optimizer.__init__` does not."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


# Why the caller, not gradients and learning rates of 0: a rank may have those in a training too, and others would wait.
def allocating() -> bool:
    """Whether this step is not part of training: `torch.distributed.checkpoint` takes one to allocate state."""
    from torch.distributed.checkpoint.state_dict import _init_optim_state

    return called_by(_init_optim_state)


def infers_shapes() -> bool:
    """Whether this forward pass is not part of training: a pipeline stage takes one to infer shapes."""
    if (loaded := sys.modules.get("torch.distributed.pipelining.stage")) is None:
        return False
    stage = getattr(loaded, "PipelineStage", None)
    names = ("_forward_metadata_inference", "_backward_metadata_inference")
    return called_by(*(getattr(stage, name) for name in names if hasattr(stage, name)))


def called_by(*functions: FunctionType) -> bool:
    """Whether this thread runs one of some functions."""
    codes = {function.__code__ for function in functions}
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame is not None


def profiler_runs() -> bool:
    """Whether a profiler of torch records."""
    return bool(profiler._is_profiler_enabled)


def timeout_of(group: dist.ProcessGroup | None) -> timedelta:
    """Return the timeout of a process group's collectives; None is the default group."""
    group = group or dist.group.WORLD
    assert group is not None
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    return group._get_backend(device).options._timeout


# Why: docs/decisions.md, "A group has a name that its members agree on".
def named_group(
    name: str, ranks: Sequence[int], timeout: timedelta | None = None, backend: str | None = None
) -> dist.ProcessGroup:
    """Make a process group; its members call this together, and nobody else.

    `torch.distributed.new_group` with ``use_local_synchronization`` names a group by how many this rank is a member of,
    and members that are in different numbers of groups would wait for each other under different names.

    Args:
        name: A name that no other group has had; the same on all members.
        ranks: The members, in the order of their numbers in the group.
        timeout: Of its collectives.
        backend: The backend; None is the default group's.
    """
    default = dist.group.WORLD
    assert default is not None
    tables, here = tables_of_groups(), dist.get_rank()
    default_backend, store = tables.pg_map[default]
    group, _ = dist.distributed_c10d._new_process_group_helper(
        len(ranks), ranks.index(here), [*ranks], dist.Backend(backend or default_backend), store, name, timeout=timeout
    )
    tables.pg_group_ranks[group] = {rank: number for number, rank in enumerate(ranks)}
    return group  # type: ignore[no-any-return]


def finished_work(result: Any) -> dist.Work:
    """Return what a collective that has finished returns."""
    future = torch.futures.Future[Any]()
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)


def new_tables(default: dist.ProcessGroup, backend: str) -> Any:
    """Return what torch keeps of its process groups, for a process that has only a default group."""
    return SimpleNamespace(
        default_pg=default,
        pg_map={default: (backend, None)},
        pg_names={default: "0"},
        pg_group_ranks={default: {rank: rank for rank in range(default.size())}},
        pg_backend_config={default: backend},
        group_count=1,
        tags_to_pg={},
        pg_to_tag={},
        pg_coalesce_state={},
        comms=[],
    )


def tables_of_groups() -> Any:
    """Return what torch keeps of this process's groups."""
    return dist.distributed_c10d._world


def set_tables_of_groups(tables: Any) -> None:
    """Replace what torch keeps of this process's groups."""
    dist.distributed_c10d._world = tables


def cloned(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, also of one that is made of others and has no `clone`, as torchao's 8-bit moments."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if not is_traceable_wrapper_subclass(tensor):
        return tensor.clone()
    names, context = tensor.__tensor_flatten__()
    held = {name: getattr(tensor, name) for name in names}  # a DTensor has its mesh there too
    parts = {name: cloned(part) if isinstance(part, Tensor) else part for name, part in held.items()}
    made: Tensor = type(tensor).__tensor_unflatten__(parts, context, tensor.size(), tensor.stride())
    return made


def shards_of(tensor: Tensor) -> list[Any] | None:
    """Return the shards that this rank has of a `ShardedTensor`, as FSDP1's state dicts hold; None for another one."""
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    return tensor.local_shards() if isinstance(tensor, ShardedTensor) else None


# --- DistributedDataParallel ---


def join_runs(model: DistributedDataParallel) -> bool:
    """Whether a model is inside `DistributedDataParallel.join`."""
    return bool(model._join_config.enable)


def has_comm_hook(model: DistributedDataParallel) -> bool:
    """Whether a communication hook is registered; that of a copied model has no effect."""
    return model._get_ddp_logging_data().get("comm_hook") is not None


# --- FullyShardedDataParallel (FSDP1) ---


def flat_parameter(module: FullyShardedDataParallel) -> Any:
    """Return the flat parameter of a block; None if the block has none."""
    return None if module._handle is None else module._handle.flat_param


def flat_parts(module: FullyShardedDataParallel) -> Iterator[tuple[str, tuple[int, ...], nn.Parameter | None]]:
    """Yield the name, shape and parameter of each part of a block's flat parameter; alignment has no parameter.

    Raises:
        BadInput: If this version of torch stores flat parameters differently.
    """
    flat = flat_parameter(module)
    try:
        parameters = zip(flat._fqns, flat._shapes, flat._params, strict=True)
        numels = list(zip(flat._numels_with_padding, flat._is_padding_mask, strict=True))
    except AttributeError as error:
        raise BadInput(f"strategy fsdp1 with a compressor does not support this version of torch ({error}).") from error
    for numel, padding in numels:
        if padding:
            yield "", (numel,), None
        else:
            name, shape, parameter = next(parameters)
            yield name, tuple(shape), parameter


def accumulates_flat(module: FullyShardedDataParallel) -> bool:
    """Whether a block's reduced gradient is added to an earlier one."""
    return hasattr(flat_parameter(module), "_saved_grad_shard")


def set_hook_state(module: FullyShardedDataParallel, state: object) -> None:
    """Set the state that the communication hook of a block gets."""
    module._comm_hook_state = state


# --- fully_shard (FSDP2) ---


def check_offered(what: str, *setters: str) -> None:
    """Check that FSDP2 has these setters.

    Raises:
        BadInput: If this version of torch lacks one.
    """
    from torch.distributed.fsdp import FSDPModule

    missing = [setter for setter in setters if not hasattr(FSDPModule, setter)]
    if missing:
        raise BadInput(f"strategy fsdp2 with {what} needs FSDPModule.{missing[0]}: use torch 2.11 or later.")


def backward_interrupted(module: FSDPModule) -> bool:
    """Whether an exception has interrupted the last backward pass, and FSDP2 still has its gradients."""
    return bool(module._get_fsdp_state()._state_ctx.post_backward_final_callback_queued)


def inside_another(module: FSDPModule) -> bool:
    """Whether FSDP2 has run a module as a part of another one that it shards."""
    return module._get_fsdp_state()._is_root is False


class ParameterGroup:
    """Parameters of a module that FSDP2 gathers, and whose gradients it reduces, together.

    Args:
        module: The module.
        group: FSDP2's private object of the group.
        members: FSDP2's private objects of the parameters, by name, in the order of its buffers.

    Attributes:
        discarded: Whether gradients of the last forward pass are thrown away, and need no reduction.
        used: Names of the parameters that backward passes of this optimizer step computed a gradient of.
        filled: Names of those that had none, and for which zeros were reduced.
    """

    def __init__(self, module: FSDPModule, group: Any, members: Mapping[str, Any]) -> None:
        self.module = module
        self._group = group
        self._members = members
        self.discarded = False
        self.used: set[str] = set()
        self.filled: set[str] = set()

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The modules that were sharded in one call; each may have forward passes without the others."""
        modules: Sequence[nn.Module] = self._group.modules
        return modules

    def __iter__(self) -> Iterator[str]:
        """The names of the parameters."""
        return iter(self._members)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """This rank's shards by name, also after one was replaced, as by ``load_state_dict(assign=True)``."""
        return {name: member.sharded_param for name, member in self._members.items()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters in buffers whose rows are the ranks', by name: cut along the first dimension.

        Of a parameter of tensor parallelism it is this rank's part. One that is sharded along another dimension has its
        chunks in rows.
        """
        return {name: self._buffer_shape(member) for name, member in self._members.items()}

    @property
    def trained(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters that are trainable now."""
        trained = {name for name, parameter in self.parameters.items() if parameter.requires_grad}
        return {name: shape for name, shape in self.shapes.items() if name in trained}

    def _buffer_shape(self, member: Any) -> tuple[int, ...]:
        """The shape of a parameter in FSDP2's buffers."""
        shape, dim = tuple(member._orig_size), member.fsdp_placement.dim
        if dim == 0:
            return shape
        ranks = 1 if self.shards is None else self.shards.size()
        return (shape[0] * ranks, *shape[1:dim], shape[dim] // ranks, *shape[dim + 1 :])

    @property
    def split(self) -> bool:
        """Whether tensor or expert parallelism splits a parameter."""
        return any(member.is_dtensor for member in self._members.values())

    @property
    def gathered_type(self) -> torch.dtype | None:
        """The type that parameters are converted to before they are gathered; None: their own."""
        types = (member.mp_policy.param_dtype for member in self._members.values())
        return next((kind for kind in types if kind is not None), None)

    @property
    def shards(self) -> dist.ProcessGroup | None:
        """The ranks that hold the parameters in shards; None if each rank has them whole, as under `replicate`."""
        return getattr(self._group.mesh_info, "shard_process_group", None)

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """The ranks with the same shard, over which FSDP2 itself averages: under HSDP and `replicate`; else None."""
        return getattr(self._group.mesh_info, "replicate_process_group", None)

    @property
    def shards_name(self) -> str:
        """The name of the mesh's dimension of the shards; ``shards`` if it has none."""
        return self._dimension(self._group.mesh_info.shard_mesh_dim) or "shards"

    @property
    def replicas_name(self) -> str:
        """The name of the mesh's dimension of the replicas; ``replicas`` if it has none."""
        return self._dimension(self._group.mesh_info.replicate_mesh_dim) or "replicas"

    def _dimension(self, dim: int | None) -> str | None:
        """The name of a dimension of FSDP2's mesh."""
        names: tuple[str, ...] | None = self._group.mesh_info.mesh.mesh_dim_names
        return None if names is None or dim is None else names[dim]

    def drop_replicas(self) -> None:
        """Leave the average over `replicas` to a hook: to FSDP2 this rank's shards are the only ones from now on.

        FSDP2 all-reduces before it calls a hook, so that a hook cannot replace it. The parameters' placements stay.
        """
        from torch.distributed.fsdp._fully_shard._fsdp_common import DataParallelMeshInfo, FSDPMeshInfo

        before = self._group.mesh_info
        given = {field.name: getattr(before, field.name) for field in fields(before) if field.init}
        alone: DataParallelMeshInfo
        if self.shards is None:
            alone = DataParallelMeshInfo(**given)
        else:
            alone = FSDPMeshInfo(**{**given, "replicate_mesh_dim": None})
        if self._group.post_forward_mesh_info is before:
            self._group.post_forward_mesh_info = alone
        self._group.mesh_info = alone

    def set_reduce_scatter(self, collective: Callable[..., object]) -> None:
        """Replace the reduce-scatter; FSDP2's own setter refuses a module with several groups."""
        self._group._reduce_scatter_comm = collective

    def set_all_gather(self, collective: Callable[..., object]) -> None:
        """Replace the all-gather."""
        self._group._all_gather_comm = collective

    def set_all_reduce_hook(self, hook: Callable[[Tensor], object]) -> None:
        """Set the function that gets the reduced shards of gradients, and changes them in place."""
        self._group._all_reduce_hook = hook

    def reduce_sums(self) -> None:
        """Have FSDP2 pass sums to the reduce-scatter, and divide separately."""
        self._group.force_sum_reduction_for_comms = True

    @property
    def always_fills(self) -> bool:
        """Whether the model's owner has called ``set_reduce_scatter_unused_params(True)``."""
        return getattr(self._group, "reduce_scatter_unused_params", False) is True

    def reduce_unused(self, unused: bool) -> None:
        """Have FSDP2 reduce zeros for parameters that a backward pass leaves unused; before torch 2.13 it cannot.

        If it `always_fills`, it goes on.
        """
        if not self.always_fills:
            self._group.reduce_scatter_unused_params = int(unused)  # the owner's is a bool

    def accumulate_zeros(self, accumulates: bool = False) -> None:
        """Give each trainable parameter an accumulated gradient, of zeros, if another one has it.

        FSDP2 makes zeros for unused parameters in their gathered type, and gradients accumulate in the type that is
        reduced: a buffer takes one type.

        Args:
            accumulates: Whether a gradient has just been computed, which a pass that does not reduce will accumulate.
        """
        members = [member for member in self._members.values() if member.sharded_param.requires_grad]
        accumulates = accumulates and not self._group.reduce_grads
        if accumulates or any(member.unsharded_accumulated_grad is not None for member in members):
            for member in members:
                if member.unsharded_accumulated_grad is None and member.reduce_dtype is not None:
                    zeros = torch.zeros_like(member.unsharded_param, dtype=member.reduce_dtype)
                    member.unsharded_accumulated_grad = zeros

    @property
    def reduce_scatter(self) -> str:
        """The class name of the reduce-scatter; FSDP2's own is ``DefaultReduceScatter``."""
        return type(self._group._reduce_scatter_comm).__name__

    @property
    def divide_factor(self) -> float | None:
        """The factor that divides sums of gradients; None: the number of ranks."""
        factor: float | None = self._group.gradient_divide_factor
        return factor

    @divide_factor.setter
    def divide_factor(self, factor: float) -> None:
        self._group.gradient_divide_factor = factor

    @property
    def averages_replicas(self) -> bool:
        """False after ``set_requires_all_reduce(False)``."""
        return bool(self._group.all_reduce_grads)

    @property
    def has_all_reduce_hook(self) -> bool:
        """Whether a function gets the reduced shards."""
        return self._group._all_reduce_hook is not None

    @property
    def gathered(self) -> dict[str, nn.Parameter]:
        """The gathered parameters by name; they exist from the first forward pass on."""
        return {name: member.unsharded_param for name, member in self._members.items()}

    @property
    def waiting(self) -> list[str]:
        """The parameters whose gradient FSDP2 keeps unreduced; there is none before a forward pass."""
        return [
            name
            for name, member in self._members.items()
            if hasattr(member, "_unsharded_param")
            and (member.unsharded_param.grad is not None or member.unsharded_accumulated_grad is not None)
        ]


def parameter_groups(model: nn.Module, names: Mapping[int, str]) -> list[ParameterGroup]:
    """Return the groups of an FSDP2 model, a module's before those of its children.

    Args:
        model: The model.
        names: Names of its parameters, by their ``id``.

    Raises:
        BadInput: If this version of torch stores its parameters differently.
    """
    groups: dict[int, ParameterGroup] = {}  # modules that were sharded in one call have one
    try:
        for module, group in sharded_groups(model):
            if members := {names[id(held(member))]: member for member in group.fsdp_params}:
                groups.setdefault(id(group), ParameterGroup(module, group, members))
    except AttributeError as error:
        raise BadInput(f"strategy fsdp2 does not support this version of torch ({error}).") from error
    return [*groups.values()]


def sharded_groups(model: nn.Module) -> Iterator[tuple[FSDPModule, Any]]:
    """Yield the modules that FSDP2 shards, each with FSDP2's private object of a group of parameters."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
            yield from ((module, group) for group in groups if group is not None)


@contextmanager
def unreduced(model: nn.Module) -> Iterator[None]:
    """Keep FSDP2 from reducing gradients of earlier backward passes in those of this context."""
    groups = [group for _, group in sharded_groups(model)]
    reduces = [group.reduce_grads for group in groups]
    for group in groups:
        group.reduce_grads = False
    try:
        yield
    finally:
        for group, before in zip(groups, reduces, strict=True):
            group.reduce_grads = before


def held(member: Any) -> nn.Parameter:
    """Return the parameter that a module holds for a member of a group; FSDP2 takes over a new one in a forward."""
    parameter: nn.Parameter = getattr(member._module_info.module, member._module_info.param_name)
    return parameter


# --- torchft ---


class Managed(NamedTuple):
    """Arguments of a `torchft.Manager`.

    Attributes:
        name: The group's ``replica_id``; "" without one.
        asynchronous: Whether a quorum is agreed on in the background.
        least: The smallest number of groups that may commit.
        timeout: Of its operations.
        quorum_timeout: Of a quorum.
    """

    name: str
    asynchronous: bool
    least: int
    timeout: timedelta
    quorum_timeout: timedelta


def managed(manager: Any) -> Managed:
    """Return a manager's arguments."""
    return Managed(
        manager._replica_id or "",
        manager._use_async_quorum,
        manager._min_replica_size,
        manager._timeout,
        manager._quorum_timeout,
    )


def quorum_group(manager: Any) -> dist.ProcessGroup | None:
    """Return the ranks of the quorum that have this rank's place in their groups; None if they could not connect."""
    group: dist.ProcessGroup | None = manager._pg._pg
    return group


def abort_quorum_group(manager: Any) -> None:
    """Drop the manager's reference to `quorum_group`, and abort what runs on it."""
    manager._pg.abort()
