"""State of the demo of experts: its hosts, the adopted experts, and the final report.

Each adopted expert is checked: its new host logs the digest of the adopted checkpoint, which must be the digest of the
newest checkpoint on the disk of the killed host.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from peerd.demo import report
from peerd.demo.children import Child, Children
from peerd.demo.scene import Scene
from peerd.service.experts.vault_disk import VaultDisk


@dataclass(frozen=True, slots=True)
class HostRow:
    """One host of experts, by its last status."""

    name: str
    hosted: int
    updates: int
    updates_per_s: float
    adopted: int
    waits_for: str
    running: bool


@dataclass(slots=True)
class ExpertScene(Scene):
    """State of the swarm of hosts, updated from the processes' status."""

    hosts: list[HostRow] = field(default_factory=list)
    back: dict[str, dict[str, Any]] = field(default_factory=dict)  # expert -> event of its adoption

    def read(self, children: dict[str, Child], now_s: float) -> None:
        """Update the state from the processes' last status."""
        super(ExpertScene, self).read(children, now_s)
        self.hosts = [_host(child) for name, child in children.items() if name.startswith("host-")]

    def returned(self, children: dict[str, Child]) -> Iterator[str]:
        """Messages on experts adopted since the last call, one for each host."""
        for name, child in children.items():
            if not name.startswith("host-") or not any(host.name == name and host.adopted for host in self.hosts):
                continue
            fresh = {}
            for event in child.events():
                if event.get("name") == "expert.adopted" and str(event.get("expert")) not in self.back:
                    fresh[str(event["expert"])] = {**event, "host": name}
            self.back |= fresh
            if fresh:
                lost = sum(int(event.get("updates_lost") or 0) for event in fresh.values())
                yield f"{name} took over {', '.join(sorted(fresh))}; {lost} updates lost"


def _host(child: Child) -> HostRow:
    told = child.role()
    return HostRow(
        name=child.name,
        hosted=int(told.get("hosted") or 0),
        updates=int(told.get("updates") or 0),
        updates_per_s=float(told.get("updates_per_s") or 0.0),
        adopted=int(told.get("adopted") or 0),
        waits_for=str(told.get("waits_for") or ""),
        running=child.running,
    )


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
    peer = str((child.snapshot.get("peer") or {}).get("id"))
    own = [pointer for pointer in VaultDisk(child.data_dir / "expert" / "vault").listed() if pointer.peer.text == peer]
    newest = {str(pointer.expert.uid): pointer for pointer in sorted(own, key=lambda pointer: pointer.rank)}
    others = handed_on(child.events())
    return {uid: pointer.digest.hex() for uid, pointer in newest.items() if uid not in others}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertReport:
    """Final figures of the demo of experts. Losses are as in `report.Report`."""

    loss_start: float | None
    loss_end: float | None
    loss_at_kill: float | None
    loss_after_kill: float | None
    steps: int
    seconds: float
    tokens_per_s: float
    wire_bytes_per_token: float | None
    killed: int
    experts_orphaned: int  # hosted by the killed host
    experts_back: int  # of these, adopted by other hosts
    same_weights: int  # of these, with the digest of the newest checkpoint on the killed host's disk
    updates_lost: int  # made after those checkpoints, as far as other hosts know
    taken_over: dict[str, str]  # expert -> new host
    data_dir: str
    processes_left: int
    commands: list[str]  # command lines to type next

    @classmethod
    def of(cls, scene: ExpertScene, children: Children, kill_step: int | None, commands: Sequence[str]) -> ExpertReport:
        """Compute the final figures."""
        at_kill, after = report.losses_around(scene, kill_step)
        saved = {uid: digest for name in scene.killed for uid, digest in newest_own(children.by_name[name]).items()}
        orphaned = saved.keys()
        back = {uid: event for uid, event in scene.back.items() if uid in orphaned}
        return cls(
            loss_start=scene.loss_start,
            loss_end=scene.loss_end,
            loss_at_kill=at_kill,
            loss_after_kill=after,
            steps=scene.step,
            seconds=scene.seconds,
            tokens_per_s=scene.tokens_per_s(),
            wire_bytes_per_token=report.finite(scene.bytes_per_token()),
            killed=len(scene.killed),
            experts_orphaned=len(orphaned),
            experts_back=len(back),
            same_weights=sum(str(event.get("digest")) == saved[uid] for uid, event in back.items()),
            updates_lost=sum(int(event.get("updates_lost") or 0) for event in back.values()),
            taken_over={uid: str(event["host"]) for uid, event in sorted(back.items())},
            data_dir=str(children.folder),
            processes_left=sum(child.running for child in children.by_name.values()),
            commands=list(commands),
        )

    def as_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)

    def text(self) -> str:
        lines = [
            f"validation loss   {report.loss_text(self.loss_start)} at the start, "
            f"{report.loss_text(self.loss_end)} at the end",
            f"steps             {self.steps} in {self.seconds:.0f} s, {self.tokens_per_s:,.0f} tokens/s",
            f"on the wire       {self.wire_bytes_per_token or 0:,.0f} bytes per token, all processes together",
            f"hosts             {self.killed} killed, with {self.experts_orphaned} experts",
            f"experts           {self.experts_back} adopted by other hosts, {self.same_weights} of them with the "
            "weights of their last checkpoint",
            f"updates           {self.updates_lost} lost, made after those checkpoints",
            f"everything is in  {self.data_dir}",
            "to export the model, generate text and evaluate it:",
            *(f"  {line}" for line in self.commands),
        ]
        return "\n".join(lines)
