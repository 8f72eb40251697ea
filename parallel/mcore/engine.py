"""One optimizer step, one evaluation: megatron-core's schedules around its GPT model, for every layout and device.

The loss is a mean over the unmasked tokens of the global batch: every micro-batch contributes the sum of its token
losses (`calculate_per_token_loss`, three-value loss function). So it does not depend on how the batch is split over
micro-batches and data-parallel ranks. megatron-core would divide all gradients by the number of tokens once they are
summed, a pass over the whole gradient buffer; here the ranks count the tokens first, and the loss is divided before its
backward pass.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch.profiler import record_function

from shardwright.conf.choices import CudaGraph, NonFiniteAmax
from shardwright.conf.schema import Config
from shardwright.data.loader import Batch
from shardwright.parallel.layout import Layout
from shardwright.parallel.mcore import expert_losses, fp8_state, optimizers, wgrad_fusion
from shardwright.parallel.mcore.context import own_pieces
from shardwright.parallel.mcore.expert_load import ExpertLoad
from shardwright.parallel.mcore.graphs import Graphs
from shardwright.parallel.mcore.groups import Groups
from shardwright.parallel.mcore.model import build_chunks, loss_arguments
from shardwright.parallel.mcore.narrow import NarrowLinears
from shardwright.parallel.mcore.translate import megatron_configs

FORWARD_AND_BACKWARD, UPDATE = "forward and backward", "update"
"""Parts of a step in a profiler's trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one optimizer step came to; equal on all ranks."""

    loss: float
    """Mean over the unmasked tokens of the global batch."""
    num_tokens: int
    """Unmasked tokens of the global batch."""
    grad_norm: float | None
    """Global norm before clipping; None where fp16 gradients overflowed."""
    updated: bool
    """Whether the weights moved: not after an overflow, nor with a loss or norm that is not finite."""
    loss_scale: float | None
    """Loss scale of this update; None without fp16."""
    non_finite_ranks: tuple[int, ...] | None
    """None where loss and norm are finite; else the ranks whose own loss was not, none if it was the gradients."""
    non_finite_amaxes: tuple[tuple[int, str], ...]
    """Rank and tensor of every NaN and infinity that was quantised under delayed scaling."""
    expert_losses: dict[str, float]
    """Auxiliary losses of a model with experts, unweighted, by megatron-core's names; none of another."""
    expert_load: dict[str, float]
    """How evenly tokens were shared out over experts; nothing of a model without them."""


class _NonFiniteNormError(Exception):
    """The gradient norm is not finite, on all ranks alike; raised in the optimizer's step before a weight moves."""

    def __init__(self, norm: float) -> None:
        super().__init__(f"gradient norm {norm}")
        self.norm = norm


class Engine:
    """Model, optimizer and schedule of this rank; every method is called by all ranks together.

    Args:
        config: the run.
        layout, groups: where the ranks stand.
        device: this rank's device.
        rank: global rank.
        padded_vocab_size: rows of the embedding over all TP ranks.
    """

    def __init__(
        self,
        config: Config,
        layout: Layout,
        groups: Groups,
        device: torch.device,
        rank: int,
        padded_vocab_size: int,
    ) -> None:
        self.config, self.layout, self.device = config, layout, device
        self.groups, self.control_group = groups.model, groups.control
        self.on_part: Callable[[str], None] = lambda part: None
        """Told where a step stands: before its first collective, and before its update."""
        self.device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        self.is_last_stage = layout.coordinates(rank).pp == layout.pp - 1
        configs = megatron_configs(config, layout, device)
        self.transformer_config = configs.transformer
        self.chunks = build_chunks(config, padded_vocab_size, configs, layout, self.groups, device, rank)
        if device.type == "cuda":
            fp8_state.install()
        self.narrow = NarrowLinears(config, layout, groups, self.chunks, rank)
        self.optimizer_config = configs.optimizer
        self.optimizer, self.parameter_groups = optimizers.build(config, configs.optimizer, self.chunks)
        self._refuse_non_finite_norms()
        self._expert_load = ExpertLoad(configs.transformer, self.chunks, device)
        self._graphs = Graphs(config, self.chunks, self.optimizer, self.groups, layout.dp)
        self._forward_backward = self._graphs.wrap(get_forward_backward_func())
        self._loss = loss_arguments(config, layout)
        transformer = configs.transformer
        self._per_token = torch.ones([], device=device)
        transformer.grad_scale_func = self._scale_loss
        transformer.finalize_model_grads_func = self._finalize_gradients
        if config.parallel.overlap_grad_reduce:
            # with several chunks lists, of which megatron-core takes each chunk's own
            no_sync = [chunk.no_sync for chunk in self.chunks]
            grad_sync = [chunk.start_grad_sync for chunk in self.chunks]
            transformer.no_sync_func = no_sync if layout.vpp > 1 else no_sync[0]
            if layout.pp > 1:
                transformer.grad_sync_func = grad_sync if layout.vpp > 1 else grad_sync[0]

    @property
    def model(self) -> DistributedDataParallel:
        """The one chunk of a rank without interleaved stages."""
        (chunk,) = self.chunks
        return chunk

    def train_step(self, microbatches: list[Batch], lr: float, weight_decay: float) -> StepResult:
        """Forward, backward, reduce, clip, update.

        Args:
            microbatches: this data-parallel rank's micro-batches of the step.
            lr: learning rate of this update.
            weight_decay: weight decay of this update, where a parameter group has one.

        Collective: all groups; all ranks call it with equally many micro-batches.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_mult"]
            group["weight_decay"] = weight_decay * group["wd_mult"]
        microbatches = self._own_pieces(microbatches)
        self._graphs.before_step()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss_scale = self.optimizer.get_loss_scale() if self.transformer_config.fp16 else None
        self.on_part(FORWARD_AND_BACKWARD)
        with record_function(FORWARD_AND_BACKWARD):
            self._count_tokens(microbatches)
            own = self._run(microbatches, forward_only=False)
            reduced = self._reduce(own.clone())
        grad_norm: float | None
        self.on_part(UPDATE)
        non_finite_amaxes = self.narrow.take_non_finite()
        with record_function(UPDATE):
            try:
                updated, grad_norm = False, None
                if not non_finite_amaxes or self.config.precision.on_non_finite_amax is NonFiniteAmax.keep_scale:
                    updated, grad_norm, _ = self.optimizer.step()
            except _NonFiniteNormError as error:
                updated, grad_norm = False, error.norm
        loss_sum, num_tokens = reduced.tolist()
        finite = math.isfinite(loss_sum) and (grad_norm is None or math.isfinite(grad_norm))
        return StepResult(
            loss=loss_sum / max(num_tokens, 1),
            num_tokens=int(num_tokens),
            grad_norm=None if grad_norm is None else float(grad_norm),
            updated=bool(updated),
            loss_scale=None if loss_scale is None else float(loss_scale),
            non_finite_amaxes=non_finite_amaxes,
            non_finite_ranks=None if finite else self._ranks_with_non_finite(own),
            expert_losses=expert_losses.collect(self.transformer_config, self.groups, len(microbatches)),
            expert_load=self._expert_load.collect(),
        )

    def _own_pieces(self, microbatches: list[Batch]) -> list[Batch]:
        """What this context-parallel rank holds of its data-parallel rank's sequences."""
        return [own_pieces(batch, self.layout.cp, self.groups.cp.rank()) for batch in microbatches]

    def _count_tokens(self, microbatches: list[Batch]) -> None:
        """Know 1 / (unmasked tokens of the global batch) on the device before the first backward pass.

        Args:
            microbatches: what this rank holds.

        Collective: all-reduce(SUM) over dp-cp, of one number; the host does not wait.
        """
        num_tokens = torch.stack([batch["loss_mask"].sum() for batch in microbatches]).sum()
        num_tokens = num_tokens.to(self.device, non_blocking=True)
        if self.groups.dp_cp.size() > 1:  # a collective of one rank takes a turn of its thread all the same
            dist.all_reduce(num_tokens, group=self.groups.dp_cp)
        self._per_token.copy_(num_tokens.clamp(min=1).reciprocal())

    def _scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The sum of token losses as what is differentiated: a share of the mean, times fp16's loss scale."""
        scaled: torch.Tensor = self.optimizer.scale_loss(loss * self._per_token)
        return scaled

    def _finalize_gradients(self, model: list[Any], _num_tokens: torch.Tensor, **arguments: Any) -> None:
        """megatron-core's, without its division by tokens."""
        finalize_model_grads(model, None, **{**arguments, "pg_collection": self.groups})

    def _refuse_non_finite_norms(self) -> None:
        """Look at the norm inside the optimizer's step, where megatron-core waits for it anyway, before it is used."""
        norm_of = self.optimizer.get_grad_norm

        def finite_norm() -> float:
            norm = float(norm_of())
            if not math.isfinite(norm):
                raise _NonFiniteNormError(norm)
            return norm

        self.optimizer.get_grad_norm = finite_norm

    def _ranks_with_non_finite(self, own: torch.Tensor) -> tuple[int, ...]:
        """Ranks whose own loss is not finite. Collective: all-gather over the world's control group."""
        flags: list[bool] = [False] * self.layout.world_size
        dist.all_gather_object(flags, not bool(own.isfinite().all()), group=self.control_group)
        return tuple(rank for rank, flag in enumerate(flags) if flag)

    @torch.no_grad()
    def evaluate(self, batches: Iterator[list[Batch]]) -> tuple[float, int]:
        """Mean loss over the unmasked tokens of `batches`, and their number; weights and RNG stay as they were."""
        hooked = self.config.parallel.overlap_param_gather
        for chunk in self.chunks:
            if hooked:
                chunk.disable_forward_pre_hook()
            chunk.eval()
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        for microbatches in batches:
            total += self._run(self._own_pieces(microbatches), forward_only=True)
        for chunk in self.chunks:
            chunk.train()
            if hooked:
                chunk.enable_forward_pre_hook()
        loss_sum, num_tokens = self._reduce(total).tolist()
        return loss_sum / max(num_tokens, 1), int(num_tokens)

    def gather_parameters(self) -> None:
        """Finish the parameter gather that overlaps with the next forward, so that weights can be read now."""
        if self.config.parallel.overlap_param_gather:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)

    def kernels(self) -> dict[str, str]:
        """Which implementations are in use, for people."""
        on_gpu = self.device.type == "cuda"
        layers = f"Transformer Engine {version('transformer-engine')}" if on_gpu else "megatron-core local"
        transformer, execution = self.transformer_config, self.config.execution
        loss = "megatron-core, unfused"
        if transformer.cross_entropy_loss_fusion:
            loss = {"te": "Transformer Engine", "native": "megatron-core, fused"}[transformer.cross_entropy_fusion_impl]
        if execution.cross_entropy_chunks > 1:
            loss += f" in {execution.cross_entropy_chunks} chunks"
        fused = wgrad_fusion.install() if transformer.gradient_accumulation_fusion else None
        return {
            "layers": layers,
            "attention": f"{layers}, {execution.attention_backend.name}" if on_gpu else "megatron-core, unfused",
            "cross_entropy": loss,
            "weight gradients": f"fused with their sum, {fused}" if fused else "summed apart",
            **({} if execution.cuda_graph_impl is CudaGraph.none else {"graphs": execution.cuda_graph_impl.name}),
            "optimizer": optimizers.kernel_names(self.optimizer),
            "communication": dist.get_backend(),
        }

    def memory(self) -> dict[str, int]:
        """Bytes that this rank holds for good: weights, gradient buffers, optimizer state and main weights."""
        buffers = [part for chunk in self.chunks for part in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        parameters = [parameter for chunk in self.chunks for parameter in chunk.parameters()]
        weights = {p.data_ptr(): p.numel() * p.element_size() for p in parameters}
        return {
            "weights_bytes": sum(weights.values()),
            "gradients_bytes": sum(b.grad_data.numel() * b.grad_data.element_size() for b in buffers),
            "optimizer_bytes": optimizers.state_bytes(self.optimizer, self.optimizer_config),
        }

    def _run(self, microbatches: list[Batch], *, forward_only: bool) -> torch.Tensor:
        """One pass of the pipeline schedule; this stage's sums [loss, tokens] in float64, zeros before the last.

        Args:
            microbatches: what this rank holds.
        """
        reports = self._forward_backward(
            forward_step_func=self._forward,
            data_iterator=[iter(microbatches) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(microbatches),
            seq_length=self.config.data.seq_length,
            micro_batch_size=self.config.data.micro_batch_size,
            forward_only=forward_only,
        )
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        for report in reports:
            total += report["sums"]
        return total

    def _forward(self, batches: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        batch = {name: tensor.to(self.device, non_blocking=True) for name, tensor in next(batches).items()}
        mask_BS = batch["loss_mask"]  # the model reads it for the losses of multi-token prediction alone
        inputs = batch["tokens"], batch["position_ids"], None
        loss_BS = model(*inputs, labels=batch["labels"], loss_mask=mask_BS, **self._loss)
        return loss_BS, partial(_token_loss, mask_BS)

    def _reduce(self, sums: torch.Tensor) -> torch.Tensor:
        """The whole batch's sums on every rank.

        Collective: all-reduce(SUM) over dp-cp on the last stage, broadcast from it over pp.
        """
        if self.is_last_stage and self.groups.dp_cp.size() > 1:
            dist.all_reduce(sums, group=self.groups.dp_cp)
        if self.layout.pp > 1:
            dist.broadcast(sums, src=dist.get_process_group_ranks(self.groups.pp)[-1], group=self.groups.pp)
        return sums


def _token_loss(
    loss_mask_BS: torch.Tensor, loss_BS: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of unmasked token losses, their count, and both for the report; nothing waits for the device here."""
    loss_sum = (loss_BS.float() * loss_mask_BS).sum()
    num_tokens = loss_mask_BS.sum()
    sums = torch.stack([loss_sum.detach(), num_tokens]).double()
    return loss_sum, num_tokens.to(torch.int), {"sums": sums}
