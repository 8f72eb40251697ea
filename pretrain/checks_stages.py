"""Config rules of the pipeline: does every stage get its layers, and every layer a stage? `checks` lists them.

Layers are shared out evenly, or unevenly in one of the ways of `parallel.stages`, and only when asked for: a number of
layers that stages cannot share is refused, with what could be asked for.
"""

from collections.abc import Iterator

from shardwright.conf.problems import Problem
from shardwright.conf.schema import Config
from shardwright.parallel.stages import LETTERS, Split, rows
from shardwright.pretrain.checks_layout import filling_the_world
from shardwright.pretrain.ranges import divisors, nearest, rest, value_of, works

WRITTEN = "parallel.pipeline_layout"
COUNTED = ("parallel.account_for_embedding_in_pipeline_split", "parallel.account_for_loss_in_pipeline_split")
ENDS = ("parallel.num_layers_in_first_pipeline_stage", "parallel.num_layers_in_last_pipeline_stage")


def stages_are_for_a_pipeline(config: Config) -> Iterator[Problem]:
    if config.parallel.pp != 1:
        return
    if config.parallel.vpp > 1:
        rule, remedy = "interleaves pipeline ranks, and parallel.pp=1", "parallel.vpp=1 or parallel.pp=2 works"
        yield Problem(key="parallel.vpp", value=config.parallel.vpp, rule=rule, remedy=remedy)
    for key, value in _asked_for(config).items():
        rule, off = "is about the stages of a pipeline, and parallel.pp=1", "false" if key in COUNTED else "null"
        yield Problem(key=key, value=value, rule=rule, remedy=f"{key}={off} or parallel.pp=2 works")


def layers_are_split_one_way(config: Config) -> Iterator[Problem]:
    asked = _asked_for(config)
    ways = [[key for key in keys if key in asked] for keys in ((WRITTEN,), ENDS, COUNTED)]
    ways = [keys for keys in ways if keys]
    if len(ways) > 1:
        key, others = ways[0][0], ", ".join(key for keys in ways[1:] for key in keys)
        rule = f"layers are shared out in one way, and this is another than {others}"
        yield Problem(key=key, value=asked[key], rule=rule, remedy="keep one of them")


def layers_fill_the_stages(config: Config) -> Iterator[Problem]:
    """Evenly shared layers, with embedding and loss among them where they count."""
    parallel, layers = config.parallel, config.model.num_layers
    pp, asked = parallel.pp, _asked_for(config)
    if WRITTEN in asked or any(key in asked for key in ENDS):
        return
    counted = [key.split("_")[2] for key in COUNTED if key in asked]
    slots = layers + len(counted)
    if not rest(slots, pp):
        return
    key, built = "parallel.pp", slots // pp * pp - len(counted)
    what = " and ".join([f"model.num_layers={layers}", *(f"1 for the {part}" for part in counted)])
    rule = f"does not divide {what}" + (f" = {slots}" if counted else "")
    rule += f": {max(built, 0)} of {layers} layers would be built" if pp <= layers else ": a stage would be empty"
    without = " ".join(f"{name}=false" for name in COUNTED if name in asked) if layers % pp == 0 else ""
    sizes = [size for size in divisors(slots) if size > 1 or not counted]
    fitting = filling_the_world(config, "pp", sizes) or ([] if without else sizes)
    offers = [nearest(key, pp, fitting), without]
    if not counted:
        offers = offers[:1] + _uneven_offers(layers, pp, parallel.vpp)
    yield Problem(key=key, value=pp, rule=rule, remedy=", or ".join(filter(None, offers)))


def first_and_last_stage_leave_equal_shares(config: Config) -> Iterator[Problem]:
    asked, pp, layers = _asked_for(config), config.parallel.pp, config.model.num_layers
    given = {key: int(value_of(config, key)) for key in ENDS if key in asked}
    if not given or pp < 2 or layers < 1 or min(given.values()) < 1:
        return
    left, between = layers - sum(given.values()), pp - len(given)
    key = list(given)[-1]
    others = sum(given.values()) - given[key]
    if between == 0 and left != 0:  # megatron-core would build the two stages and no more
        rule = f"the two stages hold {sum(given.values())} layers, and model.num_layers={layers}"
    elif not _shares(left, between):
        beside = "".join(f"with {name}={given[name]} " for name in given if name != key)
        shared = f"{between} stages, which cannot share them equally"
        rule = f"{beside}leaves {left} of model.num_layers={layers} to {shared}"
    else:
        return
    fitting = [size for size in range(1, layers - others + 1) if _shares(layers - others - size, between)]
    yield Problem(key=key, value=given[key], rule=rule, remedy=nearest(key, given[key], fitting))


def chunks_hold_equal_layers(config: Config) -> Iterator[Problem]:
    parallel, asked, layers = config.parallel, _asked_for(config), config.model.num_layers
    pp, vpp, key = parallel.pp, parallel.vpp, "parallel.vpp"
    if min(pp, vpp, layers) < 1 or pp == 1 or vpp == 1 or WRITTEN in asked or list(layers_are_split_one_way(config)):
        return
    counted = sum(key in asked for key in COUNTED)
    ends = [int(value_of(config, key)) for key in ENDS if key in asked]
    between = pp - len(ends)
    if (layers + counted) % pp if not ends else min(ends) < 1 or not _shares(layers - sum(ends), between):
        return  # reported above
    each = {(layers + counted - sum(ends)) // between if between else ends[0], *ends}
    odd = sorted(number for number in each if number % vpp)
    if not odd:
        return
    built = sum(Split.of(config).counts())
    held = " and ".join(str(number) for number in odd)
    rule = f"does not divide the {held} layers of a pipeline rank (model.num_layers={layers} over parallel.pp={pp}): "
    rule += f"{built} of {layers} would be built"
    fitting = [size for size in range(1, layers + 1) if all(number % size == 0 for number in each)]
    yield Problem(key=key, value=vpp, rule=rule, remedy=nearest(key, vpp, fitting))


def written_stages_are_complete(config: Config) -> Iterator[Problem]:
    written, parallel, layers = config.parallel.pipeline_layout, config.parallel, config.model.num_layers
    if written is None or parallel.pp < 2 or parallel.vpp < 1:
        return
    stages = rows(written)
    text, wanted = "".join(stages), parallel.pp * parallel.vpp

    def problem(rule: str, remedy: str = "") -> Problem:
        return Problem(key=WRITTEN, value=written, rule=rule, remedy=remedy)

    unknown = sorted(set(text) - set(LETTERS))
    if unknown:
        yield problem(
            f"holds {' '.join(unknown)}", "E embedding, t layer, m multi-token prediction, L loss, | between stages"
        )
        return
    if len(stages) != wanted:
        rule = f"writes {len(stages)} stages, and parallel.pp * parallel.vpp = {parallel.pp} * {parallel.vpp}"
        chunks = len(stages) // parallel.pp if len(stages) % parallel.pp == 0 else 0
        yield problem(rule, works("parallel.vpp", [chunks]) or works("parallel.pp", [len(stages) // parallel.vpp]))
    if text[:1] != "E" or text[-1:] != "L" or text.count("E") != 1 or text.count("L") != 1:
        yield problem("must begin with the one E and end with the one L", "for example Ett|tt|ttL")
    if text.count("t") != layers:
        rule = f"writes {text.count('t')} layers, and model.num_layers={layers}"
        yield problem(rule, works("model.num_layers", [text.count("t")]))
    mtp = Split.of(config).num_mtp_layers
    if text.count("m") != mtp:
        yield problem(f"writes {text.count('m')} layers of multi-token prediction (m), and the model has {mtp}")
    elif not text.endswith("m" * mtp + "L") or "m" in "".join(stages[:-1]):
        # the output layer and the loss of megatron-core's own placement stand on the same stage
        yield problem("multi-token prediction stands on the last stage, before the loss", "for example t|tmL")
    if not all(stages):
        yield problem(f"leaves stage {stages.index('') + 1} empty", "every stage holds at least one letter")


def _asked_for(config: Config) -> dict[str, object]:
    """The keys that ask for an uneven split -> what they hold, as the user writes it."""
    values = {key: value_of(config, key) for key in (WRITTEN, *ENDS, *COUNTED)}
    return {key: "true" if value is True else value for key, value in values.items() if value not in (None, False)}


def _shares(layers: int, stages: int) -> bool:
    """Whether so many stages can share so many layers equally, each getting one at least."""
    return layers == 0 if stages == 0 else layers >= stages and layers % stages == 0


def _uneven_offers(layers: int, pp: int, vpp: int) -> list[str]:
    """What could be asked for where `pp` ranks of `vpp` chunks cannot share `layers` equally."""
    offers = []
    for keys in ((COUNTED[1],), COUNTED):
        if (layers + len(keys)) % (pp * vpp) == 0:
            offers.append(" ".join(f"{key}=true" for key in keys))
            break
    fullest = range(vpp, layers, vpp)
    last = [size for size in fullest if pp > 1 and _shares((layers - size) // vpp, pp - 1) and layers % vpp == 0]
    if last:
        even = min(last, key=lambda size: abs(size - layers / pp))
        offers.append(f"{ENDS[1]}={even}")
    return [*offers, f"the stages written out in {WRITTEN}"] if pp <= layers else offers
