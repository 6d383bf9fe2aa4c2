"""LoRA adapters (Hu et al., 2022) with `peft`: saved, or initialized from a seed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from gradwire.base import files
from gradwire.base.errors import BadInput
from gradwire.lm.models import saved

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ADAPTER = "default"  # what `peft` calls an adapter in a model


def check(adapter: Path, base: Path) -> None:
    """Check that a folder holds an adapter for a base model.

    Raises:
        BadInput: If a file is missing, or the adapter belongs to another base model.
    """
    for name in (CONFIG, WEIGHTS):
        if not (adapter / name).is_file():
            raise BadInput(f"{adapter} holds no LoRA adapter: {name} is missing.")
    made_for = files.read_object(adapter / CONFIG).get("base_model_name_or_path")
    if not isinstance(made_for, str | None):
        raise BadInput(f"{adapter / CONFIG}: base_model_name_or_path is not a string.")
    if not made_for or Path(made_for).name == base.resolve().name:
        return
    if (Path(made_for) / saved.CONFIG).is_file() and saved.digest(Path(made_for)) == saved.digest(base):
        return
    raise BadInput(
        f"the LoRA adapter in {adapter} was made for {made_for}, but --model_dir is {base}; use that model, or "
        f"correct base_model_name_or_path in {adapter / CONFIG}."
    )


def digest(adapter: Path) -> str:
    """A digest of the adapter's configuration and weights, in hex."""
    return files.digest([files.sha256_file(adapter / name) for name in (CONFIG, WEIGHTS)], length=64)


def weights(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The adapter's part of a model's state, with the names that `peft` gives a saved adapter."""
    return {name.replace(f".{ADAPTER}.", "."): tensor for name, tensor in state.items() if f".{ADAPTER}." in name}


def attach(model: nn.Module, base: Path, *, adapter: Path | None = None, rank: int = 8, seed: int = 0) -> nn.Module:
    """Attach an adapter to a model; only the adapter's parameters are trainable.

    Args:
        model: The base model.
        base: The base model's folder.
        adapter: A saved adapter's folder. If None, a new adapter is initialized, with B = 0 and without dropout, in
            peft's default layers for this architecture.
        rank: Rank of a new adapter.
        seed: Seed of a new adapter's A; the global random state does not change.

    Raises:
        BadInput: If the adapter does not match the model.
    """
    import peft

    if adapter is not None:
        check(adapter, base)
        try:
            return peft.PeftModel.from_pretrained(model, str(adapter), is_trainable=True)
        except (OSError, RuntimeError, ValueError, TypeError, KeyError) as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise BadInput(f"the LoRA adapter in {adapter} does not match {base}: {lines[0]}") from error
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        try:
            return peft.get_peft_model(model, peft.LoraConfig(r=rank, lora_alpha=2 * rank, task_type="CAUSAL_LM"))
        except ValueError as error:
            raise BadInput(f"peft has no default layers for {base}: {error}") from error
