"""State of the demo of experts: its hosts, the adopted experts, and the final report.

Each adopted expert is checked: its new host logs the digest of the adopted checkpoint, which must be the digest of the
newest checkpoint on the disk of the killed host.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from peerd.cli.demo.children import Child, Children
from peerd.cli.demo.report import DemoReport
from peerd.cli.demo.scene import ProcessRow, Scene, rows
from peerd.experts.calls.vault_disk import VaultDisk


@dataclass(slots=True)
class ExpertScene(Scene):
    """State of the swarm of hosts, updated from the processes' status."""

    hosts: list[ProcessRow] = field(default_factory=list)
    back: dict[str, dict[str, Any]] = field(default_factory=dict)  # expert -> event of its adoption

    def read(self, children: dict[str, Child], now_s: float) -> None:
        """Update the state from the processes' last status."""
        super(ExpertScene, self).read(children, now_s)
        self.hosts = rows(children, "host-")

    def returned(self, children: dict[str, Child]) -> Iterator[str]:
        """Messages on experts adopted since the last call, one for each host."""
        for name in [host.name for host in self.hosts if host.told.adopted]:
            fresh = {}
            for event in children[name].events():
                if event.get("name") == "expert.adopted" and str(event.get("expert")) not in self.back:
                    fresh[str(event["expert"])] = {**event, "host": name}
            self.back |= fresh
            if fresh:
                lost = sum(int(event.get("updates_lost") or 0) for event in fresh.values())
                yield f"{name} took over {', '.join(sorted(fresh))}; {lost} updates lost"


def handed_on(events: Iterable[dict[str, Any]]) -> set[str]:
    """Experts that a host has given to other hosts, by its log, and has not adopted again."""
    left = set[str]()
    for event in events:
        uid = str(event.get("expert"))
        if event.get("name") in ("expert.given", "expert.left_to", "expert.yielded"):
            left.add(uid)
        elif event.get("name") in ("expert.taken", "expert.adopted"):
            left.discard(uid)
    return left


def newest_own(child: Child) -> dict[str, str]:
    """By expert, the digest of the newest checkpoint on a host's disk. Only experts that it hosted to the end."""
    kept = VaultDisk(child.data_dir / "expert" / "vault").listed()
    own = [pointer for pointer in kept if pointer.peer.text == child.snapshot.peer.id]
    newest = {str(pointer.expert.uid): pointer for pointer in sorted(own, key=lambda pointer: pointer.rank)}
    others = handed_on(child.events())
    return {uid: pointer.digest.hex() for uid, pointer in newest.items() if uid not in others}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertReport(DemoReport):
    """Final figures of the demo of experts."""

    experts_orphaned: int  # hosted by the killed host
    experts_back: int  # of these, adopted by other hosts
    same_weights: int  # of these, with the digest of the newest checkpoint on the killed host's disk
    updates_lost: int  # made after those checkpoints, as far as other hosts know
    taken_over: dict[str, str]  # expert -> new host

    @classmethod
    def of_experts(cls, scene: ExpertScene, children: Children, common: dict[str, Any]) -> ExpertReport:
        """Compute the final figures. `common` has those of `DemoReport`."""
        saved = {uid: digest for name in scene.killed for uid, digest in newest_own(children.by_name[name]).items()}
        back = {uid: event for uid, event in scene.back.items() if uid in saved}
        return cls(
            **common,
            experts_orphaned=len(saved),
            experts_back=len(back),
            same_weights=sum(str(event.get("digest")) == saved[uid] for uid, event in back.items()),
            updates_lost=sum(int(event.get("updates_lost") or 0) for event in back.values()),
            taken_over={uid: str(event["host"]) for uid, event in sorted(back.items())},
        )

    def facts(self) -> dict[str, str]:
        back = f"{self.experts_back} adopted by other hosts, {self.same_weights} of them with the weights of their last"
        return {
            "hosts": f"{self.killed} killed, with {self.experts_orphaned} experts",
            "experts": f"{back} checkpoint",
            "updates": f"{self.updates_lost} lost, made after those checkpoints",
            "everything is in": self.data_dir,
        }
