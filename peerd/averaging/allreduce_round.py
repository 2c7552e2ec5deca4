"""One round of all-reduce from one member's view: which peer owes which part to whom, and which peers are late.

The vector is cut into shares, one for each owner, and each share into parts. Every sender sends each part to its owner.
The owner sums all senders' versions in the order of the senders, so that everyone gets the same bits, and returns the
sum. Most peers are both sender and owner; a helper sends nothing, a client owns nothing, and a listener requests the
sums but contributes no vector. A round succeeds completely or not at all; the conductor repeats it without the lost
members. This module only keeps count; the elements are summed elsewhere. Hostile input: a member may send a part twice,
or one that its receiver does not own; a conductor may send an inconsistent plan. Both are rejected. Invariants: a part
is summed once, when every sender's version is there; an owner stays in the round until all have requested its parts.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, deque
from collections.abc import Iterator, KeysView, Sequence
from dataclasses import dataclass, replace

from peerd.averaging.shares import apportioned
from peerd.core.errors import PeerdError
from peerd.core.limits import AVERAGE_PARTS
from peerd.messages.swarm import Prepare

_SHARES_TOLERANCE = 1e-6
_OWNER_MARGIN_S = 0.5  # beyond the patience, so that an owner can first report the late sender it waits for
_PART_S = 0.005  # assumed cost of one more part per share, in seconds of a round
_PARTS_OF_A_SHARE = 24  # at most, unless parts would then exceed the requested size
_PARTS_OF_AN_EQUAL_SHARE = 3  # at least, if the lines are unknown
_LEAST_ELEMENTS_OF_AN_EQUAL_SHARE = 1 << 18  # smallest part of an equal share: on a fast line each part costs calls
_LEAST_UNDER_WAY = 1.25  # parts in flight for any share; with fewer its owner's line idles between two parts
_SECOND = b"peerd second sum\0"
_LEAST_ELEMENTS = 1024  # smallest part if the lines are known, unless its share is smaller
_LINE_SHARE = 0.95  # payload's share of a line; the rest is for headers and acknowledgements
_EVEN_ELEMENTS = 1024  # part lengths are multiples of this: CPUs are slower on vectors not aligned to a cache line


class RoundFailed(PeerdError):
    """The round cannot finish. `lost`: the members at fault; `lost_share`: fraction of the vector that has no sum."""

    def __init__(self, reason: str, lost: tuple[str, ...]) -> None:
        super().__init__(reason)
        self.lost = lost
        self.lost_share = 1.0


@dataclass(frozen=True, slots=True)
class AveragingPlan:
    """The plan of one round. Raises ValueError if it is inconsistent.

    `group`: all members, in the order of the shares; `patience_s`: how long a silent member is tolerated. `senders`
    (default: the group) contribute vectors, which are summed in their order. `shares`: the group's shares, in its
    order, with sum 1; None for equal ones. `length` and `dtype` describe the vectors for owners that contribute none,
    and so does `further`, the length of a second sum that follows. `listeners` receive the sum and contribute nothing.
    This group is number `copy` of `copies` groups that compute the same sum. Coded parts must be the same in all of
    them, so they begin at multiples of `align` elements.
    """

    attempt: bytes
    group: tuple[str, ...]
    part_bytes: int
    patience_s: float
    senders: tuple[str, ...] = ()
    shares: tuple[float, ...] | None = None
    length: int = 0
    dtype: str = ""
    further: int = 0
    listeners: tuple[str, ...] = ()
    copy: int = 0
    copies: int = 1
    align: int = 1
    timeout_s: float = 0.0  # of the attempt
    coming_s: float = 0.0  # how long others may still be in the sum before this one
    s_per_byte: float = 0.0  # a round's time per byte of the vector, by the stated rates of all lines; 0: unknown

    def __post_init__(self) -> None:
        if not self.senders:
            object.__setattr__(self, "senders", self.group)
        if any(len({*peers}) != len(peers) for peers in (self.group, self.senders, self.listeners)):
            raise ValueError("a peer is listed twice in a round")
        if not {*self.senders, *self.listeners} <= {*self.group} or {*self.senders} & {*self.listeners}:
            raise ValueError("a sender or a listener is not in the round's group, or is both")
        if self.shares is not None:
            check_shares(self.shares, len(self.group))

    @classmethod
    def of(cls, order: Prepare, part_bytes: int, patience_s: float, align: int = 1) -> AveragingPlan:
        """The plan of the ordered round, with parts of at most `part_bytes`. Raises ValueError if invalid."""
        listeners = frozenset(order.listeners)
        if order.copy >= order.copies:
            raise ValueError("the group's number exceeds the number of groups with the same sum")
        if order.split and sorted(party.peer for party in order.split if party.mode != "aux") != sorted(order.group):
            raise ValueError("the senders and listeners of a round must be its group")
        if any(party.mode == "client" and party.share != 0 for party in order.split):
            raise ValueError("a client has a share, though it cannot sum")
        return cls(
            attempt=order.attempt,
            group=tuple(party.peer for party in order.split) or tuple(order.group),
            part_bytes=min(part_bytes, order.part_bytes or part_bytes),
            patience_s=patience_s,
            senders=tuple(peer for peer in order.group if peer not in listeners),
            shares=tuple(party.share for party in order.split) if order.split else None,
            length=order.elements if order.split else 0,
            dtype=order.dtype if order.split else "",
            further=order.further if order.split else 0,
            listeners=tuple(order.listeners),
            copy=order.copy,
            copies=order.copies,
            align=align,
            timeout_s=order.timeout_s,
            s_per_byte=order.s_per_byte,
        )

    def pair_bytes_per_s(self, own: str) -> dict[str, float]:
        """Sending rates from `own` to each other peer that keep all lines busy until the end; empty if these are
        unknown.

        A margin of each line is left for headers; otherwise its queue grows round by round until it loses packets.
        """
        if self.shares is None or self.s_per_byte <= 0:
            return {}
        share = dict(zip(self.group, self.shares, strict=True))
        takes = {*self.senders, *self.listeners}
        loads = {
            peer: share[peer] * (own in self.senders) + share[own] * (peer in takes) for peer in share if peer != own
        }
        return {peer: _LINE_SHARE * load / self.s_per_byte for peer, load in loads.items() if load > 0}

    def second(self) -> AveragingPlan:
        """The second sum of the same round. It has its own attempt id, so that parts of the sums cannot be confused."""
        attempt = hashlib.sha256(_SECOND + self.attempt).digest()[: len(self.attempt)]
        later_s = self.timeout_s / 2  # both sums share the timeout
        return replace(self, attempt=attempt, length=self.further, further=0, coming_s=later_s)

    def parts(self, length: int, itemsize: int) -> tuple[Part, ...]:
        """The parts of a vector of `length` elements of `itemsize` bytes. Raises ValueError if there are too many."""
        part_elements = max(1, self.part_bytes // itemsize)
        if length // part_elements + _PARTS_OF_A_SHARE * len(self.group) > AVERAGE_PARTS:
            raise ValueError(f"a vector of {length} elements has too many parts of {part_elements}")
        count = parts_of_a_share(self.s_per_byte * length * itemsize)
        return cut(length, self.group, part_elements, self.shares, self.align if self.copies > 1 else 1, count)


def parts_of_a_share(round_s: float) -> int:
    """Number of parts per share in a round that takes `round_s` seconds; the maximum if 0 (unknown).

    Sums return one part's time after the parts leave, so larger parts end the round later; but each part costs time.
    """
    return min(max(2, round(math.sqrt(round_s / _PART_S))), _PARTS_OF_A_SHARE) if round_s else _PARTS_OF_A_SHARE


def check_shares(shares: Sequence[float], count: int) -> None:
    """Raise ValueError unless these are `count` fractions that add up to 1."""
    if len(shares) != count:
        raise ValueError(f"{len(shares)} shares for {count} peers")
    if not all(math.isfinite(share) and 0 <= share <= 1 for share in shares):
        raise ValueError("a share must be a number from 0 to 1")
    if abs(math.fsum(shares) - 1) > _SHARES_TOLERANCE:
        raise ValueError("shares must add up to 1")


@dataclass(frozen=True, slots=True)
class Part:
    """Elements `begin` to `end` (exclusive) of the vector, summed by `owner`."""

    index: int
    owner: str
    begin: int
    end: int


def cut(
    length: int,
    group: tuple[str, ...],
    part_elements: int,
    shares: Sequence[float] | None = None,
    align: int = 1,
    count: int = _PARTS_OF_A_SHARE,
) -> tuple[Part, ...]:
    """The parts of a vector, one contiguous share per member of the group; every member computes the same parts.

    Without `shares` all shares are equal, up to `align` elements. Each share is cut into `count` parts, or into more if
    they would exceed `part_elements`. Small shares are cut as finely as large ones, so that all can be sent evenly side
    by side and sums return while other parts are in flight. Every part begins at a multiple of `align`.
    """
    parts: list[Part] = []
    least = _LEAST_ELEMENTS
    if shares is None:
        count, least = _PARTS_OF_AN_EQUAL_SHARE, _LEAST_ELEMENTS_OF_AN_EQUAL_SHARE
    for owner, span in zip(group, _spans(-(-length // align), len(group), shares), strict=True):
        begin, share_end = (min(length, at * align) for at in span)
        most = min(part_elements, max(least, -(-(share_end - begin) // count)))
        step = _raised(_alike(share_end - begin, most), align)
        for at in range(begin, share_end, step):
            parts.append(Part(len(parts), owner, at, min(at + step, share_end)))
    return tuple(parts)


def _alike(share: int, most: int) -> int:
    """Length of the parts of a share: at most `most`, and such that the parts have about the same length."""
    if not share:
        return most
    return min(most, _raised(-(-share // -(-share // most)), _EVEN_ELEMENTS))


def _raised(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _spans(length: int, count: int, shares: Sequence[float] | None) -> Iterator[tuple[int, int]]:
    if shares is None:
        yield from ((i * length // count, (i + 1) * length // count) for i in range(count))
        return
    end = 0
    for elements in apportioned(length, shares):
        begin, end = end, end + elements
        yield begin, end


class AllReduceRound:
    """Progress of one member in a round. `now` is monotonic time in seconds."""

    def __init__(
        self,
        own: str,
        senders: tuple[str, ...],
        parts: tuple[Part, ...],
        patience_s: float,
        listeners: tuple[str, ...] = (),
    ) -> None:
        self.own, self.senders, self.parts, self.listeners = own, senders, parts, listeners
        self._everyone = frozenset((*senders, *listeners))
        self.takes = own in self._everyone  # whether it receives the sum; a helper does not
        self._patience_s = patience_s
        self._came: dict[int, set[str]] = {part.index: set() for part in parts if part.owner == own}
        self._brought = Counter[int]()  # versions, by part
        self._missing = len(self._came) * len(self._everyone)  # versions of our parts, and listeners' requests for them
        due = parts if self.takes else ()
        self._due = {part.index: part.owner for part in due if part.owner != own}
        self._asked: set[int] = set()  # parts that may have been sent to their owner
        self._heard: dict[str, tuple[float, int]] = {}  # peer -> (last heard, sequence number as tie-break)
        self._times_heard = 0
        self.began = 0.0
        self.waited_s: dict[str, float] = {}  # by peer: time that only its version of a part of ours was missing
        self._waited_until: dict[str, float] = {}  # by peer: end of the last wait that `waited_s` includes
        self._newest: dict[int, float] = {}  # by part: when its newest version arrived

    def begin(self, now: float) -> None:
        """Start the timeouts of the other members."""
        self.began = now
        self.be_patient(now)

    def be_patient(self, now: float) -> None:
        """Restart all timeouts, because everybody waits for peers that are still in an earlier round."""
        self._heard = dict.fromkeys({*self._everyone, *self._due.values()}, (now, 0))

    def check(self, index: int, sender: str) -> None:
        """Raise ValueError unless `sender`'s version of this part, or its request for the sum, is still expected."""
        came = self._came.get(index)
        if came is None:
            raise ValueError(f"part {index} is summed by another member")
        if sender not in self._everyone:
            raise ValueError("the sender does not take part in this round")
        if sender in came:
            raise ValueError(f"part {index} arrived twice")

    def arrived(self, now: float, index: int, sender: str) -> bool:
        """Record `sender`'s version of one of our parts; return True if it was the last one and the sum can be made.

        For a listener, record its request for the part's sum and return False. Raises ValueError like `check`.
        """
        self.check(index, sender)
        came = self._came[index]
        came.add(sender)
        self._missing -= 1
        self._hear(sender, now)
        if sender in self.listeners:
            return False
        before, self._newest[index] = self._newest.get(index, self.began), now
        self._brought[index] += 1
        whole = self._brought[index] == len(self.senders)
        if whole and sender != self.own:
            since = max(before, self._waited_until.get(sender, before))  # many parts are waited for at once
            self.waited_s[sender] = self.waited_s.get(sender, 0.0) + now - since
            self._waited_until[sender] = now
        return whole

    def asked(self, index: int) -> None:
        """Record that our version of this part, or our request, was sent to its owner, who now owes us the sum."""
        self._asked.add(index)

    def returned(self, now: float, index: int) -> None:
        """Record that the owner has sent us the sum of a part."""
        self._hear(self._due.pop(index), now)

    @property
    def others(self) -> KeysView[str]:
        """All peers from which a message is expected."""
        return self._heard.keys()

    @property
    def finished(self) -> bool:
        """True once we have every sum and every version that others owe us."""
        return not self._due and not self._missing

    def heard(self, now: float, peer: str) -> None:
        """Record that a peer is slow but not silent, since its bytes arrive or it reports progress."""
        if peer in self._heard and now > self._heard[peer][0]:
            self._hear(peer, now)

    def _hear(self, peer: str, now: float) -> None:
        self._times_heard += 1
        self._heard[peer] = now, self._times_heard

    def missing_share(self) -> float:
        """Fraction, from 0 to 1, of the parts due to this member that have no complete sum."""
        due = [part for part in self.parts if part.owner == self.own or self.own in self._everyone]
        whole = len(self.senders)
        lost = [p for p in due if p.index in self._due or (p.index in self._came and self._brought[p.index] < whole)]
        return sum(p.end - p.begin for p in lost) / max(1, sum(p.end - p.begin for p in due))

    def progress(self) -> tuple[int, int]:
        """Elements received and elements expected in all: others' versions of our parts, and sums of their parts."""
        ours = [(self._brought[index], self.parts[index]) for index in self._came]
        whole = len(self.senders) - (self.own in self.senders)
        sums = [part for part in self.parts if part.owner != self.own and self.takes]
        done = sum((brought - (self.own in self._came[p.index])) * (p.end - p.begin) for brought, p in ours)
        done += sum(part.end - part.begin for part in sums if part.index not in self._due)
        return done, sum(whole * (p.end - p.begin) for _, p in ours) + sum(part.end - part.begin for part in sums)

    def owes(self, sender: str) -> bool:
        """Return True while this sender owes us a part."""
        return sender in self._everyone and any(sender not in came for came in self._came.values())

    def silent(self, now: float) -> set[str]:
        """Peers that have been silent for longer than our patience, whether or not we are waiting for them."""
        return {peer for peer, (heard, _) in self._heard.items() if now - heard > self._patience_s} - {self.own}

    def late(self, now: float) -> tuple[str, ...]:
        """Members at fault for a delay longer than our patience, sorted.

        One hanging member soon blocks all others, which then seem to hang as well. So of the members that we wait for,
        the one that fell silent first is returned. An owner may itself be waiting for a late sender, so it has a little
        more time. An owner that has no part of ours yet, because other sums delay our parts, owes us nothing.
        """
        silent = self.silent(now)
        if not silent:
            return ()
        owing = {owner for index, owner in self._due.items() if index in self._asked}
        blocking, owners = self._blocking() & silent, owing & silent
        margin_s = min(_OWNER_MARGIN_S, self._patience_s)
        if not blocking and not any(now - self._heard[peer][0] > self._patience_s + margin_s for peer in owners):
            return ()
        heard = {peer: self._heard[peer] for peer in blocking | owners}
        first = min(heard.values())
        lost = {peer for peer in heard if heard[peer] == first}
        return tuple(sorted(lost & blocking or lost))

    def _blocking(self) -> set[str]:
        """Peers that have not sent their version of our first incomplete part; all others wait for them."""
        whole = len(self._everyone)
        return set(next((self._everyone - came for came in self._came.values() if len(came) < whole), ()))


class PartPace:
    """Pacing of the parts sent to other owners, so that all shares are sent evenly and finish together.

    A part's place is the fraction (0 to 1) of its owner's share that is sent with it; the owners' places are slightly
    shifted, so that the parts of small shares do not all leave at once. A part may leave if it is at most a window
    ahead of the least place still waiting for its sum, among shares of the same size or larger. So a small share
    neither overtakes a large one, whose owner's line would be idle at the end, nor holds it up, and the amount in
    flight is bounded.
    """

    def __init__(self, parts: Sequence[Part], under_way: float) -> None:
        """`under_way`: number of parts of an average share that may be in flight to its owner."""
        counts = Counter(part.owner for part in parts)
        window = under_way * len(counts) / max(1, len(parts))
        self._window = {owner: max(window, _LEAST_UNDER_WAY / count) for owner, count in counts.items()}
        self._size = {owner: count.bit_length() for owner, count in counts.items()}  # size class: powers of two
        self._left: dict[str, deque[int]] = {owner: deque() for owner in counts}  # parts without a sum yet
        self._place: dict[int, float] = {}
        apart = {owner: (i + 0.5) / len(counts) for i, owner in enumerate(counts)}
        for part in parts:
            queue = self._left[part.owner]
            self._place[part.index] = (len(queue) + apart[part.owner]) / counts[part.owner]
            queue.append(part.index)
        self._least = self._find_least()

    def may_leave(self, part: Part) -> bool:
        return self._place[part.index] <= self._least[self._size[part.owner]] + self._window[part.owner]

    def returned(self, owner: str) -> bool:
        """Record the sum of the next part of `owner`; return True if more parts may leave than before."""
        before = self._least[self._size[owner]]
        if self._place[self._left[owner].popleft()] > before:
            return False
        self._least = self._find_least()
        return self._least[self._size[owner]] > before

    def _find_least(self) -> dict[int, float]:
        """For each size class, the least waiting place among the shares of that class and larger ones."""
        found, least = {}, 1.0
        for size in sorted(set(self._size.values()), reverse=True):
            heads = (queue[0] for owner, queue in self._left.items() if queue and self._size[owner] == size)
            least = min([least, *(self._place[head] for head in heads)])
            found[size] = least
        return found


@dataclass(frozen=True, slots=True)
class MemberTerms:
    """Averaging settings of a run file. `align`: elements per block of the codec (`AveragingPlan.align`)."""

    part_bytes: int
    patience_s: float
    align: int = 1


def plan_of(order: Prepare, own: str, terms: MemberTerms) -> AveragingPlan:
    """The plan of the round that a conductor orders, checked by member `own`.

    A hostile conductor may send an inconsistent order, or one in which our gradient would not count: ValueError is
    raised. This member cannot see the orders sent to others; if they differ, rounds fail and report the members at
    fault.
    """
    if own not in order.group:
        raise ValueError("the order's group does not include this member")
    if own in order.listeners and order.second:
        raise ValueError("a listener cannot contribute second factors")
    if order.second and (order.brings is None or order.further):
        raise ValueError("a second sum needs a first one and cannot be followed by a third")
    return AveragingPlan.of(order, terms.part_bytes, terms.patience_s, terms.align)
