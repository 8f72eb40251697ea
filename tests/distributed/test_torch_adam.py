"""The faults of megatron-core with torch's Adam are still there: each of these tests fails once upstream mended one.

Every other test runs with the mends of `parallel/mcore/torch_adam.py`; the ranks here run without them.
"""

from pathlib import Path

from shardwright.parallel.mcore import optimizers, shards, torch_adam
from shardwright.parallel.mcore.engine import Engine

from . import engines
from .harness import RunRanks


def engine_without_mends(rank: int, world: int, store: str) -> Engine:
    torch_adam.mend = lambda: None
    return engines.engine_of(engines.config_of(["optimizer=adam"], world), rank, store)


def save_without_state(rank: int, world: int, store: str) -> bool:
    """Whether a new optimizer whose state was not created can say what it would save."""
    optimizers.create_state = lambda optimizer: None
    try:
        engine_without_mends(rank, world, store).optimizer.state_dict()
    except AssertionError:
        return False
    return True


def load_what_was_saved(rank: int, world: int, store: str, folder: Path) -> bool:
    """Whether a fully reshardable checkpoint can be loaded."""
    engine = engine_without_mends(rank, world, store)
    engines.train(engine, 1)
    engines.save(engine, folder)
    try:
        shards.load(engine, folder, with_rng=False)
    except KeyError as error:
        assert error.args == ("step",)
        return False
    return True


def steps_after_load(rank: int, world: int, store: str) -> tuple[int, int]:
    """How many parameters there are, and how many tensors hold their steps, after a load."""
    engine = engine_without_mends(rank, world, store)
    engines.train(engine, 1)
    (part,) = optimizers.parts(engine.optimizer)
    part.load_state_dict(part.state_dict())
    steps = [state["step"] for state in part.optimizer.state.values()]
    return len(steps), len({id(step) for step in steps})


def steps_after_load_mended(rank: int, world: int, store: str) -> tuple[int, int]:
    """The same with the mends."""
    torch_adam.mend()
    return steps_after_load(rank, world, store)


def test_state_before_the_first_step_is_still_missed(run_ranks: RunRanks) -> None:
    mended = run_ranks(save_without_state, 1)[0]
    assert not mended, "megatron-core mended saving before the first step: delete torch_adam.create_state"


def test_the_step_is_still_missed_when_a_fully_reshardable_checkpoint_is_loaded(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    mended = run_ranks(load_what_was_saved, 1, tmp_path / "saved")[0]
    assert not mended, "megatron-core mended the missing step: delete set_states_with_step in torch_adam.mend"


def test_one_step_is_still_shared_by_all_parameters_after_a_load(run_ranks: RunRanks) -> None:
    parameters, steps = run_ranks(steps_after_load, 1)[0]
    assert parameters > 1
    assert steps == 1, "megatron-core mended the shared step: delete load_with_own_steps in torch_adam.mend"


def test_with_the_mends_every_parameter_has_its_own_step(run_ranks: RunRanks) -> None:
    parameters, steps = run_ranks(steps_after_load_mended, 1)[0]
    assert parameters == steps > 1
