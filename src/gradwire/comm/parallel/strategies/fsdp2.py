"""fully_shard (FSDP2): each parameter is sharded along its first dimension, and reduced with its block."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from gradwire.base.errors import BadInput, RunFault
from gradwire.comm.collectives import Layout, Reducer
from gradwire.comm.collectives.ops import Group
from gradwire.comm.collectives.parameters import ParameterGather, Replica
from gradwire.comm.parallel.mesh import local
from gradwire.comm.parallel.names import named_parameters, trainable
from gradwire.comm.parallel.strategy import EndOfBackward, Strategy, in_backward

Members = Mapping[str, Any]  # FSDP2's private parameters by name, in buffer order
ONE_TYPE = MixedPrecisionPolicy()  # the default: everything in the parameters' own type
NEEDED = ("set_custom_reduce_scatter", "set_force_sum_reduction_for_comms", "set_gradient_divide_factor")


class FSDP2(Strategy):
    """Sharded parameters; the reducer replaces each block's reduce-scatter, and does all of the averaging.

    Args:
        group: The ranks; None is the default group.
        device: The model's device.
        param_compress: Encoding of the parameters in all-gathers: ``none`` (uncompressed), or a key of
            `comm.compressors.reduction.ENCODINGS`. Shards and the weights in evaluation mode stay exact. With
            one rank nothing is sent. ``int4-diff`` sends each optimizer step's differences once, in the first forward
            pass; `comm.parallel.accumulation` names the last micro-batch before the next optimizer step.
        reshard_after_forward: As for `fully_shard`; None is its default.
        mp_policy: As for `fully_shard`: types of gathered parameters and of reduced gradients.

    Raises:
        BadInput: If ``mp_policy`` gathers parameters in another type than ``param_compress`` encodes.
    """

    name = "fsdp2"
    kind = "reduce_scatter"

    def __init__(
        self,
        group: Group,
        device: torch.device,
        *,
        param_compress: str = "none",
        reshard_after_forward: bool | int | None = None,
        mp_policy: MixedPrecisionPolicy = ONE_TYPE,
    ) -> None:
        super().__init__(group, device)
        if param_compress != "none" and mp_policy.param_dtype not in (None, torch.float32):
            raise BadInput(
                f"param_compress {param_compress} gathers float32 parameters, and mp_policy asks for "
                f"{mp_policy.param_dtype}: omit one of them."
            )
        self.framework: dict[str, Any] = {"reshard_after_forward": reshard_after_forward, "mp_policy": mp_policy}
        self.gather = None if param_compress == "none" else ParameterGather(param_compress, self.shards)
        self._ignored: set[str] = set()  # trainable parameters that no group has: fully_shard's ignored_params
        self._accumulating = False  # the last micro-batch was not the last one before the optimizer step

    def wrap(self, model: nn.Module) -> nn.Module:
        """Shard each block, then the rest of the model, in place."""
        mesh = self.mesh()
        for block in self.units(model):
            fully_shard(block, mesh=mesh, **self.framework)
        wrapped = fully_shard(model, mesh=mesh, **self.framework)
        if self.gather is not None:
            self.replicas = compress_parameters(wrapped, self.gather, self._unchanged)
        return wrapped

    def hook(self, wrapped: nn.Module, reducer: Reducer) -> None:
        """Replace the reduce-scatter of every group of parameters."""
        check_offered("a compressor", *NEEDED)
        check_sharded(wrapped, reducer)
        self._ignored = trainable(wrapped).keys() - {name for _, members in groups(wrapped) for name in members}
        end = EndOfBackward(reducer.synchronize)
        for module, members in groups(wrapped):
            # The reducer divides once; the framework must neither divide nor average.
            module.set_force_sum_reduction_for_comms(True)
            take_over_factor(module)
            reduce_unused(module)
            module.set_custom_reduce_scatter(ReduceScatter(reducer, end, module, members))
        wrapped.register_forward_pre_hook(check_not_interrupted, prepend=True)  # before the framework's own

    def averaged(self, wrapped: nn.Module) -> dict[str, nn.Parameter]:
        """Return the parameters without those that `fully_shard` is set to ignore: their owner averages them."""
        return {name: p for name, p in trainable(wrapped).items() if name not in self._ignored}

    def held_back(self, wrapped: nn.Module) -> list[str]:
        """Return the parameters with a gradient that was not reduced, as `set_requires_gradient_sync` leaves it."""
        if not any(waits(member) for _, members in param_groups(wrapped) for member in members):
            return []
        return [name for _, members in groups(wrapped) for name, member in members.items() if waits(member)]

    def reduced_numel(self, wrapped: nn.Module) -> int:
        """Count parameters padded to a multiple of W rows."""
        shapes = [(name, tuple(p.shape)) for name, p in trainable(wrapped).items()]
        return Layout.dim0(shapes, dist.get_world_size(self.shards)).numel

    @contextmanager
    def accumulation(self, wrapped: nn.Module, last: bool) -> Iterator[None]:
        """Reduce in the last micro-batch only; gradients are unsharded until then."""
        assert isinstance(wrapped, FSDPModule)
        wrapped.set_requires_gradient_sync(last)
        yield
        self._accumulating = not last

    def _unchanged(self) -> bool:
        """Whether the parameters are those of the previous forward pass."""
        return self._accumulating or in_backward()


# Why: docs/decisions.md, "A parameter without a gradient is reduced as zeros under FSDP2".
def reduce_unused(module: FSDPModule) -> None:
    """Have FSDP2 reduce zeros for the parameters of a group that a backward pass leaves unused.

    A group's layout has all of its parameters. FSDP2's setting is on while a gradient of the group is not reduced yet:
    always on, it would also reduce zeros in passes that leave no gradient, such as that of `torch.autograd.grad`.
    Before torch 2.13 FSDP2 cannot, and the shorter buffer is refused.
    """
    if not hasattr(module, "set_reduce_scatter_unused_params"):
        return
    owner = weakref.proxy(module)  # Python's garbage collector does not see through hooks on tensors
    watched = set[nn.Parameter]()

    def fill(unused: bool) -> None:
        owner.set_reduce_scatter_unused_params(unused, recurse=False)

    @torch.compiler.disable
    def watch(*_: object) -> None:
        """Watch the gathered parameters: they exist from the first forward pass on."""
        if not torch.is_grad_enabled():
            return
        members = parameter_group(module).fsdp_params
        fill(any(map(waits, members)))
        gathered_now = {member.unsharded_param for member in members}
        for gathered in {parameter for parameter in gathered_now if parameter.requires_grad} - watched:
            gathered.register_post_accumulate_grad_hook(lambda _: fill(True))
            watched.add(gathered)

    module.register_forward_pre_hook(watch)  # after the framework's own, which gathers


class Collective:
    """Common part of the collectives that replace FSDP2's; it passes arguments by name."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate an input or output buffer."""
        return torch.empty(size, dtype=dtype, device=device)


# Why: docs/decisions.md, "FSDP's shards are filled until the end of the backward pass".
class ReduceScatter(Collective):
    """The reducer's reduce-scatter with FSDP2's interface.

    FSDP2 reads the output as soon as this returns only in some cases (`read_at_once`); otherwise gradients become views
    of it, and it is filled until the end of the backward pass.
    """

    def __init__(self, reducer: Reducer, end: EndOfBackward, module: FSDPModule, members: Members) -> None:
        self.reducer = reducer
        self.end = end
        self.module = module
        self.members = members
        self.layout = cache(partial(Layout.dim0, world=reducer.world))

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        """Write this rank's row of the mean, or of the sum divided by the factor that the model's owner has set."""
        taken_over = take_over_factor(self.module)
        # A factor that was set since the last reduction is FSDP2's to apply to this one, unless by the collective.
        divides = not taken_over and op == dist.ReduceOp.SUM
        factor = 1.0 if divides else divide_factor(self.module)
        scale = 1.0 if factor is None else self.reducer.world / factor

        def deliver(mean: Tensor) -> None:
            output_tensor.copy_(mean if scale == 1 else mean * scale)

        later = self.end.expect()
        layout = self.layout(tuple(trained_shapes(self.members).items()))  # parameters may be frozen and unfrozen
        handle = self.reducer.begin_reduce_scatter(input_tensor, layout, deliver)
        if divides or not later or self.read_at_once(output_tensor):
            handle.wait()

    def read_at_once(self, output: Tensor) -> bool:
        """Whether FSDP2 adds the output to gradients, converts or moves it, or gives it to a user's hook."""
        return parameter_group(self.module)._all_reduce_hook is not None or gradients_read_at_once(self.members, output)


def gradients_read_at_once(members: Members, output: Tensor) -> bool:
    """Whether FSDP2 adds a block's reduced shard to gradients, converts or moves it, or gives it to a user's hook."""
    return any(
        p.grad is not None
        or getattr(p, "_post_accumulate_grad_hooks", None)
        or (p.dtype, p.device) != (output.dtype, output.device)
        for p in (member.sharded_param for member in members.values())
    )


# Why: docs/decisions.md, "FSDP2's divide factor is taken over".
class TakenOver(float):
    """A divide factor of 1 for FSDP2, whose own division would wait for each reduction; the reducer applies the given.

    Attributes:
        given: The factor that the model's owner has set, which divides the sum of gradients; None: the number of ranks.
    """

    given: float | None

    def __new__(cls, given: float | None) -> Self:
        """Make the factor."""
        factor = super().__new__(cls, 1.0)
        factor.given = given
        return factor


def divide_factor(module: FSDPModule) -> float | None:
    """Return what divides the sum of a group's gradients, as the model's owner has set it; None: the ranks."""
    factor: float | None = parameter_group(module).gradient_divide_factor
    return factor.given if isinstance(factor, TakenOver) else factor


def take_over_factor(module: FSDPModule) -> bool:
    """Take the division of a group's gradients over from FSDP2; return whether that was done before."""
    if isinstance(parameter_group(module).gradient_divide_factor, TakenOver):
        return True
    module.set_gradient_divide_factor(TakenOver(divide_factor(module)))
    return False


@torch.compiler.disable
def check_not_interrupted(module: nn.Module, _: object) -> None:
    """Check that an exception did not interrupt the last backward pass: its gradients would be added to the next ones.

    Raises:
        RunFault: If one did.
    """
    context = fully_shard.state(module)._state_ctx  # type: ignore[attr-defined]
    if context.post_backward_final_callback_queued and not in_backward():
        raise RunFault(
            "an exception interrupted the last backward pass, and FSDP2 still has its gradients: call the model's "
            "reset_iter_state() and zero_grad() where the exception is caught."
        )


class AllGather(Collective):
    """A parameter gather with FSDP2's interface.

    The layout includes frozen parameters: unlike their gradients, they are sent.

    Args:
        gather: The gather.
        layout: The layout of the module's parameters.
        module: Its mode decides: in evaluation mode, everything is sent as float32.
        replica: Where to take the parameters from in training mode; None gathers them.
        unchanged: Whether the replica needs no update.
    """

    def __init__(
        self,
        gather: ParameterGather,
        layout: Layout,
        module: nn.Module,
        replica: Replica | None,
        unchanged: Callable[[], bool],
    ) -> None:
        self.gather = gather
        self.layout = layout
        self.module = module
        self.replica = replica
        self.unchanged = unchanged

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Fill all rows; this rank's row is already filled, because the input is a view of it."""
        if self.replica is None or not self.module.training:
            self.gather(output_tensor, self.layout, exact=not self.module.training)
            return
        if not self.unchanged():
            self.replica.follow(input_tensor)
        output_tensor.copy_(self.replica.values)


def compress_parameters(
    wrapped: nn.Module, gather: ParameterGather, unchanged: Callable[[], bool]
) -> dict[str, Replica]:
    """Replace the all-gather of every group of parameters.

    Args:
        wrapped: The sharded model.
        gather: The gather.
        unchanged: Whether the parameters are those of the previous forward pass.

    Returns:
        The replica of each group, by the name of its first parameter; nothing if parameters themselves are sent.

    Raises:
        BadInput: If a parameter is not float32, or is frozen although its differences would be sent, or this version of
            torch does not support it.
    """
    check_offered("param_compress", "set_custom_all_gather")
    for name, parameter in named_parameters(wrapped):
        if parameter.dtype != torch.float32:
            raise BadInput(f"param_compress needs float32 parameters, but {name} is {parameter.dtype}; leave it out.")
        if gather.encoding.differences and not parameter.requires_grad:
            raise BadInput(
                f"param_compress int4-diff sends what changed, and {name} is frozen: use int8, which keeps no replica, "
                f"or train all parameters."
            )
    replicas: dict[str, Replica] = {}
    for module, members in groups(wrapped):
        shapes = [(name, tuple(member.sharded_param.shape)) for name, member in members.items()]
        layout = Layout.dim0(shapes, gather.ranks.world)
        first = next(iter(members))
        if gather.encoding.differences and gather.ranks.world > 1:
            shards = {name: local(member.sharded_param) for name, member in members.items()}
            replicas[first] = Replica(gather, layout, shards)
        module.set_custom_all_gather(AllGather(gather, layout, module, replicas.get(first), unchanged))
    wrapped.register_forward_pre_hook(reshard_evaluated, prepend=True)  # before the framework's own
    wrapped.register_forward_hook(reshard_evaluated)
    return replicas


# Why: docs/decisions.md, "Compressed parameters are for training only".
def reshard_evaluated(module: nn.Module, *_: object) -> None:
    """Make the root gather its weights again around an evaluation.

    It keeps them from a forward pass to the next backward pass, so an evaluation would use the encoded weights of
    training, or training the exact ones.
    """
    assert isinstance(module, FSDPModule)
    if not module.training:
        module.reshard()


def check_offered(what: str, *setters: str) -> None:
    """Check that FSDP2 has these setters.

    Raises:
        BadInput: If this version of torch lacks one.
    """
    missing = [setter for setter in setters if not hasattr(FSDPModule, setter)]
    if missing:
        raise BadInput(f"strategy fsdp2 with {what} needs FSDPModule.{missing[0]}: use torch 2.11 or later.")


def check_sharded(wrapped: nn.Module, reducer: Reducer) -> None:
    """Check that parameters are sharded over the reducer's ranks, in one dimension, and reduced by FSDP2 itself.

    Raises:
        BadInput: If they are not. On a mesh with replicas too (HSDP), FSDP2 itself sums the reducer's means over them:
            with the division left to the reducer, gradients would be as many times too large as there are replicas.
    """
    own = dist.get_process_group_ranks(reducer.group or dist.group.WORLD)
    for name, parameter in named_parameters(wrapped):
        if not isinstance(parameter, DTensor):
            continue
        mesh = parameter.device_mesh
        if mesh.ndim > 1 or parameter.placements != (Shard(0),):
            raise BadInput(
                f"{name} is placed as {parameter.placements} on a mesh of shape {tuple(mesh.shape)}, as HSDP, "
                f"replication, tensor parallelism or a shard_placement_fn does: a reducer supports fully_shard over a "
                f"mesh of one dimension, with parameters sharded along their first one, Shard(0). For islands of ranks "
                f"(HSDP) use gradwire.comm.parallel.wrap with strategy hsdp."
            )
        if (ranks := dist.get_process_group_ranks(mesh.get_group())) != own:
            raise BadInput(
                f"{name} is sharded over ranks {ranks}, and the reducer averages over {own}: pass Reducer the process "
                f"group that the model was wrapped with."
            )
    for module, members in groups(wrapped):
        collective = type(parameter_group(module)._reduce_scatter_comm).__name__
        if collective != "DefaultReduceScatter":
            raise BadInput(
                f"the group of {next(iter(members))} has a reduce-scatter already ({collective}), which the reducer "
                f"would replace: leave set_custom_reduce_scatter and FSDP2's settings of its memory out."
            )


def groups(wrapped: nn.Module) -> Iterator[tuple[FSDPModule, Members]]:
    """Yield every module that has a parameter group, with the group's members by name, in buffer order.

    The order is read from the framework, which puts children before a module's own parameters. A member's
    ``sharded_param`` is the parameter at any time, also after one was replaced, as by ``load_state_dict(assign=True)``.

    Raises:
        BadInput: If this version of torch stores its parameters differently.
    """
    names = {id(parameter): name for name, parameter in named_parameters(wrapped)}
    for module, members in param_groups(wrapped):
        try:
            yield module, {names[id(held(member))]: member for member in members}
        except AttributeError as error:
            raise BadInput(f"strategy fsdp2 does not support this version of torch ({error}).") from error


def param_groups(wrapped: nn.Module) -> Iterator[tuple[FSDPModule, Sequence[Any]]]:
    """Yield every module that has a parameter group, with the group's members, in buffer order.

    Raises:
        BadInput: As `groups`.
    """
    for module in wrapped.modules():
        if isinstance(module, FSDPModule):
            try:
                group = parameter_group(module)
                members = [] if group is None else group.fsdp_params
            except AttributeError as error:
                raise BadInput(f"strategy fsdp2 does not support this version of torch ({error}).") from error
            if members:
                yield module, members


def parameter_group(module: FSDPModule) -> Any:
    """Return FSDP2's group of a module's parameters; None without any."""
    return fully_shard.state(module)._fsdp_param_group  # type: ignore[attr-defined]


def held(member: Any) -> nn.Parameter:
    """Return the parameter that a module holds for a group's member; FSDP2 takes over a replaced one in a forward."""
    parameter: nn.Parameter = getattr(member._module_info.module, member._module_info.param_name)
    return parameter


def waits(member: Any) -> bool:
    """Whether FSDP2 keeps a gradient of a group's member that was not reduced; there is none before a forward pass."""
    return hasattr(member, "_unsharded_param") and (
        member.unsharded_param.grad is not None or member.unsharded_accumulated_grad is not None
    )


def trained_shapes(members: Members) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a group's trainable parameters by name."""
    held = {name: member.sharded_param for name, member in members.items()}
    return {name: tuple(parameter.shape) for name, parameter in held.items() if parameter.requires_grad}
