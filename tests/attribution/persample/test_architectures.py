"""Norms of every causal architecture of transformers, in tiny sizes, against one backward pass per sample."""

from __future__ import annotations

import pytest
import torch
from diagonals import chosen
from test_methods import squares
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from gradwire.attribution.persample import hooks, loop, norms
from gradwire.lm.data.batches import Batch

VOCABULARY, LARGEST = 64, 2_000_000  # parameters
SIZES = {  # of the options that an architecture has
    32: "hidden_size n_embd d_model embedding_size word_embed_proj_dim max_position_embeddings n_positions n_ctx",
    2: "num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers num_key_value_heads "
    "num_experts_per_tok linear_num_key_heads n_mamba_heads",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads num_decoder_attention_heads num_experts "
    "num_local_experts n_routed_experts rotary_dim qk_rope_head_dim qk_nope_head_dim time_step_rank "
    "linear_num_value_heads mamba_n_heads mamba_num_heads",
    1: "encoder_layers num_encoder_layers n_group topk_group mamba_n_groups n_groups",
    8: "head_dim d_head d_kv q_lora_rank kv_lora_rank v_head_dim qk_head_dim state_size mamba_d_state ssm_state_size "
    "linear_key_head_dim linear_value_head_dim hidden_size_per_layer_input",
    16: "moe_intermediate_size shared_expert_intermediate_size mamba_d_head mamba_head_dim sliding_window",
    48: "intermediate_size ffn_dim decoder_ffn_dim d_inner ffn_hidden_size d_ff n_inner dff",
    VOCABULARY: "vocab_size vocab_size_per_layer_input",
}
OTHERS = {
    "deepseek_v3": {"num_key_value_heads": 4, "head_dim": 4},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "youtu": {"num_key_value_heads": 4, "head_dim": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "roc_bert": {"pronunciation_vocab_size": VOCABULARY, "shape_vocab_size": VOCABULARY},
}
FEW = ("gpt2", "blenderbot", "prophetnet", "xlnet", "roc_bert", "bamba")
FLOAT32 = 1e-5  # of the square, for kernels that know no float64


def small(architecture: str) -> torch.nn.Module:
    kind = CONFIG_MAPPING[architecture]
    usual = kind().to_dict()
    sizes = {name: size for size, names in SIZES.items() for name in names.split()}
    made = {name: size for name, size in sizes.items() if type(usual.get(name, "")) not in (str, dict, bool)}
    made = {name: size for name, size in made.items() if kind.attribute_map.get(name, name) == name}
    made |= {name: 0.0 for name, value in usual.items() if "drop" in name and isinstance(value, float)}
    made |= {name: 1 for name in ("bos_token_id", "eos_token_id", "pad_token_id") if isinstance(usual.get(name), int)}
    made |= {"is_decoder": True} if "is_decoder" in usual else {}
    config = kind(**made | OTHERS.get(architecture, {}))
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    if count > LARGEST:
        raise ValueError(f"{count} parameters")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # initial zeros and ones would hide faults
        if parameter.ndim == 1 or not parameter.any():
            torch.nn.init.normal_(parameter, 0.5, 0.3)
    return model


def batch_of(samples: int, read: int) -> Batch:
    tokens = torch.randint(3, 60, (samples, read + 1), generator=torch.Generator().manual_seed(3))
    return Batch(tokens, tokens, [f"s{row}" for row in range(samples)])


def exact(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, float]:
    """The squares of the loop and their tolerance, in float64 where the model can be computed in it."""
    try:
        return squares(loop.gradients(model.double(), batch)), 1e-6  # parts of some are always in float32
    except (RuntimeError, NotImplementedError):
        return squares(loop.gradients(model.float(), batch)), FLOAT32


@pytest.mark.parametrize(
    "architecture",
    chosen(FEW, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
)
@pytest.mark.filterwarnings("ignore")
def test_norms_are_those_of_the_loop(architecture):
    """As many samples as tokens first: sizes alone do not tell the two apart."""
    try:
        model = small(architecture)
        loop.gradients(model, batch_of(2, 2))
    except Exception as error:
        if architecture in FEW:
            raise
        pytest.skip(f"not built so small: {type(error).__name__}: {str(error)[:100]}")
    for samples, read in ((4, 4), (5, 4), (3, 1)):
        batch = batch_of(samples, read)
        wanted, tolerance = exact(model, batch)
        torch.testing.assert_close(norms.norms(model, batch).square, wanted, rtol=tolerance, atol=0)
    unseen = hooks.backward(model, batch_of(4, 4), lambda name, use, last: None).unseen
    assert len(unseen) < sum(parameter.requires_grad for parameter in model.parameters())
