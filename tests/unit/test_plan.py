"""The plan of a configuration: numbers that are known from elsewhere, and shapes counted by hand."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.conf.compose import compose
from shardwright.conf.schema_model import Model
from shardwright.parallel.stages import Split
from shardwright.pretrain import model_size, plan


def model_of(*overrides: str) -> Model:
    return compose(overrides).model


TINY = model_of()


def test_parameter_counts_are_those_of_the_published_models() -> None:
    assert plan.count_parameters(model_of("model=llama3_8b")) == 8_030_261_248
    assert plan.count_parameters(model_of("model=llama3_1b")) == 1_235_814_400


def test_every_part_of_a_model_is_counted() -> None:
    model = model_of(
        "model={num_layers:2,hidden_size:8,ffn_hidden_size:12,num_attention_heads:2,num_query_groups:1,kv_channels:4}",
        "model={vocab_size:10,make_vocab_size_divisible_by:16,share_embeddings_and_output_weights:false}",
        "model={normalization:LayerNorm,gated_linear_unit:false,add_bias_linear:true,qk_layernorm:true}",
        "model={position_embedding_type:learned_absolute,max_position_embeddings:5}",
    )
    attention, mlp = (8 * 16 + 16) + (8 * 8 + 8), (8 * 12 + 12) + (12 * 8 + 8)
    norms = 2 * 2 * 8 + 2 * 2 * 4
    embeddings, final_norm, output = 16 * 8 + 5 * 8, 2 * 8, 16 * 8
    assert plan.count_parameters(model) == embeddings + 2 * (attention + mlp + norms) + final_norm + output


def test_a_qkv_bias_is_counted_alone() -> None:
    bare, biased = model_of(), model_of("model.add_qkv_bias=true")
    extra = bare.num_layers * (4 + 2 * 2) * bare.kv_channels
    assert plan.count_parameters(biased) - plan.count_parameters(bare) == extra


@pytest.mark.parametrize("choice", ["llama3_8b", "llama3_1b"])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_stages_add_up_to_the_model_and_a_tied_embedding_stands_twice(choice: str, pp: int) -> None:
    model = model_of(f"model={choice}")
    copies = pp > 1 and model.share_embeddings_and_output_weights
    stages = Split(num_layers=model.num_layers, pp=pp).stages()
    total = sum(stage.total for stage in plan.stage_weights(model, stages))
    assert total == plan.count_parameters(model) + copies * 128256 * model.hidden_size


def test_uneven_stages_hold_the_weights_of_their_own_layers() -> None:
    model = model_of("model=llama3_8b")
    even, uneven = (Split(num_layers=32, pp=2, first=first).stages() for first in (None, 10))
    first, last = plan.stage_weights(model, uneven)
    first_even, last_even = plan.stage_weights(model, even)
    layer = plan.count_parameters(model) - plan.count_parameters(model_of("model=llama3_8b", "model.num_layers=31"))
    assert (first_even.total - first.total, last.total - last_even.total) == (6 * layer, 6 * layer)


def test_tensor_parallel_ranks_share_matrices_and_repeat_norms() -> None:
    model = model_of()
    (stage,) = plan.stage_weights(model, Split(num_layers=model.num_layers).stages())
    assert stage.whole == (2 * model.num_layers + 1) * model.hidden_size
    assert stage.per_rank(2) == stage.split // 2 + stage.whole


def test_flops_per_token_are_counted_causal() -> None:
    assert model_size.flops_per_token(model_of("model=llama3_8b"), 8192) / 1e9 == pytest.approx(51.47, abs=0.005)


def test_attention_costs_half_of_the_full_square() -> None:
    model = model_of("model=llama3_8b")
    per_token = model_size.flops_per_token(model, 4096) - model_size.flops_per_token(model, 2048)
    full_square = 3 * 2 * (2 * 2048 * model.num_attention_heads * model.kv_channels) * model.num_layers
    assert per_token == full_square / 2


def test_the_batch_is_shared_over_data_parallel_ranks() -> None:
    config = compose(["cluster.ranks=8", "parallel.tp=2", "data.micro_batch_size=2", "data.global_batch_size=32"])
    steps = plan.batch(config)
    assert (steps.dp_size, steps.num_microbatches, steps.tokens_per_step) == (4, 4, 32 * 256)


@settings(max_examples=50)
@given(vocab=st.integers(1, 300_000), multiple=st.integers(1, 1024))
def test_the_padded_vocabulary_is_the_next_multiple(vocab: int, multiple: int) -> None:
    model = dataclasses.replace(TINY, vocab_size=vocab, make_vocab_size_divisible_by=multiple)
    padded = plan.padded_vocab_size(model)
    assert padded % multiple == 0 and 0 <= padded - vocab < multiple


@pytest.mark.parametrize(
    ("gpu", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_peak_flops_are_known_for_data_centre_gpus_alone(gpu: str, peak: float | None) -> None:
    assert plan.peak_flops(gpu) == peak


def test_json_names_every_ranks_place() -> None:
    found = plan.as_json(plan.make_plan(compose(["experiment=quickstart", "cluster.ranks=4"])))
    place = {"rank": 3, "tp": 1, "cp": 0, "dp": 1, "pp": 0, "etp": 1, "ep": 0, "edp": 1}
    assert found["layout"]["rank_map"][3] == place
    assert (found["layout"]["dp"], found["batch"]["tokens_per_step"], found["precision"]["fp8"]) == (2, 1024, None)


# ---- experts, latent attention, multi-token prediction ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "total", "active"),
    [
        ("mixtral_8x7b", 46_702_792_704, 12_879_925_248),
        ("mixtral_8x22b", 140_620_634_112, 39_152_031_744),
        ("qwen3_30b_a3b", 30_532_122_624, 3_353_032_704),
        ("deepseek_v3", 671_026_404_352, 37_552_282_624),
    ],
)
def test_a_token_passes_the_experts_it_is_routed_to_and_no_others(choice: str, total: int, active: int) -> None:
    found = model_size.weights(model_of(f"model={choice}"))
    assert (found.total, found.active(model_of(f"model={choice}"))) == (total, active)


def test_every_part_of_experts_and_latent_attention_is_counted() -> None:
    model = model_of("model=tiny_deepseek")
    queries = 128 * 64 + 64 + 64 * 4 * (32 + 16)
    keys_and_values = 128 * (32 + 16) + 32 + 32 * 4 * (32 + 24)
    attention = queries + keys_and_values + 4 * 24 * 128
    dense, one_expert = 3 * 128 * 384, 3 * 128 * 64
    experts = 16 * one_expert + one_expert + 16 * 128
    layers = 4 * (attention + 2 * 128) + dense + 3 * experts
    assert plan.count_parameters(model) == 2 * 2048 * 128 + layers + 128
    prediction = attention + 2 * 128 + experts + 3 * 128 + 2 * 128 * 128
    assert model_size.multi_token_prediction(model).total == prediction


def test_experts_are_shared_out_by_their_own_axes() -> None:
    model = model_of("model=tiny_mixtral")
    whole = model_size.weights(model)
    assert whole.experts == 4 * 4 * 3 * 128 * 256
    assert whole.per_rank(2, ep=2, etp=2) == whole.split // 2 + whole.whole + whole.experts // 4


def test_a_token_costs_what_its_experts_cost() -> None:
    def cost(*overrides: str) -> float:
        return model_size.flops_per_token(model_of("model=tiny_mixtral", *overrides), 256)

    one_expert = 3 * 2 * 3 * 128 * 256 * 4  # forward and backward, two operations a weight, in four layers
    assert cost("model.moe_router_topk=3") - cost() == one_expert
    router = 3 * 2 * 128 * 4 * 4
    assert cost("model.num_moe_experts=8") - cost() == router


def test_latent_attention_costs_its_own_widths() -> None:
    model = model_of("model=tiny_deepseek")
    longer = model_size.flops_per_token(model, 512) - model_size.flops_per_token(model, 256)
    assert longer == 3 * 256 * 4 * (32 + 16 + 24) * 4


def test_multi_token_prediction_is_counted_apart() -> None:
    config = compose(["model=tiny_deepseek"])
    planned = plan.make_plan(config)
    model = config.model
    without = model_of("model=tiny_deepseek", "model.mtp_num_layers=null", "model.mtp_loss_scaling_factor=null")
    assert planned.parameters == plan.count_parameters(without)
    assert planned.mtp_parameters > 0
    assert planned.flops_per_token - planned.mtp_flops_per_token == model_size.flops_per_token(without, 256)
    layer = model_size.flops_per_token(model, 256) - model_size.flops_per_token(
        model_of("model=tiny_deepseek", "model.num_layers=3", "model.moe_layer_freq='[0,1,1]'"), 256
    )
    assert planned.mtp_flops_per_token == layer + 6 * (2 * 128 * 128 + 2048 * 128)


def test_multi_token_prediction_stands_on_the_last_stage_with_the_embedding() -> None:
    model = model_of("model=tiny_deepseek")
    extra = model_size.multi_token_prediction(model).total
    embedding = 2048 * 128
    for pp, copies in ((1, 0), (2, 1), (4, 1)):
        stages = Split(num_layers=model.num_layers, num_mtp_layers=1, pp=pp).stages()
        total = sum(stage.total for stage in plan.stage_weights(model, stages))
        assert total == plan.count_parameters(model) + extra + copies * embedding
