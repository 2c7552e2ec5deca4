"""A pool of tasks that run call handlers, each reused for the next call; and further tasks for reading and writing.

A worker keeps its task and cancel scope from call to call, which is cheaper than new ones. A worker whose scope was
cancelled, or whose handler crashed, ends, and the next call gets a new one. Workers are started on demand; callers
limit the number of concurrent calls. An internal error in any task here ends only the call or stream that it works for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

import trio

_KEPT = 64  # idle workers; a burst beyond this starts new tasks


Supervise = Callable[[Callable[[], Awaitable[None]], Callable[[], str]], Awaitable[bool]]


class TaskJob(Protocol):
    """A job for a worker of the pool: one call."""

    worker: PoolWorker | None

    @property
    def deadline(self) -> float:
        """The time, in trio's clock, at which the job is cancelled."""
        ...

    async def run(self) -> None: ...

    def cut(self, crashed: bool) -> None:
        """Called when `run` was cancelled or raised."""
        ...

    def abandon(self) -> None:
        """Called when `cut` raised: nothing more can be sent to the caller."""
        ...

    def about(self) -> str:
        """Description for the log, used if it crashes."""
        ...


def _task(work: Callable[[], None]) -> Callable[[], Awaitable[None]]:
    async def run() -> None:
        work()

    return run


class Tasks:
    """Starts tasks that do not run handlers, but write to streams or watch them."""

    def __init__(self, supervise: Supervise, nursery: trio.Nursery) -> None:
        self._supervise = supervise
        self._nursery = nursery

    def start(
        self, work: Callable[[], Awaitable[None]], about: Callable[[], str], end: Callable[[], None] | None = None
    ) -> None:
        """Run `work` in a new task; if it fails by an internal error, call `end` to end what it works for."""
        self._nursery.start_soon(self._do, work, about, end)

    async def _do(
        self, work: Callable[[], Awaitable[None]], about: Callable[[], str], end: Callable[[], None] | None
    ) -> None:
        if not await self._supervise(work, about) and end is not None:
            await self._supervise(_task(end), about)


class PoolWorker:
    """One task of the pool, which runs one job at a time."""

    __slots__ = ("_crew", "_job", "_scope", "_task")

    def __init__(self, crew: TaskPool, job: TaskJob) -> None:
        self._crew = crew
        self._job: TaskJob | None = job
        self._scope = trio.CancelScope()
        self._task: trio.lowlevel.Task | None = None  # set while idle

    def cancel(self, job: TaskJob) -> None:
        """Cancel `job`, if it is running here."""
        if self._job is job:
            self._scope.cancel()

    def take(self, job: TaskJob) -> None:
        """Run `job` next; only while idle."""
        assert self._task is not None
        task, self._task, self._job = self._task, None, job
        trio.lowlevel.reschedule(task)

    async def live(self) -> None:
        """Run jobs until one is cancelled, one crashes, or enough other workers are idle."""
        fine = await self._crew.supervise(self._work, self._about)
        job, self._job = self._job, None
        if job is not None and not await self._crew.supervise(_task(lambda: job.cut(not fine)), job.about):
            await self._crew.supervise(_task(job.abandon), job.about)

    def _about(self) -> str:
        return self._job.about() if self._job is not None else "no call"

    async def _work(self) -> None:
        with self._scope as scope:
            while self._job is not None:
                scope.deadline = self._job.deadline
                await self._job.run()
                self._job = None
                if not scope.cancel_called and self._crew.keep(self):
                    self._task = trio.lowlevel.current_task()
                    await trio.lowlevel.wait_task_rescheduled(self._abort)

    def _abort(self, _: object) -> trio.lowlevel.Abort:
        # The last job's deadline passed while idle, or the whole crew is ending.
        self._task = None
        self._crew.forget(self)
        return trio.lowlevel.Abort.SUCCEEDED


class TaskPool:
    """Runs jobs in tasks of the nursery given to `open`; `tasks` starts further tasks there."""

    def __init__(self, supervise: Supervise) -> None:
        self.supervise = supervise
        self.nursery: trio.Nursery | None = None
        self.tasks: Tasks | None = None
        self._idle: list[PoolWorker] = []

    def open(self, nursery: trio.Nursery) -> Tasks:
        """Run jobs in `nursery` from now on."""
        self.nursery, self.tasks = nursery, Tasks(self.supervise, nursery)
        return self.tasks

    def close(self) -> None:
        """Start no more tasks."""
        self.nursery = self.tasks = None

    def start(self, job: TaskJob) -> None:
        """Run `job` soon."""
        if self._idle:
            worker = self._idle.pop()
            job.worker = worker
            worker.take(job)
        elif self.nursery is not None:
            job.worker = PoolWorker(self, job)
            self.nursery.start_soon(job.worker.live)
        else:
            job.cut(crashed=False)

    def keep(self, worker: PoolWorker) -> bool:
        """True if an idle worker should wait for the next job; `start` may then use it at once."""
        if len(self._idle) >= _KEPT:
            return False
        self._idle.append(worker)
        return True

    def forget(self, worker: PoolWorker) -> None:
        """Remove an idle worker that ends."""
        self._idle.remove(worker)
