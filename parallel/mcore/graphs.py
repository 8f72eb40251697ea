"""CUDA graphs: kernels are recorded in the first steps and replayed from then on, without the host's launches.

Three ways, all megatron-core's. `local` records every layer inside its schedules and needs nothing from here but its
random-number tracker. `transformer_engine` records every layer at one moment between two steps. `full_iteration`
records forward and backward of all micro-batches, for training and evaluation apart.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import num_microbatches_calculator
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

from shardwright.conf.choices import CudaGraph
from shardwright.conf.schema import Config

WARMUP_STEPS = 3
"""Steps before the recording: kernels are chosen and buffers come to their place in them."""


class Graphs:
    """The recording of one engine; every method is called by all ranks together.

    Args:
        config: the run.
        models: model chunks of this rank, wrapped for data parallelism.
        optimizer: megatron-core's.
        groups: megatron-core's groups.
        dp_size: data-parallel ranks.
    """

    def __init__(
        self, config: Config, models: list[Any], optimizer: Any, groups: ProcessGroupCollection, dp_size: int
    ) -> None:
        self._impl, self._models, self._steps = config.execution.cuda_graph_impl, models, 0
        self._hooked = config.parallel.overlap_param_gather
        self._recorder: TECudaGraphHelper | None = None
        if self._impl is CudaGraph.transformer_engine:
            if num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR is None:
                num_microbatches_calculator.init_num_microbatches_calculator(
                    rank=1,  # rank 0 prints
                    rampup_batch_size=None,
                    global_batch_size=config.data.global_batch_size,
                    micro_batch_size=config.data.micro_batch_size,
                    data_parallel_size=dp_size,
                )
            self._recorder = TECudaGraphHelper(
                model=models,
                config=models[0].config,
                seq_length=config.data.seq_length,
                micro_batch_size=config.data.micro_batch_size,
                optimizers=[optimizer],
                pg_collection=groups,
            )

    def wrap(self, forward_backward: Callable[..., Any]) -> Callable[..., Any]:
        """The schedule, recorded as a whole where that is asked for."""
        if self._impl is not CudaGraph.full_iteration:
            return forward_backward
        wrapped: Callable[..., Any] = FullCudaGraphWrapper(
            forward_backward, cuda_graph_warmup_steps=WARMUP_STEPS, use_single_mempool=True
        )
        return wrapped

    def before_step(self) -> None:
        """Record the layers when the warm-up is over."""
        if self._recorder is not None and self._steps == WARMUP_STEPS:
            self._hooks("disable_forward_pre_hook", param_sync=False)
            self._recorder.create_cudagraphs()
            self._hooks("enable_forward_pre_hook")
            if self._hooked:
                self._recorder.cuda_graph_set_manual_hooks()
            torch.cuda.synchronize()
        self._steps += 1

    def _hooks(self, method: str, **arguments: Any) -> None:
        if self._hooked:
            for model in self._models:
                getattr(model, method)(**arguments)
