"""One optimizer step, one evaluation: megatron-core's schedules around its GPT model, for every layout and device.

The loss is a mean over tokens: every micro-batch contributes the sum of its unmasked token losses and their count
(`calculate_per_token_loss`, three-value loss function), and the gradient is divided once by the tokens of the global
batch. So it does not depend on how the batch is split over micro-batches and data-parallel ranks.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import get_megatron_optimizer, get_standard_config_overrides
from megatron.core.pipeline_parallel import get_forward_backward_func

from shardwright.conf.schema import Config
from shardwright.data.loader import Batch
from shardwright.parallel.layout import Layout
from shardwright.parallel.mcore import expert_losses, fp8_state, torch_adam
from shardwright.parallel.mcore.groups import Groups
from shardwright.parallel.mcore.model import build_gpt, wrap_data_parallel
from shardwright.parallel.mcore.translate import megatron_configs


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
    expert_losses: dict[str, float]
    """Auxiliary losses of a model with experts, unweighted, by megatron-core's names; none of another."""


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
        self.device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        self.is_last_stage = layout.coordinates(rank).pp == layout.pp - 1
        configs = megatron_configs(config, layout, device)
        self.transformer_config = configs.transformer
        gpt = build_gpt(config.model, padded_vocab_size, configs, layout, self.groups, device, rank)
        self.model = wrap_data_parallel(gpt, configs, self.groups)
        if device.type == "cuda":
            fp8_state.install()
        torch_adam.mend()
        self._group_overrides = get_standard_config_overrides(configs.optimizer)
        self.optimizer = get_megatron_optimizer(configs.optimizer, [self.model], self._group_overrides)
        torch_adam.create_state(self.optimizer)
        torch_adam.link(self.optimizer)
        self._refuse_non_finite_norms()
        self._forward_backward = get_forward_backward_func()
        transformer = configs.transformer
        transformer.grad_scale_func = self.optimizer.scale_loss
        transformer.finalize_model_grads_func = partial(finalize_model_grads, pg_collection=self.groups)
        if config.parallel.overlap_grad_reduce:
            transformer.no_sync_func = self.model.no_sync
            if layout.pp > 1:
                transformer.grad_sync_func = self.model.start_grad_sync

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
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss_scale = self.optimizer.get_loss_scale() if self.transformer_config.fp16 else None
        own = self._run(microbatches, forward_only=False)
        reduced = self._reduce(own.clone())
        grad_norm: float | None
        try:
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
            non_finite_ranks=None if finite else self._ranks_with_non_finite(own),
            expert_losses=expert_losses.collect(self.transformer_config, self.groups, len(microbatches)),
        )

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
        if hooked:
            self.model.disable_forward_pre_hook()
        self.model.eval()
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        for microbatches in batches:
            total += self._run(microbatches, forward_only=True)
        self.model.train()
        if hooked:
            self.model.enable_forward_pre_hook()
        loss_sum, num_tokens = self._reduce(total).tolist()
        return loss_sum / max(num_tokens, 1), int(num_tokens)

    def gather_parameters(self) -> None:
        """Finish the parameter gather that overlaps with the next forward, so that weights can be read now."""
        if self.config.parallel.overlap_param_gather:
            self.model.start_param_sync(force_sync=True)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """What decays and what does not, by the very overrides that the optimizer was built with.

        Returns:
            One row per optimizer parameter group: name, parameters on this rank, weight_decay, lr_mult.
        """
        rows: dict[str, dict[str, Any]] = {}
        for name, parameter in self.model.module.named_parameters():
            merged: dict[str, Any] = {}
            for key, override in self._group_overrides.items():
                if key.matches(parameter, name):
                    merged.update(override)
            wd_mult = merged.get("wd_mult", 1.0)
            group = "matrices" if wd_mult else "norms and biases"
            row = rows.setdefault(
                group,
                {
                    "name": group,
                    "parameters": 0,
                    "weight_decay": self.config.optimizer.weight_decay * wd_mult,
                    "lr_mult": merged.get("lr_mult", 1.0),
                },
            )
            row["parameters"] += parameter.numel()
        return list(rows.values())

    def kernels(self) -> dict[str, str]:
        """Which implementations are in use, for people."""
        on_gpu = self.device.type == "cuda"
        parts = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        adam = type(parts[0].optimizer)
        layers = f"Transformer Engine {version('transformer-engine')}" if on_gpu else "megatron-core local"
        return {
            "layers": layers,
            "attention": layers if on_gpu else "megatron-core unfused",
            "cross_entropy": "Transformer Engine" if on_gpu else "megatron-core",
            "optimizer": f"{adam.__module__.split('.')[0]} {adam.__name__}",
            "communication": dist.get_backend(),
        }

    def memory(self) -> dict[str, int]:
        """Bytes that this rank holds for good: weights, gradient buffers, optimizer state and main weights."""
        buffers = [*self.model.buffers, *self.model.expert_parallel_buffers]
        weights = {p.data_ptr(): p.numel() * p.element_size() for p in self.model.parameters()}
        main = 0
        for group in self.optimizer.param_groups:
            # Adam: two moments in fp32, and a main weight in fp32 where the model's is not
            main += sum(p.numel() * (12 if self.transformer_config.bf16 else 8) for p in group["params"])
        return {
            "weights_bytes": sum(weights.values()),
            "gradients_bytes": sum(b.grad_data.numel() * b.grad_data.element_size() for b in buffers),
            "optimizer_bytes": main,
        }

    def _run(self, microbatches: list[Batch], *, forward_only: bool) -> torch.Tensor:
        """One pass of the pipeline schedule; this stage's sums [loss, tokens] in float64, zeros before the last."""
        reports = self._forward_backward(
            forward_step_func=self._forward,
            data_iterator=iter(microbatches),
            model=[self.model],
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
        loss_BS = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], loss_mask=mask_BS)
        return loss_BS, partial(_token_loss, mask_BS)

    def _reduce(self, sums: torch.Tensor) -> torch.Tensor:
        """The whole batch's sums on every rank.

        Collective: all-reduce(SUM) over dp-cp on the last stage, broadcast from it over pp.
        """
        if self.is_last_stage:
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
