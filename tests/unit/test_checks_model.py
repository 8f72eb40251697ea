"""Rules of the model, by the override that breaks them: experts, latent attention, multi-token prediction."""

import pytest

from shardwright.conf.compose import compose
from shardwright.conf.problems import Problem
from shardwright.conf.schema_model import layer_pattern
from shardwright.pretrain import checks
from shardwright.pretrain.machine import Machine

from ..models import MODELS

MIXTRAL, DEEPSEEK = "model=tiny_mixtral", "model=tiny_deepseek"
LATENT = f"{DEEPSEEK} model.mtp_num_layers=null model.mtp_loss_scaling_factor=null"


def broken(*overrides: str) -> list[Problem]:
    return checks.config_problems(compose(overrides))


@pytest.mark.parametrize("choice", MODELS)
def test_every_model_file_breaks_no_rule(choice: str) -> None:
    assert broken(f"model={choice}") == []


@pytest.mark.parametrize(
    "overrides",
    [
        f"{MIXTRAL} model.moe_layer_freq=2",
        f"{MIXTRAL} model.moe_layer_freq='[0,1]*2'",
        f"{MIXTRAL} model.moe_router_topk=1 model.moe_router_pre_softmax=true",
        f"{MIXTRAL} model.moe_expert_capacity_factor=1.25 model.moe_pad_expert_input_to_capacity=true",
        f"{MIXTRAL} model.moe_router_load_balancing_type=none model.moe_aux_loss_coeff=0",
        f"{LATENT} model.q_lora_rank=null model.qk_layernorm=false",
        "model.rope_scaling=true model.rope_scaling_factor=8",
    ],
)
def test_a_sound_model_breaks_no_rule(overrides: str) -> None:
    assert broken(*overrides.split()) == []


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        ("model.moe_router_topk=2", "moe_router_topk", "moe_router_topk=null works, or for example"),
        ("model.moe_aux_loss_coeff=0.01", "moe_aux_loss_coeff", "is read only with model.num_moe_experts"),
        ("model.moe_expert_capacity_factor=1.5", "moe_expert_capacity_factor", "is read only with"),
        ("model.num_moe_experts=8", "moe_ffn_hidden_size", "model.num_moe_experts=8 needs it"),
        ("model.num_moe_experts=8", "moe_router_topk", "for example 2"),
        (f"{MIXTRAL} model.add_bias_linear=true", "add_bias_linear", "experts have no biases"),
        (f"{MIXTRAL} model.moe_layer_freq='[0]*3+[1]*58'", "moe_layer_freq", "is a pattern of 61 layers, and"),
        (f"{MIXTRAL} model.moe_layer_freq='[1]*4;x'", "moe_layer_freq", "'[0]+[1]*3' or 1 works"),
        (f"{MIXTRAL} model.moe_layer_freq='[0]*4'", "moe_layer_freq", "leaves no layer to the 4 experts"),
        (f"{MIXTRAL} model.moe_router_topk=5", "moe_router_topk", "moe_router_topk=4 or less works"),
        (f"{MIXTRAL} model.moe_router_topk=1", "moe_router_topk", "moe_router_pre_softmax=true works"),
        (f"{MIXTRAL} model.moe_router_topk=0", "moe_router_topk", "must be at least 1"),
        (f"{MIXTRAL} model.moe_aux_loss_coeff=0", "moe_aux_loss_coeff", "leaves aux_loss out"),
        (f"{MIXTRAL} model.moe_router_load_balancing_type=none", "moe_aux_loss_coeff", "has no loss to weigh"),
        (f"{MIXTRAL} model.moe_router_enable_expert_bias=true", "moe_router_enable_expert_bias", "sigmoid works"),
        (f"{MIXTRAL} model.moe_pad_expert_input_to_capacity=true", "moe_pad_expert_input_to_capacity", "=1.25 works"),
        (
            f"{MIXTRAL} model.moe_router_padding_for_quantization=true",
            "moe_router_padding_for_quantization",
            "or precision=fp8_delayed",
        ),
        (
            f"{MIXTRAL} model.moe_router_padding_for_quantization=true model.moe_token_dispatcher_type=allgather "
            "precision=fp8_delayed",
            "moe_token_dispatcher_type",
            "alltoall works",
        ),
        (f"{MIXTRAL} model.moe_router_num_groups=2", "moe_router_group_topk", "needs both numbers"),
        (f"{DEEPSEEK} model.moe_router_num_groups=3", "moe_router_num_groups", "=2 or model.moe_router_num_groups=4"),
        (f"{DEEPSEEK} model.moe_router_group_topk=3", "moe_router_group_topk", "must divide model.moe_router_topk=4"),
        # megatron-core would take the best 2 // 4 = 0 experts of each group for its score
        (f"{DEEPSEEK} model.moe_router_topk=2 model.moe_router_group_topk=4", "moe_router_group_topk", "=2 works"),
        (f"{DEEPSEEK} model.moe_router_topk=8 model.moe_router_group_topk=1", "moe_router_group_topk", "=2 works"),
        ("model.kv_lora_rank=64", "kv_lora_rank", "is read only with model.multi_latent_attention"),
        ("model.multi_latent_attention=true", "qk_head_dim", "model=deepseek_v3 has it"),
        (f"{LATENT} model.mscale=null", "mscale", "model.rope_type=yarn needs it"),
        (f"{LATENT} model.rope_type=rope", "beta_fast", "model.beta_fast=null works, or model.rope_type=yarn"),
        (f"{LATENT} model.num_query_groups=2", "num_query_groups", "model.num_query_groups=4 works"),
        (f"{LATENT} model.position_embedding_type=learned_absolute", "position_embedding_type", "=rope works"),
        (f"{LATENT} model.q_lora_rank=null", "qk_layernorm", "model.q_lora_rank=512 works"),
        (f"{LATENT} model.add_qkv_bias=true", "add_qkv_bias", "is not for latent attention"),
        (f"{LATENT} model.qk_pos_emb_head_dim=15", "qk_pos_emb_head_dim", "need pairs"),
        ("model.rope_scaling=true", "rope_scaling_factor", "model.rope_scaling_factor=8 works"),
        ("model.rope_scaling_factor=8", "rope_scaling_factor", "is read only with model.rope_scaling=true"),
        (
            "model=tiny_gpt model.rope_scaling=true model.rope_scaling_factor=8",
            "rope_scaling",
            "stretches rotary positions",
        ),
        ("model.mtp_loss_scaling_factor=0.1", "mtp_loss_scaling_factor", "or model.mtp_num_layers=1"),
        ("model.mtp_num_layers=1", "mtp_loss_scaling_factor", "model.mtp_loss_scaling_factor=0.3 works"),
        (f"{DEEPSEEK} model.mtp_num_layers=256", "mtp_num_layers", "looks further ahead than data.seq_length=256"),
        (
            "model=tiny_gpt model.mtp_num_layers=1 model.mtp_loss_scaling_factor=0.3",
            "position_embedding_type",
            "multi-token prediction needs rotary positions",
        ),
    ],
)
def test_a_broken_model_names_key_and_what_works(overrides: str, key: str, words: str) -> None:
    found = {problem.key: str(problem) for problem in broken(*overrides.split())}
    assert words in found[f"model.{key}"]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ("model=tiny_mixtral model.moe_ffn_hidden_size=250", "moe_ffn_hidden_size"),
        ("model=tiny_deepseek model.moe_shared_expert_intermediate_size=72", "moe_shared_expert_intermediate_size"),
        ("model=tiny_deepseek model.q_lora_rank=60", "q_lora_rank"),
        ("model=tiny_deepseek model.kv_lora_rank=30 model.qk_pos_emb_head_dim=18", "kv_lora_rank"),
        ("model=tiny_deepseek model.qk_pos_emb_head_dim=12", "qk_pos_emb_head_dim"),
        ("model=tiny_deepseek model.v_head_dim=25", "v_head_dim"),
    ],
)
def test_fp8_wants_multiples_of_every_kind_of_matrix(overrides: str, key: str) -> None:
    found = {problem.key: problem.rule for problem in broken(*overrides.split(), "precision=fp8_delayed")}
    assert "FP8 needs multiples of 16" in found[f"model.{key}"]
    assert broken(overrides.split()[0], "precision=fp8_delayed") == []


def test_deep_eps_dispatcher_is_refused_where_it_is_missing() -> None:
    installed = {"torch": "2.11.0", "megatron_core": "0.19.2"}
    config = compose([MIXTRAL, "model.moe_token_dispatcher_type=flex"])
    (problem,) = checks.machine_problems(config, Machine(versions=installed))
    assert "model.moe_token_dispatcher_type=alltoall" in str(problem)
    assert checks.machine_problems(config, Machine(versions={**installed, "deep_ep": "1.2.1"})) == []


@pytest.mark.parametrize(
    ("text", "layers"),
    [("1", "1111"), ("2", "1010"), ("3", "1001"), ("[0]+[1]*3", "0111"), ("[0, 1] * 2", "0101"), ("[0,0,1,1]", "0011")],
)
def test_a_layer_pattern_is_read_as_megatron_core_reads_it(text: str, layers: str) -> None:
    assert layer_pattern(text, 4) == tuple(digit == "1" for digit in layers)


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "[2]*4", "[1]*0+[1]*4", "__import__('os')", "[1]**4", "[1]*4+", "[[1]]*4"]
)
def test_anything_else_is_no_layer_pattern(text: str) -> None:
    with pytest.raises(ValueError, match="is neither a number nor a pattern"):
        layer_pattern(text, 4)
