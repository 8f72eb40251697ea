"""Which files of `conf/model` are whole models: bases of families lack sizes."""

from functools import cache

import yaml

from shardwright.conf.compose import CONFIG_FOLDER, compose
from shardwright.conf.schema_model import Model

MODELS = sorted(
    path.stem
    for path in (CONFIG_FOLDER / "model").glob("*.yaml")
    if isinstance(yaml.safe_load(path.read_text()).get("num_layers"), int)
)
TINY = [name for name in MODELS if name.startswith("tiny")]


@cache
def model_of(name: str) -> Model:
    """The model of that name, composed once for all tests: a composition takes a fifth of a second."""
    return compose([f"model={name}"]).model
