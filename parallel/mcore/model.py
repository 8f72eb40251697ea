"""The one place where a model is built: its class, layer spec and data-parallel wrapper can change here alone."""

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection

from shardwright.conf.schema_model import Model
from shardwright.parallel.layout import Layout
from shardwright.parallel.mcore.layers import decoder_block_spec, mtp_block_spec
from shardwright.parallel.mcore.translate import MegatronConfigs


def build_gpt(
    model: Model,
    padded_vocab_size: int,
    configs: MegatronConfigs,
    layout: Layout,
    groups: ProcessGroupCollection,
    device: torch.device,
    rank: int,
) -> GPTModel:
    """This rank's part of the GPT decoder, on its device; every rank calls it.

    Args:
        model: architecture.
        padded_vocab_size: rows of the embedding over all TP ranks.
        configs: megatron-core's configs of the run.
        layout, groups: where the ranks stand.
        device: where the parameters go.
        rank: global rank.
    """
    pp_rank = layout.coordinates(rank).pp
    gpt = GPTModel(
        config=configs.transformer,
        transformer_layer_spec=decoder_block_spec(configs.transformer, device),
        vocab_size=padded_vocab_size,
        max_sequence_length=model.max_position_embeddings,
        pre_process=pp_rank == 0,
        post_process=pp_rank == layout.pp - 1,
        parallel_output=True,
        share_embeddings_and_output_weights=model.share_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type.value,
        rotary_base=model.rotary_base,
        rope_scaling=model.rope_scaling,
        rope_scaling_factor=model.rope_scaling_factor or 1.0,
        mtp_block_spec=mtp_block_spec(configs.transformer, device),
        pg_collection=groups,
    ).to(device)
    # as megatron-core's Float16Module: activations enter and leave in the parameters' format
    return gpt.to(configs.transformer.params_dtype)


def wrap_data_parallel(
    gpt: GPTModel, configs: MegatronConfigs, groups: ProcessGroupCollection
) -> DistributedDataParallel:
    """Give the model its gradient buffers and data-parallel reduction.

    Routed experts are marked as such in every layout. megatron-core marks them where the ranks share them out, and then
    has one optimizer for them and one for all else: a checkpoint of one layout would not fit the other.
    """
    for name, parameter in gpt.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False
    return DistributedDataParallel(config=configs.transformer, ddp_config=configs.ddp, module=gpt, pg_collection=groups)
