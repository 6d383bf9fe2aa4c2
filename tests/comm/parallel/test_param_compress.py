"""Parameters that travel compressed under FSDP2, against one process that computes with the weights as decoded.

Of `collectives/parameters.py`.
"""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from diagonals import diagonals, swept
from test_frameworks import Even, assert_near, batch_of, exact_gradients, loss_of, model_of, whole_gradients
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gradwire.base.errors import BadInput
from gradwire.comm.closed_forms import parameters_unhooked
from gradwire.comm.collectives import Layout, Reducer
from gradwire.comm.collectives.meter import METER
from gradwire.comm.collectives.parameters import ParameterGather
from gradwire.comm.compressors import build
from gradwire.comm.parallel import accumulation, block_sizes, full_state_dict, strategy_class, wrap
from gradwire.comm.reduction import ENCODINGS

methods = pytest.mark.parametrize("method", ["bf16", "int8"])


def frozen(name):
    """Some parameters need no gradient; they travel all the same, between others."""
    model = model_of(name)
    for parameter in list(model.parameters())[1::3]:
        parameter.requires_grad_(False)
    return model


def codec_of(encoding):
    """The compressor of an encoding of parameters."""
    return build(ENCODINGS[encoding].method, **ENCODINGS[encoding].options)


def decoded(model, method, world):
    """The model with its weights as they arrive: every chunk of every parameter through the compressor alone."""
    codec = codec_of(method)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 or method == "bf16":
                parts = [part.reshape(part.shape[0], -1) for part in parameter.chunk(world)]
                back = [codec.decode(codec.encode(part), tuple(part.shape)) for part in parts]
                parameter.copy_(torch.cat(back).view(parameter.shape))
    return model


def simulated(name, method, world, micros=1):
    """Gradients of the mean loss over all ranks, in float64, at the weights as decoded."""
    model = decoded(frozen(name), method, world).double()
    for rank, micro in itertools.product(range(world), range(micros)):
        batch = batch_of(name, rank, micro)
        batch = batch.double() if batch.is_floating_point() else batch
        (loss_of(name, model, batch) / (world * micros)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}


def weights_seen(model, forward):
    """The weights that every module computes with in a forward pass, by the names of the parameters."""
    seen = {}

    def look(prefix, module):
        for name, parameter in module.named_parameters(recurse=False):
            seen[f"{prefix}{name}"] = parameter.detach().clone()

    modules = list(model.named_modules())
    hooks = [
        module.register_forward_pre_hook(lambda module, _, prefix=f"{name}." if name else "": look(prefix, module))
        for name, module in modules
    ]
    forward()
    for hook in hooks:
        hook.remove()
    return seen


def step(rank, world, group, name, method, reduction, micros):
    """One step's gradients, what the weights were while computing, before and after, and the counted bytes."""
    reducer = None if reduction is None else Reducer(build(reduction), group)
    model = wrap(frozen(name), "fsdp2", reducer, device="cpu", param_compress=method).train()
    before = full_state_dict(model)
    sent = METER.sent("parameters")
    for micro in range(micros):
        with accumulation(model, last=micro == micros - 1):
            (loss_of(name, model, batch_of(name, rank, micro)) / micros).backward()
    sent = METER.sent("parameters") - sent
    gradients = whole_gradients(model)
    seen = weights_seen(model, lambda: loss_of(name, model, batch_of(name, rank)))
    exact = weights_seen(model.eval(), lambda: loss_of(name, model, batch_of(name, rank)))
    return {
        "gradients": gradients,
        "before": copy.deepcopy(before),
        "after": full_state_dict(model),
        "seen": seen,
        "exact": exact,
        "sent": sent,
    }


STEPS = [("odd", None, 1), ("odd", "none", 2), ("gpt2", "none", 1)]  # a model, a reduction, micro-batches


@pytest.mark.parametrize(("method", "case", "size"), diagonals(["bf16", "int8"], STEPS, [2, 3]))
def test_a_step_is_that_of_the_weights_as_they_arrive(world, size, method, case):
    """So are the bytes that are counted: of the blocks, which are gathered twice, and of what is outside of them."""
    name, reduction, micros = case
    plain = decoded(frozen(name), method, size)
    exact = simulated(name, method, size, micros)
    first, *others = results = world(size).run(step, name, method, reduction, micros)
    for found in results:
        assert_near(found["gradients"], exact)
        for key, parameter in plain.named_parameters():
            assert torch.equal(found["seen"][key], parameter), key
        for key, parameter in frozen(name).named_parameters():
            assert torch.equal(found["exact"][key], parameter), key
    assert all(found["before"] == found["after"] == {} for found in others)
    for key, value in model_of(name).state_dict().items():
        assert torch.equal(first["before"][key], value), key
        assert torch.equal(first["after"][key], value), key
    if name == "odd":
        blocks = sizes_by_hand(frozen(name).layers, method, size)
        root = sizes_by_hand(frozen(name), method, size) - blocks
        assert sum(found["sent"] for found in results) == (size - 1) * micros * (root + 2 * blocks)


@pytest.mark.parametrize("method", ["fp8", "int4"])
def test_a_step_with_other_direct_encodings(world, method):
    exact, plain = simulated("odd", method, 2), decoded(frozen("odd"), method, 2)
    results = world(2).run(step, "odd", method, "none", 1)
    for found in results:
        assert_near(found["gradients"], exact)
        assert all(torch.equal(found["seen"][key], parameter) for key, parameter in plain.named_parameters())
    blocks = sizes_by_hand(frozen("odd").layers, method, 2)
    root = sizes_by_hand(frozen("odd"), method, 2) - blocks
    assert sum(found["sent"] for found in results) == root + 2 * blocks


def sizes_by_hand(model, method, world):
    """Bytes of all the ranks' encodings of some modules' own parameters: a plain sum over chunks."""
    total = 0
    for parameter in model.parameters():
        for part in parameter.chunk(world):
            if method == "bf16":
                total += 2 * part.numel()
            else:
                codes = (part.numel() + 1) // 2 if method == "int4" else part.numel()
                total += codes + 4 * -(-part.numel() // 256) if parameter.ndim > 1 else 4 * part.numel()
    return total


def gathered(rank, world, group, shapes, method):
    """One gather of a layout with empty and uneven shards; a NaN and an infinity in the last rank's shard."""
    layout = Layout.dim0(shapes, world)
    values = {name: torch.randn(shape, generator=torch.Generator().manual_seed(3)) for name, shape in shapes}
    gather = ParameterGather(method, group)
    before = METER.sent("parameters")
    found = []
    for bad in (False, True):
        if bad and rank == world - 1:
            values["matrix"][-1, :2] = torch.tensor([float("nan"), float("inf")])
        full = torch.full((layout.numel,), -7.0)
        own = slice(rank * layout.row_numel, (rank + 1) * layout.row_numel)
        full[own] = layout.pack(values)[own]
        gather(full, layout)
        whole = {name: torch.empty(shape) for name, shape in shapes}
        layout.unpack(full, whole)
        found.append(whole)
    return found, METER.sent("parameters") - before, gather.closed_form(layout)


@pytest.mark.parametrize("size", [3, *swept(2, 4)])
@methods
def test_empty_shards_and_what_is_not_finite(world, size, method):
    shapes = [("one", (1, 5)), ("bias", (2,)), ("matrix", (7, 41)), ("cube", (3, 2, 3)), ("number", ())]
    results = world(size).run(gathered, shapes, method)
    holder = nn.ParameterDict(
        {name: nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(3))) for name, shape in shapes}
    )
    expected = decoded_parts(holder, method, size)
    for (clean, bad), _, _ in results:
        for name in expected:
            assert torch.equal(clean[name], expected[name]), name
        assert not bad["matrix"][-1, :2].isfinite().any(), "on every rank"
        assert all(bad[name].isfinite().all() for name in expected if name != "matrix")
        assert all(torch.equal(bad[name], results[0][0][1][name]) for name in expected if name != "matrix")
    closed = {closed for *_, closed in results}
    assert 2 * closed.pop() == sum(sent for _, sent, _ in results) and not closed


def decoded_parts(holder, method, world):
    """`decoded` for parameters of any number of dimensions."""
    numbers = {name: p.detach().view(-1) for name, p in holder.items() if not p.ndim}
    matrices = nn.ParameterDict({name: p for name, p in holder.items() if p.ndim})
    found = {name: p.detach() for name, p in decoded(matrices, method, world).items()}
    codec = build(method if method == "bf16" else "none")
    found |= {name: codec.decode(codec.encode(x), 1).view(()) for name, x in numbers.items()}
    return found


class Counting(TorchDispatchMode):
    """Counts the elements that all-gathers send, as the frameworks call them."""

    def __init__(self):
        super().__init__()
        self.sent = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() in ("c10d::_allgather_base_", "c10d::allgather_"):
            given = args[1] if isinstance(args[1], torch.Tensor) else args[1][0]
            self.sent += given.numel() * (dist.get_world_size() - 1)
        return func(*args, **(kwargs or {}))


def counted(rank, world, group, strategy, micros, checkpointing):
    """Elements that this rank's all-gathers send in three steps, an evaluation between the second and the third."""
    model = Even()
    if checkpointing:
        for index, layer in enumerate(model.layers):
            model.layers[index] = Recomputed(layer)
    sizes = block_sizes(model)
    model = wrap(model, strategy, device="cpu").train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = []
    for number in range(3):
        if number == 2:
            with torch.no_grad():
                loss_of("even", model.eval(), batch_of("even", rank))
            model.train()
        with Counting() as counting:
            for micro in range(micros):
                with accumulation(model, last=micro == micros - 1):
                    loss_of("even", model, batch_of("even", rank, micro)).backward()
            optimizer.step()
            optimizer.zero_grad()
        counts.append(counting.sent)
    return sizes, counts


class Recomputed(nn.Module):
    """A block that forgets its activations."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)


@pytest.mark.parametrize(
    ("strategy", "micros", "checkpointing"),
    [
        ("fsdp1", 3, False),
        ("fsdp2", 2, True),
        ("ddp", 1, False),
        *swept(("fsdp1", 1, False), ("fsdp1", 2, True), ("fsdp2", 1, False), ("fsdp2", 3, False)),
        *swept(("bucket", 1, False), ("naive", 1, False)),
    ],
)
def test_the_frameworks_own_gathers_are_the_closed_form(world, strategy, micros, checkpointing):
    results = world(2).run(counted, strategy, micros, checkpointing)
    sizes = results[0][0]
    kind = strategy_class(strategy).kind
    plain = parameters_unhooked(kind, sizes, 2, micros)
    evaluated = parameters_unhooked(kind, sizes, 2, micros, evaluated=True)
    found = [4 * sum(counts) for counts in zip(*(counts for _, counts in results), strict=True)]
    assert found == [plain or 0, plain or 0, evaluated or 0]
    assert (plain is None) == (strategy in ("ddp", "bucket", "naive"))


def trained(rank, world, group, method, reduction):
    """Losses of some steps, with an evaluation among them, and the final weights."""
    reducer = Reducer(build(reduction), group, error_feedback=reduction != "none")
    model = wrap(model_of("gpt2"), "fsdp2", reducer, device="cpu", param_compress=method).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for number in range(6):
        optimizer.zero_grad()
        sent = METER.sent("parameters")
        loss = loss_of("gpt2", model, batch_of("gpt2", rank, number % 3))
        loss.backward()
        losses.append((loss.item(), METER.sent("parameters") - sent))
        assert reducer.finish()
        optimizer.step()
        if number == 2:
            with torch.no_grad():
                loss_of("gpt2", model.eval(), batch_of("gpt2", rank))
            model.train()
    return losses, full_state_dict(model)


@pytest.mark.parametrize(
    ("reduction", "method"),
    [("int8", "int8"), *swept(("none", "bf16"), ("none", "int8"), ("int8", "bf16"))],
)
def test_training_stays_close_to_that_with_exact_weights(world, reduction, method):
    (exact, _), (narrow, _) = (world(2).run(trained, encoding, reduction)[0] for encoding in ("none", method))
    losses, expected = [loss for loss, _ in narrow], [loss for loss, _ in exact]
    assert losses == pytest.approx(expected, rel=0.01) and losses != expected
    assert len({sent for _, sent in narrow}) == 1, "a step after an evaluation gathers as others do"


def alone(rank, world, group, method):
    before = METER.sent("parameters")
    model = wrap(model_of("odd"), "fsdp2", device="cpu", param_compress=method).train()
    loss_of("odd", model, batch_of("odd", 0)).backward()
    return whole_gradients(model), METER.sent("parameters") - before


@methods
def test_one_rank_has_nothing_to_gather(world, method):
    [(found, sent)] = world(1).run(alone, method)
    assert sent == 0
    assert_near(found, exact_gradients("odd", (0,)))


def wrapped(rank, world, group, strategy, dtype, options):
    wrap(Even().to(dtype), strategy, device="cpu", **options)


def frozen_part(rank, world, group):
    wrap(frozen("odd"), "fsdp2", device="cpu", param_compress="int4-diff")


def test_bad_input_is_reported(world):
    for strategy in ("naive", "bucket", "ddp", "fsdp1"):
        with pytest.raises(BadInput, match=f"unknown option of strategy {strategy} 'param_compress'"):
            world(1).run(wrapped, strategy, torch.float32, {"param_compress": "int8"})
    with pytest.raises(BadInput, match=r"unknown parameter compression 'int9'\. Did you mean 'int8'"):
        world(1).run(wrapped, "fsdp2", torch.float32, {"param_compress": "int9"})
    for encoding in ("bf16", "int4-diff"):
        with pytest.raises(BadInput, match=r"layers\.0\.weight is torch\.bfloat16; leave it out"):
            world(2).run(wrapped, "fsdp2", torch.bfloat16, {"param_compress": encoding})
    with pytest.raises(BadInput, match=r"int4-diff sends what changed, and enter.weight is frozen: use int8"):
        world(2).run(frozen_part)
