"""The plan of a configuration: numbers that are known from elsewhere, and shapes counted by hand."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.conf.compose import compose
from shardwright.conf.schema import Model
from shardwright.parallel.stages import Split
from shardwright.pretrain import plan


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
    assert plan.flops_per_token(model_of("model=llama3_8b"), 8192) / 1e9 == pytest.approx(51.47, abs=0.005)


def test_attention_costs_half_of_the_full_square() -> None:
    model = model_of("model=llama3_8b")
    per_token = plan.flops_per_token(model, 4096) - plan.flops_per_token(model, 2048)
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
