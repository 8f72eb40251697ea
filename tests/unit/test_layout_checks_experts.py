"""Rules of the expert grid, on models with experts: what a refused one is told."""

import pytest

from shardwright.conf.compose import compose
from shardwright.pretrain import checks, plan

EXPERTS = "model=tiny_qwen3_moe data=mock cluster.gpu=none data.global_batch_size=16 cluster.ranks=4"
MTP = "model=tiny_deepseek data=mock cluster.gpu=none data.global_batch_size=16 cluster.ranks=2"


@pytest.mark.parametrize(
    "overrides",
    [
        f"{EXPERTS} parallel.ep=4",
        f"{EXPERTS} parallel.tp=2 parallel.sp=true parallel.ep=2",
        f"{EXPERTS} parallel.tp=2 parallel.sp=true parallel.ep=4 parallel.etp=1",
        f"{EXPERTS} parallel.cp=2 parallel.ep=4",
        f"{MTP} parallel.pp=2 parallel.vpp=2 parallel.pipeline_layout=E|tt|tt|mL",
        f"{MTP} parallel.tp=2 parallel.sp=true parallel.ep=2 parallel.etp=1",
        f"{MTP} parallel.cp=2 model.mtp_num_layers=null model.mtp_loss_scaling_factor=null",
        # only the CPU's layers split what latent attention compresses to
        f"{MTP} parallel.tp=2 parallel.sp=true model.kv_lora_rank=33 cluster.gpu=h200 cluster.gpus_per_node=2",
    ],
)
def test_experts_are_shared_out(overrides: str) -> None:
    assert checks.config_problems(compose(overrides.split())) == []


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (
            f"{EXPERTS} parallel.tp=2 parallel.sp=true parallel.ep=4",
            "parallel.etp * parallel.ep",
            "2 * 4 = 8: does not divide the 4 ranks of the run, where parallel.etp is parallel.tp=2 by default; "
            "cluster.ranks=8 works, or parallel.etp=1",
        ),
        (
            f"{EXPERTS} cluster.ranks=3 parallel.ep=3 data.global_batch_size=12",
            "parallel.ep",
            "does not divide model.num_moe_experts=8; parallel.ep=1 works",
        ),
        (f"{EXPERTS} parallel.tp=2 parallel.ep=2", "parallel.sp", "needs sequence parallelism; parallel.sp=true works"),
        (
            f"{EXPERTS} parallel.etp=4 model.moe_ffn_hidden_size=66",
            "parallel.etp",
            "does not split the width of an expert, 66; parallel.etp=2 works",
        ),
        (
            f"{MTP} parallel.tp=2 parallel.sp=true model.kv_lora_rank=33",
            "parallel.tp",
            "evenly: model.kv_lora_rank + model.qk_pos_emb_head_dim=49; parallel.tp=1 parallel.sp=false works",
        ),
        (
            f"{MTP} parallel.tp=2 parallel.sp=true model.moe_shared_expert_intermediate_size=63",
            "parallel.tp",
            "evenly: model.moe_shared_expert_intermediate_size=63; parallel.tp=1 parallel.sp=false works",
        ),
        (
            f"{MTP} parallel.cp=2",
            "parallel.cp",
            "tokens of each context-parallel rank by itself; parallel.cp=1 works, or model.mtp_num_layers=null",
        ),
        (
            f"{MTP} parallel.pp=2 parallel.pipeline_layout=Ett|ttL",
            "parallel.pipeline_layout",
            "writes 0 layers of multi-token prediction (m), and the model has 1",
        ),
        (
            f"{MTP} parallel.pp=2 parallel.vpp=2 parallel.pipeline_layout=E|tt|ttm|L",
            "parallel.pipeline_layout",
            "stands on the last stage, before the loss; for example t|tmL",
        ),
    ],
)
def test_a_broken_expert_grid_is_told_what_works(overrides: str, key: str, words: str) -> None:
    found = {problem.key: str(problem) for problem in checks.config_problems(compose(overrides.split()))}
    assert words in found[key]


def test_the_layers_of_multi_token_prediction_stand_with_the_loss() -> None:
    stages = plan.make_plan(compose([*MTP.split(), "parallel.pp=2"])).stages
    assert [[chunk.letters for chunk in chunks] for chunks in stages] == [["Ett"], ["ttmL"]]
