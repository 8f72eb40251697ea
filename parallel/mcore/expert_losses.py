"""The auxiliary losses of a model with experts, as a person wants to see them; they are no part of the loss.

megatron-core's routers record them in a tracker of the process during the forward pass. Here they are read once a step.
"""

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""Kind of load balancing -> name of its loss in megatron-core's tracker (moe/router.py)."""


def names(config: TransformerConfig) -> list[str]:
    """Losses that the routers of every layer with experts record."""
    if config.num_moe_experts is None:
        return []
    balancing = [NAMES[config.moe_router_load_balancing_type]] if config.moe_aux_loss_coeff else []
    return balancing + (["z_loss"] if config.moe_z_loss_coeff else [])


def collect(config: TransformerConfig, groups: ProcessGroupCollection, num_microbatches: int) -> dict[str, float]:
    """Each loss, unweighted, as the mean over layers with experts, micro-batches and data-parallel ranks.

    A balancing loss is 1 where all experts get equally much, and at most `num_moe_experts / moe_router_topk`.

    Collective: all-reduces over pp, tp-cp and dp, on every rank alike, also on stages without experts.
    """
    wanted = names(config)
    if not wanted:
        return {}
    losses: dict[str, float] = {}
    get_moe_metrics_tracker().report(
        loss_scale=1 / num_microbatches,
        iteration=0,
        force_initialize=True,
        track_names=wanted,
        num_layers=config.num_layers,
        moe_layer_freq=config.moe_layer_freq,
        mtp_num_layers=config.mtp_num_layers,
        total_loss_dict=losses,
        pg_collection=groups,
    )
    return {name: float(value) for name, value in losses.items()}
