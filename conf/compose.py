"""Overrides in, one typed `Config` out; and everything that is wrong with them in ONE message.

Hydra alone stops at the first mistake, accepts `+misspelt.key=3`, and knows no types. So composing has three steps:

1. Each override is parsed by itself with Hydra's grammar and held against the schema and the folders beside this
   module. What is wrong is noted and left out, so that the rest can still be judged.
2. Hydra composes the YAML files and the remaining overrides, once.
3. Our own walk compares every composed key with the schema: unknown, missing, of the wrong type, an interpolation that
   leads nowhere. Only a tree without problems becomes a `Config`.

The same walk reads the frozen `config.yaml` of a run, which is resolved and begins with its `schema_version`.
"""

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException, ValidationError
from yaml import MarkedYAMLError, YAMLError

from shardwright.conf.keys import ResumePolicy
from shardwright.conf.problems import Problem, RefusedError, refuse
from shardwright.conf.schema import SCHEMA_VERSION, Config, ParamOverride

CONFIG_FOLDER = Path(__file__).resolve().parent
CONFIG_NAME = "config"
SECTIONS: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(Config)}
"""Section name -> its schema class, in the order of the schema."""

NOT_TO_BE_HAD = {
    ("precision", "int8"): (
        "INT8 training is not to be had: neither Transformer Engine nor megatron-core has INT8 kernels for gradients",
        "precision=fp8_delayed, fp8_current or fp8_blockwise halve the bytes of the GEMMs on Hopper",
    )
}
"""Choices that people ask for and that cannot work, with the reason and what does."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One key that a resumed run would change."""

    key: str
    saved: object
    present: object
    policy: ResumePolicy

    def __str__(self) -> str:
        return f"{self.key}: {shown(self.saved)} -> {shown(self.present)}"


def compose(overrides: Sequence[str]) -> Config:
    """The configuration of `config.yaml` under Hydra `overrides` (`GROUP=CHOICE`, `section.key=value`).

    Raises:
        RefusedError: everything that is wrong with the overrides and the files, together.
    """
    problems: list[Problem] = []
    sound: list[str] = []
    for text in overrides:
        found, override = _check_override(text)
        problems += found
        if override is not None:
            sound.append(override)
    try:
        with hydra.initialize_config_dir(config_dir=str(CONFIG_FOLDER), version_base="1.3"):
            tree = hydra.compose(config_name=CONFIG_NAME, overrides=sound)
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
        problems.append(Problem(key="overrides", value=" ".join(overrides), rule=_one_line(error)))
        raise RefusedError(problems) from None
    return _typed(tree, problems)


def complete(error: RefusedError, overrides: Sequence[str], rules: Callable[[Config], list[Problem]]) -> RefusedError:
    """The error of `compose(overrides)` and what `rules` say of the configuration without the refused overrides.

    So a user who misspelt one key and broke a rule with another reads of both at once.
    """
    refused = {problem.key for problem in error.problems}
    keys = {text: text.partition("=")[0] for text in overrides}
    rest = [text for text, name in keys.items() if not {name, name.lstrip("+~")} & refused]
    try:
        return RefusedError([*error.problems, *rules(compose(rest))])
    except RefusedError:
        return error


def load(path: Path) -> Config:
    """The frozen configuration of a run.

    Raises:
        RefusedError: unreadable, of another schema version, or not what the schema says.
    """
    problem = Problem(key=str(path), rule="is not a frozen configuration")
    try:
        tree = OmegaConf.load(path)  # a subclass of yaml.SafeLoader: builds no objects
    except (OSError, UnicodeDecodeError, YAMLError, OmegaConfBaseException) as error:
        raise RefusedError([dataclasses.replace(problem, rule=f"cannot be read: {_one_line(error)}")]) from None
    if not isinstance(tree, DictConfig):
        raise RefusedError([problem])
    version = tree.pop("schema_version", None)
    if version is None:
        raise RefusedError([dataclasses.replace(problem, rule="is not a frozen configuration: no schema_version")])
    if version != SCHEMA_VERSION:
        rule = f"was frozen with schema_version {version}, and this program reads {SCHEMA_VERSION}"
        remedy = "continue with the shardwright that wrote it, or begin a new run in another run.dir"
        raise RefusedError([Problem(key=str(path), rule=rule, remedy=remedy)])
    return _typed(tree, [])


def dump(config: Config) -> str:
    """`config` as resolved YAML that `load` reads back equal; the first key is `schema_version`."""
    return f"schema_version: {SCHEMA_VERSION}\n{OmegaConf.to_yaml(OmegaConf.structured(config))}"


def differences(saved: Config, present: Config) -> list[Difference]:
    """Every key in which two configurations differ, with what its schema says about a resume."""
    return [
        Difference(f"{section}.{field.name}", old, new, field.metadata["resume"])
        for section, schema in SECTIONS.items()
        for field in dataclasses.fields(schema)
        if (old := getattr(getattr(saved, section), field.name))
        != (new := getattr(getattr(present, section), field.name))
    ]


@cache
def groups() -> dict[str, tuple[str, ...]]:
    """Config groups and their choices, as the folders have them."""
    folders = [*SECTIONS, "experiment"]
    return {name: tuple(sorted(file.stem for file in (CONFIG_FOLDER / name).glob("*.yaml"))) for name in folders}


@cache
def schema_keys() -> dict[str, Any]:
    """Every dotted key of the schema and its type."""
    return {
        f"{section}.{field.name}": field.type
        for section, schema in SECTIONS.items()
        for field in dataclasses.fields(schema)
    }


def shown(value: object) -> str:
    """`value` in words, as an override has it but for quotes."""
    if isinstance(value, Enum):
        return str(value.name)
    if isinstance(value, bool) or value is None:
        return "null" if value is None else str(value).lower()
    if isinstance(value, list | tuple | ListConfig):
        return f"[{','.join(map(_shown_element, value))}]"
    return str(value)


def _shown_element(value: object) -> str:
    """`value` inside a list: a text is quoted where Hydra would not read it as it stands; nulls of a mapping go."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        given = {name: quoted(leaf) if isinstance(leaf, str) else shown(leaf) for name, leaf in value.items()}
        return f"{{{','.join(f'{name}:{leaf}' for name, leaf in given.items() if leaf != 'null')}}}"
    plain = not isinstance(value, str) or re.fullmatch(r"[\w./*?@%+:-]+", value)
    return shown(value) if plain else quoted(str(value))


def quoted(text: str) -> str:
    """`text` as a quoted value of Hydra's override grammar."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def override(key: str, text: str) -> str:
    """The override that sets `key` to what `shown` gave as `text`, quoted where Hydra would read something else."""
    plain = f"{key}={text}"
    try:
        parsed = OverridesParser.create().parse_override(plain)
        same = not parsed.is_sweep_override() and shown(parsed.value()) == text
    except (HydraException, ValueError):
        same = False
    return plain if same else f"{key}={quoted(text)}"


def _check_override(text: str) -> tuple[list[Problem], str | None]:
    """Problems of one override, and the override for Hydra where it has none.

    Prefixes are dropped or unified: a known key is set, whether a user wrote `key`, `+key` or `++key`.
    """
    name, equals, value = text.partition("=")
    if not equals and not text.startswith("~"):
        return [Problem(key=name, rule="has no value", remedy=f"write {name}=...")], None
    try:
        override = OverridesParser.create().parse_override(text)
    except (HydraException, ValueError) as error:
        remedy = "write key=value, and quote a value with special characters: 'run.name=\"a,b\"'"
        rule = f"cannot be read ({_one_line(error)})"
        return [Problem(key=name, value=value, rule=rule, remedy=remedy)], None
    if override.is_sweep_override():
        rule = "is a sweep, and one run has one value"
        return [Problem(key=name, value=value, rule=rule, remedy="add -m to run every value, or quote it")], None
    if override.package is not None:
        rule = f"the choices of {override.key_or_group} go into that section alone"
        return [Problem(key=name, value=value, rule=rule, remedy=f"write {override.key_or_group}={value}")], None
    if override.key_or_group in groups() and not isinstance(override.value(), dict):
        return _check_choice(override)
    kind = schema_keys().get(override.key_or_group)
    if _element_schema(kind) is not None and isinstance(override.value(), dict):  # Hydra would merge it into the list
        return [_of_wrong_type(override.key_or_group, [override.value()], kind)], None
    found = [
        _unknown_key(key, shown(leaf), typed=key if key != override.key_or_group else name)
        for key, leaf in _leaves(override.key_or_group, override.value())
        if key not in schema_keys()
    ]
    if found or override.is_delete():
        return found, None if found else text
    return [], f"++{override.key_or_group}={override.get_value_string()}"


def _check_choice(override: Override) -> tuple[list[Problem], str | None]:
    """The same for `GROUP=CHOICE`."""
    group, choice = override.key_or_group, override.value()
    if choice is None:
        return [], f"~{group}"  # no experiment; any other section is then found missing
    chosen = str(choice).removesuffix(".yaml")
    if chosen in groups()[group]:
        return [], f"{'~' if override.is_delete() else ''}{group}={chosen}"
    if (group, chosen) in NOT_TO_BE_HAD:
        rule, remedy = NOT_TO_BE_HAD[group, chosen]
        return [Problem(key=group, value=shown(choice), rule=rule, remedy=remedy)], None
    rule = f"is none of the choices of {group}: {', '.join(groups()[group])}"
    return [Problem(key=group, value=shown(choice), rule=rule, remedy=did_you_mean(chosen, groups()[group]))], None


def _leaves(key: str, value: object) -> Iterator[tuple[str, object]]:
    """Dotted keys that an override sets, and to what; `parallel={tp: 2}` sets `parallel.tp`."""
    if key in SECTIONS and isinstance(value, dict):
        for name, leaf in value.items():
            yield f"{key}.{name}", leaf
    else:
        yield key, value


def _unknown_key(key: str, value: object, *, typed: str, known: Sequence[str] = ()) -> Problem:
    """The problem of a key that the schema does not have; `known` are its neighbours, if not the whole schema."""
    if "_target_" in key:
        return Problem(key=typed, value=value, rule="a configuration names no code to call")
    if key.split(".")[0].split("/")[0] == "hydra":
        rule = "Hydra's own settings have no effect here"
        return Problem(key=typed, value=value, rule=rule, remedy="run.dir names the folder of a run")
    if known:
        remedy = did_you_mean(key, known) or f"there are {', '.join(known)}"
        return Problem(key=typed, value=value, rule="there is no such key", remedy=remedy)
    known, leaf = list(schema_keys()), key.rpartition(".")[2]
    namesakes = [name for name in known if name.endswith(f".{leaf}")]
    remedy = f"did you mean {' or '.join(namesakes)}?" if namesakes else did_you_mean(key, [*known, *groups()])
    rule = "there is no such key"
    return Problem(key=typed, value=value, rule=rule, remedy=remedy or f"the sections are {', '.join(groups())}")


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """A remedy that names the closest of `known`; empty if none is close."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]}?" if close else ""


def _typed(tree: DictConfig, problems: list[Problem]) -> Config:
    """The `Config` that a composed tree describes, or one error with `problems` and all that are found here."""
    problems = list(problems)
    sections: dict[str, DictConfig] = {}
    for name in tree:
        if str(name) not in SECTIONS:
            problems.append(_unknown_key(str(name), _raw(tree, str(name)), typed=str(name)))
    for section, schema in SECTIONS.items():
        node = None if section not in tree or OmegaConf.is_missing(tree, section) else tree[section]
        if not isinstance(node, DictConfig):
            remedy = f"choose one of {section}={'|'.join(groups()[section])}"
            problems.append(Problem(key=section, value=shown(node), rule="this section is missing", remedy=remedy))
            continue
        found, sections[section] = _typed_section(section, schema, node)
        problems += found
    refuse(problems)
    whole: dict[str, Any] = {section: OmegaConf.to_object(typed) for section, typed in sections.items()}
    return Config(**whole)


def _typed_section(section: str, schema: Any, node: DictConfig) -> tuple[list[Problem], DictConfig]:
    """Problems of one section or of one element of a list, and its typed node, which is whole if there are none."""
    problems: list[Problem] = []
    typed = OmegaConf.structured(schema)
    fields = {field.name: field for field in dataclasses.fields(schema)}
    for name in map(str, node):
        if name not in fields:
            key, known = f"{section}.{name}", [] if section in SECTIONS else [f"{section}.{field}" for field in fields]
            problems.append(_unknown_key(key, _raw(node, name), typed=key, known=known))
    for name, field in fields.items():
        key = f"{section}.{name}"
        if name not in node and field.default is not dataclasses.MISSING:
            continue
        if name not in node or OmegaConf.is_missing(node, name):
            problems.append(Problem(key=key, value="???", rule="has no value", remedy=f"give one: {key}=..."))
            continue
        try:
            value = node[name]
            if isinstance(value, ListConfig):
                list(value)  # resolves what its elements lead to
        except InterpolationToMissingValueError:
            continue  # the key that it leads to is reported itself
        except OmegaConfBaseException as error:
            rule, remedy = f"leads nowhere: {_one_line(error)}", r"a shell's ${NAME} is written \${NAME}"
            problems.append(Problem(key=key, value=_raw(node, name), rule=rule, remedy=remedy))
            continue
        found, value = _typed_elements(key, field.type, value)
        problems += found
        if not found and not _accepts(typed, name, field.type, value):
            if schema_keys().get(_raw(node, name).removeprefix("${").removesuffix("}")) == field.type:
                continue  # it repeats another key, which is reported itself
            problems.append(_of_wrong_type(key, value, field.type))
    return problems, typed


def _typed_elements(key: str, kind: Any, value: object) -> tuple[list[Problem], object]:
    """Problems of a list whose elements have a schema, and the list of them; any other value is handed back."""
    schema = _element_schema(kind)
    if schema is None or not isinstance(value, ListConfig):
        return [], value
    problems: list[Problem] = []
    elements = []
    for index, node in enumerate(value):
        found, element = [_of_wrong_type(f"{key}[{index}]", node, kind)], node
        if isinstance(node, DictConfig):
            found, element = _typed_section(f"{key}[{index}]", schema, node)
        problems += found
        elements.append(element)
    return problems, value if problems else [OmegaConf.to_object(element) for element in elements]


def _element_schema(kind: Any) -> Any:
    """The dataclass of which `kind` is a list; None for all other types."""
    return next(filter(dataclasses.is_dataclass, typing.get_args(kind)), None)


def _accepts(typed: DictConfig, name: str, kind: Any, value: object) -> bool:
    """Write `value` into the typed node; False if it is not of its type. NaN and infinities are no numbers."""
    if kind is bool and not isinstance(value, bool | str):
        return False  # OmegaConf would read 2 as true
    try:
        typed[name] = value
    except ValidationError:
        return False
    stored = typed[name]
    numbers = stored if isinstance(stored, ListConfig) else [stored]
    return all(math.isfinite(number) for number in numbers if isinstance(number, float))


def _of_wrong_type(key: str, value: object, kind: Any) -> Problem:
    rule, remedy = _wanted(kind)
    return Problem(key=key, value=shown(value), rule=rule, remedy=remedy)


def _wanted(kind: Any) -> tuple[str, str]:
    """What a key of this type accepts, and how to write it."""
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    or_null = " or null" if type(None) in options else ""
    kind = options[0]
    if isinstance(kind, type) and issubclass(kind, Enum):
        choices = [choice.name for choice in kind]
        return f"is none of {', '.join(choices)}{or_null}", ""
    rule, remedy = {
        int: ("must be a whole number", "write it in digits, without a point or an exponent: 2000"),
        float: ("must be a finite number", "write it like 0.1 or 3e-4"),
        bool: ("must be true or false", ""),
        str: ("must be a text", ""),
        list[int]: ("must be a list of whole numbers", "write it like [2,2,24]"),
        list[str]: ("must be a list of texts", "write it in brackets: [a.jsonl,b.jsonl]"),
        list[ParamOverride]: ("must be a list of mappings", "write it like [{match:'*.weight',lr_mult:0.5}]"),
    }.get(kind, ("must be a list of finite numbers", "write it like [98,1,1]"))
    return f"{rule}{or_null}", remedy


def _raw(node: DictConfig, name: str) -> str:
    """The value as the file or the override has it, interpolations unresolved."""
    return shown(OmegaConf.to_container(node, resolve=False)[name])  # type: ignore[index, call-overload]


def _one_line(error: BaseException) -> str:
    """First line of a foreign error, of a YAML error what and where; the rest speaks of that library's internals."""
    if isinstance(error, MarkedYAMLError) and error.problem and error.problem_mark:
        return f"{error.problem}, line {error.problem_mark.line + 1}"
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
