"""The scene of hostile sessions with a peer that hosts experts and keeps checkpoints of others'.

One host runs the role `expert` with real experts on a virtual device, with its vault, its adoption and the directory;
the honest peer calls an expert. Without tokens a hostile peer may claim any expert, and the host yields to it: then it
says so, and goes on.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import trio

from peerd.compute.worker import InlineWorker
from peerd.core.errors import Refused, RemoteError
from peerd.core.experts.grid import Uid
from peerd.core.frame import TensorFrame
from peerd.core.messages.experts import Forward, Name, Output
from peerd.core.run.runfile import ExpertsSection, LimitsSection, ModelSection, RunFile, fingerprint
from peerd.log import EventLog
from peerd.role import RoleContext
from peerd.service.dht.dht import Dht
from peerd.service.rpc.rpc import Rpc
from peerd.service.run_services import RunServices
from peerd.sim.clock import SimClock
from roles.expert import ExpertRole
from tests.fuzz.service_scene import still_lent
from tests.fuzz.sessions import HOST, NETWORK, Stage
from tests.kit.hosts import echo, keypair, running_hosts
from tests.kit.virtual import addr_of, transport

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
class ExpertStage(Stage):
    """A host of experts."""

    role: ExpertRole
    asks: Rpc  # of the honest peer
    friends: frozenset[str]

    async def check(self) -> str:
        """As below, and: nothing that was lent to strangers is out, and a call of an expert is answered."""
        return await super().check() or await still_lent(self.host, self.friends) or await self.is_answered()

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
            host, clock = await hosts.start("host", HOST), SimClock(1, "host")
            rpc = Rpc(host, clock)
            dht = Dht(host, rpc, clock, keypair("host"))
            await hosts.nursery.start(rpc.run)
            await hosts.nursery.start(dht.run, [])
            workers = {device: InlineWorker() for device in ("cpu", "files", "data", "coding")}
            ctx = RoleContext(
                run=RUN,
                services=RunServices(RUN, host, rpc, dht, clock),
                host=host,
                rpc=rpc,
                dht=dht,
                clock=clock,
                data_dir=Path(folder),
                device="cpu",
                seed=1,
                log=EventLog(clock),
                worker=workers.__getitem__,
            )
            role = ExpertRole(ctx)
            await hosts.nursery.start(role.run)
            host.handle("/echo/1", echo)
            honest = await hosts.start("honest")
            asks = Rpc(honest, SimClock(1, "honest"))
            await hosts.nursery.start(asks.run)
            await honest.connect(host.id, [hosts.addr("host")])
            network = transport(hosts.net, "hostile")
            listener = await network.listen(addr_of(hosts.net, "hostile"))
            async with trio.open_nursery() as nursery:
                made = ExpertStage(
                    host=host,
                    honest=honest,
                    addr=hosts.addr("host"),
                    network=network,
                    listener=listener,
                    nursery=nursery,
                    role=role,
                    asks=asks,
                    friends=frozenset((host.id.text, honest.id.text)),
                )
                await trio.sleep(20)
                assert sorted(role.host.experts) == EXPERTS
                made.links = set(host.links)
                assert await made.is_answered() == ""
                yield made
                nursery.cancel_scope.cancel()
