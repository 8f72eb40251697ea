"""The schedules of a run as one HTML file that needs no network: what `plan --plot` writes."""

from pathlib import Path

from shardwright.conf.problems import Problem, RefusedError, refuse
from shardwright.conf.schema import Config
from shardwright.data.batch_size import BatchSizes
from shardwright.pretrain import requirements
from shardwright.pretrain.schedule import Update, decay_updates, next_update, warmup_updates

MOST_POINTS = 2000
"""Of more updates every n-th is drawn, and those where a curve turns."""


def updates(config: Config) -> list[Update]:
    """The updates to draw, the first and the last one among them."""
    last, sizes = config.schedule.train_iters, BatchSizes.of(config.data)
    decay_end = decay_updates(config)
    turns = [warmup_updates(config), decay_end, decay_end - (config.schedule.lr_wsd_decay_iters or 0)]
    turns += [sizes.steps_to(samples) for samples, _ in sizes.stages]
    numbers = {*range(1, last + 1, -(-last // MOST_POINTS)), last}
    numbers |= {number for turn in turns for number in (turn, turn + 1) if 1 <= number <= last}
    return [next_update(number - 1, sizes.consumed_after(number - 1), config) for number in sorted(numbers)]


def write(config: Config, path: Path) -> None:
    """Draw learning rate, weight decay and batch size over the updates of a run.

    Raises:
        RefusedError: plotly is missing, or the file cannot be written.
    """
    missing = requirements.problem("plotly", requirements.version("plotly"))
    problems = [missing] if missing else []
    if path.suffix != ".html":
        problems.append(Problem(key="--plot", value=path, rule="is no name of an HTML file", remedy="--plot plan.html"))
    refuse(problems)
    from plotly.subplots import make_subplots

    drawn = updates(config)
    curves = {
        "learning rate": [update.learning_rate for update in drawn],
        "weight decay": [update.weight_decay for update in drawn],
        "batch size in samples": [update.batch_size for update in drawn],
    }
    figure = make_subplots(rows=len(curves), cols=1, shared_xaxes=True, vertical_spacing=0.06)
    numbers = [update.number for update in drawn]
    for row, (name, values) in enumerate(curves.items(), start=1):
        shape = "hv" if name.startswith("batch") else "linear"
        figure.add_scatter(x=numbers, y=values, name=name, line_shape=shape, row=row, col=1)
        figure.update_yaxes(title_text=name, rangemode="tozero", row=row, col=1)
    figure.update_xaxes(title_text="update", row=len(curves), col=1)
    title = f"{config.run.name}: {config.schedule.train_iters:,} updates"
    figure.update_layout(title=title, template="plotly_white", showlegend=False, hovermode="x unified", height=860)
    try:
        figure.write_html(path, include_plotlyjs=True)
    except OSError as error:
        rule = f"cannot be written: {error.strerror}"
        raise RefusedError([Problem(key="--plot", value=path, rule=rule)]) from None
