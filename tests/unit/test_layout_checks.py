"""Rules of the layout: what a refused one is told, and that what it is told works."""

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.conf.compose import compose
from shardwright.conf.problems import Problem
from shardwright.parallel.stages import Split
from shardwright.pretrain import checks, plan

CLUSTER = "model=llama3_8b cluster=dgx_h200 precision=bf16 data.seq_length=4096 data.micro_batch_size=1 "
CLUSTER += "data.global_batch_size=128 cluster.nodes=2"
EMBEDDING, LOSS = (f"parallel.account_for_{part}_in_pipeline_split" for part in ("embedding", "loss"))
FIRST, LAST = (f"parallel.num_layers_in_{end}_pipeline_stage" for end in ("first", "last"))


def broken(overrides: str) -> list[Problem]:
    return checks.config_problems(compose([*CLUSTER.split(), *overrides.split()]))


@pytest.mark.parametrize(
    "overrides",
    [
        "",
        "parallel.tp=8 parallel.sp=true",
        "parallel.pp=4 parallel.vpp=4 parallel.tp=2 parallel.cp=2",
        f"parallel.pp=2 {EMBEDDING}=true {LOSS}=true",
        f"parallel.pp=4 model.num_layers=30 {EMBEDDING}=true {LOSS}=true",
        f"parallel.pp=4 parallel.vpp=2 {LAST}=8",
        f"parallel.pp=4 {LAST}=5",
        f"parallel.pp=2 {FIRST}=20 {LAST}=12",
        "parallel.pp=2 parallel.pipeline_layout=Et*20|t*12L",
        "parallel.pp=2 parallel.vpp=2 parallel.pipeline_layout=E|t*20|t*12|L",
        "parallel.tp=16 parallel.allow_tp_across_nodes=true model.num_attention_heads=32",
        "parallel.tp=4 parallel.sp=true parallel.cp=2 data.seq_length=1016 precision=bf16",
    ],
)
def test_a_layout_that_works_is_accepted(overrides: str) -> None:
    assert broken(overrides) == []


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        # layers over chunks: megatron-core would build a smaller model
        (
            "model.num_layers=40 parallel.pp=8 parallel.vpp=2",
            "parallel.vpp",
            "2: does not divide the 5 layers of a pipeline rank (model.num_layers=40 over parallel.pp=8): "
            "32 of 40 would be built; parallel.vpp=1 or parallel.vpp=5 works",
        ),
        ("model.num_layers=80 parallel.pp=16 parallel.vpp=2", "parallel.vpp", "64 of 80 would be built"),
        ("model.num_layers=24 parallel.pp=4 parallel.vpp=4", "parallel.vpp", "16 of 24 would be built"),
        (
            f"parallel.pp=4 parallel.vpp=3 {LAST}=5",
            "parallel.vpp",
            "divide the 5 layers of a pipeline rank (model.num_layers=32 over parallel.pp=4): 30",
        ),
        # layers over stages
        (
            "parallel.pp=4 model.num_layers=30",
            "parallel.pp",
            f"28 of 30 layers would be built; parallel.pp=2 works, or {EMBEDDING}=true {LOSS}=true, "
            f"or {LAST}=6, or the stages written out in parallel.pipeline_layout",
        ),
        ("parallel.pp=4 model.num_layers=3", "parallel.pp", "a stage would be empty; parallel.pp=1 works"),
        (
            f"parallel.pp=4 {LOSS}=true",
            "parallel.pp",
            "does not divide model.num_layers=32 and 1 for the loss = 33: 31 of 32 layers would be built",
        ),
        (
            f"parallel.pp=4 {LAST}=6",
            LAST,
            "leaves 26 of model.num_layers=32 to 3 stages, which cannot share them equally; "
            f"{LAST}=5 or {LAST}=8 works",
        ),
        (
            f"parallel.pp=2 {FIRST}=20 {LAST}=6",
            LAST,
            f"the two stages hold 26 layers, and model.num_layers=32; {LAST}=12 works",
        ),
        (f"parallel.pp=2 {LAST}=40", LAST, f"{LAST}=31 works"),
        (f"parallel.pp=2 {LAST}=4 {LOSS}=true", LAST, f"another than {LOSS}; keep one of them"),
        # stages written out
        ("parallel.pp=2 parallel.pipeline_layout=Ett|ttL", "parallel.pipeline_layout", "model.num_layers=4 works"),
        ("parallel.pp=2 parallel.pipeline_layout=Et*16|t*15xL", "parallel.pipeline_layout", "holds x; E embedding"),
        ("parallel.pp=2 parallel.pipeline_layout=t*16|t*16L", "parallel.pipeline_layout", "begin with the one E"),
        (
            "parallel.pp=2 parallel.pipeline_layout=Et*16|t*16mL",
            "parallel.pipeline_layout",
            "1 layers of multi-token prediction (m), and the model has 0",
        ),
        (
            "parallel.pp=2 parallel.pipeline_layout=Et*8|t*8|t*8|t*8L",
            "parallel.pipeline_layout",
            "writes 4 stages, and parallel.pp * parallel.vpp = 2 * 1; parallel.vpp=2 works",
        ),
        (
            "parallel.pp=2 parallel.pipeline_layout=Et*8|t*8|t*16L",
            "parallel.pipeline_layout",
            "writes 3 stages, and parallel.pp * parallel.vpp = 2 * 1; parallel.pp=3 works",
        ),
        (
            "parallel.pp=2 parallel.vpp=2 parallel.pipeline_layout=Et*16||t*8|t*8L",
            "parallel.pipeline_layout",
            "stage 2 empty",
        ),
        # keys of a pipeline without one
        ("parallel.vpp=2", "parallel.vpp", "parallel.vpp=1 or parallel.pp=2 works"),
        (f"{LOSS}=true", LOSS, f"{LOSS}=false or parallel.pp=2 works"),
        ("parallel.pipeline_layout=Et*32L", "parallel.pipeline_layout", "pipeline_layout=null or parallel.pp=2 works"),
        # micro-batches over stages and chunks
        (
            "parallel.pp=4 parallel.vpp=2 data.global_batch_size=18",
            "data.global_batch_size",
            "= 1 * 4 * 4 (with parallel.vpp=2 stages take micro-batches in groups of parallel.pp); "
            "data.global_batch_size=16 or data.global_batch_size=32 works",
        ),
        (
            "parallel.pp=4 parallel.vpp=2 data.rampup_batch_size=[24,8,100]",
            "data.rampup_batch_size",
            "passes through 24, 40, 56, 72, 88, 104, 120",
        ),
        ("parallel.pp=4 parallel.cp=2 data.global_batch_size=17", "data.global_batch_size", "= 1 * 2; data.global"),
        # the sequence over context and sequence parallelism
        (
            "data.seq_length=1012 parallel.cp=2 parallel.tp=4 parallel.sp=true",
            "data.seq_length",
            "parallel.cp * lcm(2, parallel.tp) = 2 * 4 = 8",
        ),
        (
            "data.seq_length=24 parallel.cp=4 parallel.tp=4 parallel.sp=true",
            "data.seq_length",
            "data.seq_length=16 or data.seq_length=32 works",
        ),
        ("data.seq_length=1022 parallel.cp=2", "data.seq_length", "data.seq_length=1020 or data.seq_length=1024 works"),
        (
            "data.seq_length=1022 parallel.cp=2 parallel.tp=3 parallel.sp=true",
            "data.seq_length",
            "2 * 6 = 12",
        ),
        # nodes
        (
            "parallel.tp=16",
            "parallel.tp",
            "across nodes of 8 ranks, where every layer waits; parallel.tp=8 works, or parallel.allow_tp_across_nodes",
        ),
        # the vocabulary
        (
            "parallel.tp=8 model.make_vocab_size_divisible_by=1 model.vocab_size=128258",
            "parallel.tp",
            "padded vocabulary=128258; model.make_vocab_size_divisible_by=8 or parallel.tp=2 works",
        ),
        # FP8 on what a rank has
        (
            "precision=fp8_current data.seq_length=1016 parallel.cp=2 parallel.tp=4 parallel.sp=true",
            "data.seq_length",
            "gives 127 tokens at once on each rank, and FP8 needs multiples of 8; data.seq_length=960 or "
            "data.seq_length=1024 works",
        ),
        # experts of a model without experts
        ("parallel.ep=2", "parallel.ep", "this model has none (model.num_moe_experts=null); parallel.ep=1 works"),
        ("parallel.etp=1", "parallel.etp", "parallel.etp=null works"),
    ],
)
def test_a_broken_layout_is_told_what_works(overrides: str, key: str, words: str) -> None:
    found = broken(overrides)
    assert [problem.key for problem in found if problem.key == key] == [key]
    assert words in next(str(problem) for problem in found if problem.key == key)


@pytest.mark.parametrize("name", ["tp", "pp", "vpp", "cp", "ep", "etp"])
@pytest.mark.parametrize("size", [0, -1])
def test_a_size_below_one_is_reported_once(name: str, size: int) -> None:
    (problem,) = broken(f"parallel.{name}={size}") if name != "etp" else broken(f"parallel.{name}={size}")[:1]
    assert str(problem) == f"parallel.{name}={size}: must be at least 1; parallel.{name}=1 works"


def test_the_sizes_of_both_grids_are_judged_together() -> None:
    found = {problem.key: str(problem) for problem in broken("parallel.tp=3 parallel.cp=3 parallel.ep=5")}
    assert "cluster.nodes=45 works" in found["parallel.tp * parallel.cp"]
    assert "cluster.nodes=45 works" in found["parallel.etp * parallel.ep"]


CONFIG = compose([*CLUSTER.split()])
SIZES = st.sampled_from([1, 2, 3, 4, 5, 6, 8, 16])


@settings(deadline=None)
@given(tp=SIZES, cp=SIZES, pp=SIZES, vpp=SIZES, sp=st.booleans(), seq=st.integers(1, 4096), layers=st.integers(1, 64))
def test_every_layout_that_is_accepted_splits_evenly(tp, cp, pp, vpp, sp, seq, layers) -> None:
    config = copy.deepcopy(CONFIG)
    sizes = config.parallel
    sizes.tp, sizes.cp, sizes.pp, sizes.vpp, sizes.sp = tp, cp, pp, vpp, sp
    config.model.num_layers, config.data.seq_length = layers, seq
    if checks.config_problems(config):
        return
    layout, model = plan.layout(config), config.model
    assert layout.tp * layout.cp * layout.dp * layout.pp == config.world_size
    assert seq % (2 * cp) == 0 or cp == 1
    assert (seq // cp) % (tp if sp else 1) == 0
    assert model.num_attention_heads % tp == model.ffn_hidden_size % tp == plan.padded_vocab_size(model) % tp == 0
    assert sum(len(chunk.layers) for chunks in Split.of(config).stages() for chunk in chunks) == layers
    assert plan.batch(config).num_microbatches * config.data.micro_batch_size * layout.dp == 128
    assert vpp == 1 or plan.batch(config).num_microbatches % pp == 0
