"""The demo's story: start a backbone, four peers and a trainer; watch; kill a peer at one third; end with figures.

`StageStory` is a pipeline of two stages, where a new peer comes at half and the model writes a sample in the end;
`ExpertStory` has hosts of experts, whose experts come back on the others. Whatever happens, a child's failure included,
all processes are stopped and the end is said in one message.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from abc import ABC, abstractmethod
from typing import Final

import trio

from peerd.core.errors import PeerdError
from peerd.core.run.runfile import RunFile
from peerd.demo import outcome, report
from peerd.demo.children import Child, Children
from peerd.demo.expert_scene import ExpertReport, ExpertScene
from peerd.demo.scene import Scene
from peerd.demo.screen import Screen, open_screen
from peerd.demo.setting import DemoConfig, prepare

LISTEN: Final = "/ip4/127.0.0.1/tcp/0"
PERIOD_S: Final = 0.4
ASK_TIMEOUT_S: Final = 2.0
START_S: Final = 90.0  # a slow disk takes this long to import torch five times
STALL_S: Final = 120.0  # in which nothing is done: something is wrong, and each process says what it waits for
NO_STEP_S: Final = 1800.0  # without a new step, though something is: a busy machine is slow, and not stuck
PEERS_PER_STAGE: Final = 2
EXPERT_HOSTS: Final = 4
IDLE_STEPS: Final = 2  # so long the kill waits for a peer that would lose something

__all__ = ["DemoConfig", "run"]


class DemoStory(ABC):
    """One demo from the first process to the last step."""

    scene: Scene
    peers: str  # what the peers besides backbone and trainer are, in words

    def __init__(self, wish: DemoConfig, settings: RunFile, children: Children) -> None:
        self._wish = wish
        self._run = settings
        self._children = children
        self._file = children.folder / "run.yaml"
        self._bootstrap = ""
        self._began = 0.0
        self.stopped = False
        self.kill_step: int | None = None
        self.started_later = 0

    @property
    def _sizes(self) -> tuple[int, int]:
        """Steps of the run, and tokens of each."""
        return self._run.optimizer.total_steps, self._run.batch.target_samples * self._run.model.context

    @abstractmethod
    def _cast(self) -> dict[str, str]:
        """The role of each peer besides backbone and trainer, by name."""

    @abstractmethod
    def _disturb(self) -> None:
        """Look whether a peer is to be killed, or to come."""

    @abstractmethod
    def report(self) -> str:
        """The end, for people or for programs."""

    async def play(self, screen: Screen) -> None:
        """Run the story until the trainer has finished, or Ctrl+C. PeerdError when a process failed or nothing
        moves.
        """
        self._began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._obey_signals, nursery.cancel_scope)
            nursery.start_soon(self._watch, screen)
            await self._start()
            await self._train()
            nursery.cancel_scope.cancel()
        self._look()
        self.scene.read_log(self._children.by_name["trainer"].events())
        screen.update(self.scene, self.now_s)

    @property
    def now_s(self) -> float:
        return trio.current_time() - self._began

    async def _start(self) -> None:
        self.scene.say(self.now_s, f"everything is in {self._children.folder}")
        backbone = self._children.start("backbone", ["backbone", "--listen", LISTEN])
        with trio.move_on_after(START_S):
            while not (addrs := backbone.snapshot.get("peer", {}).get("addrs")):
                await self._pause()
            self._bootstrap = addrs[0]
        if not self._bootstrap:
            raise PeerdError(f"the backbone did not start within {START_S:.0f} s:\n{backbone.tail()}")
        cast = self._cast()
        for name, role in cast.items():
            self._join(name, role)
        self._join("trainer", "trainer")
        self.scene.say(self.now_s, f"started a backbone, {len(cast)} {self.peers} and a trainer")

    def _join(self, name: str, role: str) -> Child:
        options = ["--model", str(self._file), "--bootstrap", self._bootstrap, "--listen", LISTEN]
        return self._children.start(name, ["join", "--role", role, *options])

    async def _train(self) -> None:
        trainer = self._children.by_name["trainer"]
        moved_at = stepped_at = trio.current_time()
        step, work = -1, (0, 0)
        while trainer.running:
            await self._pause()
            self._disturb()
            now = trio.current_time()
            if self.scene.step != step:
                moved_at, stepped_at, step = now, now, self.scene.step
            if self.scene.work != work:
                moved_at, work = now, self.scene.work
            if now - moved_at > STALL_S or now - stepped_at > NO_STEP_S:
                raise PeerdError(self._stalled(now - stepped_at))
        self._check()

    async def _pause(self) -> None:
        self._check()
        await trio.sleep(PERIOD_S / 4)

    def _check(self) -> None:
        failed = self._children.failed()
        if failed is not None:
            raise PeerdError(f"{failed.name} {failed.ending}:\n{failed.tail()}")

    def _stalled(self, since_s: float) -> str:
        waits = []
        for child in self._children.by_name.values():
            why = child.role().get("waits_for") or "nothing that it names"
            waits.append(f"  {child.name}: {'waits: ' + str(why) if child.running else 'is gone'}")
        return f"no new step for {since_s:.0f} s at step {self.scene.step}\n" + "\n".join(waits)

    async def _watch(self, screen: Screen) -> None:
        while True:
            async with trio.open_nursery() as nursery:
                for child in self._children.by_name.values():
                    if child.running:
                        nursery.start_soon(child.ask, ASK_TIMEOUT_S)
            self._look()
            screen.update(self.scene, self.now_s)
            await trio.sleep(PERIOD_S)

    def _look(self) -> None:
        self.scene.read(self._children.by_name, self.now_s)

    def _kill(self, name: str, words: str) -> None:
        """Kill a peer as a power cut would; `words`: what it was."""
        self._children.kill(self._children.by_name[name])
        self.scene.killed.append(name)
        self.kill_step = self.scene.step
        self.scene.say(self.now_s, f"killed {name} {words}")

    async def _obey_signals(self, everything: trio.CancelScope) -> None:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for _ in signals:
                self.stopped = True
                everything.cancel()


class StageStory(DemoStory):
    """A pipeline of stages: the peer whose loss hurts most is killed, and another takes its place."""

    peers = "stage peers"

    def __init__(self, wish: DemoConfig, settings: RunFile, children: Children) -> None:
        super().__init__(wish, settings, children)
        self.scene = Scene(*self._sizes)

    def _cast(self) -> dict[str, str]:
        return {f"stage-{n}": "stage" for n in range(1, PEERS_PER_STAGE * self._run.pipeline.stages + 1)}

    def _disturb(self) -> None:
        """Kill at one third; replace at half."""
        scene, total = self.scene, self.scene.total_steps
        if self._wish.calm:
            return
        if not scene.killed and scene.step * 3 >= total and (victim := scene.victim()) is not None:
            if not victim.held and scene.step * 3 < total + 3 * IDLE_STEPS:
                return  # one that holds work will be along
            work = f"; it held {victim.held} samples' gradients" if victim.held else ""
            self._kill(victim.name, f"of stage {victim.stage} at step {scene.step}{work}")
        elif scene.killed and not self.started_later and scene.step * 2 >= total:
            name = f"stage-{PEERS_PER_STAGE * self._run.pipeline.stages + 1}"
            self._join(name, "stage")
            self.started_later += 1
            scene.say(self.now_s, f"started {name} at step {scene.step}")

    def _look(self) -> None:
        before = {peer.name: peer.stage for peer in self.scene.stage_peers}
        super()._look()
        for peer in self.scene.stage_peers:
            if peer.stage is not None and before.get(peer.name) is None:
                self.scene.say(self.now_s, f"{peer.name} serves stage {peer.stage}")

    def report(self) -> str:
        scene = self.scene
        at_kill, after = report.losses_around(scene, self.kill_step)
        checkpoint = outcome.gather_checkpoint(self._children.folder, self._run)
        found = report.Report(
            loss_start=scene.loss_start,
            loss_end=scene.loss_end,
            loss_at_kill=at_kill,
            loss_after_kill=after,
            steps=scene.step,
            seconds=scene.seconds,
            tokens_per_s=scene.tokens_per_s(),
            wire_bytes_per_token=report.finite(scene.bytes_per_token()),
            killed=len(scene.killed),
            started_later=self.started_later,
            microbatches=scene.microbatches,
            microbatches_redone=scene.redone,
            microbatches_requeued=scene.requeued,
            microbatches_lost=scene.lost,
            checkpoint=str(checkpoint),
            data_dir=str(self._children.folder),
            sample=outcome.sample(checkpoint, self._run),
            processes_left=sum(child.running for child in self._children.by_name.values()),
            commands=outcome.commands(self._children.folder, self._run),
        )
        return found.as_json() if self._wish.as_json else "\n" + found.text()


class ExpertStory(DemoStory):
    """Hosts of experts: the one with most of them is killed, and the others take its experts over."""

    peers = "hosts of experts"

    def __init__(self, wish: DemoConfig, settings: RunFile, children: Children) -> None:
        super().__init__(wish, settings, children)
        self.scene: ExpertScene = ExpertScene(*self._sizes)

    def _cast(self) -> dict[str, str]:
        return {f"host-{n}": "expert" for n in range(1, EXPERT_HOSTS + 1)}

    def _disturb(self) -> None:
        scene = self.scene
        if self._wish.calm or scene.killed or scene.step * 3 < scene.total_steps:
            return
        victim = max(
            (host for host in scene.hosts if host.running and host.hosted), key=lambda h: h.hosted, default=None
        )
        if victim is not None:
            self._kill(victim.name, f"at step {scene.step}; it hosted {victim.hosted} experts")

    def _look(self) -> None:
        super()._look()
        for text in self.scene.returned(self._children.by_name):
            self.scene.say(self.now_s, text)

    def report(self) -> str:
        commands = outcome.commands(self._children.folder, self._run)
        found = ExpertReport.of(self.scene, self._children, self.kill_step, commands)
        return found.as_json() if self._wish.as_json else "\n" + found.text()


def run(wish: DemoConfig) -> int:
    """The whole demo; its exit code."""
    folder, settings = prepare(wish)
    with Children(folder) as children:
        story = (StageStory if settings.experts is None else ExpertStory)(wish, settings, children)
        screen = open_screen(as_json=wish.as_json)
        with contextlib.closing(screen):
            try:
                trio.run(story.play, screen)
            except BaseExceptionGroup as group:
                raise _first(group) from group
    if story.stopped:
        sys.stderr.write(f"stopped; what there is lies in {folder}\n")
        return 0
    print(story.report())
    return 0


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
