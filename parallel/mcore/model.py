"""The one place where a model is built: its class, layer spec and data-parallel wrapper can change here alone."""

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.full_cuda_graph import get_shared_capture_stream
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection

from shardwright.conf.schema import Config
from shardwright.parallel.layout import Layout
from shardwright.parallel.mcore import initial, optimizers, wgrad_fusion
from shardwright.parallel.mcore.emulated import attach, is_emulated
from shardwright.parallel.mcore.layers import decoder_block_spec, mtp_block_spec
from shardwright.parallel.mcore.loss_in_chunks import loss_in_chunks
from shardwright.parallel.mcore.translate import MegatronConfigs


def build_gpt(
    config: Config,
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
        config: the run.
        padded_vocab_size: rows of the embedding over all TP ranks.
        configs: megatron-core's configs of the run.
        layout, groups: where the ranks stand.
        device: where the parameters go.
        rank: global rank.
        vp_stage: which of the rank's chunks of the model; None where it has one.
    """
    if configs.transformer.gradient_accumulation_fusion:
        wgrad_fusion.install()
    model, pp_rank = config.model, layout.coordinates(rank).pp
    emulated = is_emulated(config.precision)
    gpt = GPTModel(
        config=configs.transformer,
        transformer_layer_spec=decoder_block_spec(configs.transformer, device, vp_stage, emulated=emulated),
        vocab_size=padded_vocab_size,
        max_sequence_length=model.max_position_embeddings,
        pre_process=pp_rank == 0 and vp_stage in (None, 0),
        post_process=pp_rank == layout.pp - 1 and vp_stage in (None, layout.vpp - 1),
        vp_stage=vp_stage,
        parallel_output=True,
        share_embeddings_and_output_weights=model.share_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type.value,
        rotary_base=model.rotary_base,
        rope_scaling=model.rope_scaling,
        rope_scaling_factor=model.rope_scaling_factor or 1.0,
        mtp_block_spec=mtp_block_spec(configs.transformer, device, vp_stage, emulated=emulated),
        pg_collection=groups,
    ).to(device)
    if emulated:
        attach(gpt, config, groups, device)
    initial.draw_weights(gpt, model, config.run.seed)
    if config.execution.cross_entropy_chunks > 1 and gpt.post_process:
        # a checkpointed piece sees its weight without the gradient buffer that fusion would add to
        gpt.output_layer.gradient_accumulation_fusion = False
    # as megatron-core's Float16Module: activations enter and leave in the parameters' format
    return gpt.to(configs.transformer.params_dtype)


def build_chunks(
    config: Config,
    padded_vocab_size: int,
    configs: MegatronConfigs,
    layout: Layout,
    groups: ProcessGroupCollection,
    device: torch.device,
    rank: int,
) -> list[DistributedDataParallel]:
    """This rank's chunks of the model, wrapped for data parallelism: one, or `layout.vpp` that are interleaved.

    Args:
        config, padded_vocab_size, configs, layout, groups, device, rank: as of `build_gpt`.
    """
    chunks: list[DistributedDataParallel] = []
    for vp_stage in range(layout.vpp) if layout.vpp > 1 else [None]:
        gpt = build_gpt(config, padded_vocab_size, configs, layout, groups, device, rank, vp_stage)
        chunks.append(wrap_data_parallel(gpt, configs, groups, is_first=not chunks))
    return chunks


def wrap_data_parallel(
    gpt: GPTModel, configs: MegatronConfigs, groups: ProcessGroupCollection, *, is_first: bool = True
) -> DistributedDataParallel:
    """Give the model its gradient buffers and data-parallel reduction; those of later chunks overlap as a whole.

    Routed experts are marked as such in every layout. megatron-core marks them where the ranks share them out, and then
    has one optimizer for them and one for all else: a checkpoint of one layout would not fit the other.
    """
    for name, parameter in gpt.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False

    def wrapped() -> DistributedDataParallel:
        return DistributedDataParallel(
            config=configs.transformer,
            ddp_config=configs.ddp,
            module=gpt,
            disable_bucketing=not is_first,  # as megatron-core's training does
            pg_collection=groups,
            full_param_layout=optimizers.param_layout(gpt, configs.optimizer, configs.ddp, groups, is_first=is_first),
        )

    recorded = configs.transformer.cuda_graph_impl
    if recorded == "none":
        return wrapped()
    # The wrapper keeps every parameter's AccumulateGrad node, and a node keeps the stream it was made on: a recording
    # fails where that is the default stream. Source: megatron-core 0.19.2, megatron/training/training.py:1870.
    stream = get_shared_capture_stream() if recorded == "full_iteration" else torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        model = wrapped()
    torch.cuda.current_stream().wait_stream(stream)
    return model


def loss_arguments(config: Config, layout: Layout) -> dict[str, Any]:
    """What `GPTModel.forward` gets beside its batch, where output layer and loss are computed in pieces."""
    num_chunks = config.execution.cross_entropy_chunks
    if num_chunks == 1:
        return {}
    return {"output_processor": loss_in_chunks(num_chunks, layout.tp if config.parallel.sp else 1)}
