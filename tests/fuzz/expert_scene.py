"""The scene of hostile sessions with a peer that hosts experts and keeps checkpoints of others'.

One host runs the role `expert` with real experts on a virtual device, with its vault, its adoption and the directory;
the honest peer calls an expert. Without tokens a hostile peer may claim an expert of which nobody else holds a
checkpoint yet, and the host may yield to it: then it says so, and goes on.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from peerd.codec.format.frame import TensorFrame
from peerd.core.errors import Refused, RemoteError
from peerd.messages.experts import Forward, Name, Output
from peerd.run.grid import Uid
from peerd.run.runfile import ExpertsSection, LimitsSection, ModelSection, RunFile, fingerprint
from roles.expert import ExpertRole
from tests.fuzz.service_scene import start_caller, start_peer
from tests.fuzz.sessions import NETWORK, ServiceStage, attacked
from tests.worlds.network.hosts import running_hosts

WIDTH = 4
EXPERTS = [Uid(0, (row, column)) for row in range(2) for column in range(2)]
RUN = RunFile(
    run="hostile",
    seed=5,
    model=ModelSection(d_model=WIDTH, heads=1, layers=1, context=4),
    experts=ExpertsSection(
        grid=[2, 2], layers=1, hidden=4, input=[WIDTH], max_batch=8, announce_s=5.0, checkpoint_updates=4, copies=1
    ),
    limits=LimitsSection(experts=4),
)
MARK = fingerprint(RUN)


def samples(rows: int = 2) -> TensorFrame:
    """What an expert takes, and what it gives back."""
    return TensorFrame("float32", (rows, WIDTH), np.linspace(-1, 1, rows * WIDTH, dtype="float32").tobytes())


@dataclass(kw_only=True)
class ExpertStage(ServiceStage):
    """A host of experts."""

    role: ExpertRole

    async def is_answered(self) -> str:
        """The honest peer gets outputs, or hears who has the expert now."""
        uid = min(self.role.host.experts, default=EXPERTS[0])
        body = Forward(MARK, Name.of(uid))
        try:
            answer = await self.asks.call(
                self.host.id, "expert/1/forward", body, Output, frames=(samples(),), timeout_s=30
            )
        except Refused as error:
            return "" if "is not served here" in str(error) else f"an honest call is refused: {error}"
        except RemoteError as error:
            return f"an honest call is not answered: {error}"
        values = np.frombuffer(bytes(answer.frames[0].payload), "float32")
        return "" if np.isfinite(values).all() else f"expert {uid} answers {values}"


@asynccontextmanager
async def expert_host() -> AsyncIterator[ExpertStage]:
    """A host that has all experts of its run."""
    with tempfile.TemporaryDirectory() as folder:
        async with running_hosts(NETWORK) as hosts:
            peer = await start_peer(hosts, "host", RUN, Path(folder), role=ExpertRole)
            honest, asks = await start_caller(hosts)
            async with attacked(hosts, peer.host, honest, ExpertStage, 20.0, role=peer.role, asks=asks) as made:
                assert sorted(peer.role.host.experts) == EXPERTS
                assert await made.is_answered() == ""
                yield made
