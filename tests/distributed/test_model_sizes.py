"""Counted parameters are those of Hugging Face's classes for the published configurations, and those that are built."""

import dataclasses
from typing import Any

import pytest

from shardwright.conf.schema import Config
from shardwright.conf.schema_model import Model
from shardwright.pretrain import model_size

from ..models import MODELS, TINY, model_of
from . import engines, hugging_face
from .harness import RunRanks
from .tail import long_tail


def gpt(layers: int, width: int, heads: int) -> tuple[str, dict[str, Any]]:
    values = {"n_layer": layers, "n_embd": width, "n_head": heads, "n_positions": 2048, "vocab_size": 50257}
    return "GPT2", values


def decoder(family: str, layers: int, width: int, mlp: int, heads: int, groups: int, **others: Any) -> Any:
    return family, {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        **others,
    }


def qwen3(*sizes: int, tied: bool) -> Any:
    return decoder("Qwen3", *sizes, head_dim=128, vocab_size=151936, tie_word_embeddings=tied)


def qwen3_moe(*sizes: int, expert: int) -> Any:
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": expert}
    return decoder("Qwen3Moe", *sizes, head_dim=128, vocab_size=151936, **experts)


LLAMA_3 = {"vocab_size": 128256}
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt3_125m": gpt(12, 768, 12),
    "gpt3_350m": gpt(24, 1024, 16),
    "gpt3_760m": gpt(24, 1536, 16),
    "gpt3_1_3b": gpt(24, 2048, 16),
    "gpt3_2_7b": gpt(32, 2560, 32),
    "gpt3_6_7b": gpt(32, 4096, 32),
    "gpt3_13b": gpt(40, 5120, 40),
    "gpt3_175b": gpt(96, 12288, 96),
    "llama2_7b": decoder("Llama", 32, 4096, 11008, 32, 32, vocab_size=32000),
    "llama2_13b": decoder("Llama", 40, 5120, 13824, 40, 40, vocab_size=32000),
    "llama2_70b": decoder("Llama", 80, 8192, 28672, 64, 8, vocab_size=32000),
    "llama3_1b": decoder("Llama", 16, 2048, 8192, 32, 8, **LLAMA_3, head_dim=64, tie_word_embeddings=True),
    "llama3_3b": decoder("Llama", 28, 3072, 8192, 24, 8, **LLAMA_3, head_dim=128, tie_word_embeddings=True),
    "llama3_8b": decoder("Llama", 32, 4096, 14336, 32, 8, **LLAMA_3),
    "llama3_70b": decoder("Llama", 80, 8192, 28672, 64, 8, **LLAMA_3),
    "llama3_405b": decoder("Llama", 126, 16384, 53248, 128, 8, **LLAMA_3),
    "qwen3_0_6b": qwen3(28, 1024, 3072, 16, 8, tied=True),
    "qwen3_1_7b": qwen3(28, 2048, 6144, 16, 8, tied=True),
    "qwen3_4b": qwen3(36, 2560, 9728, 32, 8, tied=True),
    "qwen3_8b": qwen3(36, 4096, 12288, 32, 8, tied=False),
    "qwen3_14b": qwen3(40, 5120, 17408, 40, 8, tied=False),
    "qwen3_32b": qwen3(64, 5120, 25600, 64, 8, tied=False),
    "qwen3_30b_a3b": qwen3_moe(48, 2048, 6144, 32, 4, expert=768),
    "qwen3_235b_a22b": qwen3_moe(94, 4096, 12288, 64, 4, expert=1536),
    "mixtral_8x7b": decoder("Mixtral", 32, 4096, 14336, 32, 8, vocab_size=32000, num_local_experts=8),
    "mixtral_8x22b": decoder("Mixtral", 56, 6144, 16384, 48, 8, vocab_size=32000, num_local_experts=8),
    "deepseek_v3": ("DeepseekV3", {"n_routed_experts": 256}),  # and the class's own defaults
}
"""Model file -> Hugging Face's family, and its published `config.json` as far as it counts parameters."""
ONE_OF_EACH_FAMILY = (
    *("gpt3_125m", "llama2_7b", "llama3_1b", "llama3_8b", "qwen3_0_6b", "qwen3_30b_a3b"),
    *("mixtral_8x7b", "deepseek_v3"),
)


def published_parameters(family: str, values: dict[str, Any]) -> int:
    """Parameters of Hugging Face's class; those of 128 experts and more from two smaller models, for building takes
    Python a minute, and every expert adds equally many.
    """

    def count(values: dict[str, Any]) -> int:
        return sum(parameter.numel() for parameter in hugging_face.build(family, values, device="meta").parameters())

    key = next((key for key in ("num_experts", "n_routed_experts") if key in values), None)
    if key is None:
        return count(values)
    one, two = (count({**values, key: experts}) for experts in (1, 2))
    return one + (int(values[key]) - 1) * (two - one)


def unpadded(model: Model) -> Model:
    return dataclasses.replace(model, make_vocab_size_divisible_by=1)


def test_every_model_file_has_its_published_configuration() -> None:
    assert set(MODELS) - set(TINY) == set(PUBLISHED)


@pytest.mark.parametrize("choice", long_tail(PUBLISHED, quick=ONE_OF_EACH_FAMILY))
def test_parameters_are_those_of_the_published_model(choice: str) -> None:
    family, values = PUBLISHED[choice]
    counted = model_size.count_parameters(unpadded(model_of(choice)))
    assert counted == published_parameters(family, values)


def tiny_configs() -> list[Config]:
    return [engines.family_config([f"model={choice}", "model.vocab_size=2000"], 1) for choice in TINY]


def built_parameters(rank: int, world: int, store: str) -> list[int]:
    built = engines.engines_of(tiny_configs(), rank, store)
    return [sum(parameter.numel() for parameter in engine.model.parameters()) for engine in built]


def test_parameters_are_those_that_are_built(run_ranks: RunRanks) -> None:
    (built,) = run_ranks(built_parameters, 1)
    models = [config.model for config in tiny_configs()]
    counted = [model_size.weights(model) + model_size.multi_token_prediction(model) for model in models]
    assert dict(zip(TINY, built, strict=True)) == dict(zip(TINY, (count.total for count in counted), strict=True))
