"""A contributor's memory of the conductor's answers, and the number of samples that a trainer keeps ready."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from peerd.messages.swarm import MemberInfo, Seqs, TrainerAnswer, TrainerSync
from peerd.pipeline.trainer.contributor import Contributor
from peerd.swarm.batch.trainer_ledger import Holding
from roles import trainer
from roles.trainer import TrainerRole


class Conductor:
    """Admits whatever it is asked for. News are answered in the time that it is told, and may end the step."""

    def __init__(self, answers: list[tuple[float, bool]]) -> None:
        self.waits_for, self.changes = None, 0
        self._answers = answers
        self.step = 0

    async def ask(self, method: str, report: Callable[[], TrainerSync], answer: object, timeout_s: float) -> Any:
        body = report()
        took_s, stepped = self._answers.pop(0) if body.done else (9.0, False) if self.step else (0.0, False)
        await trio.sleep(took_s)
        self.step += stepped
        return TrainerAnswer(
            term=1,
            step=self.step,
            taken=not stepped,
            admitted=Seqs() if stepped else Seqs.of([*body.open, *(done.seq for done in body.done)]),
            redo=[],
            counted=Seqs(),
            evaluate=None,
            complete=not self._answers,
            waits_for="",
            version=1,
            members=None,
        )

    def note_forecast(self, forecast: object, waits_for: str = "") -> None: ...

    def note_members(self, members: list[MemberInfo]) -> list[MemberInfo]:
        return members


class Work:
    """Done as soon as it is begun."""

    def __init__(self) -> None:
        self.longest: list[float] = []  # whenever it changed
        self.contributor: Contributor[str] | None = None

    def in_flight(self) -> int:
        return 2

    def told_together(self) -> int:
        return 1

    def refill(self, waiting: list[str]) -> None:
        waiting += ["samples"] * (2 - len(waiting))

    async def train(self, step: int, seq: int, load: str) -> list[Holding]:
        return [Holding("us", None)]

    async def repeat(self, step: int, seq: int, stage: int, load: str) -> Holding:
        return Holding("us", None)

    def note_members(self, members: list[MemberInfo]) -> None: ...

    def stepped(self, before: int) -> None: ...

    def answered(self, answer: TrainerAnswer) -> None:
        assert self.contributor is not None
        if not self.longest or self.longest[-1] != self.contributor.answer_s:
            self.longest.append(self.contributor.answer_s)

    def progress(self) -> Any: ...


async def test_the_longest_answer_to_news_of_this_step_and_the_one_before_counts(autojump_clock: MockClock) -> None:
    said = [(0.1, False), (0.4, False), (0.2, True), (0.1, False), (0.2, False), (0.1, True), (0.1, False), (0.1, True)]
    said += [(0.1, False)]
    ctx: Any = SimpleNamespace(clock=SimpleNamespace(secure_bytes=bytes))
    training: Any = SimpleNamespace(following=Conductor(said), fingerprint=bytes(16))
    work = Work()
    contributor: Contributor[str] = Contributor(ctx, training, work)
    work.contributor = contributor
    await contributor.follow()
    # Reports without news wait for some, however long that is. 0.4 is forgotten when the step after its own ends.
    assert work.longest == pytest.approx([0.0, 0.1, 0.4, 0.2, 0.1])


class OneByOne(Work):
    """One after the other, a second each; what is done is told `together`."""

    def __init__(self, together: int) -> None:
        super().__init__()
        self._together, self._lock = together, trio.Lock()

    def in_flight(self) -> int:
        return 6

    def told_together(self) -> int:
        return self._together

    def refill(self, waiting: list[str]) -> None:
        waiting += ["samples"] * (6 - len(waiting))

    async def train(self, step: int, seq: int, load: str) -> list[Holding]:
        async with self._lock:
            await trio.sleep(1.0)
        return [Holding("us", None)]


class Listener(Conductor):
    """Notes when it hears of how many; who has no news waits. The run ends with the twelfth."""

    def __init__(self) -> None:
        super().__init__([(0.0, False), (0.0, False)])
        self.heard: list[tuple[int, int]] = []
        self._met = False

    async def ask(self, method: str, report: Callable[[], TrainerSync], answer: object, timeout_s: float) -> Any:
        body = report()
        if not body.done and self._met:
            await trio.sleep_forever()  # until there are news
        self._met = True
        if body.done:
            self.heard.append((round(trio.current_time()), len(body.done)))
            self._answers = [(0.0, False), (0.0, False)] if trio.current_time() < 11.5 else [(0.0, False)]
        return await super().ask(method, lambda: body, answer, timeout_s)


@pytest.mark.parametrize(
    ("together", "heard"),
    [(1, [(n, 1) for n in range(1, 13)]), (3, [(3, 3), (6, 3), (9, 3), (12, 3)])],
)
async def test_what_is_done_is_told_at_once_or_so_many_together(
    autojump_clock: MockClock, together: int, heard: list[tuple[int, int]]
) -> None:
    conductor = Listener()
    ctx: Any = SimpleNamespace(clock=SimpleNamespace(secure_bytes=bytes))
    training: Any = SimpleNamespace(following=conductor, fingerprint=bytes(16))
    work = OneByOne(together)
    contributor: Contributor[str] = Contributor(ctx, training, work)
    work.contributor = contributor
    await contributor.follow()
    assert conductor.heard == heard


async def fed(waiting: int, open_: int, in_flight: int) -> tuple[int, int]:
    """The number of samples ready in the end, and of reports asked for while they were loaded."""
    role: Any = TrainerRole.__new__(TrainerRole)
    role._run = SimpleNamespace(pipeline=SimpleNamespace(microbatch=2))
    role._books = SimpleNamespace(waiting=["samples"] * waiting, open=lambda: range(open_))
    tells: list[None] = []
    role._contributor = SimpleNamespace(in_flight=lambda: in_flight, tell=lambda: tells.append(None))

    async def take() -> str:
        return "samples"

    role._data = SimpleNamespace(take=take)
    feed: Callable[[], Awaitable[None]] = role._feed
    async with trio.open_nursery() as nursery:
        nursery.start_soon(feed)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    return len(role._books.waiting), len(tells)


@pytest.mark.parametrize("in_flight", [1, 4, 23])
async def test_as_many_samples_lie_ready_as_the_next_report_may_wish_for(in_flight: int) -> None:
    """While gradients fill the line, few reports pass: each wishes for all that is computed until the next one."""
    assert await fed(0, in_flight, in_flight) == (max(trainer._AHEAD, in_flight), 0)


@pytest.mark.parametrize(("waiting", "told"), [(0, 1), (1, 0)])
async def test_samples_are_news_only_where_the_last_report_lacked_some(waiting: int, told: int) -> None:
    """Otherwise the wish for more goes with the next report of done microbatches."""
    assert await fed(waiting, 5, 6) == (6, told)
