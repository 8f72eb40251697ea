"""Rules of the model: positions, experts, latent attention, multi-token prediction; `checks` lists them.

megatron-core ignores or asserts on most of what is refused here, an hour into a queue or on every rank at once.
"""

from collections.abc import Iterator

from shardwright.conf.choices import LoadBalancing, PositionEmbedding, RopeType, ScoreFunction, TokenDispatcher
from shardwright.conf.compose import shown
from shardwright.conf.problems import Problem
from shardwright.conf.schema import Config
from shardwright.conf.schema_model import Model, layer_pattern
from shardwright.pretrain.checks_fp8 import recipe_of
from shardwright.pretrain.ranges import divisors, nearest

WIDTHS = {"moe_ffn_hidden_size": "for example 1024", "moe_router_topk": "for example 2"}
"""What experts cannot be without, with an example of each."""
EXPERT_OPTIONS = {
    "moe_shared_expert_intermediate_size": None,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_router_topk_scaling_factor": None,
    "moe_router_enable_expert_bias": False,
    "moe_router_load_balancing_type": LoadBalancing.none,
    "moe_aux_loss_coeff": 0.0,
    "moe_z_loss_coeff": None,
    "moe_expert_capacity_factor": None,
    "moe_pad_expert_input_to_capacity": False,
    "moe_router_padding_for_quantization": False,
}
"""What a model without experts has in their other keys, as far as a user would expect something of a change."""
LATENT = ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rope_type")
"""What latent attention cannot be without."""
YARN = (
    "rotary_scaling_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)


def experts_are_complete(config: Config) -> Iterator[Problem]:
    model = config.model
    if model.num_moe_experts is None:
        neutral = dict.fromkeys(WIDTHS) | EXPERT_OPTIONS
        yield from _only_with(model, neutral, "model.num_moe_experts", "for example model.num_moe_experts=8")
    else:
        yield from _needed(model, WIDTHS, f"model.num_moe_experts={model.num_moe_experts} needs it")
        if model.add_bias_linear:
            rule, remedy = "experts have no biases", "model.add_bias_linear=false works"
            yield Problem(key="model.add_bias_linear", value="true", rule=rule, remedy=remedy)


def expert_layers_are_layers(config: Config) -> Iterator[Problem]:
    model = config.model
    if model.num_moe_experts is None or model.num_layers < 1:
        return
    key, text, remedy = "model.moe_layer_freq", model.moe_layer_freq, f"'[0]+[1]*{model.num_layers - 1}' or 1 works"
    try:
        pattern = layer_pattern(text, model.num_layers)
    except ValueError as error:
        yield Problem(key=key, value=text, rule=str(error), remedy=remedy)
        return
    if not any(pattern):
        rule = f"leaves no layer to the {model.num_moe_experts} experts"
        yield Problem(key=key, value=text, rule=rule, remedy=f"{remedy}, or model.num_moe_experts=null")


def tokens_find_experts(config: Config) -> Iterator[Problem]:
    model, key = config.model, "model.moe_router_topk"
    experts, topk = model.num_moe_experts, model.moe_router_topk
    if experts is None or topk is None or min(experts, topk) < 1:
        return
    if topk > experts:
        rule = f"sends a token to more experts than model.num_moe_experts={experts}"
        yield Problem(key=key, value=topk, rule=rule, remedy=f"{key}={experts} or less works")
    elif topk == 1 and model.moe_router_score_function is ScoreFunction.softmax and not model.moe_router_pre_softmax:
        rule = "softmax over the one expert chosen is 1 always, and the router would get no gradient"
        yield Problem(key=key, value=topk, rule=rule, remedy="model.moe_router_pre_softmax=true works")


def groups_divide_experts(config: Config) -> Iterator[Problem]:
    model = config.model
    experts, number, chosen = model.num_moe_experts, model.moe_router_num_groups, model.moe_router_group_topk
    if experts is None or (number is None and chosen is None):
        return
    if number is None or chosen is None:
        key = "moe_router_num_groups" if number is None else "moe_router_group_topk"
        rule = "group-limited routing needs both numbers: groups, and groups that a token may use"
        yield Problem(key=f"model.{key}", value="null", rule=rule, remedy="or neither of the two")
        return
    topk = model.moe_router_topk or 0
    if min(experts, number, chosen, topk) < 1:
        return
    key = "model.moe_router_num_groups"
    if experts % number:
        rule = f"does not divide model.num_moe_experts={experts}"
        yield Problem(key=key, value=number, rule=rule, remedy=nearest(key, number, divisors(experts)))
        return
    key = "model.moe_router_group_topk"
    # Source: megatron-core 0.19.2, group_limited_topk (moe_utils.py): a group's score is the sum of its best
    # topk // group_topk experts, so of none where a token may use more groups than experts.
    fitting = [size for size in divisors(topk) if size <= number and size * (experts // number) >= topk]
    if chosen not in fitting:
        rule = (
            f"must divide model.moe_router_topk={topk}, be at most model.moe_router_num_groups={number}, "
            f"and leave room for {topk} experts in groups of {experts // number}"
        )
        yield Problem(key=key, value=chosen, rule=rule, remedy=nearest(key, chosen, fitting))


def load_is_balanced_one_way(config: Config) -> Iterator[Problem]:
    model = config.model
    if model.num_moe_experts is None:
        return
    kind, weight = model.moe_router_load_balancing_type, model.moe_aux_loss_coeff
    if (kind is LoadBalancing.none) != (weight == 0):
        without = kind is LoadBalancing.none
        rule = (
            "has no loss to weigh: model.moe_router_load_balancing_type=none" if without else f"leaves {kind.name} out"
        )
        remedy = "0 works, or model.moe_router_load_balancing_type=aux_loss" if without else "1.0e-2 is usual"
        yield Problem(key="model.moe_aux_loss_coeff", value=weight, rule=rule, remedy=remedy)
    if model.moe_router_enable_expert_bias and model.moe_router_score_function is not ScoreFunction.sigmoid:
        rule = "is for sigmoid scores alone"
        remedy = "model.moe_router_score_function=sigmoid works"
        yield Problem(key="model.moe_router_enable_expert_bias", value="true", rule=rule, remedy=remedy)


def capacity_has_its_options(config: Config) -> Iterator[Problem]:
    model = config.model
    if model.num_moe_experts is None:
        return
    if model.moe_pad_expert_input_to_capacity and model.moe_expert_capacity_factor is None:
        rule, remedy = "needs a capacity to pad to", "model.moe_expert_capacity_factor=1.25 works"
        yield Problem(key="model.moe_pad_expert_input_to_capacity", value="true", rule=rule, remedy=remedy)
    if model.moe_pad_expert_input_to_capacity and model.moe_token_dispatcher_type is TokenDispatcher.flex:
        # Source: megatron-core 0.19.2, transformer_config.py:1601
        rule, remedy = "does not pad to a capacity", "model.moe_token_dispatcher_type=alltoall works"
        yield Problem(key="model.moe_token_dispatcher_type", value="flex", rule=rule, remedy=remedy)
    if model.moe_router_padding_for_quantization and recipe_of(config) is None:
        rule, remedy = "is for FP8 and FP4 alone", "false works, or precision=fp8_delayed"
        yield Problem(key="model.moe_router_padding_for_quantization", value="true", rule=rule, remedy=remedy)
    if model.moe_router_padding_for_quantization and model.moe_token_dispatcher_type is TokenDispatcher.allgather:
        rule, remedy = "does not pad for FP8", "model.moe_token_dispatcher_type=alltoall works"
        yield Problem(key="model.moe_token_dispatcher_type", value="allgather", rule=rule, remedy=remedy)


def latent_attention_is_complete(config: Config) -> Iterator[Problem]:
    model, key = config.model, "model.multi_latent_attention"
    if not model.multi_latent_attention:
        yield from _only_with(model, dict.fromkeys(("q_lora_rank", *LATENT, *YARN)), key, f"{key}=true")
        return
    yield from _needed(model, dict.fromkeys(LATENT, "model=deepseek_v3 has it"), f"{key}=true needs it")
    if model.rope_type is RopeType.yarn:
        yield from _needed(model, dict.fromkeys(YARN, "model=deepseek_v3 has it"), "model.rope_type=yarn needs it")
    elif model.rope_type is RopeType.rope:
        yield from _only_with(model, dict.fromkeys(YARN), "model.rope_type=yarn", "model.rope_type=yarn")
    if model.num_query_groups != model.num_attention_heads:
        rule, heads = "latent attention gives every head keys and values of its own", model.num_attention_heads
        remedy = f"model.num_query_groups={heads} works"
        yield Problem(key="model.num_query_groups", value=model.num_query_groups, rule=rule, remedy=remedy)
    if model.position_embedding_type is not PositionEmbedding.rope:
        rule, remedy = "latent attention has rotary positions", "model.position_embedding_type=rope works"
        yield Problem(
            key="model.position_embedding_type", value=model.position_embedding_type.name, rule=rule, remedy=remedy
        )
    if model.qk_layernorm and model.q_lora_rank is None:
        rule = "normalises compressed queries, and model.q_lora_rank=null compresses none"
        yield Problem(key="model.qk_layernorm", value="true", rule=rule, remedy="model.q_lora_rank=512 works")
    for name in ("add_qkv_bias", "rope_scaling"):
        if getattr(model, name):
            rule = "is not for latent attention"
            yield Problem(key=f"model.{name}", value="true", rule=rule, remedy=f"model.{name}=false works")
    if (model.qk_pos_emb_head_dim or 0) % 2:
        rule = "rotary positions need pairs"
        yield Problem(key="model.qk_pos_emb_head_dim", value=model.qk_pos_emb_head_dim, rule=rule)


def long_sequences_have_their_factor(config: Config) -> Iterator[Problem]:
    model, key = config.model, "model.rope_scaling_factor"
    if model.rope_scaling and model.rope_scaling_factor is None:
        yield Problem(key=key, value="null", rule="model.rope_scaling=true needs it", remedy=f"{key}=8 works")
    if not model.rope_scaling:
        yield from _only_with(
            model, {"rope_scaling_factor": None}, "model.rope_scaling=true", "model.rope_scaling=true"
        )
    elif model.position_embedding_type is not PositionEmbedding.rope:
        rule, remedy = "stretches rotary positions, and these are learned", "model.rope_scaling=false works"
        yield Problem(key="model.rope_scaling", value="true", rule=rule, remedy=remedy)


def further_tokens_are_weighed(config: Config) -> Iterator[Problem]:
    model, key = config.model, "model.mtp_loss_scaling_factor"
    if model.mtp_num_layers is None:
        yield from _only_with(
            model, {"mtp_loss_scaling_factor": None}, "model.mtp_num_layers", "model.mtp_num_layers=1"
        )
        return
    if model.mtp_loss_scaling_factor is None:
        rule = f"model.mtp_num_layers={model.mtp_num_layers} needs it"
        yield Problem(key=key, value="null", rule=rule, remedy=f"{key}=0.3 works")
    if model.mtp_num_layers >= config.data.seq_length:
        rule = f"looks further ahead than data.seq_length={config.data.seq_length}"
        yield Problem(key="model.mtp_num_layers", value=model.mtp_num_layers, rule=rule, remedy="1 is usual")
    if model.position_embedding_type is not PositionEmbedding.rope:
        # Source: megatron-core 0.19.2, megatron/training/arguments.py:857
        rule, remedy = "multi-token prediction needs rotary positions", "model.position_embedding_type=rope works"
        yield Problem(
            key="model.position_embedding_type", value=model.position_embedding_type.name, rule=rule, remedy=remedy
        )


def _needed(model: Model, keys: dict[str, str], rule: str) -> Iterator[Problem]:
    """A problem for each of `keys` without a value; each has its remedy."""
    for name, remedy in keys.items():
        if getattr(model, name) is None:
            yield Problem(key=f"model.{name}", value="null", rule=rule, remedy=remedy)


def _only_with(model: Model, neutral: dict[str, object], what: str, with_what: str) -> Iterator[Problem]:
    """A problem for each key that is not as `neutral` has it, since nothing would read it."""
    for name, value in neutral.items():
        found = getattr(model, name)
        if found != value:
            rule = f"is read only with {what}"
            remedy = f"model.{name}={shown(value)} works, or {with_what}"
            yield Problem(key=f"model.{name}", value=shown(found), rule=rule, remedy=remedy)


RULES = (
    experts_are_complete,
    expert_layers_are_layers,
    tokens_find_experts,
    groups_divide_experts,
    load_is_balanced_one_way,
    capacity_has_its_options,
    latent_attention_is_complete,
    long_sequences_have_their_factor,
    further_tokens_are_weighed,
)
