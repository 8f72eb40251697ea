"""The yardstick: megatron-core's own step, with nothing of ours around it.

The same model, data-parallel wrapper, optimizer and schedule as `engine.Engine`, with the same settings (`translate`),
fed with micro-batches that are already on the device. It takes no measurements, reduces no loss, writes nothing, and
waits for nothing that megatron-core itself does not wait for. What the engine and the loop around it cost is their time
per step against this one's; that both do the same work is seen by their losses (`tests/distributed/test_bare.py`).
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection

from shardwright.conf.schema import Config
from shardwright.data.loader import Batch
from shardwright.parallel.layout import Layout
from shardwright.parallel.mcore import optimizers
from shardwright.parallel.mcore.context import own_pieces
from shardwright.parallel.mcore.model import build_chunks, loss_arguments
from shardwright.parallel.mcore.translate import megatron_configs


def bare_step(
    config: Config,
    layout: Layout,
    groups: ProcessGroupCollection,
    device: torch.device,
    rank: int,
    padded_vocab_size: int,
) -> Callable[[list[Batch]], torch.Tensor]:
    """Build model and optimizer of this rank, and the function that makes one optimizer step; every rank calls it.

    Returns:
        A function from this data-parallel rank's micro-batches, on the device, to its sums [loss, tokens], on the
        device too; zeros but on the last pipeline stage. The learning rate is `optimizer.lr` always.
    """
    configs = megatron_configs(config, layout, device)
    transformer = configs.transformer
    chunks = build_chunks(config, padded_vocab_size, configs, layout, groups, device, rank)
    optimizer, _ = optimizers.build(config, configs.optimizer, chunks)
    for group in optimizer.param_groups:  # megatron-core leaves that to its scheduler: without one, norms decay too
        group["lr"] = config.optimizer.lr * group["lr_mult"]
        group["weight_decay"] = config.optimizer.weight_decay * group["wd_mult"]
    transformer.grad_scale_func = optimizer.scale_loss
    transformer.finalize_model_grads_func = partial(finalize_model_grads, pg_collection=groups)
    if config.parallel.overlap_grad_reduce:
        no_sync, grad_sync = [chunk.no_sync for chunk in chunks], [chunk.start_grad_sync for chunk in chunks]
        transformer.no_sync_func = no_sync if layout.vpp > 1 else no_sync[0]
        transformer.grad_sync_func = grad_sync if layout.vpp > 1 else grad_sync[0]
    forward_backward = get_forward_backward_func()
    forward = partial(_forward, loss_arguments(config, layout))

    def step(microbatches: list[Batch]) -> torch.Tensor:
        own = [own_pieces(batch, layout.cp, groups.cp.rank()) for batch in microbatches]
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        reports = forward_backward(
            forward_step_func=forward,
            data_iterator=[iter(own) for _ in chunks],
            model=chunks,
            num_microbatches=len(microbatches),
            seq_length=config.data.seq_length,
            micro_batch_size=config.data.micro_batch_size,
            forward_only=False,
        )
        optimizer.step()
        return torch.stack([report["sums"] for report in reports]).sum(0) if reports else torch.zeros(2, device=device)

    return step


def _forward(arguments: dict[str, Any], batches: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    batch = next(batches)
    inputs = batch["tokens"], batch["position_ids"], None
    losses = model(*inputs, labels=batch["labels"], loss_mask=batch["loss_mask"], **arguments)
    return losses, partial(_loss, batch)


def _loss(batch: Batch, loss_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of unmasked token losses, their count, and both for the report."""
    loss_sum, num_tokens = (loss_BS.float() * batch["loss_mask"]).sum(), batch["loss_mask"].sum()
    return loss_sum, num_tokens.to(torch.int), {"sums": torch.stack([loss_sum.detach(), num_tokens])}
