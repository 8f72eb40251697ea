"""Hugging Face's classes as an outside oracle: the same architecture from one of our `Model`s."""

from typing import Any

import torch

from shardwright.conf.schema_model import Model
from shardwright.parallel.mcore.hf.families import family_of


def build(family: str, values: dict[str, Any], device: str = "cpu") -> Any:
    """The class of a family (`Llama`), built from values of its `config.json`."""
    import transformers

    return from_config(getattr(transformers, f"{family}Config")(**values).to_dict(), device)


def from_config(values: dict[str, Any], device: str = "cpu") -> Any:
    """The class that the values of a `config.json` speak of."""
    import transformers

    config = transformers.AutoConfig.for_model(**values)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def randomised(model: Model) -> Any:
    """The class of the family of `model`, with weights so far from zero and one that a forgotten one is seen."""
    torch.manual_seed(3)
    theirs = from_config({**family_of(model).config(model), "initializer_range": 0.1})
    with torch.no_grad():
        for name, tensor in theirs.state_dict().items():
            if name.endswith("bias"):  # of a linear layer, a norm, or an expert
                tensor.normal_(0.0, 0.1)
            elif tensor.dim() == 1:
                tensor.normal_(1.0, 0.3)
            elif name.endswith("mlp.gate.weight"):  # DeepSeek's router begins as zeros
                tensor.normal_(0.0, 0.1)
    return theirs.eval()
