"""Session of a post with the conductor: reports the post's position and holdings, receives the swarm's position.

Members and helpers use it alike; only their reports differ (`ReportingPost`). A report without news waits at the
conductor until there is a change. A complete report is sent to a new conductor, to a conductor that asks for one, and
after each call of `tell`; otherwise the last complete report remains valid. Invariant: an answer is applied only to the
report that it answers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Protocol

import trio

from peerd.messages.swarm import LineInfo, Mb, Mbs, MemberAnswer, MemberInfo, MemberSync, Position, PostLoad
from peerd.role.run_services import RunServices
from peerd.swarm.roster import START
from peerd.swarm.steps.member_list import KnownMembers

_WAIT_S: Final = 2.0  # that a report waits at the conductor for news
_LOAD_S: Final = 10.0  # between two reports of the load
_ANSWER_S: Final = 8.0  # for the answer, in addition to that wait


@dataclass(frozen=True, slots=True)
class Holdings:
    """The parts of a report that are sent only when they changed. `early`: microbatches held for the next step."""

    held: list[Mb]
    counted: list[Mb]
    early: list[Mb]
    digest: bytes
    seen: list[Position]  # positions of the swarm; see swarm/positions/evidence


@dataclass(frozen=True, slots=True)
class PostReport:
    """A post's report about itself. `helps` is True for a helper, which sums for others and holds nothing."""

    line: LineInfo
    helps: bool = False
    position: Position = START
    prepared: Position | None = None
    saved: list[Position] = field(default_factory=list)
    load: PostLoad | None = None
    holdings: Holdings | None = None


class ReportingPost(Protocol):
    """What a session needs from its post."""

    def report(self, whole: bool) -> PostReport:
        """The current state; `holdings` is set only in a `whole` report of a member."""
        ...

    def heard(self, answer: MemberAnswer, stated: Position) -> None:
        """Process the conductor's answer to a report of the post's position as `stated`."""
        ...


class ConductorSession:
    """The session of one post. `members` is the whole swarm, as the conductor last listed it."""

    def __init__(self, services: RunServices, stage: int, post: ReportingPost) -> None:
        self.stage, self.id = stage, int.from_bytes(services.clock.secure_bytes(6), "big")
        self.since = services.clock.wall()  # when the post began
        self.members: list[MemberInfo] = []
        self.term = 0  # the highest term received
        self._services, self._following, self._post = services, services.following, post
        self._listed = KnownMembers()
        self._seen, self._changes, self._resend = 0, -1, True  # version seen, changes of conductor, complete report due
        self._asking = trio.CancelScope()  # scope of a report that waits for news
        self._told, self._news = 0, 0  # calls of `tell`: already reported, and all
        self._line_said: LineInfo | None = None
        self._stated = START
        self._load_said_at = float("-inf")
        self._left = False

    async def run(self) -> None:
        """Report until cancelled or until `say_goodbye`."""
        by = f" of stage {self.stage}"
        while not self._left:
            told = self._news
            with trio.CancelScope() as self._asking:
                timeout_s = _WAIT_S + _ANSWER_S
                answer = await self._following.ask("swarm/6/member", self._report, MemberAnswer, timeout_s, by)
            if self._asking.cancelled_caught:
                continue
            self._seen, self._resend, self._told = answer.version, answer.resend, told
            self.term = max(self.term, answer.term)
            self._following.note_forecast(answer.forecast, answer.waits_for)
            if (members := self._listed.take(answer.members)) is not None:
                self.members = self._following.note_members(members)
            self._post.heard(answer, self._stated)

    def tell(self) -> None:
        """Send a complete report at once."""
        self._news += 1
        self._asking.cancel()

    async def say_goodbye(self) -> None:
        """Notify the conductor that the post is left, so that no step waits for it, and stop reporting."""
        self._left = True
        self._asking.cancel()
        await self._following.say_goodbye(self._services.fingerprint, self.stage)

    def _report(self) -> MemberSync:
        self._resend |= self._told != self._news
        if self._following.changes != self._changes:
            self._changes, self._seen, self._resend = self._following.changes, 0, True
            self._listed.forget()
        whole, said = self._resend, self._post.report(self._resend)
        has = said.holdings
        news, self._line_said, self._stated = said.line != self._line_said, said.line, said.position
        return MemberSync(
            run=self._services.fingerprint,
            session=self.id,
            stage=self.stage,
            position=said.position,
            prepared=said.prepared,
            saved=said.saved,
            held=Mbs.of(has.held) if has is not None else None,
            counted=Mbs.of(has.counted if has is not None else []),
            addrs=self._services.directory.own_addrs(),
            since=self.since,
            term=self.term,
            seen=self._seen,
            wait_s=0.0 if whole or self._listed.more else _WAIT_S,
            line=said.line if whole or news or said.helps else None,
            early=Mbs.of(has.early if has is not None else []),
            listed=self._listed.version,
            digest=has.digest if has is not None else b"",
            load=self._load(said.load, whole),
            witnessed=has.seen if has is not None else [],
        )

    def _load(self, load: PostLoad | None, whole: bool) -> PostLoad | None:
        """The load, if it is due in this report, else None."""
        now = trio.current_time()
        if load is None or not (whole or now - self._load_said_at >= _LOAD_S):
            return None
        self._load_said_at = now
        return load
