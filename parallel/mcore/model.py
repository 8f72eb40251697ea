"""The one place where a model is built: its class, layer spec and data-parallel wrapper can change here alone."""

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection

from shardwright.conf.schema import Model
from shardwright.parallel.layout import Layout
from shardwright.parallel.mcore.layers import decoder_block_spec
from shardwright.parallel.mcore.translate import MegatronConfigs


def build_gpt(
    model: Model,
    padded_vocab_size: int,
    configs: MegatronConfigs,
    layout: Layout,
    groups: ProcessGroupCollection,
    device: torch.device,
    rank: int,
    vp_stage: int | None = None,
) -> GPTModel:
    """This rank's part of the GPT decoder, on its device; every rank calls it.

    Args:
        model: architecture.
        padded_vocab_size: rows of the embedding over all TP ranks.
        configs: megatron-core's configs of the run.
        layout, groups: where the ranks stand.
        device: where the parameters go.
        rank: global rank.
        vp_stage: which of the rank's chunks of the model; None where it has one.
    """
    pp_rank = layout.coordinates(rank).pp
    gpt = GPTModel(
        config=configs.transformer,
        transformer_layer_spec=decoder_block_spec(configs.transformer, device, vp_stage),
        vocab_size=padded_vocab_size,
        max_sequence_length=model.max_position_embeddings,
        pre_process=pp_rank == 0 and vp_stage in (None, 0),
        post_process=pp_rank == layout.pp - 1 and vp_stage in (None, layout.vpp - 1),
        vp_stage=vp_stage,
        parallel_output=True,
        share_embeddings_and_output_weights=model.share_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type.value,
        rotary_base=model.rotary_base,
        pg_collection=groups,
    ).to(device)
    # as megatron-core's Float16Module: activations enter and leave in the parameters' format
    return gpt.to(configs.transformer.params_dtype)


def build_chunks(
    model: Model,
    padded_vocab_size: int,
    configs: MegatronConfigs,
    layout: Layout,
    groups: ProcessGroupCollection,
    device: torch.device,
    rank: int,
) -> list[DistributedDataParallel]:
    """This rank's chunks of the model, wrapped for data parallelism: one, or `layout.vpp` that are interleaved.

    Args:
        model, padded_vocab_size, configs, layout, groups, device, rank: as of `build_gpt`.
    """
    chunks: list[DistributedDataParallel] = []
    for vp_stage in range(layout.vpp) if layout.vpp > 1 else [None]:
        gpt = build_gpt(model, padded_vocab_size, configs, layout, groups, device, rank, vp_stage)
        chunks.append(wrap_data_parallel(gpt, configs, groups, is_first=not chunks))
    return chunks


def wrap_data_parallel(
    gpt: GPTModel, configs: MegatronConfigs, groups: ProcessGroupCollection, *, is_first: bool = True
) -> DistributedDataParallel:
    """Give the model its gradient buffers and data-parallel reduction; those of later chunks overlap as a whole."""
    return DistributedDataParallel(
        config=configs.transformer,
        ddp_config=configs.ddp,
        module=gpt,
        disable_bucketing=not is_first,  # as megatron-core's training does
        pg_collection=groups,
    )
