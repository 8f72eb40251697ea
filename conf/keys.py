"""What a field of the schema says beside its type: what a change means to a run that resumes."""

import dataclasses
from dataclasses import field
from enum import Enum
from typing import Any


class ResumePolicy(Enum):
    """What happens when a resumed run's configuration differs from the saved one in a key."""

    free = "free"
    """The new value is used; the difference is printed."""
    warn = "warn"
    """The new value is used; the difference is printed as a warning, since results change."""
    refuse = "refuse"
    """The run does not start (exit 2)."""


def key(default: Any = dataclasses.MISSING, *, resume: str = "refuse") -> Any:
    """A dataclass field with its resume policy in the metadata; without a default the value must be given."""
    return field(default=default, metadata={"resume": ResumePolicy(resume)})


def items(*, resume: str = "refuse") -> Any:
    """The same for a list, whose value a YAML file always gives; a dataclass has no mutable default."""
    return field(metadata={"resume": ResumePolicy(resume)})
