"""`compress_gradients` in training loops that do not change: equal to torch's own DDP and FSDP2.

The oracle is the same loop without gradwire. Means of ``none`` through the exchange differ by rounding at most.
"""

from __future__ import annotations

import copy
import re
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from diagonals import diagonals
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.base.errors import BadInput, NonFiniteGradient, RunFault
from gradwire.comm.parallel import accumulation, wrap

STEPS = 4
EXACT = {"compressor": "none", "algorithm": "exchange"}


def net(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5), nn.Tanh(), nn.Linear(5, 3))


def framed(model: nn.Module, framework: str) -> nn.Module:
    if framework == "ddp":
        return DistributedDataParallel(model, bucket_cap_mb=0.0001)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in (model[0], model[2], model):
        fully_shard(block, mesh=mesh)
    return model


def loss_of(model: nn.Module, rank: int, step: int, micro: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank + 1)
    return model(torch.randn(4, 7, generator=generator)).square().mean()


def values(model: nn.Module) -> list[torch.Tensor]:
    shards = (p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters())
    return [p.detach().clone() for p in shards]


def synchronizing(model: nn.Module, last: bool):
    """Accumulate as users of the two frameworks do."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = last
    else:
        model.set_requires_gradient_sync(last)


def accumulated(model, rank, step):
    for micro in range(3):
        synchronizing(model, micro == 2)
        (loss_of(model, rank, step, micro) / 3).backward()


def plain(model, make, rank):
    optimizer = make(model.parameters())
    yield [optimizer]
    for step in range(STEPS):
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def clipped(model, make, rank):
    optimizer = make(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    yield [optimizer]
    for step in range(STEPS):
        accumulated(model, rank, step)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def several(model, make, rank):
    parameters = list(model.parameters())
    pair = [make(parameters[:3]), make(parameters[3:])]
    yield pair
    for step in range(STEPS):
        loss_of(model, rank, step).backward()
        for optimizer in pair[:: 1 if step % 2 else -1]:
            optimizer.step()
        if step == 2:  # another backward pass, in which only one of them steps
            model.zero_grad()
            loss_of(model, rank, 50).backward()
            pair[1].step()
        model.zero_grad()


def scaled(model, make, rank):
    """A gradient scaler that skips one step: a value of one rank overflows."""
    optimizer = make(model.parameters())
    yield [optimizer]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for step in range(STEPS):
        loss = loss_of(model, rank, step) * (float("inf") if (step, rank) == (2, 1) else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 2.0**10, "grown once, and halved once"


def closure(model, make, rank):
    optimizer = make(model.parameters())
    yield [optimizer]
    for step in range(STEPS):

        def evaluate(step=step):
            optimizer.zero_grad()
            loss = loss_of(model, rank, step)
            loss.backward()
            return loss

        optimizer.step(evaluate)


def lbfgs(model, make, rank):
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    yield [optimizer]
    for step in range(STEPS):

        def evaluate(step=step):
            optimizer.zero_grad()
            loss = loss_of(model, rank, step)
            loss.backward()
            return loss

        optimizer.step(closure=evaluate)


LOOPS = {each.__name__: each for each in (plain, clipped, several, scaled, closure, lbfgs)}


def trained(rank, world, group, framework, loop, compressed, **options):
    model = framed(net(), framework)
    run = LOOPS[loop](model, lambda parameters: torch.optim.AdamW(parameters, lr=0.05), rank)
    optimizers = next(run)
    compression = None
    if compressed:
        compression = gradwire.compress_gradients(model, optimizer=optimizers, **(options or EXACT))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in run:
            pass
    return values(model), compression and (compression.reducer.step, compression.traffic.details["nonfinite_steps"])


STEPPED = {"plain": 4, "clipped": 4, "several": 5, "scaled": 3, "closure": 4}


@pytest.mark.parametrize(("loop", "framework"), diagonals(STEPPED, ["ddp", "fsdp2"]))
def test_a_loop_that_does_not_change_trains_as_without_gradwire(world, framework, loop):
    theirs = world(2).run(trained, framework, loop, False)
    ours = world(2).run(trained, framework, loop, True)
    for (exact, _), (parameters, counted) in zip(theirs, ours, strict=True):
        torch.testing.assert_close(parameters, exact, rtol=1e-5, atol=1e-6)
        assert counted == (STEPPED[loop], 1 if loop == "scaled" else 0)


def test_a_closure_that_is_evaluated_several_times(world):
    """LBFGS needs equal losses on all ranks in its line search; without one it does not look at them."""
    theirs = world(2).run(trained, "ddp", "lbfgs", False)
    ours = world(2).run(trained, "ddp", "lbfgs", True)
    torch.testing.assert_close(ours[0][0], theirs[0][0], rtol=1e-4, atol=1e-5)
    assert ours[0][1][0] > STEPS


def compressors(rank, world, group, compressor):
    """Parameters after some steps with one spelling of a compressor."""
    return trained(rank, world, group, "ddp", "plain", True, compressor=compressor, error_feedback=True)[0]


def test_a_compressor_is_a_name_a_mapping_or_an_object(world):
    spelled = ({"method": "topk", "density": 0.3}, gradwire.TopK(density=0.3))
    one, two = (world(2).run(compressors, each) for each in spelled)
    assert all(torch.equal(a, b) for a, b in zip(one[0], two[0], strict=True))
    other = world(2).run(compressors, "topk")
    assert not torch.equal(one[0][0], other[0][0])


# --- compressed parameters ---


def with_replicas(rank, world, group, own: bool, stop: int | None = None):
    """Parameters after some steps with `int4-diff`, in a user's loop or in `wrap`; a new process goes on at a step."""
    torch.manual_seed(3)
    model, compression, optimizer = replicated(own)
    for step in range(STEPS):
        if step == stop:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), compression.state_dict()))
            model, compression, optimizer = replicated(own, seed=9)
            for target, state in zip((model, optimizer, compression), saved, strict=True):
                target.load_state_dict(state)
        for micro in range(2):
            if own:
                model.set_requires_gradient_sync(micro == 1)
                loss_of(model, rank, step, micro).backward()
            else:
                with accumulation(model, last=micro == 1):
                    loss_of(model, rank, step, micro).backward()
        if not own:
            compression.finish()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            loss_of(model, rank, step)  # an evaluation uses the exact weights, and moves nothing
        model.train()
    return values(model), compression.traffic["sent"]


def replicated(own: bool, seed: int = 3):
    from gradwire.comm.collectives import Reducer

    if not own:
        reducer = Reducer("int8", error_feedback=True)
        model = wrap(Blocks(seed), "fsdp2", reducer, param_compress="int4-diff")
        return model, reducer, torch.optim.AdamW(model.parameters(), lr=0.05)
    model = Blocks(seed)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in (*model.blocks, model):
        fully_shard(block, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    options = {"error_feedback": True, "parameters": "int4-diff"}
    return model, gradwire.compress_gradients(model, "int8", optimizer=optimizer, **options), optimizer


class Blocks(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(2))
        self.last = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def test_compressed_parameters_are_those_of_wrap(world):
    """Bit by bit: differences are sent once per optimizer step, in the first micro-batch."""
    ours, wraps = (world(2).run(with_replicas, own) for own in (True, False))
    for (mine, sent), (theirs, wanted) in zip(ours, wraps, strict=True):
        assert sent == wanted and all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_a_resumed_run_has_its_residuals_and_replicas(world):
    whole, resumed = (world(2).run(with_replicas, True, stop) for stop in (None, 2))
    assert all(torch.equal(a, b) for a, b in zip(whole[0][0], resumed[0][0], strict=True))


def stored_by_dcp(rank, world, group, folder):
    """Largest change of the residuals by a round trip through torch.distributed.checkpoint."""
    model = framed(net(), "fsdp2")
    optimizer = torch.optim.AdamW(model.parameters())
    compression = gradwire.compress_gradients(model, "onebit", optimizer=optimizer, error_feedback=True)
    get_state_dict(model, optimizer)  # dcp allocates the moments by a step whose learning rates are 0
    loss_of(model, rank, 0).backward()
    optimizer.step()
    before = copy.deepcopy(compression.state_dict())
    dcp.save({"compression": compression}, checkpoint_id=folder)
    loss_of(model, rank, 1).backward()
    optimizer.step()
    assert compression.state_dict()["step"] == 2
    dcp.load({"compression": compression}, checkpoint_id=folder)
    after = compression.state_dict()
    return repr(before) == repr(after) and before["step"] == 1


def test_it_is_a_stateful_of_dcp(world, tmp_path):
    assert world(2).run(stored_by_dcp, str(tmp_path)) == [True, True]


# --- what is refused ---


def refused(rank, world, group, case):
    model = net()
    if case == "built before":
        stale = torch.optim.SGD(model.parameters(), lr=0.1)
    framework = "fsdp2" if case in ("built before", "no optimizer", "hook of shards") else "ddp"
    wrapped = model if case == "not wrapped" else framed(model, framework)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    try:
        if case == "skip":
            gradwire.compress_gradients(wrapped, "int8", optimizer=optimizer, nonfinite="skip")
        elif case == "built before":
            gradwire.compress_gradients(wrapped, "int8", optimizer=stale)
        elif case == "no optimizer":
            gradwire.compress_gradients(wrapped, "int8", parameters="int4-diff")
        elif case == "parameters of ddp":
            gradwire.compress_gradients(wrapped, "int8", parameters="int8")
        elif case == "hook of shards":
            gradwire.comm_hook(wrapped, "int8")
        elif case == "hook of nothing":
            gradwire.comm_hook(None, "int8")
        elif case == "a number":
            gradwire.compress_gradients(wrapped, "int8", optimizer=3)
        elif case == "misspelt":
            gradwire.compress_gradients(wrapped, "int8", optimizer=optimizer, dense_step=3)
        elif case == "a scheduler":
            gradwire.compress_gradients(wrapped, "int8", optimizer=[torch.optim.lr_scheduler.StepLR(optimizer, 1)])
        else:
            gradwire.compress_gradients(wrapped, "int8", optimizer=optimizer)
            if case == "twice":
                gradwire.compress_gradients(wrapped, "int8", optimizer=optimizer)
    except ValueError as error:
        assert isinstance(error, BadInput)
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("skip", "a step that an optimizer has begun cannot be skipped: pass no optimizer"),
        ("built before", "SGD has no parameter of the model: build it from model.parameters() after"),
        ("no optimizer", "parameters is 'int4-diff', which sends what an optimizer changed: pass optimizer."),
        ("parameters of ddp", "parameters is 'int8', but DistributedDataParallel sends none: omit it."),
        ("misspelt", "Did you mean 'dense_steps'"),
        ("a scheduler", "optimizer is StepLR, not a torch.optim.Optimizer with step hooks"),
        ("a number", "optimizer is int, not a torch.optim.Optimizer with step hooks"),
        ("hook of nothing", "comm_hook: model must be an instance of Module, got null"),
        ("not wrapped", "Sequential is neither a DistributedDataParallel nor an FSDP2 model"),
        ("twice", "the model has a reducer already"),
        ("hook of shards", "FSDPSequential is sharded, and comm_hook is for DistributedDataParallel"),
    ],
)
def test_what_is_refused_at_the_call(world, case, message):
    assert all(message in said for said in world(2).run(refused, case))


def unsafe(rank, world, group, case):
    """The error of a step that would use gradients that are not the mean, or not finite."""
    model = framed(net(), "ddp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradwire.compress_gradients(model, "int8", optimizer=optimizer, nonfinite="raise")
    if case == "around":
        loss_of(model.module, rank, 0).backward()
    elif case == "twice":
        loss_of(model, rank, 0).backward()
        optimizer.step()
    elif case == "nan":
        (loss_of(model, rank, 0) * (float("nan") if rank else 1.0)).backward()
    before = values(model)
    try:
        optimizer.step()
    except (RunFault, NonFiniteGradient) as error:
        assert all(torch.equal(a, b) for a, b in zip(before, values(model), strict=True))
        return type(error).__name__
    return "nothing"


@pytest.mark.parametrize(
    ("case", "raised"),
    [("around", "RunFault"), ("twice", "RunFault"), ("none", "RunFault"), ("nan", "NonFiniteGradient")],
)
def test_a_step_without_means_raises_on_all_ranks(world, case, raised):
    assert world(2).run(unsafe, case) == [raised, raised]


class Derived(torch.optim.AdamW):
    """A user's subclass; torch calls the hooks of both steps."""

    def step(self, closure=None):
        return super().step(closure)


def derived(rank, world, group):
    """Weights after steps of a subclass and of its base, and the steps that were counted; also without a backward."""
    found = []
    for make in (Derived, torch.optim.AdamW):
        model = framed(net(), "ddp")
        optimizer = make(model.parameters(), lr=0.1)
        compression = gradwire.compress_gradients(model, "int8", error_feedback=True, optimizer=optimizer)
        for step in range(3):
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        loss_of(model.module, rank, 3).backward()
        with pytest.raises(RunFault):
            optimizer.step()
        found.append((values(model), compression.step))
    return found


def test_the_step_of_a_subclass_is_one_step(world):
    for (weights, steps), (expected, expected_steps) in world(2).run(derived):
        assert steps == expected_steps == 3
        assert all(map(torch.equal, weights, expected))


class Communicates(torch.optim.Optimizer):
    """An optimizer that communicates in its step, as sharded ones do."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        torch.distributed.all_reduce(torch.ones(3))
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter -= self.param_groups[0]["lr"] * parameter.grad


def unreduced_on_one_rank(rank, world, group, make):
    """The error of a step after a layer was unfrozen on rank 1 alone, and which parameters have moved."""
    net_of_rank = net()
    net_of_rank[0].requires_grad_(False)
    model = framed(net_of_rank, "ddp")
    optimizer = make(model.parameters(), lr=0.1)
    gradwire.compress_gradients(model, "none", optimizer=optimizer)
    loss_of(model, rank, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    net_of_rank[0].requires_grad_(rank == 1)
    loss_of(model, rank, 1).backward()
    before, means = values(model), [p.grad for p in model.parameters()]
    with pytest.raises(RunFault) as error:
        optimizer.step()
    moved = [not torch.equal(a, b) for a, b in zip(before, values(model), strict=True)]
    return str(error.value), moved, means[2:]


@pytest.mark.parametrize("make", [torch.optim.SGD, Communicates])
def test_a_gradient_that_is_no_mean_is_not_used_and_the_step_raises_on_all_ranks(world, make):
    (message, first, means), (same_message, second, same_means) = world(2).run(unreduced_on_one_rank, make)
    assert message == same_message and "2 parameters have gradients that were not reduced on rank 1 (" in message
    assert not any(second), "the rank that has such a gradient waits for the others"
    assert first == [False, False, *([make is torch.optim.SGD] * 4)], "while an optimizer communicates, nobody agrees"
    assert all(map(torch.equal, means, same_means))


def copied(rank, world, group):
    """The number of warnings where a copy of the optimizer steps, which has no hooks."""
    model = framed(net(), "ddp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradwire.compress_gradients(model, "int8", optimizer=optimizer)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            loss_of(model, rank, step).backward()
            other.step()
            other.zero_grad()
    return sum("a copy of one has no hooks" in str(warning.message) for warning in caught)


def test_a_step_of_another_optimizer_warns_once(world):
    assert world(2).run(copied) == [1, 1]


def in_turn(rank, world, group):
    """The optimizer steps finished after each step of two optimizers, of which one leaves a backward pass out."""
    model = framed(net(), "ddp")
    parameters = list(model.parameters())
    first, second = (torch.optim.SGD(half, lr=0.1) for half in (parameters[:3], parameters[3:]))
    compression = gradwire.compress_gradients(model, "int8", optimizer=[first, second])
    finished = []
    for step, stepping in enumerate(([first, second], [second], [first, second])):
        loss_of(model, rank, step).backward()
        for optimizer in stepping:
            optimizer.step()
            finished.append(compression.step)
        model.zero_grad()
    return finished


def test_the_first_of_several_optimizers_ends_the_step(world):
    assert world(2).run(in_turn) == [[1, 1, 2, 3, 3]] * 2


def printed(rank, world, group):
    model = framed(net(), "ddp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compression = gradwire.compress_gradients(model, "topk+int8", optimizer=optimizer, error_feedback=True)
    fresh = str(compression)
    loss_of(model, rank, 0).backward()
    optimizer.step()
    return fresh, str(compression)


def test_what_a_compression_prints(world):
    for fresh, after in world(2).run(printed):
        said = r"<topk\+int8 over 2 ranks with error feedback: {} of {} bytes sent{}, in {}>"
        assert re.fullmatch(said.format(0, 0, "", "0 steps"), fresh)
        assert re.fullmatch(said.format(r"\d{2}", r"\d{3}", r", \d\.\d times fewer", "1 step"), after), after


# --- the communication hook overlaps ---


def begun(rank, world, group, compressor, options):
    """For every backward pass: DDP's buckets at the first reduction, and in all; reductions of a bucket in place."""
    model = framed(net(), "ddp")
    state, hook = gradwire.comm_hook(model, compressor, **options)
    handed, at_reductions, buffers, in_place = [], [], [], []
    begin = state.reducer.begin_all_reduce

    def logged(flat, *args, **options):
        at_reductions[-1].append(handed[-1])
        in_place[-1] += (flat.data_ptr(), flat.numel()) == buffers[-1]
        return begin(flat, *args, **options)

    def take(state, bucket: torch.distributed.GradBucket):
        if bucket.index() == 0:
            handed.append(0)
            at_reductions.append([])
            in_place.append(0)
        handed[-1] += 1
        buffers.append((bucket.buffer().data_ptr(), bucket.buffer().numel()))
        return hook(state, bucket)

    take.__annotations__.clear()
    state.reducer.begin_all_reduce = logged
    model.register_comm_hook(state, take)
    for step in range(3):
        loss_of(model, rank, step).backward()
    return [(first[0], *rest) for first, *rest in zip(at_reductions, handed, in_place, strict=True)]


def test_a_reduction_of_planned_buckets_begins_before_the_last_bucket(world):
    first, *others = world(2).run(begun, "int8", {"granularity": "row"})[0]
    assert first[0] == first[1], "the first pass shows which parameters DDP reduces"
    assert all(before < buckets for before, buckets, _ in others)


@pytest.mark.parametrize(
    ("compressor", "options"), [("fp16", {}), ("bf16", {"algorithm": "native"}), ("topk", {"error_feedback": True})]
)
def test_a_bucket_of_ddp_is_reduced_where_it_is(world, compressor, options):
    for before, buckets, in_place in world(2).run(begun, compressor, options)[0]:
        assert (before, in_place) == (1, buckets)


def by_ddps_buckets(rank, world, group, compressor, options, bucket_mb):
    """Gradients of some steps, and the bytes that were sent."""
    torch.manual_seed(1)
    ddp = DistributedDataParallel(net(), bucket_cap_mb=bucket_mb)
    compression = gradwire.compress_gradients(ddp, compressor, **options)
    gradients = []
    for step in range(3):
        loss_of(ddp, rank, step).backward()
        compression.finish()
        gradients += [p.grad.clone() for p in ddp.parameters()]
        ddp.zero_grad()
    return gradients, compression.traffic["sent"]


@pytest.mark.parametrize(
    ("compressor", "options", "size"),
    [
        ("fp16", {"algorithm": "native"}, 3),
        ("int8", {"error_feedback": True}, 3),
        ({"method": "powersgd", "rank": 1}, {"error_feedback": True}, 2),
        ("topk", {"granularity": "row"}, 2),
    ],
    ids=str,
)
def test_the_buckets_of_ddp_change_no_bit(world, compressor, options, size):
    small, large = (world(size).run(by_ddps_buckets, compressor, options, mb) for mb in (0.0001, 25))
    for (one, bytes_of_one), (other, bytes_of_other) in zip(small, large, strict=True):
        assert bytes_of_one == bytes_of_other and all(map(torch.equal, one, other))
