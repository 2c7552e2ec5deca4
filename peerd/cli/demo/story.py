"""Script of the demo: start a backbone, four peers and a trainer; watch; kill a peer after a third; print a report.

`PipelineDemo` is a pipeline of two stages: a new peer joins at half time, and the model generates text at the end.
`ExpertDemo` has hosts of experts: the others adopt the experts of the killed host. In all cases, also if a child
fails, all processes are stopped and the result is one message.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from abc import ABC, abstractmethod
from typing import Any, Final

import trio

from peerd.cli.demo import outcome
from peerd.cli.demo.children import Child, Children
from peerd.cli.demo.expert_scene import ExpertReport, ExpertScene
from peerd.cli.demo.report import DemoReport, PipelineReport, common_figures
from peerd.cli.demo.scene import Scene
from peerd.cli.demo.screen import Screen, open_screen
from peerd.cli.demo.setting import DemoConfig, prepare
from peerd.core.errors import PeerdError
from peerd.run.runfile import RunFile

LISTEN: Final = "/ip4/127.0.0.1/tcp/0"
PERIOD_S: Final = 0.4
ASK_TIMEOUT_S: Final = 2.0
START_S: Final = 90.0  # for the backbone to start; importing torch five times is slow on a slow disk
STALL_S: Final = 120.0  # without any work done, until the demo fails with what each process waits for
NO_STEP_S: Final = 1800.0  # without a new step but with work done, as on a busy machine, until the demo fails
PEERS_PER_STAGE: Final = 2
EXPERT_HOSTS: Final = 4
IDLE_STEPS: Final = 2  # the kill waits up to this many steps for a peer with work to lose

__all__ = ["DemoConfig", "run"]


class DemoStory(ABC):
    """Base class of a demo: runs it from the first process to the last step."""

    scene: Scene
    peers: str  # name of the peers besides backbone and trainer, for messages

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
        """Number of steps, and tokens per step."""
        return self._run.optimizer.total_steps, self._run.batch.target_samples * self._run.model.context

    @abstractmethod
    def _cast(self) -> dict[str, str]:
        """Role of each peer besides backbone and trainer, by name."""

    @abstractmethod
    def _disturb(self) -> None:
        """Kill or start a peer if it is time for that."""

    @abstractmethod
    def _report(self) -> DemoReport:
        """The final figures."""

    def report(self) -> str:
        """The final report, as text or JSON."""
        found = self._report()
        return found.as_json() if self._wish.as_json else "\n" + found.text()

    def _common(self) -> dict[str, Any]:
        return common_figures(self.scene, self._children, self.kill_step, self._run)

    async def play(self, screen: Screen) -> None:
        """Run the demo until the trainer finishes, or Ctrl+C. Raises PeerdError if a process fails or hangs."""
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
            while not (addrs := backbone.snapshot.peer.addrs):
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
            why = child.role().waits_for or "no reason given"
            waits.append(f"  {child.name}: {f'waits: {why}' if child.running else 'has ended'}")
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
        """Kill a peer without warning, like a power cut. `words` describes it in the message."""
        self._children.kill(self._children.by_name[name])
        self.scene.killed.append(name)
        self.kill_step = self.scene.step
        self.scene.say(self.now_s, f"killed {name} {words}")

    async def _obey_signals(self, everything: trio.CancelScope) -> None:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for _ in signals:
                self.stopped = True
                everything.cancel()


class PipelineDemo(DemoStory):
    """Demo of a pipeline: kills the stage peer with the most work, and starts another one later."""

    peers = "stage peers"

    def __init__(self, wish: DemoConfig, settings: RunFile, children: Children) -> None:
        super().__init__(wish, settings, children)
        self.scene = Scene(*self._sizes)

    def _cast(self) -> dict[str, str]:
        return {f"stage-{n}": "stage" for n in range(1, PEERS_PER_STAGE * self._run.pipeline.stages + 1)}

    def _disturb(self) -> None:
        """Kill a peer after a third of the steps; start another one after half."""
        scene, total = self.scene, self.scene.total_steps
        if self._wish.calm:
            return
        if not scene.killed and scene.step * 3 >= total and (victim := scene.victim()) is not None:
            held, stage = victim.told.held_samples, victim.told.stage
            if not held and scene.step * 3 < total + 3 * IDLE_STEPS:
                return  # wait for a peer that has work to lose
            work = f"; it held {held} samples' gradients" if held else ""
            self._kill(victim.name, f"of stage {stage} at step {scene.step}{work}")
        elif scene.killed and not self.started_later and scene.step * 2 >= total:
            name = f"stage-{PEERS_PER_STAGE * self._run.pipeline.stages + 1}"
            self._join(name, "stage")
            self.started_later += 1
            scene.say(self.now_s, f"started {name} at step {scene.step}")

    def _look(self) -> None:
        before = {peer.name for peer in self.scene.stage_peers if peer.told.stage >= 0}
        super()._look()
        for peer in self.scene.stage_peers:
            if peer.told.stage >= 0 and peer.name not in before:
                self.scene.say(self.now_s, f"{peer.name} serves stage {peer.told.stage}")

    def _report(self) -> PipelineReport:
        scene = self.scene
        checkpoint = outcome.gather_checkpoint(self._children.folder, self._run)
        return PipelineReport(
            **self._common(),
            started_later=self.started_later,
            microbatches=scene.microbatches,
            microbatches_redone=scene.redone,
            microbatches_requeued=scene.requeued,
            microbatches_lost=scene.lost,
            checkpoint=str(checkpoint),
            sample=outcome.sample(checkpoint, self._run),
        )


class ExpertDemo(DemoStory):
    """Demo of a mixture of experts: kills the host with the most experts, which the others then adopt."""

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
        living = [host for host in scene.hosts if host.running and host.told.hosted]
        victim = max(living, key=lambda host: host.told.hosted, default=None)
        if victim is not None:
            self._kill(victim.name, f"at step {scene.step}; it hosted {victim.told.hosted} experts")

    def _look(self) -> None:
        super()._look()
        for text in self.scene.returned(self._children.by_name):
            self.scene.say(self.now_s, text)

    def _report(self) -> ExpertReport:
        return ExpertReport.of_experts(self.scene, self._children, self._common())


def run(wish: DemoConfig) -> int:
    """Run the whole demo. Returns the exit code."""
    folder, settings = prepare(wish)
    with Children(folder) as children:
        story = (PipelineDemo if settings.experts is None else ExpertDemo)(wish, settings, children)
        screen = open_screen(as_json=wish.as_json)
        with contextlib.closing(screen):
            try:
                trio.run(story.play, screen)
            except BaseExceptionGroup as group:
                raise _first(group) from group
    if story.stopped:
        sys.stderr.write(f"stopped; the data so far is in {folder}\n")
        return 0
    print(story.report())
    return 0


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
