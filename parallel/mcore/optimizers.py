"""Building the optimizer: whose kernels, which parameters have other settings, and what megatron-core has to be told.

Adam and SGD go through megatron-core's distributed optimizer, which shards state and main weights over data-parallel
ranks by bytes. Muon needs whole matrices: they go through its layer-wise optimizer, which gives every rank some of them
whole, beside a distributed optimizer with Adam for all other parameters. All of them write the same kind of checkpoint,
one tensor a parameter, so it loads in every layout.

Parameters are named as megatron-core names them, with one difference: a layer or an expert has its number in the whole
model and not on its rank, so that a glob means the same in every layout.
"""

import difflib
import fnmatch
import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import optimizer as mcore_optimizer
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    distrib_optimizer,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer, tag_params_for_buffer_routing
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from megatron.core.optimizer.param_layout import FullParamLayout
from megatron.core.process_groups_config import ProcessGroupCollection

from shardwright.conf.choices import OptimizerKernel
from shardwright.conf.compose import shown
from shardwright.conf.problems import Problem, refuse
from shardwright.conf.schema import Config, ParamOverride
from shardwright.parallel.mcore import torch_adam, torch_sgd, whole_state
from shardwright.parallel.mcore.names import in_whole_model

NUM_NEAR = 3
"""Names that are told where a glob matches nothing."""

_CHOSEN_AT_IMPORT = {
    mcore_optimizer: ("Adam", "SGD", "USING_PYTORCH_OPTIMIZER"),
    distrib_optimizer: ("Adam", "HAVE_APEX_OR_TE", "USING_TE_OPTIMIZER", "USING_APEX_OPTIMIZER"),
}
"""Where megatron-core keeps whose Adam and SGD it uses."""
_BY_ITSELF = {module: {name: getattr(module, name) for name in names} for module, names in _CHOSEN_AT_IMPORT.items()}


def use_kernel(kernel: OptimizerKernel) -> None:
    """Let megatron-core use this Adam and SGD from now on; `auto` is what it chose when it was imported.

    Raises:
        ImportError: it is not there; the machine rules refuse that earlier.
    """
    chosen = _BY_ITSELF
    if kernel is not OptimizerKernel.auto:
        adam, sgd, of_adam = _kernel(kernel)
        foreign = kernel is not OptimizerKernel.torch
        chosen = {
            mcore_optimizer: {"Adam": adam, "SGD": sgd, "USING_PYTORCH_OPTIMIZER": not foreign},
            distrib_optimizer: {
                "Adam": of_adam,
                "HAVE_APEX_OR_TE": foreign,
                "USING_TE_OPTIMIZER": kernel is OptimizerKernel.transformer_engine,
                "USING_APEX_OPTIMIZER": kernel is OptimizerKernel.apex,
            },
        }
    for module, values in chosen.items():
        for name, value in values.items():
            setattr(module, name, value)


def _kernel(kernel: OptimizerKernel) -> tuple[type, type, type]:
    """Adam, SGD, and the Adam that the distributed optimizer knows by its type.

    Source: megatron-core 0.19.2, optimizer/__init__.py:14 and optimizer/distrib_optimizer.py:20.
    """
    if kernel is OptimizerKernel.torch:
        return torch.optim.AdamW, torch.optim.SGD, torch.optim.Adam
    name = "apex.optimizers" if kernel is OptimizerKernel.apex else "transformer_engine.pytorch.optimizers"
    module = importlib.import_module(name)
    return module.FusedAdam, module.FusedSGD, module.FusedAdam


def param_layout(
    gpt: GPTModel, config: OptimizerConfig, ddp_config: Any, groups: ProcessGroupCollection, *, is_first: bool
) -> FullParamLayout | None:
    """Where the parameters lie in the gradient buffers; None leaves it to megatron-core.

    Muon's matrices must not be cut by the border between two ranks' shards. Every rank calls it, before the model is
    wrapped; it marks the parameters. Source: megatron-core 0.19.2, training/training.py:1637.
    """
    if not config.use_layer_wise_distributed_optimizer:
        return None
    tag_params_for_buffer_routing([gpt])
    bucketed = (
        ddp_config.overlap_grad_reduce and is_first and groups.pp.rank() == 0
    )  # as DistributedDataParallel decides
    return LayerWiseDistributedOptimizer.compute_full_param_layout(
        [parameter for parameter in gpt.parameters() if parameter.requires_grad],
        max(40_000_000, 1_000_000 * groups.dp_cp.size()) if bucketed else None,
        groups.dp_cp.size(),
        ddp_config,
        expert_data_parallel_world_size=groups.expt_dp.size(),
    )


def build(
    config: Config, optimizer_config: OptimizerConfig, chunks: list[DistributedDataParallel]
) -> tuple[MegatronOptimizer, list[dict[str, Any]]]:
    """Build the optimizer of this rank, with all of its state.

    Returns:
        The optimizer, and its parameter groups for people: rows of name, optimizer, parameters on this rank,
        weight_decay and lr_mult; the same rows on all ranks.

    Raises:
        RefusedError: an override matches no parameter; on all ranks alike.

    Collective: every rank calls it.
    """
    use_kernel(config.optimizer.kernel)
    torch_adam.mend()
    torch_sgd.allow()
    whole_state.install()
    names = {parameter: name for chunk in chunks for name, parameter in named_parameters(chunk.module).items()}
    if config.optimizer.overrides:
        refuse(_without_match(config.optimizer.overrides, list(names.values())))
    overrides = _config_overrides(optimizer_config, config.optimizer.overrides, names)
    optimizer = get_megatron_optimizer(optimizer_config, chunks, overrides)
    create_state(optimizer)
    torch_adam.link(parts(optimizer))
    return optimizer, _described(config, names, overrides)


def named_parameters(gpt: GPTModel) -> dict[str, torch.nn.Parameter]:
    """Every parameter of a chunk by its name in the whole model."""
    return {in_whole_model(gpt, name): parameter for name, parameter in gpt.named_parameters()}


def parts(optimizer: Any) -> list[Any]:
    """The optimizers that a chained one is made of, however deep; each wraps one of torch's kind as `.optimizer`."""
    chained = getattr(optimizer, "chained_optimizers", None)
    return [optimizer] if chained is None else [part for inner in chained for part in parts(inner)]


def create_state(optimizer: Any) -> None:
    """Create the state that the first step would: a checkpoint may be saved or loaded before it."""
    for part in parts(optimizer):
        inner = getattr(part, "optimizer", None)
        if isinstance(inner, torch.optim.Adam):  # AdamW is one too
            torch_adam.create_state(inner)
        elif isinstance(inner, torch.optim.SGD):
            torch_sgd.create_state(inner)
        elif hasattr(inner, "_init_group") and part.init_state_fn is not None:
            part.init_state_fn(inner, part.config)


def refuse_foreign_state(config: Config, optimizer: Any, saved: Any) -> None:
    """Refuse the state of another optimizer or of other parameter groups, which megatron-core cannot load.

    Args:
        config: the run.
        optimizer: newly built.
        saved: what its checkpoint holds beside tensors.

    Raises:
        RefusedError: on all ranks alike.
    """
    there, own = _kinds_of_groups(saved), {_kind_of(group) for group in optimizer.param_groups}
    if there == own:
        return
    if {rule for rule, *_ in there} != {rule for rule, *_ in own}:
        key, value = "optimizer.optimizer", config.optimizer.optimizer.name
        rule, remedy = "the checkpoint was written by another optimizer", "take the one that wrote it"
    else:
        key, value = "optimizer.overrides", shown(config.optimizer.overrides)
        factors = "; ".join(f"lr_mult={lr} wd_mult={wd}" for _, lr, wd in sorted(there))
        rule, remedy = f"the checkpoint has other parameter groups: {factors}", "take the overrides that wrote it"
    refuse([Problem(key=key, value=value, rule=rule, remedy=remedy)])


def _kind_of(group: dict[str, Any]) -> tuple[str, float, float]:
    """What tells parameter groups apart: the rule of the update by what it keeps, and both factors."""
    named = group.get("optimizer") or ("betas" if "betas" in group else "momentum")
    return {"adam": "betas"}.get(named, named), group["lr_mult"], group["wd_mult"]


def _kinds_of_groups(saved: Any) -> set[tuple[str, float, float]]:
    return {_kind_of(group) for group in _saved_groups(saved)}


def _saved_groups(saved: Any) -> Iterator[dict[str, Any]]:
    """The groups anywhere in what a chained or single optimizer saved."""
    if isinstance(saved, dict):
        yield from saved.get("param_groups", ())
    for inner in saved.values() if isinstance(saved, dict) else saved if isinstance(saved, list) else ():
        yield from _saved_groups(inner)


def load_state(optimizer: Any, state: dict[str, Any]) -> None:
    """Load tensors and step; what the configuration says of a group (betas, momentum) stays, whoever saved the state.

    megatron-core would take all of a saved group: the configuration's new betas would not be used, and a group that
    another kernel saved would lack what this one's reads. And it knows a group by its peak and least learning rate
    among others, so it would not find any after a change of these. Every rank calls it.

    Source: megatron-core 0.19.2, optimizer.py:139, `param_group_identifier_keys`.
    """
    configured = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    for group in _saved_groups(state):
        group.update({key: configured[0][key] for key in ("max_lr", "min_lr") if key in group and configured})
    optimizer.load_state_dict(state)
    for group, own in zip(optimizer.param_groups, configured, strict=True):
        step = {"step": group["step"]} if "step" in group else {}
        group.update(own | step)


def give_weights(optimizer: Any) -> None:
    """Let the model's parameters be what the main weights are, as an update does; gathering them is for the caller."""
    for part in parts(optimizer):
        part._copy_main_params_to_model_params()


def kernel_names(optimizer: Any) -> str:
    """Whose classes update the weights, for people."""
    kinds = [type(part.optimizer) for part in parts(optimizer) if getattr(part, "optimizer", None) is not None]
    return " and ".join(dict.fromkeys(f"{kind.__module__.split('.')[0]} {kind.__name__}" for kind in kinds))


def state_bytes(optimizer: Any, config: OptimizerConfig) -> int:
    """Bytes of moments and main weights on this rank, also where a kernel creates them at its first step."""
    total = 0
    main_bytes = 4 if config.params_dtype != torch.float32 else 0
    for part in parts(optimizer):
        for group in part.param_groups:
            moments = [config.exp_avg_dtype]
            if group.get("optimizer", config.optimizer) == "adam":
                moments.append(config.exp_avg_sq_dtype)
            each = main_bytes + sum(dtype.itemsize for dtype in moments)
            total += sum(parameter.numel() * each for parameter in group["params"])
    return total


def _merged(
    overrides: Sequence[ParamOverride], standard: dict[ParamKey, Any], parameter: torch.nn.Parameter, name: str
) -> dict[str, float]:
    """What a parameter has otherwise: megatron-core's standard, then each override that matches, the later one last."""
    merged: dict[str, float] = {}
    for key, values in standard.items():
        if key.matches(parameter, name):
            merged.update(values)
    for override in _matching(overrides, name):
        merged.update({key: value for key in ("lr_mult", "wd_mult") if (value := getattr(override, key)) is not None})
    return merged


def _matching(overrides: Sequence[ParamOverride], name: str) -> list[ParamOverride]:
    return [override for override in overrides if fnmatch.fnmatchcase(name, override.match)]


def _config_overrides(
    optimizer_config: OptimizerConfig,
    overrides: Sequence[ParamOverride],
    names: Mapping[torch.nn.Parameter, str],
) -> dict[ParamKey, Any]:
    """The overrides in megatron-core's form, one for every set of values that a parameter of this rank has.

    megatron-core refuses two overrides that say different things of a parameter, so they are merged here. It makes the
    groups of all ranks the same by itself.
    """
    standard = get_standard_config_overrides(optimizer_config)
    by_values: dict[tuple[tuple[str, float], ...], set[torch.nn.Parameter]] = {}
    for parameter, name in names.items():
        merged = _merged(overrides, standard, parameter, name)
        by_values.setdefault(tuple(sorted(merged.items())), set()).add(parameter)

    def key_of(label: str, own: set[torch.nn.Parameter]) -> ParamKey:
        # by the parameter itself: its name on this rank is another chunk's too
        return ParamKey(
            with_name_predicate=ParamWithNamePredicate(name=label, fn=lambda parameter, name: parameter in own)
        )

    return {key_of(str(values), own): dict(values) for values, own in by_values.items() if values}


def _without_match(overrides: Sequence[ParamOverride], names: Sequence[str]) -> list[Problem]:
    """A problem for each override that matches no parameter of any rank. Collective: all-gather over the world."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, list(names))
    known = sorted({name for some in everywhere for name in some})
    globs = sorted({re.sub(r"^decoder\.layers\.\d+\.", "decoder.layers.*.", name) for name in known})
    problems = []
    for index, override in enumerate(overrides):
        if not any(_matching([override], name) for name in known):
            near = difflib.get_close_matches(override.match, globs, n=NUM_NEAR, cutoff=0.0)
            problems.append(
                Problem(
                    key=f"optimizer.overrides[{index}].match",
                    value=override.match,
                    rule=f"matches none of the {len(known)} parameters",
                    remedy=f"near it are {', '.join(near)}",
                )
            )
    return problems


def _described(
    config: Config,
    names: Mapping[torch.nn.Parameter, str],
    overrides: dict[ParamKey, Any],
) -> list[dict[str, Any]]:
    """Rows of the parameter groups, the same on all ranks but for their counts. Collective: all-gather."""
    counts: dict[tuple[Any, ...], int] = {}
    for parameter, name in names.items():
        merged: dict[str, Any] = {}
        for key, values in overrides.items():  # with what get_megatron_optimizer added: Muon's share for Adam
            if key.matches(parameter, name):
                merged.update(values)
        kind = merged.get("optimizer", config.optimizer.optimizer.value)
        group = "norms and biases" if parameter.dim() < 2 else "matrices"
        if kind != config.optimizer.optimizer.value and parameter.dim() == 2:
            group = "embeddings"
        special = [override.match for override in _matching(config.optimizer.overrides, name)]
        row = (", ".join(special) or group, kind, merged.get("wd_mult", 1.0), merged.get("lr_mult", 1.0))
        counts[row] = counts.get(row, 0) + parameter.numel()
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, list(counts))
    return [
        {
            "name": name,
            "optimizer": kind,
            "parameters": counts.get((name, kind, wd_mult, lr_mult), 0),
            "weight_decay": config.optimizer.weight_decay * wd_mult,
            "lr_mult": lr_mult,
        }
        for name, kind, wd_mult, lr_mult in dict.fromkeys(row for rows in everywhere for row in rows)
    ]
