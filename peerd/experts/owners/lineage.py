"""Lineage of experts, sans-IO: which host owns each expert, and which checkpoints its owners made.

Anybody can create an identity, announce an expert in any generation and sign a checkpoint of it. So a new owner must
continue the chain of earlier owners. A peer that knows the owner of an expert accepts a new owner:

* after a handover: the old owner named the new one in a signed checkpoint (`CheckpointRef.heir`), and has made no
  updates since.
* after a loss: the owner's claim is gone, or was not renewed for longer than a period. Then a host that claims the next
  generation becomes the owner if its checkpoint continues from one that a known owner signed (`PreviousOwner`). A host
  claims before it has a checkpoint, so other peers wait a limited time for the checkpoint (the host's turn). If no
  checkpoint of a known owner was found for a whole period, the claim alone is enough. A host that claimed while the old
  owner still renewed its own claim is skipped, unless holders vouch for it.
* after a partition: if there are two owners, the one for which more networks vouch, by holding its checkpoints. If one
  continues from the other, it wins a tie, and holders of its checkpoints do not count for the other
  (`OwnerTree.beats`). If the two hosts do not see the same networks, an order decides which of them yields (`rivals`),
  and all peers then accept the other.

A peer that knows no owner, because it has just joined or has seen none for long, believes the networks: honest holders
keep no checkpoint from outside the lineage that they know. A holder vouches only if this peer has a connection to it.
All holders in one network (in a private network: at one address) count once, and not at all for a host in that network.
All holders that this peer reaches over relays count as one network, whichever relays these are.

A hostile peer with connections from as many networks as hold copies of an expert deceives a newcomer, or outvotes an
owner. A stranger may also adopt an orphan, as every host may, and is its owner then. Turns bind honest peers only: a
stranger that claims an orphan right after its owner is gone, and signs a checkpoint that continues from the owner's, is
followed before the peers whose turn it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from peerd.core.bounded_dict import BoundedDict
from peerd.core.ids import PeerId
from peerd.core.limits import EXPERTS_SEEN
from peerd.experts.owners.owner_tree import ExpertReign, KeptCopy, OwnerTree, Seat
from peerd.experts.owners.rivals import RivalWatch, Sightings
from peerd.experts.rules.orphan_watch import SeenClaim
from peerd.messages.experts import CheckpointRef, PreviousOwner
from peerd.run.grid import Uid

_RENEWED: Final = 1.1  # periods that a claim lives without renewal, as in `custody`
_UNCLAIMED: Final = 0.5  # periods that an owner without a claim remains the owner
_REMEMBERED: Final = 8.0  # periods without an owner, after which the networks are believed instead
_UNSAVED: Final = 2  # successive owners that may have gone before they made a checkpoint
_STANDING: Final = 64  # claims of one expert that are remembered
_TRAIL: Final = 8  # earlier owners that are remembered

_SEATS: Final = 3  # networks that are waited for: the first one may fail, and the second one may be a liar
_PERIODS: Final = 4.0  # announcement periods, for an empty state: records of departed holders expire by then
_BYTES_PER_S: Final = 256 << 10  # of a line that may carry experts
_MOST_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class SettledOwner:
    """Who owns an expert, as far as this peer can tell."""

    claim: SeenClaim | None = None  # of the owner, if it has one
    kept: Sequence[KeptCopy] = ()  # checkpoints of the owner and of those before it, newest first
    waits: bool = False  # another host may be about to become the owner


@dataclass(slots=True)
class _Known:
    """The owner of an expert, as this peer knows it."""

    reign: ExpertReign
    until: float | None  # expiry of its claim, as last seen, or None without a claim
    since: float  # when `until` was first seen
    trail: tuple[ExpertReign, ...] = ()  # owners before it, latest first
    given: bool = False  # the owner before it handed the expert over
    linked: bool = True  # its checkpoints name the owner before it: all peers see that it continued from there
    rivals: RivalWatch | None = None  # of this peer, while it hosts the expert
    instead_of: ExpertReign | None = None  # this peer's own reign, until it has given up the expert to this owner
    renewed_at: float = float("-inf")  # time of the last renewal of the claim, as seen
    # Claims of others when it began -> their expiry; None before the first look-up.
    stale: dict[ExpertReign, float] | None = None


class ExpertLineages:
    """Owners of experts, as this peer knows them. `seat`: returns the network of a peer."""

    def __init__(self, announce_s: float, own: PeerId, seat: Seat) -> None:
        self.hosted: Callable[[Uid], int | None] = lambda _: None  # generation of an expert that this peer hosts
        self.turns = AdopterTurns(announce_s)
        self._announce_s, self._own, self._seat = announce_s, own, seat
        self._known = BoundedDict[Uid, _Known](EXPERTS_SEEN)
        self._kept_at = BoundedDict[Uid, float](EXPERTS_SEEN)  # when a checkpoint of a known owner was last seen
        self._seen = BoundedDict[Uid, Sightings](EXPERTS_SEEN)  # of claims

    def owner(self, uid: Uid) -> ExpertReign | None:
        """The last known owner of an expert, alive or not, or None."""
        known = self._known.get(uid)
        return known.reign if known is not None else None

    def line(self, uid: Uid) -> tuple[ExpertReign, ...]:
        """The last known owner of an expert, and those before it."""
        known = self._known.get(uid)
        return (known.reign, *known.trail) if known is not None else ()

    def found(self, pointer: CheckpointRef) -> None:
        """Record a checkpoint that this peer held before it started; its owner may be gone by now."""
        uid, reign = pointer.expert.uid, ExpertReign(pointer.generation, pointer.peer)
        if uid not in self._known or self._known[uid].reign < reign:
            trail = (ExpertReign(pointer.former.generation, pointer.former.peer),) if pointer.former is not None else ()
            self._known[uid] = _Known(reign, None, float("-inf"), trail)

    def followed(self, now: float, uid: Uid, reign: ExpertReign) -> None:
        """Record the only host for long: it is the owner if this peer knows none, or has lost sight of it."""
        known = self._known.get(uid)
        if known is None or now > known.since + _REMEMBERED * self._announce_s:
            self._known[uid] = _Known(reign, None, now)

    def took(self, now: float, uid: Uid, generation: int, former: PreviousOwner | None) -> None:
        """Record that this peer hosts an expert from now on. `former`: the checkpoint from which it continued."""
        known, trail = self._known.get(uid), list[ExpertReign]()
        if former is not None:
            trail = [ExpertReign(former.generation, former.peer)]
        if known is not None:
            trail += [r for r in (known.reign, *known.trail) if r not in trail]
        given, linked = former is not None and former.heir == self._own.public_key, former is not None
        mine = ExpertReign(generation, self._own)
        rivals = RivalWatch(mine, tuple(trail[:_TRAIL]), linked, former is None, now)
        self._known[uid] = _Known(mine, None, now, tuple(trail[:_TRAIL]), given, linked, rivals)
        self.turns.settled(uid)

    def gave(self, now: float, uid: Uid, generation: int, heir: PeerId) -> None:
        """Record to whom this peer handed an expert over, before the heir's checkpoints show it."""
        known = self._known.get(uid)
        trail = (known.reign, *known.trail)[:_TRAIL] if known is not None else ()
        self._known[uid] = _Known(ExpertReign(generation, heir), None, now, trail, given=True, linked=bool(trail))

    def lost(self, now: float, uid: Uid) -> None:
        """Record that the owner of an expert does not answer, so that another host may take its place."""
        if uid in self._known:
            self._known[uid].since = min(self._known[uid].since, now - 2 * self._announce_s)

    def is_open(self, now: float, uid: Uid, claims: Sequence[SeenClaim], copies: Sequence[KeptCopy]) -> bool:
        """True if the owner of an expert cannot be determined without the networks of holders."""
        known, tree, generation = self._known.get(uid), OwnerTree.of(claims, (), self._seat), self.hosted(uid)
        if generation is not None:
            rivals = [*tree.claims]
            if known is not None and known.reign == ExpertReign(generation, self._own):
                rivals = self._renewed(known, tree)
            return any(reign.owner != self._own for reign in rivals)
        if known is None or not self._lives(now, known, tree):
            return len({claim.peer for claim in claims} | {copy.pointer.peer for copy in copies}) > 1
        return any(reign in known.trail for reign in self._renewed(known, tree))

    def gone(self, now: float, uid: Uid, claims: Sequence[SeenClaim]) -> PeerId | None:
        """The last known owner of an expert if another host may take its place, otherwise None."""
        known = self._known.get(uid)
        if known is None or self._lives(now, known, OwnerTree.of(claims, (), self._seat)):
            return None
        return known.reign.owner

    def settle(
        self, now: float, uid: Uid, claims: Sequence[SeenClaim], copies: Sequence[KeptCopy], *, whole: bool = True
    ) -> SettledOwner:
        """Determine the owner of an expert from what the directory shows of it now.

        `copies`: checkpoints, newest first; `whole`: the look-up missed none of them.
        """
        tree, generation, known = OwnerTree.of(claims, copies, self._seat), self.hosted(uid), self._known.get(uid)
        if tree.claims:
            self._seen.setdefault(uid, Sightings()).note(now, self._announce_s, tree.claims)
        self._note_kept(now, uid, tree, whole)
        if known is not None and known.trail and known.linked:
            tree.link(known.trail[0], known.reign, given=known.given)
        waits = False
        if generation is not None:
            self._be_host(now, uid, ExpertReign(generation, self._own), tree)
        else:
            size = copies[0].pointer.size_bytes if copies else 0
            waits = self._follow(now, uid, tree, size, whole)
        known = self._known.get(uid)
        if known is None:
            return SettledOwner()
        line = {known.reign, *known.trail, *tree.before(known.reign)}
        kept = [copy for copy in copies if copy.reign in line]
        return SettledOwner(tree.claims.get(known.reign), kept, waits)

    # --- inside -----------------------------------------------------------------------------------------------

    def _note_kept(self, now: float, uid: Uid, tree: OwnerTree, whole: bool) -> None:
        """Record whether a checkpoint of a known owner is left.

        A look-up that may have missed some does not show that none is left.
        """
        known = self._known.get(uid)
        seen = known is not None and any(tree.holders.get(r) for r in (known.reign, *known.trail))
        if seen or (not whole and self._is_kept(now, uid)):
            self._kept_at[uid] = now

    def _is_kept(self, now: float, uid: Uid) -> bool:
        """True if a checkpoint of a known owner was seen within the last period."""
        return now < self._kept_at.get(uid, float("-inf")) + self._announce_s

    def _become(self, now: float, uid: Uid, reign: ExpertReign, tree: OwnerTree) -> None:
        """Record `reign` as the owner of the expert from now on."""
        known, trail = self._known.get(uid), list(tree.before(reign))
        linked = bool(trail)
        if known is not None:
            trail += [r for r in (known.reign, *known.trail) if r < reign and r not in trail]
        claim = tree.claims.get(reign)
        until = claim.until if claim is not None else None
        line = tuple(trail[:_TRAIL])
        stale = {r: at for r, at in self._standing(line, tree).items() if r != reign}
        self._known[uid] = _Known(reign, until, now, line, linked=linked, stale=stale)
        if claim is not None:
            self.turns.settled(uid)

    def _be_host(self, now: float, uid: Uid, mine: ExpertReign, tree: OwnerTree) -> None:
        """Make this peer, which hosts the expert, its owner, unless another host has become the owner by now."""
        known = self._known.get(uid)
        if known is not None and known.instead_of == mine and known.reign in tree.claims:
            return  # it is about to be given up here
        anew = known is None or known.reign != mine
        if known is None or anew:
            self._become(now, uid, mine, tree)
            known = self._known[uid]
        rivals = known.rivals
        if rivals is None:
            rivals = known.rivals = RivalWatch(mine, known.trail, known.linked and bool(known.trail), anew, now)
        fresh = {r for r in self._renewed(known, tree) if r.owner != self._own}
        known.since, renewed = now, [r for r in tree.nodes(known.trail) if r in fresh] if fresh else []
        rivals.see(now, self._announce_s, renewed)
        for rival in renewed:
            beaten = tree.beats(rival, mine, living=True)
            if beaten or rivals.yields_to(now, self._announce_s, rival, tree):
                self._become(now, uid, rival, tree)
                self._known[uid].instead_of = mine
                return

    def _renewed(self, known: _Known, tree: OwnerTree) -> list[ExpertReign]:
        """Claims made or renewed since the owner began. A claim that has merely not expired does not count."""
        if known.stale is None:
            known.stale = self._standing((known.reign, *known.trail), tree)
        return [r for r, claim in tree.claims.items() if claim.until > known.stale.get(r, float("-inf"))]

    def _standing(self, line: Sequence[ExpertReign], tree: OwnerTree) -> dict[ExpertReign, float]:
        """Expiry of the present claims. If there are many, those of `line` come first; the others count as renewed."""
        claimed = [*tree.claims]
        if len(claimed) > _STANDING:
            claimed = [r for r in tree.nodes(line) if r in tree.claims]
        return {r: tree.claims[r].until for r in claimed[:_STANDING]}

    def _lives(self, now: float, known: _Known, tree: OwnerTree) -> bool:
        """Record whether an owner has renewed its claim; returns False if another host may take its place."""
        claim = tree.claims.get(known.reign)
        until = claim.until if claim is not None else None
        if until is not None and (known.until is None or until > known.until):
            known.until, known.since, known.renewed_at = until, now, now
        elif until is None and known.until is not None:
            known.until, known.since = None, now
        return now < known.since + self._announce_s * (_UNCLAIMED if until is None else _RENEWED)

    def _follow(self, now: float, uid: Uid, tree: OwnerTree, size_bytes: int, whole: bool) -> bool:
        """Follow the owner's successor, if there is one; returns True while some host has a turn to become it."""
        known = self._known.get(uid)
        lives = known is not None and self._lives(now, known, tree)
        if known is None or now > known.since + _REMEMBERED * self._announce_s:
            # If the look-up may have missed the checkpoints, any host that claims the expert would become its owner.
            best = tree.best() if whole or tree.holders else None
            if best is not None and (known is None or best != known.reign):
                self._become(now, uid, best, tree)
            return False
        handed = [r for r in tree.claims if (known.reign, r) in tree.handed]
        back = [r for r in self._renewed(known, tree) if self._comes_back(r, known, tree, lives)]
        if handed or back:
            self._become(now, uid, min(handed) if handed else max(back), tree)
            return False
        if lives:
            if known.until is not None:
                self.turns.settled(uid)
            return False
        return self._go_on(now, uid, known, tree, size_bytes)

    def _comes_back(self, reign: ExpertReign, known: _Known, tree: OwnerTree, lives: bool) -> bool:
        """True if an earlier owner, or the same one in a later generation, is the owner now."""
        if reign.owner == known.reign.owner and reign > known.reign:
            return lives and _is_near(reign, known.reign)
        return reign in known.trail and (not lives or tree.beats(reign, known.reign, living=True))

    def _go_on(self, now: float, uid: Uid, known: _Known, tree: OwnerTree, size_bytes: int) -> bool:
        """Find the successor of an owner that is gone; returns True while some host has a turn to become it."""
        line = (known.reign, *known.trail)
        kept = self._is_kept(now, uid)
        others = [r for r in tree.nodes(line) if r not in line and r.generation >= known.reign.generation]
        late = [r for r in others if r in tree.claims and not self._is_early(uid, r, known)]
        linked = [r for r in late if self._is_next(r, line, tree)]
        following = [r for r in late if r.generation == known.reign.generation + 1]
        vouched = [r for r in others if self._is_vouched(r, known, tree, kept)]
        if vouched and not linked:
            linked = [max(vouched, key=lambda r: (tree.voices(r), r))]
        found = linked or ([] if kept else following)
        if found:  # the lowest generation, since claiming a higher one costs nothing
            self._become(now, uid, min(found), tree)
            return False
        waits = False
        for reign in following:  # each uses up the turn of its network
            waits |= self.turns.has_turn(now, uid, reign.owner, self._seat(reign.owner), size_bytes)
        return waits

    def _is_next(self, reign: ExpertReign, line: Sequence[ExpertReign], tree: OwnerTree) -> bool:
        """True if an owner continued from a known one, and its generation is plausible for that number of steps."""
        for steps, before in enumerate(tree.before(reign), 1):
            if before in line:
                return _is_near(reign, max(line), steps)
        return False

    def _is_vouched(self, reign: ExpertReign, known: _Known, tree: OwnerTree, kept: bool) -> bool:
        """True if holders vouch for an owner after a known one, or for a rival in the same generation."""
        beside = reign.generation == known.reign.generation
        if not beside and not tree.below(reign, (known.reign, *known.trail)):
            return False
        if beside and reign not in tree.claims:
            return False
        has_voice = tree.voices(reign) > (0, 0) or (beside and not kept)
        return has_voice and tree.beats(reign, known.reign)

    def _is_early(self, uid: Uid, reign: ExpertReign, known: _Known) -> bool:
        """True if a host claimed an expert while its owner still renewed its own claim."""
        return uid in self._seen and self._seen[uid].first(reign) < known.renewed_at


def _is_near(reign: ExpertReign, before: ExpertReign, steps: int = 1) -> bool:
    """True if a generation is plausible after `steps` changes of the owner, so that nobody exhausts the numbers."""
    return reign.generation <= before.generation + steps + _UNSAVED


class AdopterTurns:
    """Turns of hosts that announce that they adopt an expert, sans-IO: how long others leave the expert to them.

    A host that announces this, or that claims the expert without a checkpoint of it, is waited for until it has had the
    time to download the state; then its turn is over. Identities are free, so all peers of one network (in a private
    network: at one address) share one turn for an expert, and the number of turns is limited until the expert has an
    owner.

    Turns keep honest hosts from adopting one expert twice. They do not bind anybody else: a host that claims an orphan,
    with a checkpoint that continues from the owner's, is its owner without a turn (`lineage`).
    """

    def __init__(self, announce_s: float) -> None:
        self._announce_s = announce_s
        self._since = BoundedDict[Uid, dict[str, float]](EXPERTS_SEEN)

    def has_turn(self, now: float, uid: Uid, peer: PeerId, seat: str | None, size_bytes: int) -> bool:
        """True while others leave an expert to `peer`.

        `seat`: its network, or None if unknown; `size_bytes`: of the expert's newest checkpoint, 0 if there is none.
        """
        since = self._since.get(uid, {})
        name = seat if seat is not None else ""
        if name not in since:
            if len(since) >= _SEATS:
                return False
            since[name] = now
            self._since[uid] = since
        return now < since[name] + self.longest_s(size_bytes)

    def longest_s(self, size_bytes: int) -> float:
        """Length of one turn, in seconds."""
        return min(_MOST_S, _PERIODS * self._announce_s + size_bytes / _BYTES_PER_S)

    def settled(self, uid: Uid) -> None:
        """Record that an expert has an owner: if this one is lost, every network has a turn again."""
        self._since.pop(uid, None)
