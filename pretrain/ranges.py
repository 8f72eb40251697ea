"""The range of every number in the schema, and the arithmetic behind "the nearest values that work" in a remedy."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from shardwright.conf.problems import Problem
from shardwright.conf.schema import Config


@dataclass(frozen=True, slots=True)
class Range:
    """Which numbers some keys may hold."""

    rule: str
    accepts: Callable[[float], bool]
    nearest: str
    """The limit, where it is itself allowed."""
    keys: dict[str, str]
    """Section -> names of its keys, separated by blanks."""


RANGES = (
    Range(
        "must be at least 1",
        lambda number: number >= 1,
        "1",
        {
            "run": "seed",
            "model": "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels "
            "vocab_size make_vocab_size_divisible_by max_position_embeddings rotary_base recompute_num_layers "
            "num_moe_experts moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_router_topk "
            "moe_router_num_groups moe_router_group_topk q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim "
            "v_head_dim original_max_position_embeddings mtp_num_layers",
            "parallel": "tp pp vpp cp ep etp num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage "
            "num_distributed_optimizer_instances",
            "precision": "fp8_amax_history_len loss_scale_window hysteresis",
            "data": "seq_length micro_batch_size global_batch_size vocab_size",
            "optimizer": "muon_num_ns_steps",
            "schedule": "train_iters lr_decay_iters lr_wsd_decay_iters",
            "checkpoint": "keep_last",
            "resilience": "distributed_timeout_seconds fp8_guard_steps rollback_patience",
            "telemetry": "log_interval",
            "execution": "cross_entropy_chunks",
            "cluster": "nodes gpus_per_node ranks cpus array_limit chain",
        },
    ),
    Range(
        "must not be negative",
        lambda number: number >= 0,
        "0",
        {
            "model": "moe_router_bias_update_rate moe_aux_loss_coeff moe_z_loss_coeff mscale_all_dim "
            "mtp_loss_scaling_factor",
            "precision": "fp8_margin amax_check_interval num_layers_at_start_in_bf16 num_layers_at_end_in_bf16",
            "data": "num_workers",
            "optimizer": "min_lr weight_decay clip_grad",
            "schedule": "lr_warmup_iters lr_warmup_samples end_weight_decay eval_interval eval_iters",
            "checkpoint": "save_interval load_step keep_every keep_best keep_hours",
            "execution": "cpu_offloading_num_layers gc_interval",
            "resilience": "start_timeout_seconds data_timeout_seconds load_timeout_seconds first_step_timeout_seconds "
            "step_timeout_seconds evaluation_timeout_seconds save_timeout_seconds rollback max_requeues exit_before",
            "telemetry": "straggler_interval fp8_interval",
            "cluster": "signal_seconds in_job_restarts spare_nodes failures_per_gpu_day restart_seconds",
        },
    ),
    Range(
        "must be at least 1",
        lambda number: number >= 1,
        "1.0",
        {"model": "rope_scaling_factor rotary_scaling_factor"},
    ),
    Range(
        "must be above 0",
        lambda number: number > 0,
        "",
        {
            "precision": "loss_scale initial_loss_scale min_loss_scale",
            "model": "layernorm_epsilon init_method_std moe_router_topk_scaling_factor moe_expert_capacity_factor "
            "beta_fast beta_slow mscale",
            "optimizer": "lr adam_eps muon_extra_scale_factor",
            "cluster": "save_stall_seconds",
            "telemetry": "straggler_share fp8_share",
        },
    ),
    Range(
        "must be at least 0 and below 1",
        lambda number: 0 <= number < 1,
        "0",
        {
            "model": "hidden_dropout attention_dropout",
            "optimizer": "adam_beta1 adam_beta2 sgd_momentum muon_momentum",
            "schedule": "lr_warmup_fraction",
        },
    ),
    Range(
        "must be above 0 and at most 1",
        lambda number: 0 < number <= 1,
        "1.0",
        {"cluster": "mfu", "resilience": "fp8_guard_overflow fp8_guard_underflow fp8_guard_share rollback_lr"},
    ),
    Range("must be above 1", lambda number: number > 1, "", {"resilience": "fp8_guard_spike rollback_spike"}),
)


EXAMPLES = {
    "precision.loss_scale": "null follows overflows",
    "precision.initial_loss_scale": "65536 is usual",
    "precision.min_loss_scale": "1.0 is usual",
    "model.layernorm_epsilon": "1.0e-5 is usual",
    "model.init_method_std": "0.02 is usual",
    "model.moe_router_topk_scaling_factor": "null is 1",
    "model.moe_expert_capacity_factor": "null drops no token, 1.25 is usual",
    "model.beta_fast": "32 is usual",
    "model.beta_slow": "1 is usual",
    "model.mscale": "1.0 is usual",
    "optimizer.lr": "for example optimizer.lr=3.0e-4",
    "optimizer.adam_eps": "1.0e-8 is usual",
    "optimizer.muon_extra_scale_factor": "0.2 is usual",
    "cluster.save_stall_seconds": "what a save has taken, for example 10",
    "telemetry.straggler_share": "0.1 is usual",
}
"""What is told of a number whose limit is itself refused."""


def ranged_keys() -> dict[str, Range]:
    """Dotted key -> its range, for every number of the schema."""
    return {
        f"{section}.{name}": allowed
        for allowed in RANGES
        for section, names in allowed.keys.items()
        for name in names.split()
    }


def value_of(config: Config, key: str) -> Any:
    """What `config` holds at a dotted `section.key`."""
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def numbers_in_range(config: Config) -> Iterator[Problem]:
    """A problem for every number outside of its range; null has none."""
    for key, allowed in ranged_keys().items():
        number = value_of(config, key)
        if number is not None and not allowed.accepts(number):
            remedy = f"{key}={allowed.nearest} works" if allowed.nearest else EXAMPLES[key]
            yield Problem(key=key, value=number, rule=allowed.rule, remedy=remedy)


def rest(number: int, divisor: int) -> int:
    """`number % divisor`; 0 where either is out of range, which is reported elsewhere."""
    return number % divisor if number >= 1 and divisor >= 1 else 0


def multiples(key: str, number: int, of: int) -> str:
    """A remedy: the multiples of `of` on both sides of `number`."""
    below, above = number // of * of, -(-number // of) * of
    return works(key, [below, above])


def nearest(key: str, number: int, fitting: Iterable[int]) -> str:
    """A remedy: the members of `fitting` on both sides of `number`."""
    fitting = list(fitting)
    below, above = [fit for fit in fitting if fit < number], [fit for fit in fitting if fit > number]
    return works(key, below[-1:] + above[:1])


def divisors(number: int) -> list[int]:
    """All divisors, ascending; none of a number below 1."""
    small = [part for part in range(1, math.isqrt(max(number, 0)) + 1) if number % part == 0]
    return sorted({*small, *(number // part for part in small)})


def works(key: str, values: Iterable[int]) -> str:
    """`key=2 or key=4 works`, without zeros and repetitions."""
    choices = [f"{key}={value}" for value in dict.fromkeys(values) if value > 0]
    return f"{' or '.join(choices)} works" if choices else ""
