"""`hook` and `comm_hook` on models as their owners set them up: equal to the same program without gradwire, or refused.

Divide factors, pipelines, reentrant checkpointing, ignored parameters, interrupted passes, placements and types.
"""

from __future__ import annotations

import copy
import re
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from late_encoding import late_encoding
from test_frameworks import whole_gradients
from test_naive import Breaks
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from gradwire import comm_hook, compress_gradients
from gradwire.base.errors import BadInput, RunFault
from gradwire.comm.collectives import IslandReducer, Reducer, build_islands
from gradwire.comm.parallel import hook, wrap
from gradwire.comm.parallel.strategies.fsdp2 import Collective
from gradwire.comm.topology import STRATEGIES


def noise(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.line = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.line(x))


def blocks(seed=3, count=2, width=9):
    torch.manual_seed(seed)
    return nn.Sequential(*[Block(width) for _ in range(count)])


def sharded(model, mesh, **options):
    for part in (*model.children(), model):
        fully_shard(part, mesh=mesh, **options)
    return model


def data_mesh(world):
    return init_device_mesh("cpu", (world,))


def trained(model, hooked, run, steps=3, group=None, overlap=True):
    """Gradients of the last of some steps, with `hook` or without it; ``run`` has a step's number."""
    reducer = Reducer("none", group, algorithm="exchange", overlap=overlap)
    if hooked:
        hook(model, reducer)
    for step in range(steps):
        model.zero_grad()
        run(step)
        assert not hooked or reducer.finish()
    return whole_gradients(getattr(model, "_orig_mod", model))


def passes(model, rank):
    """A step: one backward pass."""
    return lambda step: model(noise(10 * step + rank, 5, 9)).square().sum().backward()


# --- divide factors ---


def divided(rank, world, group, factor, when, reduce_dtype):
    """Gradients with a factor that the owner sets before or after `hook`, and those of FSDP2 alone."""
    results = []
    for hooked in (True, False):
        policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
        model = sharded(blocks(), data_mesh(world), mp_policy=policy)
        parts = [part for part in model.modules() if hasattr(part, "set_gradient_divide_factor")]
        [part.set_force_sum_reduction_for_comms(True) for part in parts]  # gloo has no other with a factor
        if when == "before":
            [part.set_gradient_divide_factor(factor) for part in parts]

        def run(step, model=model, parts=parts):
            if when != "before" and step == 1:
                [part.set_gradient_divide_factor(factor) for part in parts]
            passes(model, rank)(step)

        results.append(trained(model, hooked, run))
    return results


@pytest.mark.parametrize(
    ("factor", "when", "reduce_dtype"),
    [
        (1.0, "before", None),
        (8.0, "after", None),
        pytest.param(3.0, "before", None, marks=pytest.mark.sweep),
        (5.0, "after", torch.float16),
        pytest.param(2.0, "before", torch.float16, marks=pytest.mark.sweep),
    ],
)
def test_the_divide_factor_of_a_models_owner_is_kept(world, factor, when, reduce_dtype):
    close = {"rtol": 3e-3, "atol": 1e-3} if reduce_dtype else {"rtol": 1e-6, "atol": 1e-7}
    for mine, without in world(2).run(divided, factor, when, reduce_dtype):
        torch.testing.assert_close(mine, without, **close)


def divided_islands(rank, world, group, inside):
    """Gradients of ``hsdp`` with a factor of 8 in all steps but the first, and the largest error of the last."""
    islands = build_islands(2)
    between = Reducer("none", islands.inside, algorithm="exchange") if inside else None
    reducer = IslandReducer("none", islands, inside=between, algorithm="exchange")
    model = wrap(blocks(), "hsdp", reducer)
    for part in model.modules():
        if hasattr(part, "set_force_sum_reduction_for_comms"):
            part.set_force_sum_reduction_for_comms(True)
    for step in range(3):
        for part in model.modules():
            if step and hasattr(part, "set_gradient_divide_factor"):
                part.set_gradient_divide_factor(8.0)
        model.zero_grad()
        model(noise(10 * step + rank, 5, 9)).square().sum().backward()
        assert reducer.finish()
    exact = blocks().double()
    for other in range(world):
        (exact(noise(20 + other, 5, 9).double()).square().sum() / 8).backward()
    reduced = whole_gradients(model)
    return max(float((reduced[n] - p.grad).norm() / p.grad.norm()) for n, p in exact.named_parameters())


@pytest.mark.parametrize("inside", [False, True])
def test_a_divide_factor_under_islands(world, inside):
    assert max(world(4).run(divided_islands, inside)) < 1e-6


# --- reductions outside of autograd, and in nested passes ---


def pipeline(rank, world, group, schedule, count, overlap):
    """Gradients of a stage of a pipeline of two stages, with `hook` and without it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    data, stage_group, stage = mesh["dp"], mesh["pp"].get_group(), mesh["pp"].get_local_rank()
    results = []
    for hooked in (True, False):
        model = sharded(blocks(seed=stage), data)
        part = PipelineStage(model, stage, 2, torch.device("cpu"), group=stage_group)
        made = schedule(part, n_microbatches=count, loss_fn=nn.functional.mse_loss)

        def run(step, made=made):
            x = noise(10 * step + data.get_local_rank(), 8, 9)
            made.step(x) if stage == 0 else made.step(target=x.sin())

        results.append(trained(model, hooked, run, 2, data.get_group(), overlap))
    return results


@pytest.mark.parametrize(
    ("schedule", "count", "overlap"),
    [
        (Schedule1F1B, 4, True),
        pytest.param(Schedule1F1B, 4, False, marks=pytest.mark.sweep),
        pytest.param(ScheduleGPipe, 4, True, marks=pytest.mark.sweep),
        pytest.param(Schedule1F1B, 8, True, marks=pytest.mark.sweep),
    ],
)
def test_the_stages_of_a_pipeline(world, schedule, count, overlap):
    for mine, without in world(4).run(pipeline, schedule, count, overlap):
        assert mine
        torch.testing.assert_close(mine, without, rtol=1e-6, atol=1e-8)


class Headed(nn.Module):
    """The last stage of a pipeline, whose loss begins with a backward pass of the head, as a loss in chunks does."""

    def __init__(self):
        super().__init__()
        self.body, self.head = blocks(), nn.Linear(9, 9)

    def forward(self, x):
        return self.body(x)

    def loss(self, hidden, target):
        leaf = hidden.detach().requires_grad_()
        (self.head(leaf) - target).square().mean().backward()
        return (hidden * leaf.grad).sum()


def with_a_head(rank, world, group):
    """Bytes of each of two steps of a stage; the first infers shapes, and the loss runs the last stage's head."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    data, stage = mesh["dp"], mesh["pp"].get_local_rank()
    model = sharded(Headed() if stage else blocks(), data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compression = compress_gradients(model, "int8", optimizer=optimizer, error_feedback=True)
    part = PipelineStage(model, stage, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    run = Schedule1F1B(part, n_microbatches=2, loss_fn=model.loss if stage else nn.functional.mse_loss)
    sent = [0]
    for step in range(2):
        x = noise(10 * step + data.get_local_rank(), 8, 9)
        run.step(x) if stage == 0 else run.step(target=x.sin())
        sent.append(compression.traffic["sent"])
        optimizer.step()
        optimizer.zero_grad()
    return sent


def test_a_pipeline_that_infers_shapes_reduces_nothing_for_it(world):
    for start, first, second in world(4).run(with_a_head):
        assert first - start == second - first > 0


def part_given(rank, world, group):
    """The message of the first step about a model of which a block was given, and a step of a whole one."""
    answers = []
    for given in (lambda model: model[0], lambda model: model):
        model = sharded(blocks(), data_mesh(world))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compress_gradients(given(model), "int8", optimizer=optimizer)
        try:
            model(noise(rank, 5, 9)).square().sum().backward()
            optimizer.step()
            answers.append("")
        except BadInput as error:
            answers.append(str(error))
    return answers


def test_a_part_of_a_sharded_model_is_refused(world):
    for part, whole in world(2).run(part_given):
        assert "is only a part of a model that fully_shard has sharded" in part and not whole


def by_hand(rank, world, group, strategy):
    """Half the gradients of two micro-batches, reduced and halved outside of autograd, as a pipeline does it."""
    if strategy == "hsdp":
        reducer = IslandReducer("none", build_islands(2), algorithm="exchange")
    else:
        reducer = Reducer("none", algorithm="exchange")
    model = wrap(blocks(), strategy, reducer)
    model.set_requires_gradient_sync(False)
    model.set_is_last_backward(False)
    with late_encoding(rank):
        for micro in range(2):
            model(noise(10 * micro + rank, 5, 9)).square().sum().backward()
        model.set_requires_gradient_sync(True)
        model.set_is_last_backward(True)
        root = fully_shard.state(model)
        for state in root._state_ctx.all_states:
            if state._fsdp_param_group is not None:  # the root may have none outside its blocks
                state._fsdp_param_group.post_backward()
        root._root_post_backward_final_callback()
        for parameter in model.parameters():
            parameter.grad.div_(2)
        assert reducer.finish()
    exact = blocks().double()
    for other in range(world):
        for micro in range(2):
            (exact(noise(10 * micro + other, 5, 9).double()).square().sum() / (2 * world)).backward()
    reduced = whole_gradients(model)
    return max(float((reduced[n] - p.grad).norm() / p.grad.norm()) for n, p in exact.named_parameters())


@pytest.mark.parametrize(("strategy", "size"), [("fsdp2", 2), ("hsdp", 4)])
def test_reductions_outside_of_autograd_are_complete_on_return(world, strategy, size):
    assert max(world(size).run(by_hand, strategy)) < 1e-6


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = blocks(count=4)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True).tanh()
        return x


def checkpointed(rank, world, group, strategy):
    """Gradients of the third step with reentrant checkpointing, with `hook` and without it."""
    results = []
    for hooked in (True, False):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(9, 9), Checkpointed())
        if strategy == "ddp":
            model = DistributedDataParallel(model, bucket_cap_mb=0.0004)  # several buckets
        else:
            [fully_shard(block, mesh=data_mesh(world)) for block in model[1].blocks]
            fully_shard(model, mesh=data_mesh(world))
        results.append(trained(model, hooked, passes(model, rank)))
    return results


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_reentrant_checkpointing(world, strategy):
    for mine, without in world(2).run(checkpointed, strategy):
        torch.testing.assert_close(mine, without, rtol=1e-6, atol=1e-7)


# --- parameters that are DDP's own business ---


def ignoring(rank, world, group, way, said):
    """Gradients where DDP ignores a layer or delays its reduction, with a hook and without one."""
    results = []
    for hooked in (True, False):
        model = blocks(count=3)
        names, options = ["1.line.weight", "1.line.bias"], {}
        if said == "ignore":
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        else:
            delayed = [(name, parameter) for name, parameter in model.named_parameters() if name in names]
            options = {"delay_all_reduce_named_params": delayed, "param_to_hook_all_reduce": delayed[0][1]}
        model = DistributedDataParallel(model, **options)
        reducer = Reducer("none", algorithm="exchange") if way == "hook" else None
        if hooked and reducer is not None:
            hook(model, reducer)
        elif hooked:
            model.register_comm_hook(*comm_hook(model, "none"))
        for step in range(3):
            model.zero_grad()
            model(noise(10 * step + rank, 5, 9)).square().sum().backward()
            assert not hooked or reducer is None or reducer.finish()
        results.append(whole_gradients(model))
    return results


@pytest.mark.parametrize(("way", "said"), [("hook", "ignore"), ("comm_hook", "ignore"), ("hook", "delay")])
def test_parameters_that_ddp_ignores_or_delays(world, way, said):
    for mine, without in world(2).run(ignoring, way, said):
        assert mine.keys() == without.keys()
        for name, gradient in without.items():
            if said == "ignore" or not name.startswith("1."):  # torch 2.13's own means of delayed ones are wrong
                torch.testing.assert_close(mine[name], gradient, rtol=1e-6, atol=1e-7)


def joined(rank, world, group, way):
    """The sum of a gradient after uneven inputs in `join`; or what is raised."""
    model = DistributedDataParallel(blocks())
    if way == "hook":
        hook(model, Reducer("none"))
    else:
        model.register_comm_hook(*comm_hook(model, "none"))
    try:
        with model.join():
            for step in range(2 + rank):
                model.zero_grad()
                model(noise(10 * step + rank, 5, 9)).square().sum().backward()
    except RuntimeError as error:  # of a rank whose peer has raised
        return type(error).__name__
    except RunFault as error:
        return str(error)
    return float(model.module[0].line.weight.grad.sum())


def test_join_is_refused_by_hook_and_works_with_comm_hook(world):
    messages = world(2).run(joined, "hook")
    assert all("DistributedDataParallel.join does not go with" in message for message in messages)
    assert all(isinstance(total, float) for total in world(2).run(joined, "comm_hook"))


# --- interrupted passes ---


class Interrupted(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(9, 9), nn.Linear(9, 4)
        self.broken = False

    def forward(self, x):
        return self.last(Breaks.apply(self.first(x), self.broken))


def interrupted(rank, world, group, reset, compressor):
    """Gradients of the pass after one that an exception interrupted, with `hook` and in a fresh model without it."""
    results = []
    for hooked in (True, False):
        torch.manual_seed(3)
        model = sharded(Interrupted(), data_mesh(world))
        reducer = Reducer(compressor, algorithm="exchange")
        if hooked:
            hook(model, reducer)
            model.broken = True
            with pytest.raises(KeyError, match="in the middle"):
                model(noise(rank, 5, 9)).square().sum().backward()
            model.broken = False
            if reset:
                model.reset_iter_state()
            model.zero_grad()
        try:
            model(noise(10 + rank, 5, 9)).square().sum().backward()
        except RunFault as error:
            return str(error)
        assert not hooked or reducer.finish()
        results.append(whole_gradients(model))
    return results


def test_an_interrupted_pass_of_fsdp2_is_refused_until_it_is_reset(world):
    for message in world(2).run(interrupted, False, "none"):
        assert "an exception interrupted the last backward pass" in message and "reset_iter_state()" in message
    for mine, without in world(2).run(interrupted, True, "none"):
        torch.testing.assert_close(mine, without, rtol=1e-6, atol=1e-7)


# --- what is refused when the reducer is attached ---


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 4, sparse=True)

    def forward(self, x):
        return self.words(x)


def refused(rank, world, group, case):
    """The message of a model that a reducer cannot serve."""
    reducer = Reducer("int8")
    model = Sparse() if case.startswith("sparse") else blocks()
    if case.startswith("complex"):
        model = nn.Linear(3, 2, dtype=torch.cfloat)
    with pytest.raises(BadInput) as refusal:
        if case.endswith(("naive", "diloco")):
            wrap(model, "naive", reducer, average=case.endswith("naive"))
        elif case.endswith("comm_hook"):
            comm_hook(DistributedDataParallel(model), "int8")
        elif case.endswith("fsdp2"):
            hook(sharded(model, data_mesh(world)), reducer)
        elif case == "custom":
            model = sharded(model, data_mesh(world))
            model[1].set_custom_reduce_scatter(Collective())
            hook(model, reducer)
        elif case == "two models":
            hook(DistributedDataParallel(model), reducer)
            hook(DistributedDataParallel(copy.deepcopy(model)), reducer)
        else:
            hook(DistributedDataParallel(model), reducer)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("complex", "weight is complex64, and a reducer averages real gradients"),
        ("complex comm_hook", "weight is complex64"),
        ("complex naive", "weight is complex64"),
        ("complex diloco", "weight is complex64"),
        ("sparse", "words has sparse gradients, and a reducer averages dense ones: build it with sparse=False"),
        ("sparse comm_hook", "words has sparse gradients"),
        ("custom", r"the group of 1.line.weight has a reduce-scatter already \(Collective\)"),
        ("two models", r"averaged another model with the same parameters \(0.line.bias, …\)"),
    ],
)
def test_a_model_that_a_reducer_cannot_serve_is_refused(world, case, message):
    for refusal in world(2).run(refused, case):
        assert re.search(message, refusal), refusal


def on_a_mesh(rank, world, group):
    """The answers of `hook` and `wrap` to models that are spread over 2 x 2 ranks, or not over the reducer's."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    inside = mesh["shards"].get_group()

    def model():
        return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))

    def fully_shard_over(over):
        return fully_shard(model(), mesh=over)

    def hybrid():
        way = ShardingStrategy.HYBRID_SHARD
        return FullyShardedDataParallel(model(), device_mesh=mesh, sharding_strategy=way, device_id=torch.device("cpu"))

    def refusal(act):
        try:
            act()
        except BadInput as error:
            return str(error)
        return ""

    hooked = {
        "hsdp": (fully_shard_over(mesh), inside),
        "hsdp on all ranks": (fully_shard_over(mesh), None),
        "replicate": (replicate(model(), mesh=line), None),
        "shards of a half": (fully_shard_over(mesh["shards"]), None),
        "ddp of a half": (DistributedDataParallel(model(), process_group=inside), None),
        "all for a half": (fully_shard_over(line), inside),
        "fsdp1": (hybrid(), inside),
        "fine": (fully_shard_over(line), None),
        "fine in halves": (DistributedDataParallel(model(), process_group=inside), inside),
    }
    answers = {
        name: refusal(lambda model=model, of=of: hook(model, Reducer("none", of)))
        for name, (model, of) in hooked.items()
    }
    for way in STRATEGIES.available():
        for name, made in (
            ("sharded", fully_shard_over(mesh)),
            ("hybrid", hybrid()),
            ("ddp", DistributedDataParallel(model())),
        ):
            options = {"param_compress": "int8"} if way == "fsdp2" else {}
            answers[f"wrap {name} {way}"] = refusal(
                lambda made=made, way=way, options=options: wrap(made, way, Reducer("none"), device="cpu", **options)
            )
    return answers


def test_a_model_that_is_averaged_over_other_ranks_or_twice_is_refused(world):
    """Hooked as HSDP, the sums of two replicas would be added up: gradients were twice too large."""
    for answers in world(4).run(on_a_mesh):
        hooked = {name: message for name, message in answers.items() if not name.startswith("wrap")}
        wrapped = {name: message for name, message in answers.items() if name.startswith("wrap")}
        assert [hooked.pop(name) for name in ("fine", "fine in halves", "replicate")] == [""] * 3
        for name in ("hsdp", "hsdp on all ranks"):
            assert "use gradwire.compress_gradients, which builds its reducer" in hooked.pop(name), name
        assert "neither a DistributedDataParallel nor" in hooked.pop("fsdp1")
        assert "over ranks [0, 1, 2, 3], and the reducer over [" in hooked["all for a half"]
        assert len(hooked) == 3 and all("pass Reducer the process group" in message for message in hooked.values()), (
            hooked
        )
        assert len(wrapped) == 18 and all("wrapped or sharded already" in message for message in wrapped.values()), (
            wrapped
        )


def two_models(rank, world, group):
    """Gradients of two models with different names that share a reducer, and whether one alone is refused."""
    reducer = Reducer("none", algorithm="exchange")
    models = [nn.ModuleDict({"head": blocks(seed=1)}), nn.ModuleDict({"tail": blocks(seed=2)})]
    models = [
        DistributedDataParallel(Holder(name, model[name])) for name, model in zip(("head", "tail"), models, strict=True)
    ]
    for model in models:
        hook(model, reducer)
    for model in models:
        model(noise(rank, 5, 9)).square().sum().backward()
    assert reducer.finish()
    models[0](noise(rank, 5, 9)).square().sum().backward()
    with pytest.raises(RunFault, match="no gradient of 1 of the 2 models of this reducer was averaged"):
        reducer.finish()
    return [name for model in models for name in whole_gradients(model)]


class Holder(nn.Module):
    def __init__(self, name, model):
        super().__init__()
        self.name = name
        self.add_module(name, model)

    def forward(self, x):
        return getattr(self, self.name)(x)


def test_a_reducer_of_two_parts_needs_both(world):
    assert len(world(2).run(two_models)[0]) == 8


def test_a_reducer_needs_a_process_group():
    assert not dist.is_initialized()
    with pytest.raises(BadInput, match=r"a Reducer needs a process group: call torch.distributed.init_process_group"):
        Reducer("int8")
    with pytest.raises(BadInput, match=r"gradwire.comm.parallel.wrap needs a process group"):
        wrap(blocks(), "naive")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(BadInput, match=r"a Reducer needs ranks, and torch's backend 'fake' has none"):
            compress_gradients(DistributedDataParallel(blocks()), "int8")
    finally:
        dist.destroy_process_group()


# --- types ---


def typed(rank, world, group, dtype, strategy):
    """The largest error of a gradient relative to float64, and the warnings at `hook`."""
    model, exact = blocks().to(dtype), blocks().to(dtype).double()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reducer = Reducer("none", algorithm="exchange")
        if strategy == "ddp":
            model = DistributedDataParallel(model)
            hook(model, reducer)
        elif strategy == "fsdp2":
            hook(sharded(model, data_mesh(world)), reducer)
        else:
            model = wrap(model, strategy, reducer)
    model(noise(rank, 5, 9).to(dtype)).square().sum().backward()
    assert reducer.finish()
    for other in range(world):
        (exact(noise(other, 5, 9).to(dtype).double()).square().sum() / world).backward()
    reduced = whole_gradients(model)
    assert all(gradient.dtype == dtype for gradient in reduced.values())
    errors = [float((reduced[n].double() - p.grad).norm() / p.grad.norm()) for n, p in exact.named_parameters()]
    return max(errors), [str(each.message) for each in caught if "float32" in str(each.message)]


@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float64, 1e-7), (torch.float16, 3e-3), (torch.bfloat16, 2e-2)], ids=str
)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", pytest.param("bucket", marks=pytest.mark.sweep)])
def test_every_type_that_torch_trains(world, dtype, error, strategy):
    for largest, messages in world(2).run(typed, dtype, strategy):
        assert 0 < largest < error
        assert len(messages) == (dtype == torch.float64)


# --- torch.compile ---


def compiled(rank, world, group, strategy):
    """Gradients of a model that its owner has compiled after wrapping it, with `hook` and without."""
    results = []
    for hooked in (True, False):
        model = DistributedDataParallel(blocks()) if strategy == "ddp" else sharded(blocks(), data_mesh(world))
        model = torch.compile(model, backend="eager")
        results.append(trained(model, hooked, passes(model, rank), 2))
    return results


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=pytest.mark.sweep)])
def test_a_compiled_model(world, strategy):
    for mine, without in world(2).run(compiled, strategy):
        torch.testing.assert_close(mine, without, rtol=1e-6, atol=1e-7)


# --- ranks that do not agree on when a step ends ---


def uneven(rank, world, group):
    """The gradients of each rank where rank 1 does not call `finish`."""
    reducer = Reducer("int8", dist.new_group(timeout=timedelta(seconds=2)))
    model = wrap(blocks(), "naive", reducer)
    model(noise(rank, 5, 9)).square().sum().backward()
    try:
        if rank == 0:
            reducer.finish()
        model(noise(rank, 5, 9)).square().sum().backward()
    except RunFault as error:
        return str(error)
    return None


def test_ranks_that_end_different_numbers_of_steps_get_an_error(world):
    for message in world(2).run(uneven):
        assert "takes as many optimizer steps as the others" in message


class Chunked(nn.Module):
    """A head whose loss is computed chunk by chunk, each with its own backward pass, as torchtitan does."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 10)
        self.norm = nn.LayerNorm(10)
        self.head = nn.Linear(10, 4, bias=False)

    def forward(self, x):
        return self.norm(self.body(x))


def chunked(rank, world, group, compressed):
    """Gradients after two steps of a loss in three chunks; parameters are gathered in bfloat16."""
    torch.manual_seed(2)
    model, mesh = Chunked(), data_mesh(world)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model.body, mesh=mesh, mp_policy=policy)
    fully_shard([model.norm, model.head], mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if compressed:
        compression = compress_gradients(model, "none", algorithm="exchange")
    for step in range(2):
        model.zero_grad()
        hidden = model(noise(10 * rank + step, 5, 6))
        chunks = [chunk.detach().requires_grad_() for chunk in hidden.chunk(3)]
        for number, chunk in enumerate(chunks):
            model.head.set_requires_gradient_sync(number == 2)
            model.head(chunk).square().mean().backward()
        hidden.backward(torch.cat([chunk.grad for chunk in chunks]))
        if compressed:
            compression.finish()
    return [p.grad.full_tensor() for p in model.parameters()]


def test_a_loss_in_chunks_with_narrow_parameters(world):
    for got, expected in zip(world(2).run(chunked, True), world(2).run(chunked, False), strict=True):
        for ours, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
