"""When the job ends that a run is part of, and how long before that the run has to begin its last save.

Slurm's signal before the end comes at a time that was chosen before anybody knew how long a save takes. What the run
itself has measured is better: it leaves in time by itself, whatever `cluster.signal_seconds` says.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

END = "SLURM_JOB_END_TIME"
"""End of the job, in seconds since 1970; Slurm sets it, or the job script."""
SLACK_SECONDS = 30.0
"""For the clocks of machines, and for Slurm, to end a job that has nothing more to do."""


@dataclass(slots=True)
class Deadline:
    """One per rank; ranks may differ in a second, so they agree before they act on it."""

    end: float | None
    """Seconds since 1970; None where nobody ends this run."""
    exit_before: int | None
    """`resilience.exit_before`."""
    longest: dict[str, float] = field(default_factory=dict)
    """What was measured, "step", "evaluation" and "save" -> seconds."""

    @classmethod
    def of(cls, environ: Mapping[str, str], exit_before: int | None) -> "Deadline":
        """The end of Slurm's job, if this process is part of one that ends."""
        text = environ.get(END, "")
        return cls(float(text) if text.isdigit() and int(text) > 0 else None, exit_before)

    def took(self, what: str, seconds: float) -> None:
        """Remember the longest of its kind."""
        self.longest[what] = max(seconds, self.longest.get(what, 0.0))

    @property
    def needed_seconds(self) -> float:
        """What a stop takes at worst: a step and an evaluation that have begun, and a save after one in the making."""
        known = self.longest.get
        return known("step", 0.0) + known("evaluation", 0.0) + 2 * known("save", 0.0)

    @property
    def lead_seconds(self) -> float:
        """So long before the end the run stops."""
        return self.needed_seconds + SLACK_SECONDS if self.exit_before is None else self.exit_before

    def near(self) -> bool:
        """Whether it is time to save and leave."""
        return self.end is not None and self.lead_seconds > 0 and time.time() >= self.end - self.lead_seconds
