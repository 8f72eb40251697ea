"""Config rules about steps: how large, how fast, for how long. `checks` calls them."""

from collections.abc import Iterator, Sequence

from shardwright.conf.choices import LrDecayStyle, WeightDecayIncrStyle
from shardwright.conf.compose import shown
from shardwright.conf.problems import Problem
from shardwright.conf.schema import Config
from shardwright.data.batch_size import BatchSizes
from shardwright.pretrain import plan, schedule
from shardwright.pretrain.ranges import divisors, multiples, rest, value_of, works

WARMUP_KEYS = ("schedule.lr_warmup_iters", "schedule.lr_warmup_samples", "schedule.lr_warmup_fraction")
MOST_SHOWN = 16
"""Of more batch sizes that do not work the first ones are named."""


# ---- batch size ------------------------------------------------------------------------------------------------------


def batch_splits_evenly(config: Config) -> Iterator[Problem]:
    key, batch_size, at_once = "data.global_batch_size", config.data.global_batch_size, _samples_at_once(config)
    if rest(batch_size, at_once):
        rule, remedy = _no_multiple(config), multiples(key, batch_size, at_once)
        yield Problem(key=key, value=batch_size, rule=f"is {rule}", remedy=remedy)


def ramp_reaches_the_batch(config: Config) -> Iterator[Problem]:
    ramp, end = config.data.rampup_batch_size, config.data.global_batch_size
    if ramp is None or _ramp_reaches(ramp, end):
        return
    key, remedy = "data.rampup_batch_size", "data.rampup_batch_size=null works"
    if len(ramp) != 3 or min(ramp) < 1:
        rule = "must be three whole numbers of at least 1: start, increment, samples"
    elif ramp[0] >= end:
        rule = f"does not begin below data.global_batch_size={end}"
    else:
        rule = f"does not reach data.global_batch_size={end} from {ramp[0]} by steps of {ramp[1]}"
        increment = max(n for n in divisors(end - ramp[0]) if n <= ramp[1])
        remedy = f"{key}=[{ramp[0]},{increment},{ramp[2]}] works"
    yield Problem(key=key, value=shown(ramp), rule=rule, remedy=remedy)


def ramp_splits_evenly(config: Config) -> Iterator[Problem]:
    ramp, end, at_once = config.data.rampup_batch_size, config.data.global_batch_size, _samples_at_once(config)
    if ramp is None or not _ramp_reaches(ramp, end):
        return
    bad = [size for size in range(ramp[0], end, ramp[1]) if rest(size, at_once)]
    if not bad:
        return
    named = ", ".join(map(str, bad[:MOST_SHOWN])) + (f" and {len(bad) - MOST_SHOWN} more" if bad[MOST_SHOWN:] else "")
    start = -(-ramp[0] // at_once) * at_once
    fitting = [increment for increment in divisors(end - start) if increment % at_once == 0]
    increment = next((n for n in fitting if n >= ramp[1]), max(fitting, default=0))
    key = "data.rampup_batch_size"
    remedy = f"{key}=[{start},{increment},{ramp[2]}] works" if increment else f"{key}=null works"
    rule = f"passes through {named}: {'each is ' if len(bad) > 1 else ''}{_no_multiple(config)}"
    yield Problem(key=key, value=shown(ramp), rule=rule, remedy=remedy)


def _ramp_reaches(ramp: Sequence[int], end: int) -> bool:
    return len(ramp) == 3 and min(ramp) >= 1 and ramp[0] < end and (end - ramp[0]) % ramp[1] == 0


def _samples_at_once(config: Config) -> int:
    """Every batch is a multiple of so many samples; 0 where the layout is impossible, which is reported elsewhere.

    Interleaved stages take micro-batches in groups of `pp`. Source: megatron-core 0.19.2, schedules.py:1145.
    """
    layout = plan.possible_layout(config)
    if layout is None:
        return 0
    return config.data.micro_batch_size * layout.dp * (layout.pp if layout.vpp > 1 else 1)


def _no_multiple(config: Config) -> str:
    each, layout = config.data.micro_batch_size, plan.layout(config)
    if layout.vpp == 1:
        return f"no multiple of data.micro_batch_size * data-parallel ranks = {each} * {layout.dp}"
    return (
        f"no multiple of data.micro_batch_size * data-parallel ranks * parallel.pp = {each} * {layout.dp} * "
        f"{layout.pp} (with parallel.vpp={layout.vpp} stages take micro-batches in groups of parallel.pp)"
    )


# ---- learning rate and weight decay ----------------------------------------------------------------------------------


def learning_rate_falls(config: Config) -> Iterator[Problem]:
    lr, min_lr = config.optimizer.lr, config.optimizer.min_lr
    if min_lr > lr:
        rule, remedy = f"is above optimizer.lr={lr}", f"optimizer.min_lr={lr} works"
        yield Problem(key="optimizer.min_lr", value=min_lr, rule=rule, remedy=remedy)


def warmup_is_given_once(config: Config) -> Iterator[Problem]:
    given = [key for key in WARMUP_KEYS if value_of(config, key) is not None]
    if not given:
        rule = f"one of {', '.join(WARMUP_KEYS)} must be given"
        yield Problem(key=WARMUP_KEYS[0], value="null", rule=rule, remedy=f"{WARMUP_KEYS[0]}=0 works: no warm-up")
    for other in given[1:]:
        rule = f"the warm-up has one length, and {given[0]}={value_of(config, given[0])} is given too"
        remedy = f"{given[0]}=null or {other}=null works"
        yield Problem(key=other, value=value_of(config, other), rule=rule, remedy=remedy)


def warmup_ends_in_time(config: Config) -> Iterator[Problem]:
    given = [key for key in WARMUP_KEYS if value_of(config, key) is not None]
    ramp, batch_size = config.data.rampup_batch_size, config.data.global_batch_size
    if len(given) != 1 or batch_size < 1 or not (ramp is None or _ramp_reaches(ramp, batch_size)):
        return  # reported elsewhere
    key, warmup = given[0], schedule.warmup_updates(config)
    steps = "" if key == "schedule.lr_warmup_iters" else f"is {warmup} steps, and that "
    for limit_key in ("schedule.train_iters", "schedule.lr_decay_iters"):
        limit = value_of(config, limit_key)
        if limit is not None and 1 <= limit < warmup:
            remedies = [f"{limit_key}={warmup}"]
            if key != "schedule.lr_warmup_fraction":
                in_samples = key == "schedule.lr_warmup_samples"
                most = BatchSizes.of(config.data).consumed_after(limit) if in_samples else limit
                remedies.insert(0, f"{key}={most}")
            rule, remedy = f"{steps}is more than {limit_key}={limit}", f"{' or '.join(remedies)} works"
            yield Problem(key=key, value=value_of(config, key), rule=rule, remedy=remedy)


def wsd_has_its_decay(config: Config) -> Iterator[Problem]:
    key, length = "schedule.lr_wsd_decay_iters", config.schedule.lr_wsd_decay_iters
    if config.schedule.lr_decay_style is not LrDecayStyle.WSD:
        return
    end = schedule.decay_updates(config)
    if length is None:
        rule, remedy = "WSD needs the steps of its decay", works(key, [max(1, end // 5)])
        yield Problem(key=key, value="null", rule=rule, remedy=remedy)
    elif not list(warmup_is_given_once(config)) and not list(warmup_ends_in_time(config)):
        stable = end - schedule.warmup_updates(config)
        if 0 <= stable < length:
            rule = f"is more than the {stable} steps between warm-up and step {end}"
            yield Problem(key=key, value=length, rule=rule, remedy=works(key, [stable]))


def weight_decay_has_an_end(config: Config) -> Iterator[Problem]:
    start, end = config.optimizer.weight_decay, config.schedule.end_weight_decay
    style_key, key = "schedule.weight_decay_incr_style", "schedule.end_weight_decay"
    constant = config.schedule.weight_decay_incr_style is WeightDecayIncrStyle.constant
    if constant and end is not None and end != start:
        rule = f"is never reached from optimizer.weight_decay={start} with {style_key}=constant"
        yield Problem(key=key, value=end, rule=rule, remedy=f"{style_key}=linear or cosine, or {key}=null works")
    if not constant and end is None:
        rule = f"{style_key}={shown(config.schedule.weight_decay_incr_style)} needs an end"
        remedy = f"{key}={start} or {style_key}=constant works"
        yield Problem(key=key, value="null", rule=rule, remedy=remedy)
