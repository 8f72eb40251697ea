"""Which files of `conf/model` are whole models: bases of families lack sizes."""

import yaml

from shardwright.conf.compose import CONFIG_FOLDER

MODELS = sorted(
    path.stem
    for path in (CONFIG_FOLDER / "model").glob("*.yaml")
    if isinstance(yaml.safe_load(path.read_text()).get("num_layers"), int)
)
TINY = [name for name in MODELS if name.startswith("tiny")]
