"""LoRA adapters (Hu et al., 2022) by `peft`: a saved one, or a fresh one drawn from a seed."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from gradwire import files
from gradwire.errors import BadInput
from gradwire.models import saved

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def check(adapter: Path, base: Path) -> None:
    """See that a folder holds an adapter that was made for a base model.

    Raises:
        BadInput: If a file is missing, or it was made for another one.
    """
    for name in (CONFIG, WEIGHTS):
        if not (adapter / name).is_file():
            raise BadInput(f"{adapter} holds no LoRA adapter: {name} is missing.")
    made_for = files.read_object(adapter / CONFIG).get("base_model_name_or_path")
    if not isinstance(made_for, str | None):
        raise BadInput(f"{adapter / CONFIG} is no adapter's configuration with the name of its base model.")
    if not made_for or Path(made_for).name == base.resolve().name:
        return
    if (Path(made_for) / saved.CONFIG).is_file() and saved.digest(Path(made_for)) == saved.digest(base):
        return
    raise BadInput(
        f"the LoRA adapter in {adapter} was made for {made_for}, and --model_dir is {base}: give it that model, or "
        f"correct base_model_name_or_path in {adapter / CONFIG}."
    )


def digest(adapter: Path) -> str:
    """A digest of what the adapter computes, in hex."""
    return files.digest([files.sha256_file(adapter / name) for name in (CONFIG, WEIGHTS)], length=64)


def attach(model: nn.Module, base: Path, *, adapter: Path | None = None, rank: int = 8, seed: int = 0) -> nn.Module:
    """The model with an adapter, whose parameters alone are trainable.

    Args:
        model: The base model.
        base: Its folder.
        adapter: A saved adapter's folder; None: a fresh adapter, whose B is zero, in the layers that peft chooses for
            this kind of model, without dropout.
        rank: Of a fresh adapter.
        seed: Draws a fresh adapter's A; the global random state is left as it was.

    Raises:
        BadInput: If peft is missing, or the adapter does not fit.
    """
    try:
        import peft
    except ImportError:
        raise BadInput("gradients of a LoRA adapter need peft: pip install 'gradwire[lora]'.") from None
    if adapter is not None:
        check(adapter, base)
        try:
            return peft.PeftModel.from_pretrained(model, str(adapter), is_trainable=True)
        except (OSError, RuntimeError, ValueError, TypeError, KeyError) as error:
            told = str(error).strip().splitlines() or [type(error).__name__]
            raise BadInput(f"the LoRA adapter in {adapter} does not fit {base}: {told[0]}") from error
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        try:
            return peft.get_peft_model(model, peft.LoraConfig(r=rank, lora_alpha=2 * rank, task_type="CAUSAL_LM"))
        except ValueError as error:
            raise BadInput(f"peft knows no layers of {base} for a fresh adapter: {error}") from error
