"""Rules of FP8: which layers stay in BF16, which ranks must share amaxes, what cannot go together."""

import pytest

from shardwright.conf.compose import compose
from shardwright.conf.problems import Problem
from shardwright.parallel import linears
from shardwright.pretrain import checks, checks_fp8, plan, summary
from shardwright.pretrain.machine import Machine

CPU = ["model=tiny", "cluster.gpu=none", "precision=fp8_delayed", "precision.backend=emulated"]
GPU = [
    *("model=llama3_8b", "cluster=dgx_h200", "parallel.tp=2", "precision=fp8_delayed", "data.seq_length=8192"),
    *("data.micro_batch_size=1", "data.global_batch_size=16"),
]


def broken(*overrides: str) -> list[Problem]:
    return checks.config_problems(compose([*overrides]))


def test_the_configurations_of_these_tests_break_no_rule() -> None:
    assert broken(*CPU) == [] and broken(*GPU) == []


def test_a_glob_that_matches_no_layer_is_refused_with_names_that_are_near() -> None:
    (problem,) = broken(*CPU, "precision.bf16_layers=['*.linear_fc2',decoder.layers.0.mlp.linear_fc3]")
    assert problem.key == "precision.bf16_layers" and problem.value == "decoder.layers.0.mlp.linear_fc3"
    assert "decoder.layers.0.mlp.linear_fc2" in problem.remedy


def test_more_blocks_at_an_end_than_the_model_has_are_refused() -> None:
    (problem,) = broken(*CPU, "model.num_layers=2", "precision.num_layers_at_end_in_bf16=3")
    assert problem.remedy == "precision.num_layers_at_end_in_bf16=2 works"


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["precision.bf16_layers=['*.linear_fc2']"], ["0.mlp.linear_fc2", "1.mlp.linear_fc2", "2.mlp.linear_fc2"]),
        (
            ["precision.num_layers_at_end_in_bf16=1"],
            [f"2.{part}" for part in ("self_attention.linear_qkv", "self_attention.linear_proj")]
            + ["2.mlp.linear_fc1", "2.mlp.linear_fc2"],
        ),
        (
            ["precision.num_layers_at_start_in_bf16=1", "precision.bf16_layers=['*.1.*.linear_proj']"],
            [f"0.{part}" for part in ("self_attention.linear_qkv", "self_attention.linear_proj")]
            + ["0.mlp.linear_fc1", "0.mlp.linear_fc2", "1.self_attention.linear_proj"],
        ),
    ],
    ids=["by glob", "at the end", "both"],
)
def test_the_plan_says_which_layers_stay_in_bf16(overrides: list[str], names: list[str]) -> None:
    planned = plan.make_plan(compose([*CPU, "model.num_layers=3", *overrides]))
    assert planned.narrow is not None and planned.narrow.layers == 12
    assert list(planned.narrow.in_bf16) == [f"decoder.layers.{name}" for name in names]
    assert planned.narrow.in_words()["linear layers"] == f"{12 - len(names)} of 12"


def test_a_layer_that_is_recorded_cannot_step_out_of_its_region() -> None:
    (problem,) = broken(*GPU, "precision.bf16_layers=['*.linear_fc2']", "execution.cuda_graph_impl=full_iteration")
    assert problem.key == "precision.bf16_layers" and problem.remedy == "execution.cuda_graph_impl=none works"


def test_a_layer_in_bf16_has_no_parameters_in_fp8() -> None:
    (problem,) = broken(*GPU, "precision.num_layers_at_start_in_bf16=1", "precision.fp8_param_gather=true")
    assert problem.remedy == "precision.fp8_param_gather=false works"


SP, ATTENTION = "parallel.sp=true", "precision.fp8_dot_product_attention=true"
GATHER = "precision.fp8_param_gather=true"
CP = ["parallel.cp=2"]


@pytest.mark.parametrize(
    ("overrides", "works"),
    [
        ([SP], ["tp", "tp_cp", "tp_dp_cp"]),
        ([*CP, ATTENTION], ["tp_cp", "tp_dp_cp"]),
        (CP, ["tp", "tp_cp", "tp_dp_cp"]),
        ([ATTENTION], ["tp", "tp_cp", "tp_dp_cp"]),
        ([GATHER], ["tp_dp_cp"]),
        ([GATHER, "cluster.ranks=2"], ["tp", "tp_cp", "tp_dp_cp"]),
        ([SP, *CP, ATTENTION, GATHER], ["tp_dp_cp"]),
    ],
    ids=["SP", "attention over CP", "CP", "attention", "gather over DP", "gather of one replica", "all"],
)
def test_what_is_exchanged_in_fp8_has_the_same_scale_on_both_sides(overrides: list[str], works: list[str]) -> None:
    for choice in ("tp", "tp_cp", "tp_dp_cp"):
        found = broken(*GPU, *overrides, f"precision.amax_group={choice}")
        assert [problem.key for problem in found] == ([] if choice in works else ["precision.amax_group"] * len(found))
        assert bool(found) == (choice not in works)
        for problem in found:
            assert f"precision.amax_group={works[-1]}" in problem.remedy


def test_every_need_is_of_an_axis_that_a_group_can_have() -> None:
    assert {need.axis for need in checks_fp8.NEEDS} == {"tp", "cp", "dp"}


def test_recorded_layers_reduce_over_megatron_core_s_own_group_alone() -> None:
    (problem,) = broken(*GPU, "precision.amax_group=tp_cp", "execution.cuda_graph_impl=local")
    assert problem.key == "precision.amax_group"


def test_the_start_table_names_the_ranks_that_share_amaxes() -> None:
    for choice, groups in {"tp": "[0,1] [2,3]", "tp_dp_cp": "[0,1,2,3]"}.items():
        planned = plan.make_plan(compose([*CPU, "parallel.tp=2", "cluster.ranks=4", f"precision.amax_group={choice}"]))
        assert planned.narrow is not None
        words = planned.narrow.in_words()
        assert words["amaxes shared by"] == f"{choice} {groups}"
        assert f"{choice} {groups}" in dict(summary.start_facts({"precision": words}))["precision"]


@pytest.mark.parametrize("key", ["fp8_dot_product_attention", "fp8_param_gather"])
def test_the_emulation_refuses_what_it_does_not_compute(key: str) -> None:
    assert [problem.key for problem in broken(*CPU, f"precision.{key}=true")] == [f"precision.{key}"]


@pytest.mark.parametrize(("version", "refused"), [("2.20.2", False), ("2.21.0", True)])
def test_delayed_scaling_wants_a_transformer_engine_that_was_looked_at(version: str, refused: bool) -> None:
    machine = Machine(versions={"transformer_engine": version})
    for recipe, wanted in {"fp8_delayed": refused, "fp8_current": False}.items():
        config = compose([*GPU, f"precision={recipe}"])
        assert bool(list(checks_fp8.reduction_is_known(config, machine))) == wanted


def test_every_model_family_names_its_linear_layers() -> None:
    experts = linears.names(compose(["model=tiny_mixtral", "precision.backend=emulated"]))
    assert "decoder.layers.3.mlp.experts.local_experts.3.linear_fc2" in experts
    latent = linears.names(compose(["model=tiny_deepseek", "precision.backend=emulated"]))
    assert "decoder.layers.0.self_attention.linear_kv_up_proj" in latent


@pytest.mark.parametrize(
    ("gpu", "recipe", "refused"),
    [
        ("h200", "fp8_delayed", False),
        ("h200", "fp8_current", True),
        ("b200", "fp8_current", False),
        ("h200", "fp8_blockwise", True),
        ("b200", "mxfp8", False),
    ],
)
def test_attention_in_fp8_wants_a_gpu_with_a_kernel_for_the_recipe(gpu: str, recipe: str, refused: bool) -> None:
    overrides = (f"precision={recipe}", "precision.fp8_dot_product_attention=true", f"cluster.gpu={gpu}")
    problems = [problem for problem in broken(*overrides) if problem.key == "precision.fp8_dot_product_attention"]
    assert bool(problems) == refused
    assert all("precision.fp8_dot_product_attention=false" in str(problem) for problem in problems)
