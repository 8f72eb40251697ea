"""How the ranks of a preflight meet, so that a dead one is named instead of waited for.

Rank 0 serves a store. Every rank posts what it found by itself, and rank 0 waits for that until a deadline: who has
posted nothing by then is missing. Only ranks of nodes that answered whole and are fit take part in the tests of groups;
each test has a short timeout and posts how it went, also when it failed. So a report is always written, unless rank 0's
own node is the dead one: then whoever finds that out writes it.

Collective: none in here; the store's keys are `NAME/RANK`.
"""

import json
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from shardwright.pretrain.ranks import RankEnvironment

_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Meeting:
    """The store that ranks meet at, as one of them sees it."""

    store: Store
    rank: int

    @classmethod
    def join(cls, environment: RankEnvironment, timeout_seconds: float) -> "Meeting":
        """Serve the store as rank 0, or find it.

        Raises:
            RuntimeError: rank 0 did not serve in time; or its port is taken.
        """
        host = environment.master_addr
        if environment.serves_store:  # whether its own name leads to it is for the others to find out
            host = "127.0.0.1"
        else:
            _reach(host, environment.master_port, timeout_seconds)
        store = TCPStore(
            host,
            environment.master_port,
            environment.world_size,
            is_master=environment.serves_store,
            timeout=timedelta(seconds=timeout_seconds),
            wait_for_workers=False,
        )
        return cls(PrefixStore(f"preflight {environment.launch_id}", store), environment.rank)

    def post(self, name: str, value: Any) -> None:
        """Leave a value of this rank."""
        self.store.set(f"{name}/{self.rank}", json.dumps(value))

    def collect(self, name: str, ranks: Iterable[int], deadline: float) -> dict[int, Any]:
        """Values of those ranks that post one before the deadline (`time.monotonic()`)."""
        found: dict[int, Any] = {}
        missing = list(ranks)
        while True:
            came = [rank for rank in missing if self.store.check([f"{name}/{rank}"])]
            found |= {rank: json.loads(self.store.get(f"{name}/{rank}")) for rank in came}
            missing = [rank for rank in missing if rank not in found]
            if not missing or time.monotonic() > deadline:
                return dict(sorted(found.items()))
            time.sleep(_POLL_SECONDS)

    def tell(self, name: str, value: Any) -> None:
        """Rank 0 says something to all."""
        self.store.set(f"{name}/said", json.dumps(value))

    def told(self, name: str, seconds: float) -> Any:
        """What rank 0 said.

        Raises:
            RuntimeError: nothing in time, or rank 0 is gone.
        """
        self.store.wait([f"{name}/said"], timedelta(seconds=seconds))
        return json.loads(self.store.get(f"{name}/said"))


def _reach(host: str, port: int, timeout_seconds: float) -> None:
    """Return as soon as somebody listens there; the store's own client takes several times as long as it is told.

    Raises:
        RuntimeError: nobody did in time.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=max(1.0, deadline - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{host}:{port}: {error.strerror or error}, for {timeout_seconds:g} s") from None
            time.sleep(_POLL_SECONDS)
