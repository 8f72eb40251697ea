"""Names in the whole model: a block or an expert has its number there, and not the one that it has on its rank."""

import re

from megatron.core.models.gpt import GPTModel

_BLOCK = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"(?<=\.experts\.)(local_experts\.|linear_fc[12]\.(?:weight|bias))(\d+)")
"""The number of an expert on its rank: in megatron-core's local layers, and in Transformer Engine's grouped ones."""


def in_whole_model(gpt: GPTModel, name: str) -> str:
    """The name of a module or parameter of this chunk, as it is in every layout."""
    ep = gpt.pg_collection.ep
    first_expert = (gpt.config.num_moe_experts or 0) // ep.size() * ep.rank()
    found = _BLOCK.match(name)
    if found:
        number = gpt.decoder.layers[int(found[1])].layer_number - 1
        name = f"decoder.layers.{number}.{name[found.end() :]}"
    return _EXPERT.sub(lambda match: f"{match[1]}{int(match[2]) + first_expert}", name)
