"""Config rules of the layout: does every axis split evenly what it splits? `checks` lists them among all rules.

The rules on which layers stand where are in `checks_stages`, those on the batch in `checks_schedule`, those of FP8
on local shapes in `checks_fp8`.
"""

import math
from collections.abc import Iterator
from typing import Any

from shardwright.conf.choices import GpuKind
from shardwright.conf.problems import Problem
from shardwright.conf.schema import Config
from shardwright.parallel.layout import Layout
from shardwright.pretrain import plan
from shardwright.pretrain.ranges import divisors, multiples, nearest, rest

MOST_HEADS = 4096
"""Tensor-parallel sizes up to this are tried for the nearest that works."""


# ---- ranks and nodes -------------------------------------------------------------------------------------------------


def axes_divide_the_world(config: Config) -> Iterator[Problem]:
    sizes = config.parallel
    axes = (sizes.tp, sizes.pp, sizes.cp, sizes.ep, sizes.vpp, 1 if sizes.etp is None else sizes.etp)
    if min(*axes, config.world_size, sizes.num_distributed_optimizer_instances) >= 1:
        yield from plan.layout_problems(config)


def ranks_fill_the_nodes(config: Config) -> Iterator[Problem]:
    cluster, ranks = config.cluster, config.world_size
    if rest(ranks, cluster.nodes):
        rule = f"does not spread evenly over cluster.nodes={cluster.nodes}"
        yield Problem(
            key="cluster.ranks", value=ranks, rule=rule, remedy=multiples("cluster.ranks", ranks, cluster.nodes)
        )
    room = cluster.nodes * cluster.gpus_per_node
    if cluster.gpu not in (GpuKind.auto, GpuKind.none) and 1 <= room < ranks:
        rule = f"is more than {cluster.nodes} x {cluster.gpus_per_node} GPUs (cluster.nodes, cluster.gpus_per_node)"
        remedy = f"cluster.ranks={room} or cluster.nodes={-(-ranks // cluster.gpus_per_node)} works"
        yield Problem(key="cluster.ranks", value=ranks, rule=rule, remedy=remedy)


def tensor_parallelism_stays_in_a_node(config: Config) -> Iterator[Problem]:
    layout, nodes = plan.possible_layout(config), config.cluster.nodes
    if layout is None or nodes < 2 or config.world_size % nodes or config.parallel.allow_tp_across_nodes:
        return
    if config.cluster.gpu is GpuKind.gb200:
        return  # the trays of an NVL72 are one NVLink domain
    per_node = plan.local_ranks(config)
    sizes = {"tp": layout.tp} if config.parallel.etp is None else {"tp": layout.tp, "etp": layout.etp}
    for axis, size in sizes.items():
        if per_node % size:
            key, rule = f"parallel.{axis}", f"has groups across nodes of {per_node} ranks, where every layer waits"
            remedy = f"{nearest(key, size, divisors(per_node))}, or parallel.allow_tp_across_nodes=true"
            yield Problem(key=key, value=size, rule=rule, remedy=remedy)


# ---- dense layers ----------------------------------------------------------------------------------------------------


def tensor_parallelism_splits_evenly(config: Config) -> Iterator[Problem]:
    tp, key, model = config.parallel.tp, "parallel.tp", config.model
    unsplit = _unsplit(config, tp)
    if not unsplit:
        return
    fitting = [size for size in range(1, min(model.num_attention_heads, MOST_HEADS) + 1) if not _unsplit(config, size)]
    if config.parallel.sp:
        fitting = fitting[1:]  # which has nothing to split over one rank
    remedy = nearest(key, tp, filling_the_world(config, "tp", fitting) or fitting)
    remedy = remedy or "parallel.tp=1 parallel.sp=false works"
    if list(unsplit) == ["padded vocabulary"]:
        multiple = math.lcm(model.make_vocab_size_divisible_by, tp)
        remedy = f"model.make_vocab_size_divisible_by={multiple} or {remedy}"
    shown = ", ".join(f"{name}={number}" for name, number in unsplit.items())
    yield Problem(key=key, value=tp, rule=f"does not split evenly: {shown}", remedy=remedy)


def query_groups_share_heads(config: Config) -> Iterator[Problem]:
    heads, query_groups = config.model.num_attention_heads, config.model.num_query_groups
    if rest(heads, query_groups):
        key, rule = "model.num_query_groups", f"does not divide model.num_attention_heads={heads}"
        yield Problem(key=key, value=query_groups, rule=rule, remedy=nearest(key, query_groups, divisors(heads)))


def sequence_parallelism_needs_ranks(config: Config) -> Iterator[Problem]:
    if config.parallel.sp and config.parallel.tp == 1:
        rule = "sequence parallelism splits over tensor-parallel ranks, and parallel.tp=1"
        yield Problem(key="parallel.sp", value="true", rule=rule, remedy="parallel.sp=false or parallel.tp=2 works")


def sequence_splits_evenly(config: Config) -> Iterator[Problem]:
    seq_length, cp, key = config.data.seq_length, config.parallel.cp, "data.seq_length"
    tp = config.parallel.tp if config.parallel.sp else 1
    if min(cp, tp) < 1 or not rest(seq_length, sequence_multiple(cp, tp)):
        return
    multiple = sequence_multiple(cp, tp)
    if cp == 1:
        rule = f"is no multiple of parallel.tp={tp}, over which parallel.sp=true splits it"
    elif tp == 1:
        rule = f"is no multiple of 2 * parallel.cp = {multiple}: each context-parallel rank takes two pieces"
    else:
        rule = (
            f"is no multiple of parallel.cp * lcm(2, parallel.tp) = {cp} * {math.lcm(2, tp)} = {multiple}: each "
            "context-parallel rank takes two pieces, and parallel.sp=true splits what it has over parallel.tp"
        )
    yield Problem(key=key, value=seq_length, rule=rule, remedy=multiples(key, seq_length, multiple))


def sequence_multiple(cp: int, tp: int) -> int:
    """The length of a sequence is a multiple of this, over `cp` context- and `tp` sequence-parallel ranks.

    Source: megatron-core 0.19.2, utils.py `get_batch_on_this_cp_rank`: 2 * CP pieces. That 2 * CP and TP each divide
    the length is not enough: TP must divide what one context-parallel rank has.
    """
    return cp * math.lcm(2, tp) if cp > 1 else tp


def multi_token_prediction_has_whole_sequences(config: Config) -> Iterator[Problem]:
    # Source: megatron-core 0.19.2, multi_token_prediction.py:876; measured: gradients of some tensors 1.2% off
    cp, layers = config.parallel.cp, config.model.mtp_num_layers
    if cp > 1 and layers is not None:
        rule = (
            f"model.mtp_num_layers={layers} would have other gradients than on one rank: megatron-core averages the "
            "loss of multi-token prediction over the tokens of each context-parallel rank by itself"
        )
        remedy = "parallel.cp=1 works, or model.mtp_num_layers=null model.mtp_loss_scaling_factor=null"
        yield Problem(key="parallel.cp", value=cp, rule=rule, remedy=remedy)


# ---- experts ---------------------------------------------------------------------------------------------------------


def expert_parallelism_splits_experts(config: Config) -> Iterator[Problem]:
    ep, key, num_experts = config.parallel.ep, "parallel.ep", config.model.num_moe_experts
    if num_experts is None and ep > 1:
        rule = "splits experts over ranks, and this model has none (model.num_moe_experts=null)"
        yield Problem(key=key, value=ep, rule=rule, remedy=f"{key}=1 works")
    elif num_experts is not None and rest(num_experts, ep):
        rule = f"does not divide model.num_moe_experts={num_experts}"
        fitting = filling_the_world(config, "ep", divisors(num_experts)) or divisors(num_experts)
        yield Problem(key=key, value=ep, rule=rule, remedy=nearest(key, ep, fitting))


def expert_tensor_parallelism_splits_experts(config: Config) -> Iterator[Problem]:
    etp, key = config.parallel.etp, "parallel.etp"
    if config.model.num_moe_experts is None:
        if etp is not None:
            rule = "splits experts over ranks, and this model has none (model.num_moe_experts=null)"
            yield Problem(key=key, value=etp, rule=rule, remedy=f"{key}=null works")
        return
    size = config.parallel.tp if etp is None else etp
    width = config.model.moe_ffn_hidden_size
    if width is not None and rest(width, size):
        rule = f"does not split the width of an expert, {width}" + (", and is parallel.tp by default" * (etp is None))
        fitting = filling_the_world(config, "etp", divisors(width)) or divisors(width)
        yield Problem(key=key, value=size, rule=rule, remedy=nearest(key, size, fitting))


def experts_want_sequence_parallelism(config: Config) -> Iterator[Problem]:
    # Source: megatron-core 0.19.2, moe_layer.py:629, which raises in the first forward pass
    parallel = config.parallel
    if config.model.num_moe_experts is not None and parallel.tp > 1 and not parallel.sp:
        rule = f"a model with experts over parallel.tp={parallel.tp} needs sequence parallelism"
        yield Problem(key="parallel.sp", value="false", rule=rule, remedy="parallel.sp=true works")


def filling_the_world(config: Config, axis: str, sizes: list[int]) -> list[int]:
    """Those `sizes` of an axis with which both grids still fill the ranks of the run."""
    now = config.parallel
    others: dict[str, Any] = {"tp": now.tp, "pp": now.pp, "cp": now.cp, "ep": now.ep, "etp": now.etp, "vpp": now.vpp}
    return [size for size in sizes if not Layout.problems(config.world_size, **{**others, axis: size})]


def _unsplit(config: Config, tp: int) -> dict[str, int]:
    """What `tp` tensor-parallel ranks cannot share evenly: name -> number."""
    model = config.model
    if min(tp, model.num_query_groups, model.make_vocab_size_divisible_by) < 1:
        return {}
    numbers = {
        "model.num_attention_heads": model.num_attention_heads,
        "model.ffn_hidden_size": model.ffn_hidden_size,
        "model.moe_shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size or 0,
        "padded vocabulary": plan.padded_vocab_size(model),
    }
    if not model.multi_latent_attention:  # latent attention splits nothing but heads
        numbers["width of queries, keys and values"] = plan.qkv_width(model)
    elif config.cluster.gpu is GpuKind.none:  # but for the layers of the CPU, which split what it compresses to
        numbers["model.q_lora_rank"] = model.q_lora_rank or 0
        compressed = (model.kv_lora_rank or 0) + (model.qk_pos_emb_head_dim or 0)
        numbers["model.kv_lora_rank + model.qk_pos_emb_head_dim"] = compressed
    unsplit = {name: number for name, number in numbers.items() if number % tp}
    # Source: megatron-core 0.19.2, transformer_config.py:1338: with fewer groups than ranks, ranks share a group.
    if not model.multi_latent_attention and model.num_query_groups % tp and tp % model.num_query_groups:
        unsplit["model.num_query_groups"] = model.num_query_groups
    return unsplit
