"""DiLoCo that replays its embeddings: the ranks send a round's mean gradient of them, and take its steps with that.

Adam divides a rank's step by its own gradients, and their noise makes the mean of W ranks' steps shorter than a step
with the mean gradient. The matrices of the vocabulary lose most by that, above all their rows of rare tokens. Here
their gradients are averaged first, as in training that averages in every step. Within a round a rank updates them by
its own gradients, as all other parameters, and sums these gradients. At its end the ranks average them, through
another compressor than the others' pseudo-gradients; return to the anchors and to the inner optimizer's state at the
start of the round, which are equal on all ranks; and take the inner steps of the round again with the mean gradient and
the round's learning rates. The result is the next anchor. The outer step is for the other parameters.

The method is ours; `benchmarks/quality.md` has what it gains and why.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.base.errors import BadInput
from gradwire.comm.collectives import Layout, Reducer, state
from gradwire.comm.compressors import as_compressor
from gradwire.comm.parallel.checks import check_agreement
from gradwire.comm.parallel.model import blocks, local
from gradwire.comm.parallel.optimizers.base import AnyCompressor, duplicate, step_without_hooks
from gradwire.comm.parallel.optimizers.diloco import DiLoCo, copied, state_of
from gradwire.comm.parallel.strategy import strategy_of

PART = "embeddings"  # the name of their reducer


# Why: docs/decisions.md, "Embeddings are replayed".
class ReplayDiLoCo(DiLoCo):
    """DiLoCo with replayed embeddings; see the module for the algorithm.

    Args:
        optimizer: As for `diloco.DiLoCo`.
        model: As for `diloco.DiLoCo`; it has an `nn.Embedding`, whose head, tied or not, is replayed too.
        embeddings: Encodes the mean gradients of embeddings; with the reducer's other options.
        options: Other options of `diloco.DiLoCo`.

    Attributes:
        replayed: The parameters of `of_vocabulary`, by name.

    Raises:
        BadInput: If the model has no trainable embedding or nothing else, or as the base class.
    """

    regroups = False  # it reduces embeddings by a second reducer

    @torch.inference_mode(False)  # later steps change what it allocates
    def __init__(self, optimizer: Optimizer, model: nn.Module, *, embeddings: AnyCompressor, **options: Any) -> None:
        compressor = as_compressor(embeddings)
        super().__init__(optimizer, model, **options)
        weights = of_vocabulary(self.model)
        self.replayed = {name: p for name, p in self.parameters.items() if p in weights}
        if not 0 < len(self.replayed) < len(self.parameters):
            raise BadInput(
                f"embeddings: the model has {len(self.replayed)} trainable weights of embeddings and their head, of "
                f"{len(self.parameters)} parameters; use DiLoCo without it."
            )
        self.layout, self.layout_of_embeddings = (
            Layout.dim0(
                [(name, tuple(p.shape)) for name, p in self.trained.items() if (name in self.replayed) == replayed],
                self.reducer.world,
            )
            for replayed in (False, True)
        )
        reduction = {option: value for option, value in self.reducer.codec.options if option != "schedule"}
        self.part = Reducer(compressor, self.reducer.group, seed=self.reducer.codec.seed, **reduction)
        numel = sum(p.numel() for p in self.replayed.values())
        self.part.prepare("all_reduce", numel, strategy_of(self.model).device)
        self.reducer.join(PART, self.part)
        check_agreement(self.reducer.everyone, self.reducer, {})
        self.sums = {name: torch.zeros_like(self.anchors[name]) for name in self.replayed}  # of gradients, in a round
        for name in self.replayed:
            self.momenta.pop(name, None)
        self.begin_round()

    def begin_round(self) -> None:
        """Begin a round at the present anchors and inner state."""
        for total in self.sums.values():
            total.zero_()
        self.rates: list[list[float]] = []  # each group's learning rate, in each step of the round
        self.began = {  # the inner state at the start of the round
            name: {key: duplicate(kept) for key, kept in state_of(self.inner, p)} for name, p in self.replayed.items()
        }
        self.means: dict[str, Tensor] = {}  # mean gradients, from `average` to `move`

    def step_inner(self) -> None:
        """As the base class; sum the gradients of embeddings."""
        for name, p in self.replayed.items():
            if p.grad is not None:
                self.sums[name] += local(p.grad)
        self.rates.append([float(group["lr"]) for group in self.param_groups])
        super().step_inner()

    def rest(self) -> None:
        """As the base class, for both messages."""
        super().rest()
        self.part.skip(self.layout_of_embeddings)

    def send(self) -> None:
        """Average the pseudo-gradients, and the round's mean gradients of embeddings."""
        super().send()
        layout, steps = self.layout_of_embeddings, len(self.rates)
        gradients = {name: total / steps for name, total in self.sums.items()}
        mean = self.part.all_reduce(layout.pack(gradients), layout)
        self.means = {name: torch.empty_like(total) for name, total in self.sums.items()}
        layout.unpack(mean, self.means)

    def advance(self) -> None:
        """Take the outer step, replay the embeddings, and begin a round."""
        super().advance()
        self.replay()
        self.begin_round()

    def replay(self) -> None:
        """Return to the start of the round, and take its steps with the mean gradients of embeddings alone."""
        gradients = [(p, p.grad) for p in self.parameters.values()]
        rates = [group["lr"] for group in self.param_groups]
        self.return_embeddings()
        for p, _ in gradients:
            p.grad = None
        for name, p in self.replayed.items():
            p.grad = torch.zeros_like(p)
            local(p.grad).copy_(self.means[name])
        for rates_of_step in self.rates:
            self.set_rates(rates_of_step)
            step_without_hooks(type(self.inner))(self.inner)
        self.set_rates(rates)
        for p, gradient in gradients:
            p.grad = gradient
        for name in self.replayed:
            self.anchors[name].copy_(self.trained[name])

    def set_rates(self, rates: Sequence[float]) -> None:
        """Set each group's learning rate."""
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate

    def discard(self) -> None:
        """As the base class; embeddings return to the start of the round, and another one begins."""
        super().discard()
        self.return_embeddings()
        self.begin_round()

    def return_embeddings(self) -> None:
        """Return to the anchors of embeddings and to the inner state at the start of the round."""
        for name, p in self.replayed.items():
            self.trained[name].copy_(self.anchors[name])
            self.inner.state[p] = self.began[name]

    def restart(self) -> None:
        """As the base class, with the present inner state."""
        super().restart()
        self.begin_round()

    @property
    def outer_bytes(self) -> int:
        """As the base class, with sums and inner states."""
        moments = [kept for began in self.began.values() for kept in began.values() if isinstance(kept, Tensor)]
        return super().outer_bytes + sum(local(kept).nbytes for kept in (*self.sums.values(), *moments))

    def shared(self) -> Iterator[tuple[str, Tensor]]:
        """As the base class, and the inner state at the start of the round."""
        yield from super().shared()
        for name, moments in self.began.items():
            for key, kept in moments.items():
                if isinstance(kept, Tensor):
                    yield f"{key} of {name} at the start of the round", local(kept)

    def round_state(self) -> dict[str, Any]:
        """Return the base class's state, and what the replay needs."""
        began = {
            name: {key: local(kept) if isinstance(kept, Tensor) else kept for key, kept in moments.items()}
            for name, moments in self.began.items()
        }
        return super().round_state() | {"sums": self.sums, "rates": self.rates, "began": began}

    def check_round_state(self, saved: Mapping[str, Any]) -> None:
        """Check names and shapes."""
        super().check_round_state(saved)
        state.check_keys(saved, {"sums", "rates", "began"}, type(self).__name__)
        state.check_tensors(saved["sums"], self.sums, "sums of gradients")
        state.check_keys(saved["began"], set(self.replayed), f"{type(self).__name__} (began)")

    def load_round_state(self, saved: Mapping[str, Any]) -> None:
        """Copy what `round_state` returned."""
        super().load_round_state(saved)
        for name, total in self.sums.items():
            total.copy_(saved["sums"][name])
        self.rates = copy.deepcopy(saved["rates"])
        for name, p in self.replayed.items():
            present = {key: duplicate(kept) for key, kept in state_of(self.inner, p)}  # on the devices that it takes
            self.began[name] = {key: copied(kept, present.get(key), p) for key, kept in saved["began"][name].items()}
        self.means = {}


def of_vocabulary(model: nn.Module) -> set[nn.Parameter]:
    """Weights of embeddings, and of linear layers outside the blocks that have the shape of one: their heads."""
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    shapes = {weight.shape for weight in embeddings}
    in_blocks = {module for block in blocks(model) for module in block.modules()}
    linear = {module.weight for module in model.modules() if isinstance(module, nn.Linear) and module not in in_blocks}
    return embeddings | {weight for weight in linear if weight.shape in shapes}
