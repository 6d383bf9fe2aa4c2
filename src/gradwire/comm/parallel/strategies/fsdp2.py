"""fully_shard (FSDP2): each parameter is sharded along one dimension, and reduced with its group.

A model may be sharded over any mesh: over all ranks, over islands of ranks with replicas between them (HSDP), next to
tensor or expert parallelism. The reducer replaces FSDP2's reduce-scatter over the shards and its all-reduce over the
replicas; other dimensions of a mesh are left alone.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from gradwire.base.errors import BadInput, RunFault
from gradwire.comm.collectives import Layout, Reducer
from gradwire.comm.collectives.layout import Kind
from gradwire.comm.collectives.meter import METER, Meter
from gradwire.comm.collectives.ops import Group, ranks_of
from gradwire.comm.collectives.parameters import ParameterGather, Replica
from gradwire.comm.parallel.model import local, named_parameters, trainable
from gradwire.comm.parallel.strategy import EndOfBackward, Strategy, in_backward
from gradwire.comm.reduction import encoding_of
from gradwire.comm.torch_internals import (
    ParameterGroup,
    backward_interrupted,
    check_offered,
    infers_shapes,
    inside_another,
    parameter_groups,
    post_accumulate_hooks,
)

ONE_TYPE = MixedPrecisionPolicy()  # the default: everything in the parameters' own type
NEEDED = ("set_custom_reduce_scatter", "set_force_sum_reduction_for_comms", "set_gradient_divide_factor")


class FSDP2(Strategy):
    """Sharded parameters; the reducer replaces each block's reduce-scatter, and does all of the averaging.

    Args:
        group: The ranks; None is the default group.
        device: The model's device.
        param_compress: Encoding of the parameters in all-gathers: ``none`` (uncompressed), or a key of
            `comm.reduction.ENCODINGS`. Shards and the weights in evaluation mode stay exact. With
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
        self.param_compress = param_compress
        self._groups: list[weakref.ref[ParameterGroup]] = []  # of the hooked model, which holds them
        self._all_reduces: list[weakref.ref[AllReduce]] = []  # likewise
        self._ignored: set[str] = set()  # trainable, and not reduced: fully_shard's ignored_params; experts of one rank
        self._accumulating = False  # the last micro-batch was not the last one before the optimizer step

    def wrap(self, model: nn.Module) -> nn.Module:
        """Shard each block, then the rest of the model, in place."""
        mesh = self.mesh()
        for block in self.units(model):
            fully_shard(block, mesh=mesh, **self.framework)
        wrapped = fully_shard(model, mesh=mesh, **self.framework)
        if self.param_compress != "none":
            self.replicas = compress_parameters(wrapped, self.param_compress, self._unchanged).replicas
        return wrapped

    @property
    def communicates(self) -> bool:
        """Always: gradients are reduced over the shards."""
        return True

    def prepare(self, reducer: Reducer, shapes: Sequence[tuple[int, ...]]) -> None:
        """Leave it to `hook`, which knows the sizes of all levels."""

    def replicas_of(self, group: ParameterGroup) -> Group:
        """Return the ranks that have the same shards of a group, over which gradients are averaged; None if none."""
        return group.replicas

    def hook(self, wrapped: nn.Module, reducer: Reducer) -> None:
        """Replace the collectives of every group of parameters: over its shards, and over its replicas.

        Where the reducer has no part over a group's shards, FSDP2 averages them.
        """
        check_offered("a compressor", *NEEDED)
        groups = groups_of(wrapped)
        self._groups = [weakref.ref(group) for group in groups]
        reduced = set[str]()
        end = EndOfBackward(reducer.synchronize)
        sizes: Counter[tuple[Reducer, Kind]] = Counter()
        for group in groups:
            inside, between = reducer.over(group.shards), reducer.over(self.replicas_of(group))
            if inside is None and between is None:
                continue
            reduce_unused(group)
            reduced.update(group)
            if inside is not None:
                # The reducer divides once; the framework must neither divide nor average.
                group.reduce_sums()
                take_over_factor(group)
                group.set_reduce_scatter(ReduceScatter(inside, end, group))
                sizes[inside, "reduce_scatter"] += numel_of(group)
            if between is not None:
                sizes[between, "all_reduce"] += numel_of(group) // (1 if group.shards is None else group.shards.size())
                if self.averages:
                    if group.replicas is not None:
                        group.drop_replicas()
                    all_reduce = AllReduce(between, end, group)
                    self._all_reduces.append(weakref.ref(all_reduce))
                    group.set_all_reduce_hook(all_reduce)
        self._ignored = trainable(wrapped).keys() - reduced
        for (level, kind), numel in sizes.items():
            level.prepare(kind, numel, self.device)
        begin = partial(begin_forward, groups)
        for call in (begin, check_not_interrupted, check_whole):
            wrapped.register_forward_pre_hook(call, prepend=True)  # before the framework's own

    def averaged(self, wrapped: nn.Module) -> dict[str, nn.Parameter]:
        """Return the parameters without those that `fully_shard` is set to ignore, or that a single rank has."""
        return {name: p for name, p in trainable(wrapped).items() if name not in self._ignored}

    def held_back(self, wrapped: nn.Module) -> list[str]:
        """Return the parameters with a gradient that was not reduced.

        `set_requires_gradient_sync` and `set_requires_all_reduce` leave them.
        """
        groups = (group() for group in self._groups)
        hooks = (hook() for hook in self._all_reduces)
        waiting = [name for group in groups if group is not None for name in group.waiting]
        return waiting + [name for hook in hooks if hook and hook.kept is not None for name in hook.parameters]

    def left_out(self, wrapped: nn.Module) -> set[str]:
        """Return the parameters that only zeros were reduced for, and begin a step."""
        names = set[str]()
        for group in (group() for group in self._groups):
            if group is not None:
                names |= group.filled - group.used
                group.filled, group.used = set(), set(group.waiting)
        return names

    def leave_out(self, wrapped: nn.Module, names: set[str]) -> None:
        """Leave parameters without a gradient, as FSDP2 does."""
        for name, parameter in trainable(wrapped).items():
            if name in names:
                parameter.grad = None

    def reduced_numel(self, wrapped: nn.Module) -> int:
        """Count parameters padded to a multiple of W rows."""
        shapes = [(name, tuple(p.shape)) for name, p in trainable(wrapped).items()]
        return Layout.dim0(shapes, dist.get_world_size(self.shards)).numel

    def changed(self, wrapped: nn.Module) -> None:
        """Drop gathered weights: the root keeps them from an evaluation to the next step."""
        assert isinstance(wrapped, FSDPModule)
        wrapped.reshard()

    @contextmanager
    def accumulation(self, wrapped: nn.Module, last: bool) -> Iterator[None]:
        """Reduce in the last micro-batch only; gradients are unsharded until then."""
        assert isinstance(wrapped, FSDPModule)
        wrapped.set_requires_gradient_sync(last)
        yield
        self._accumulating = not last

    def _unchanged(self, _: ParameterGroup) -> bool:
        """Whether the parameters are those of the previous forward pass."""
        return self._accumulating or in_backward()


def groups_of(wrapped: nn.Module) -> list[ParameterGroup]:
    """Return the groups of parameters of a sharded model.

    Raises:
        BadInput: If this version of torch stores its parameters differently.
    """
    return parameter_groups(wrapped, {id(parameter): name for name, parameter in named_parameters(wrapped)})


def numel_of(group: ParameterGroup) -> int:
    """Return the trainable elements of a group, over all of its shards."""
    return sum(map(math.prod, group.trained.values()))


# Why: docs/decisions.md, "A parameter without a gradient is reduced as zeros under FSDP2".
def reduce_unused(group: ParameterGroup) -> None:
    """Have FSDP2 reduce zeros for the parameters of a group that a backward pass leaves unused.

    A group's layout has all of its parameters. FSDP2's setting is on while a gradient of the group is not reduced yet:
    always on, it would also reduce zeros for a group that a pass leaves out, and in passes that leave no gradient, such
    as that of `torch.autograd.grad`. Before torch 2.13 FSDP2 cannot, and the shorter buffer is refused.
    """
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        return
    seen = weakref.proxy(group)  # Python's garbage collector does not see through hooks on tensors
    watched = set[nn.Parameter]()

    def fill(name: str, _: Tensor) -> None:
        seen.used.add(name)
        seen.reduce_unused(True)
        seen.accumulate_zeros(accumulates=True)

    @torch.compiler.disable
    def watch(*_: object) -> None:
        """Watch the gathered parameters: they exist from the first forward pass on."""
        if not torch.is_grad_enabled():
            return
        group.discarded = infers_shapes()
        group.accumulate_zeros()
        for name, gathered in group.gathered.items():
            if gathered.requires_grad and gathered not in watched:
                gathered.register_post_accumulate_grad_hook(partial(fill, name))
                watched.add(gathered)

    for module in group.modules:
        module.register_forward_pre_hook(watch)  # after the framework's own, which gathers


@torch.compiler.disable
def begin_forward(groups: Sequence[ParameterGroup], *_: object) -> None:
    """Have FSDP2 reduce zeros for the groups with a gradient that is not reduced yet, and for no other.

    The last backward pass may have been interrupted.
    """
    for group in groups:
        group.reduce_unused(bool(group.waiting))


def begin_reduction(group: ParameterGroup, reducer: Reducer) -> dict[str, tuple[int, ...]]:
    """Record the parameters of a group that are reduced as zeros; return the shapes of all of its parameters."""
    trained = group.trained
    if group.used and not group.always_fills:
        unused = {name for name, p in group.parameters.items() if name not in group.used and p.grad is None}
        group.filled |= unused & trained.keys()
        reducer.codec.hold(group.filled - group.used)
    group.reduce_unused(False)
    return trained


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

    def __init__(self, reducer: Reducer, end: EndOfBackward, parameters: ParameterGroup) -> None:
        self.reducer = reducer
        self.end = end
        self.parameters = parameters
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
        if self.parameters.discarded:
            output_tensor.zero_()
            return
        taken_over = take_over_factor(self.parameters)
        # A factor that was set since the last reduction is FSDP2's to apply to this one, unless by the collective.
        divides = not taken_over and op == dist.ReduceOp.SUM
        factor = 1.0 if divides else divide_factor(self.parameters)
        scale = 1.0 if factor is None else self.reducer.world / factor

        def deliver(mean: Tensor) -> None:
            output_tensor.copy_(mean if scale == 1 else mean * scale)

        later = self.end.expect()
        trained = begin_reduction(self.parameters, self.reducer)  # parameters may be frozen and unfrozen
        layout = self.layout(tuple(trained.items()))
        handle = self.reducer.begin_reduce_scatter(input_tensor, layout, deliver)
        if divides or not later or self.read_at_once(output_tensor):
            handle.wait()

    def read_at_once(self, output: Tensor) -> bool:
        """Whether FSDP2 adds the output to gradients, converts or moves it, or gives it to a user's hook."""
        return self.parameters.has_all_reduce_hook or gradients_read_at_once(self.parameters, output)


def gradients_read_at_once(group: ParameterGroup, output: Tensor) -> bool:
    """Whether FSDP2 adds a group's reduced shard to gradients, converts or moves it, or gives it to a user's hook."""
    return any(
        p.grad is not None or post_accumulate_hooks(p) or (p.dtype, p.device) != (output.dtype, output.device)
        for p in group.parameters.values()
    )


class Row:
    """This rank's shard of a group of parameters.

    Args:
        shapes: The group's trainable parameters, in buffer order.
        shards: The ranks that hold them in shards; None if each rank has them whole.
        replicas: Number of ranks with the same shard.

    Attributes:
        numel: The shard's elements.
        parameters: Each parameter's position in the shard, by name.
        layout: The layout of the shard between the replicas.
    """

    def __init__(self, shapes: Iterable[tuple[str, tuple[int, ...]]], shards: Group, replicas: int) -> None:
        world, rank = (1, 0) if shards is None else (dist.get_world_size(shards), dist.get_rank(shards))
        inside = Layout.dim0(shapes, world)
        held = inside.rows[rank]
        self.numel = inside.row_numel
        self.parameters = {shard.name: inside.place_in_row(shard) for shard in held}
        parts = [(p.name, (p.numel // math.prod(p.shape[1:]), *p.shape[1:])) for p in held]
        self.layout = Layout.dim0(parts, replicas)


class AllReduce:
    """The reducer's all-reduce of a group's shards over the replicas, as FSDP2's hook; complete when the pass ends.

    Attributes:
        kept: The sum of the shards of micro-batches under ``set_requires_all_reduce(False)``; None without any.
    """

    def __init__(self, reducer: Reducer, end: EndOfBackward, parameters: ParameterGroup) -> None:
        self.reducer = reducer
        self.end = end
        self.parameters = parameters
        self.kept: Tensor | None = None
        self.row = cache(partial(Row, shards=parameters.shards, replicas=reducer.world))

    def __call__(self, shard: Tensor) -> None:
        """Replace a shard of the mean over one replica's ranks with the mean over the replicas.

        Where the model's owner has set the factor that divides sums, it is their sum: FSDP2 has divided by it. While
        the all-reduce is switched off, the shard is kept for the next one, and zeros are added to the gradients.

        Raises:
            RunFault: If FSDP2 left a parameter without a gradient out, as before torch 2.13, which cannot reduce zeros.
        """
        if self.parameters.discarded:
            return
        row = self.row(tuple(begin_reduction(self.parameters, self.reducer).items()))
        if shard.numel() != row.numel:
            raise RunFault(
                f"a shard of gradients has {shard.numel()} elements, but {row.numel} were expected "
                f"({', '.join(row.parameters)}); did a parameter get no gradient?"
            )
        if self.kept is not None:
            shard += self.kept
            self.kept = None
        if not self.parameters.averages_replicas:
            self.kept = shard.clone()
            shard.zero_()
            return
        if not row.parameters:
            return
        scale = 1 if divide_factor(self.parameters) is None else self.reducer.world
        gradients = {name: shard[place] for name, place in row.parameters.items()}

        def deliver(mean: Tensor) -> None:
            row.layout.unpack(mean if scale == 1 else mean * scale, gradients)

        later = self.end.expect()
        handle = self.reducer.begin_all_reduce(row.layout.pack(gradients), row.layout, deliver)
        divided = shard.dtype == torch.float16 or scale != 1  # by FSDP2, after this hook
        if divided or not later or gradients_read_at_once(self.parameters, shard):
            handle.wait()


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


def divide_factor(group: ParameterGroup) -> float | None:
    """Return what divides the sum of a group's gradients, as the model's owner has set it; None: the ranks."""
    factor = group.divide_factor
    return factor.given if isinstance(factor, TakenOver) else factor


def take_over_factor(group: ParameterGroup) -> bool:
    """Take the division of a group's gradients over from FSDP2; return whether that was done before."""
    if isinstance(group.divide_factor, TakenOver):
        return True
    group.divide_factor = TakenOver(divide_factor(group))
    return False


@torch.compiler.disable
def check_not_interrupted(module: nn.Module, _: object) -> None:
    """Check that an exception did not interrupt the last backward pass: its gradients would be added to the next ones.

    Raises:
        RunFault: If one did.
    """
    assert isinstance(module, FSDPModule)
    if backward_interrupted(module) and not in_backward():
        raise RunFault(
            "an exception interrupted the last backward pass, and FSDP2 still has its gradients: call the model's "
            "reset_iter_state() and zero_grad() where the exception is caught."
        )


@torch.compiler.disable
def check_whole(module: nn.Module, _: object) -> None:
    """Check that a hooked model is no part of a larger one, whose other gradients would be sent as they are.

    Raises:
        BadInput: If it is.
    """
    assert isinstance(module, FSDPModule)
    if inside_another(module):
        raise BadInput(
            f"this {type(module).__name__} is only a part of a model that fully_shard has sharded, and gradients of "
            f"the rest would be sent uncompressed: pass the whole model."
        )


@dataclass(eq=False)
class AllGather(Collective):
    """A parameter gather with FSDP2's interface.

    The layout includes frozen parameters: unlike their gradients, they are sent.

    Attributes:
        gather: The gather.
        layout: The layout of the module's parameters.
        module: Its mode decides: in evaluation mode, everything is sent as float32.
        replica: Where to take the parameters from in training mode; None gathers them.
        unchanged: Whether the replica needs no update.
    """

    gather: ParameterGather
    layout: Layout
    module: nn.Module
    replica: Replica | None
    unchanged: Callable[[], bool]

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Fill all rows; this rank's row is already filled, because the input is a view of it."""
        self.gather.count(self.layout)
        if self.replica is None or not self.module.training:
            self.gather(output_tensor, self.layout, exact=not self.module.training)
            return
        if not self.unchanged():
            self.replica.follow(input_tensor)
        output_tensor.copy_(self.replica.values)


class CompressedParameters(NamedTuple):
    """Compressed gathers in place of a model's all-gathers.

    Attributes:
        gathers: The gathers, over different ranks.
        replicas: The replica of each group, by the name of its first parameter; nothing if parameters themselves are
            sent.
    """

    gathers: tuple[ParameterGather, ...] = ()
    replicas: Mapping[str, Replica] = MappingProxyType({})

    @property
    def traffic(self) -> dict[str, int]:
        """Bytes of this rank since the start: ``raw``, as float32, and ``sent``."""
        return {
            "raw": sum(gather.raw for gather in self.gathers),
            "sent": sum(gather.ranks.meter.sent("parameters") for gather in self.gathers),
        }


def compress_parameters(
    wrapped: nn.Module, encoding: str, unchanged: Callable[[ParameterGroup], bool]
) -> CompressedParameters:
    """Replace the all-gather of every group of parameters that several ranks hold in shards.

    Args:
        wrapped: The sharded model.
        encoding: A key of `comm.reduction.ENCODINGS`.
        unchanged: Whether the replica of a group needs no update.

    Raises:
        BadInput: As `check_gathered`.
    """
    groups = check_gathered(wrapped, encoding)
    gathers: dict[Group, ParameterGather] = {}
    replicas: dict[str, Replica] = {}
    for group in groups:
        if group.shards not in gathers:
            gathers[group.shards] = ParameterGather(encoding, group.shards, Meter(METER))
        gather, first = gathers[group.shards], next(iter(group))
        layout = Layout.dim0(group.shapes.items(), gather.ranks.world)
        if gather.encoding.differences:
            shards = {name: local(parameter) for name, parameter in group.parameters.items()}
            replicas[first] = Replica(gather, layout, shards)
        group.set_all_gather(AllGather(gather, layout, group.module, replicas.get(first), partial(unchanged, group)))
    wrapped.register_forward_pre_hook(reshard_evaluated, prepend=True)  # before the framework's own
    wrapped.register_forward_hook(reshard_evaluated)
    return CompressedParameters(tuple(gathers.values()), replicas)


def check_gathered(wrapped: nn.Module, encoding: str) -> list[ParameterGroup]:
    """Check that an encoding can replace the all-gathers of parameters; return the groups that several ranks shard.

    Raises:
        BadInput: If the encoding is unknown, a parameter is not float32, or is frozen although its differences would be
            sent, is gathered in another type, or this version of torch does not support it.
    """
    check_offered("param_compress", "set_custom_all_gather")
    differences = encoding_of(encoding).differences
    for name, parameter in named_parameters(wrapped):
        if parameter.dtype != torch.float32:
            raise BadInput(f"param_compress needs float32 parameters, but {name} is {parameter.dtype}; leave it out.")
        if differences and not parameter.requires_grad:
            raise BadInput(
                f"param_compress int4-diff sends what changed, and {name} is frozen: use int8, which keeps no replica, "
                f"or train all parameters."
            )
    groups = [group for group in groups_of(wrapped) if group.shards is not None and group.shards.size() > 1]
    for group in groups:
        if group.gathered_type not in (None, torch.float32):
            raise BadInput(
                f"parameters are compressed from float32, and MixedPrecisionPolicy converts {next(iter(group))} to "
                f"{group.gathered_type} first: omit its param_dtype, or the compression of parameters."
            )
    return groups


# Why: docs/decisions.md, "Compressed parameters are for training only".
def reshard_evaluated(module: nn.Module, *_: object) -> None:
    """Make the root gather its weights again around an evaluation.

    It keeps them from a forward pass to the next backward pass, so an evaluation would use the encoded weights of
    training, or training the exact ones.
    """
    assert isinstance(module, FSDPModule)
    if not module.training:
        module.reshard()


def check_sharded(wrapped: nn.Module, reducer: Reducer) -> None:
    """Check that the reducer averages over the ranks of every group of parameters, and that FSDP2 itself does so now.

    Raises:
        BadInput: If it does not, or a collective that it would replace is a user's.
    """
    for group in groups_of(wrapped):
        name = next(iter(group))
        levels = [ranks for ranks in (group.replicas, group.shards) if ranks is not None and ranks.size() > 1]
        if levels and reducer.over(levels[0]) is None:
            raise BadInput(
                f"FSDP2 averages {name} over ranks {ranks_of(levels[0])}, and the reducer over "
                f"{ranks_of(reducer.group)}: use gradwire.compress_gradients, which builds its reducer from the "
                f"model's mesh, or pass Reducer the process group that the model was sharded with."
            )
        if group.reduce_scatter != "DefaultReduceScatter":
            raise BadInput(
                f"the group of {name} has a reduce-scatter already ({group.reduce_scatter}), which the reducer would "
                f"replace: leave set_custom_reduce_scatter and FSDP2's settings of its memory out."
            )
        if group.replicas is not None and group.has_all_reduce_hook:
            raise BadInput(
                f"the group of {name} has an all-reduce hook already, which the reducer would replace: leave "
                f"set_all_reduce_hook out."
            )
