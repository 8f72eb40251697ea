"""Rules that a run must keep before it starts, one small function each; all broken ones are reported together.

* Config rules need the configuration alone and hold on any machine. What a rule compares may itself be out of range and
  then is reported by `numbers_in_range`, so every rule tolerates zeros and negative numbers.
* Machine rules compare the configuration with what `machine.detect` found where the ranks will run.

Each problem names the nearest values that work. Refused is what fails or would silently be wrong, not what is slow.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from shardwright.conf.choices import DataSource, GpuKind, PositionEmbedding, Recompute, TokenDispatcher
from shardwright.conf.compose import shown
from shardwright.conf.problems import Problem
from shardwright.conf.schema import BYTES, Config
from shardwright.data import documents
from shardwright.pretrain import (
    checks_cluster,
    checks_execution,
    checks_fp8,
    checks_layout,
    checks_model,
    checks_optimizer,
    checks_schedule,
    checks_stages,
    plan,
    requirements,
)
from shardwright.pretrain import machine as machines
from shardwright.pretrain.machine import Machine
from shardwright.pretrain.ranges import multiples, numbers_in_range, value_of

LEAST_BPE_VOCAB = 257
"""A byte-level BPE tokenizer holds all 256 bytes and the end-of-document token before it learns a merge."""

TEXT_KEYS = {
    "data.files": "[texts/*.jsonl]",
    "data.text_key": "text",
    "data.tokenizer": "bytes",
    "data.eod_token": "'</s>'",
}
"""What data=text alone reads, with an example of each."""


def config_problems(config: Config) -> list[Problem]:
    """Every config rule that `config` breaks."""
    return [problem for rule in CONFIG_RULES for problem in rule(config)]


def machine_problems(config: Config, machine: Machine) -> list[Problem]:
    """Every machine rule that `config` breaks on `machine`, where the ranks will run."""
    return [problem for rule in MACHINE_RULES for problem in rule(config, machine)]


def own_ranks_problems(config: Config) -> list[Problem]:
    """What stands against `train` starting all ranks by itself, on this machine."""
    if config.cluster.nodes <= 1:
        return []
    rule = "train starts ranks on one machine"
    remedy = "start one rank per GPU with torchrun or srun, or cluster.nodes=1"
    return [Problem(key="cluster.nodes", value=config.cluster.nodes, rule=rule, remedy=remedy)]


# ---- config rules ----------------------------------------------------------------------------------------------------


def names_are_given(config: Config) -> Iterator[Problem]:
    for key in ("run.name", "run.dir", "data.cache_dir"):
        if not str(value_of(config, key)).strip():
            yield Problem(key=key, value="", rule="must not be empty")


def gathering_needs_overlapped_reduction(config: Config) -> Iterator[Problem]:
    if config.parallel.overlap_param_gather and not config.parallel.overlap_grad_reduce:
        rule = "needs parallel.overlap_grad_reduce=true"
        remedy = "parallel.overlap_param_gather=false works"
        yield Problem(key="parallel.overlap_param_gather", value="true", rule=rule, remedy=remedy)


def positions_cover_the_sequence(config: Config) -> Iterator[Problem]:
    longest, seq_length = config.model.max_position_embeddings, config.data.seq_length
    if seq_length > longest:
        rule = f"is longer than model.max_position_embeddings={longest}"
        remedy = f"data.seq_length={longest} or model.max_position_embeddings={seq_length} works"
        yield Problem(key="data.seq_length", value=seq_length, rule=rule, remedy=remedy)


def rotary_channels_come_in_pairs(config: Config) -> Iterator[Problem]:
    channels, key = config.model.kv_channels, "model.kv_channels"
    if config.model.position_embedding_type is PositionEmbedding.rope and channels % 2:
        yield Problem(key=key, value=channels, rule="rotary positions need pairs", remedy=multiples(key, channels, 2))


def text_of_your_own_is_named(config: Config) -> Iterator[Problem]:
    source, tokenizer = config.data.source.name, config.data.tokenizer
    for key, example in TEXT_KEYS.items():
        value, needed = value_of(config, key), key != "data.eod_token"
        if config.data.source is not DataSource.text:
            if value is not None:
                rule = f"is for data=text alone, and data.source={source}"
                yield Problem(key=key, value=shown(value), rule=rule, remedy=f"{key}=null or data=text works")
        elif value in ([], "") or (needed and value is None):
            rule = "must not be empty" if value is not None else "data=text needs it"
            yield Problem(key=key, value=shown(value), rule=rule, remedy=f"for example {key}={example}")
    if tokenizer and tokenizer != BYTES and not tokenizer.endswith((".json", ".model")):
        rule = f"is neither a tokenizer.json of Hugging Face, nor a SentencePiece .model, nor the word {BYTES}"
        yield Problem(key="data.tokenizer", value=tokenizer, rule=rule, remedy=f"data.tokenizer={BYTES} needs no file")


def tokens_fit_the_vocabulary(config: Config) -> Iterator[Problem]:
    tokenizer, model, key = config.data.vocab_size, config.model.vocab_size, "data.vocab_size"
    if tokenizer > model:
        rule = f"the tokenizer would give ids that the model lacks: model.vocab_size={model}"
        yield Problem(
            key=key, value=tokenizer, rule=rule, remedy=f"{key}={model} or model.vocab_size={tokenizer} works"
        )
    if config.data.source is DataSource.python_stdlib and 1 <= tokenizer < LEAST_BPE_VOCAB:
        rule = "a byte-level tokenizer holds 256 bytes and the end of a document"
        yield Problem(key=key, value=tokenizer, rule=rule, remedy=f"at least {key}={LEAST_BPE_VOCAB}")


def split_is_three_shares(config: Config) -> Iterator[Problem]:
    split, schedule = config.data.split, config.schedule
    evaluates = schedule.eval_interval > 0 and schedule.eval_iters > 0
    rule = ""
    if len(split) != 3 or min(split) < 0:
        rule = "must be three shares that are not negative: training, validation, test"
    elif split[0] <= 0:
        rule = "leaves nothing to train on"
    elif evaluates and split[1] <= 0:
        rule = "leaves nothing to evaluate on"
    if rule:
        remedy = "data.split=[98,1,1] works" + (", or schedule.eval_iters=0" if "evaluate" in rule else "")
        yield Problem(key="data.split", value=shown(split), rule=rule, remedy=remedy)


def recomputation_says_what(config: Config) -> Iterator[Problem]:
    model = config.model
    granularity = model.recompute_granularity
    known = ("core_attn", "layernorm", "mlp")
    unknown = [module for module in model.recompute_modules if module not in known]
    if unknown or (granularity is Recompute.selective and not model.recompute_modules):
        rule, remedy = "names what can be recomputed by itself", f"any of [{','.join(known)}] works"
        yield Problem(key="model.recompute_modules", value=shown(model.recompute_modules), rule=rule, remedy=remedy)
    for key in ("recompute_method", "recompute_num_layers"):
        value = getattr(model, key)
        if (value is not None) != (granularity is Recompute.full):
            needs = "needs a value" if value is None else "needs model.recompute_granularity=full"
            rule = f"{needs}: full recomputation goes by method and number of layers"
            remedy = "model.recompute_method=uniform with model.recompute_num_layers=1 recomputes every layer"
            yield Problem(key=f"model.{key}", value=shown(value), rule=rule, remedy=remedy if value is None else "")


CONFIG_RULES = (
    numbers_in_range,
    names_are_given,
    checks_layout.ranks_fill_the_nodes,
    checks_layout.axes_divide_the_world,
    checks_layout.tensor_parallelism_stays_in_a_node,
    checks_layout.tensor_parallelism_splits_evenly,
    checks_layout.query_groups_share_heads,
    checks_layout.sequence_parallelism_needs_ranks,
    checks_layout.sequence_splits_evenly,
    checks_layout.multi_token_prediction_has_whole_sequences,
    checks_layout.expert_parallelism_splits_experts,
    checks_layout.expert_tensor_parallelism_splits_experts,
    checks_layout.experts_want_sequence_parallelism,
    checks_stages.stages_are_for_a_pipeline,
    checks_stages.layers_are_split_one_way,
    checks_stages.layers_fill_the_stages,
    checks_stages.first_and_last_stage_leave_equal_shares,
    checks_stages.chunks_hold_equal_layers,
    checks_stages.written_stages_are_complete,
    gathering_needs_overlapped_reduction,
    checks_schedule.batch_splits_evenly,
    checks_schedule.ramp_reaches_the_batch,
    checks_schedule.ramp_splits_evenly,
    positions_cover_the_sequence,
    rotary_channels_come_in_pairs,
    text_of_your_own_is_named,
    tokens_fit_the_vocabulary,
    split_is_three_shares,
    checks_schedule.learning_rate_falls,
    checks_schedule.warmup_is_given_once,
    checks_schedule.warmup_ends_in_time,
    checks_schedule.wsd_has_its_decay,
    checks_schedule.weight_decay_has_an_end,
    recomputation_says_what,
    checks_optimizer.states_have_their_kernel,
    checks_optimizer.muon_trains_in_bf16,
    checks_optimizer.buckets_are_adams,
    checks_optimizer.muon_has_one_instance,
    checks_optimizer.overrides_say_something,
    checks_execution.chunks_divide_the_sequence,
    checks_execution.kernels_are_for_the_model,
    checks_execution.offloading_stands_alone,
    checks_execution.recording_suits_the_run,
    checks_execution.deterministic_has_its_kernels,
    checks_execution.loss_kernel_takes_the_format,
    checks_execution.kernels_need_a_gpu,
    checks_fp8.one_narrow_format,
    checks_fp8.emulation_has_something_to_do,
    checks_fp8.narrow_formats_run_on_bf16,
    checks_fp8.recipe_suits_the_cluster,
    checks_fp8.shapes_are_multiples,
    checks_fp8.amaxes_are_shared_where_they_must,
    checks_fp8.exceptions_name_layers,
    checks_fp8.exceptions_can_step_out,
    checks_fp8.linear_layers_alone_are_emulated,
    checks_fp8.recordings_know_their_group,
    checks_fp8.samples_can_be_taken,
    *checks_model.RULES,
    *checks_cluster.RULES,
)


# ---- machine rules ---------------------------------------------------------------------------------------------------


def gpus_are_there(config: Config, machine: Machine) -> Iterator[Problem]:
    if machines.device(config, machine) == "cpu":
        return
    gpu, present, wanted = config.cluster.gpu.name, len(machine.gpus), plan.local_ranks(config)
    if not present:
        why = f" ({machine.notes[0]})" if machine.notes else ""
        rule = f"this machine shows no GPU{why}"
        yield Problem(key="cluster.gpu", value=gpu, rule=rule, remedy="cluster.gpu=none trains on the CPU")
    elif present < wanted:
        rule = f"{wanted} ranks want a GPU each, and this machine shows {present}"
        remedy = f"cluster.ranks={present * config.cluster.nodes} works, or cluster.gpu=none on the CPU"
        yield Problem(key="cluster.ranks", value=config.world_size, rule=rule, remedy=remedy)


def gpus_are_what_they_are_called(config: Config, machine: Machine) -> Iterator[Problem]:
    if config.cluster.gpu in (GpuKind.auto, GpuKind.none):
        return
    for name in dict.fromkeys(gpu.name for gpu in machine.gpus[: plan.local_ranks(config)] if gpu.name):
        if not re.search(rf"\b{config.cluster.gpu.name}\b", name, re.IGNORECASE):
            rule = f"this machine has {name}, and speed and FP8 would be judged against another GPU"
            yield Problem(key="cluster.gpu", value=config.cluster.gpu.name, rule=rule, remedy="cluster.gpu=auto works")


def packages_are_there(config: Config, machine: Machine) -> Iterator[Problem]:
    needed = ["torch", "megatron_core"]
    if machines.device(config, machine) == "cuda":
        needed.append("transformer_engine")  # every layer on a GPU is Transformer Engine's
    if config.model.moe_token_dispatcher_type is TokenDispatcher.flex:
        needed.append("deep_ep")
    if (config.data.tokenizer or "").endswith(".model"):
        needed.append("sentencepiece")
    for feature in needed:
        problem = requirements.problem(feature, machine.versions.get(feature))
        if problem:
            yield problem


def recomputation_has_its_kernels(config: Config, machine: Machine) -> Iterator[Problem]:
    model = config.model
    selective = model.recompute_granularity is Recompute.selective and "layernorm" in model.recompute_modules
    if selective and machines.device(config, machine) == "cpu":
        # megatron-core 0.19.2, tensor_parallel/random.py:693, names a class that only Transformer Engine brings
        rule = "recomputing norms alone needs Transformer Engine, which runs on a GPU"
        value = shown(model.recompute_modules)
        yield Problem(key="model.recompute_modules", value=value, rule=rule, remedy="[core_attn,mlp] works")


def text_is_there(config: Config, machine: Machine) -> Iterator[Problem]:
    data = config.data
    if data.source is DataSource.text:
        yield from documents.find_files(data.files or [])[1]
        if data.tokenizer and data.tokenizer != BYTES and not Path(data.tokenizer).is_file():
            yield Problem(key="data.tokenizer", value=data.tokenizer, rule="there is no such file")


MACHINE_RULES = (
    gpus_are_there,
    gpus_are_what_they_are_called,
    packages_are_there,
    recomputation_has_its_kernels,
    checks_optimizer.kernels_are_there,
    checks_optimizer.muon_is_there,
    checks_execution.kernels_are_there,
    checks_execution.variables_are_deterministic,
    checks_fp8.gpus_compute_the_recipe,
    checks_fp8.reduction_is_known,
    text_is_there,
)
