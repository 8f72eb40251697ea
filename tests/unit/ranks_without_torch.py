"""A launcher and its ranks with everything but the training: `ranks_without_torch.py RUN_DIR CONFIG BEHAVIOUR...`.

One behaviour per rank; the same file is the rank program. Used by test_launch.py, in processes of their own.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from shardwright.pretrain import faults, launch, rank
from shardwright.pretrain.faults import TrainingFault
from shardwright.pretrain.folder import RunFolder
from shardwright.pretrain.heartbeat import STARTING

_BEHAVIOURS = "RANKS_WITHOUT_TORCH"
_IGNORES_SIGTERM = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(60)
"""


def engine(context: rank.RankContext) -> int:
    """Do what this rank's behaviour says; steps are a hundredth of a second."""
    number = context.environment.rank
    behaviour = os.environ[_BEHAVIOURS].split(",")[number]
    (context.attempt.path / f"pid_{number}").write_text(str(os.getpid()))
    if behaviour == "grandchild":
        child = subprocess.Popen([sys.executable, "-c", _IGNORES_SIGTERM], stdout=subprocess.PIPE)
        assert child.stdout is not None and child.stdout.readline()
        (context.attempt.path / "pid_grandchild").write_text(str(child.pid))
    context.events.write("ready")
    if behaviour in ("stops", "stands", "is behind"):
        context.heart.rest()
        while len(list(context.attempt.path.glob("pid_*"))) < context.environment.world_size:
            time.sleep(0.01)
        context.heart.beat(STARTING)  # they fall silent together
        if behaviour != "is behind":
            context.phase("connecting ranks")
        if behaviour == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(3600)
    if behaviour == "dozes":  # over its limit, and goes on before it is ended
        described = faults.error_file(context.attempt.errors, number)
        while not described.exists():
            time.sleep(0.01)
        context.heart.rest()
        while described.exists():
            time.sleep(0.01)
        return 0
    if behaviour == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if behaviour == "dies":
        print("last words")
        os._exit(7)
    if behaviour == "victim":
        time.sleep(0.1)
        raise RuntimeError("[gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:5000")
    if behaviour == "fault":
        time.sleep(0.3)
        raise TrainingFault("loss is nan at step 4")
    if behaviour == "ends":
        return 0
    while not context.stop_requested() or behaviour == "deaf":
        time.sleep(0.01)
    return 75


def main() -> int:
    """Be the launcher."""
    folder, config, behaviours = RunFolder(Path(sys.argv[1])), Path(sys.argv[2]).read_text(), sys.argv[3:]
    folder.create()
    with folder.lock(0) as lock:
        attempt = folder.new_attempt(config, {"device": "cpu", "load": []})
        outcome = launch.launch(
            attempt,
            world_size=len(behaviours),
            added={_BEHAVIOURS: ",".join(behaviours)},
            lock_fd=lock.fd,
            command=(sys.executable, "-P", __file__),
        )
    if outcome.failure is not None:
        print(outcome.failure.rank, outcome.failure.host, outcome.failure.error)
    return outcome.exit_code


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank.main(engine)
    sys.exit(main())
