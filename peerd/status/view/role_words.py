"""Formats a role's own figures for the details column of `peerd status`.

Figures of the built-in roles have specific phrases. Those of other roles are shown by name, value and unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from peerd.screen import units
from peerd.status.role_status import (
    AveragingFigures,
    HandoverFigures,
    MicrobatchFigures,
    TrainerExpertFigures,
    figures_of,
)
from peerd.status.swarm_status import StatusPart

Told = Mapping[str, Any]

_WAYS: Final = {"direct": "directly", "relay": "over a relay", "trainer": "over the trainer"}
_FORMS: Final[Mapping[str, type[StatusPart]]] = {
    "averaging": AveragingFigures,
    "microbatches": MicrobatchFigures,
    "handover": HandoverFigures,
    "experts": TrainerExpertFigures,
}
_NEXT_SHOWN: Final = 3  # most peers of the next stage that are named

_ELSEWHERE: Final = {
    *("waits_for", "role", "state", "restarts", "failure", "posts", "members", "evaluations", "valid_step"),
    *("replica", "member"),
}


@dataclass(frozen=True, slots=True)
class RolePart:
    """A role, one of its posts, or a trainer's replica, with its figures by name."""

    role: str
    state: str
    restarts: int
    failure: str
    waits_for: str
    figures: Told

    @property
    def stage(self) -> int | None:
        stage = self.figures.get("stage")
        return stage if isinstance(stage, int) and stage >= 0 else None


def parts_of(roles: Iterable[Told]) -> Iterator[RolePart]:
    """The parts of a snapshot's roles: each post of a role, and the replica of a trainer."""
    for role in roles:
        for post in role.get("posts") or [{}]:
            yield _part({**role, **post})
        for name in ("replica", "member"):
            if isinstance(role.get(name), dict):
                yield _part({"state": role.get("state"), **role[name], "role": "replica"})


def _part(told: Told) -> RolePart:
    role, state = str(told.get("role", "?")), str(told.get("state", "?"))
    failure, waits_for = (str(told.get(key) or "") for key in ("failure", "waits_for"))
    return RolePart(role, state, told.get("restarts") or 0, failure, waits_for, told)


def details(role: Told) -> Iterator[str]:
    """Phrases on a role's figures, in the order of its keys."""
    for key, value in role.items():
        if key in _ELSEWHERE or value is None or value is False or value in ("", [], {}):
            continue
        phrase = _PHRASES.get(key)
        if key in _FORMS and (value := figures_of(value, _FORMS[key])) is None:
            value, phrase = role[key], None  # of a role that is not built in
        told = phrase(value, role) if phrase is not None else _plain(key, value)
        if told:
            yield told


def _plain(key: str, value: object) -> str:
    """Phrase of name and value. The ending of the name, as in "_bytes", is the unit."""
    if value == "nan" or (isinstance(value, float) and units.known(value) is None):
        return ""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return ""  # for `--json`
    name = key.replace("_", " ")
    if value is True:
        return name
    if units.known(value) is not None:
        for ending, form in (("_bytes", units.size), ("_s", units.took)):
            if key.endswith(ending) and not key.endswith("_per_s"):
                return f"{key.removesuffix(ending).replace('_', ' ')} {form(value)}"
    return f"{name.replace(' per s', '/s')} {units.brief(value)}"


def _averaging(told: AveragingFigures, role: Told) -> str:
    if not told.rounds:
        return f"averaging failed: {told.last_failure}" if told.last_failure else ""
    phrase = f"{units.counted(told.rounds, 'round')} averaged, the last in {units.took(told.last_s)}"
    why = told.last_failure or "for no known reason"
    return phrase + _more(told.failed, f"failed ({why})")


def _microbatches(told: MicrobatchFigures, role: Told) -> str:
    phrase = f"{units.count(told.counted)} microbatches counted"
    if role.get("in_flight_why"):
        why = "" if role.get("waits_for") else f": {role['in_flight_why']}"
        phrase += _more(told.in_flight, f"in flight{why}")
    outcomes = ((told.redone, "repeated"), (told.requeued, "restarted"), (told.lost, "lost"))
    return phrase + "".join(_more(*one) for one in (*outcomes, (told.not_finite, "dropped as not finite")))


def _more(count: int, words: str) -> str:
    """One more phrase on a count, or "" for 0."""
    return f", {units.count(count)} {words}" if count else ""


def _next_step(value: Any, role: Told) -> str:
    """Phrase on when the next step is due. Returns "" if it is overdue and the role shows what it waits for."""
    due_in_s = units.known(value)
    return f"next step {units.soon(due_in_s)}" if due_in_s or (due_in_s == 0 and not role.get("waits_for")) else ""


def _handover(told: HandoverFigures, role: Told) -> str:
    """Phrase on the microbatches that a stage peer holds, and on the peers that it forwards them to."""
    phrase = f"{units.count(told.in_flight)} microbatches in flight" + _more(told.queue, "waiting")
    if told.kept_bytes:
        phrase += f", {units.size(told.kept_bytes)} of {units.size(told.room_bytes)} kept"
    phrase += _more(told.refused_full, "refused for lack of room")
    shown = [f"to {units.short(name)} {_WAYS.get(way, way)}" for name, way in told.next.items()][:_NEXT_SHOWN]
    if shown:
        phrase += f", forwards {', '.join(shown)}"
    return phrase + (f" and {len(told.next) - _NEXT_SHOWN} more" if len(told.next) > _NEXT_SHOWN else "")


def _experts(told: TrainerExpertFigures, role: Told) -> str:
    """Phrase on the expert updates and microbatches of a trainer."""
    phrase = f"{units.counted(told.updates, 'update')} of experts"
    if told.updates and told.staleness is not None:
        mean, most = units.brief(told.staleness.mean), units.count(told.staleness.most)
        phrase += f", {mean} stale on average, {most} at most"
    if not role.get("in_flight_why"):  # else the microbatches' own phrase says so
        phrase += _more(told.in_flight, "microbatches in flight")
    phrase += _more(told.too_old, "too old for the trunk")
    phrase += _more(told.not_summed, "with gradients too large for the trunk")
    phrase += _more(sum(told.began_again.values()), "restarted")
    lost = told.calls.lost_updates
    return phrase + (f", {units.counted(lost, 'update')} lost with their hosts" if lost else "")


def _validation(value: Any, role: Told) -> str:
    if units.known(value) is None:
        return ""
    step = role.get("valid_step")
    at = f" at step {units.count(step)}" if isinstance(step, int) and step >= 0 else ""
    return f"validation {units.loss(value)}{at}"


def _code(told: object) -> str:
    """The name of a tensor code, without the reason for its choice."""
    name = str(told).partition(":")[0]
    return "plain tensors" if name == "none" else name


def _speed(value: Any, role: Told) -> str:
    if not value:
        return ""
    return f"can do {units.rate(value)}" if "held_samples" in role else units.rate(value)


def _hosted(value: Any, role: Told) -> str:
    room = role.get("capacity")
    return f"hosts {units.count(value)}{f' of {units.count(room)}' if room else ''} experts"


def _counted(words: str) -> Callable[[Any, Told], str]:
    """Formatter for a count followed by `words`. Returns "" for 0."""
    return lambda value, role: f"{units.count(value)} {words}" if value else ""


_PHRASES: Final[Mapping[str, Callable[[Any, Told], str]]] = {
    "stage": lambda value, role: f"stage {value}" if isinstance(value, int) and value >= 0 else "no stage yet",
    "step": lambda value, role: f"step {units.count(value)}",
    "next_step_in_s": _next_step,
    "loss": lambda value, role: f"loss {units.loss(value)}" if units.known(value) is not None else "",
    "valid_loss": _validation,
    "samples_per_s": _speed,
    "tokens_per_s": lambda value, role: units.rate(value, "tokens") if value else "",
    "held_samples": lambda value, role: f"holds {units.counted(value, 'sample')}" if value else "",
    "samples": lambda value, role: f"{units.counted(value, 'sample')} computed" if value else "",
    "averaging": _averaging,
    "microbatches": _microbatches,
    "in_flight_why": lambda value, role: "",
    "handover": _handover,
    "busy": lambda value, role: f"busy {units.share(value)} of the time" if value else "",
    "moves": lambda value, role: str(value),
    "relayed_bytes": lambda value, role: f"{units.size(value)} relayed between stage peers" if value else "",
    "experts": _experts,
    "coding": lambda value, role: ", ".join(f"{key} sent as {_code(code)}" for key, code in value.items()),
    "retries": lambda value, role: f"{units.counted(value, 'call')} repeated" if value else "",
    "payload_bytes": lambda value, role: f"{units.size(value)} of tensors",
    "aggregated_bytes": lambda value, role: f"{units.size(value)} summed for others",
    "busy_s": lambda value, role: f"busy for {units.duration(value)}" if value else "",
    "precision": lambda value, role: f"computes in {value}",
    "recomputes": lambda value, role: "recomputes layers in the backward pass, to save memory",
    "conducts": lambda value, role: "conducts the run" if value else "",
    "conductor": lambda value, role: "" if role.get("conducts") else f"conducted by {units.short(str(value))}",
    "complete": lambda value, role: "the run is complete",
    "saved_steps": lambda value, role: f"saved at step {units.count(value[-1])}",
    "checkpoint": lambda value, role: f"checkpoints in {value}",
    "not_saved": lambda value, role: f"not saved: {value}",
    "not_kept": lambda value, role: f"no checkpoints kept: {value}",
    "hosted": _hosted,
    "capacity": lambda value, role: "",
    "updates": _counted("updates"),
    "updates_per_s": lambda value, role: f"{units.brief(value)} updates/s" if value else "",
    "queue": lambda value, role: (
        f"{units.counted(value, 'call')} waiting for {units.took(role.get('queue_s'))}" if value else ""
    ),
    "queue_s": lambda value, role: "",
    "batch": lambda value, role: f"{units.brief(value)} samples a batch" if value else "",
    "adopted": _counted("taken over"),
    "given": _counted("handed to other hosts"),
    "received": _counted("handed over by other hosts"),
    "began_anew": _counted("initialized anew"),
    "dropped": _counted("given up"),
    "updates_lost": _counted("updates lost with their hosts"),
    "updates_dropped": _counted("updates dropped"),
    "updates_unsaved": _counted("updates without a checkpoint"),
    "checkpoints": _counted("checkpoints"),
    "copies_least": lambda value, role: f"at least {units.count(value)} copies of each",
    "held": lambda value, role: f"holds {units.counted(value, 'checkpoint')} of experts" if value else "",
    "repeats": _counted("repeated calls"),
    "stale": _counted("calls refused as stale"),
    "refused": _counted("calls refused"),
    "problem": lambda value, role: str(value),
    "connected": lambda value, role: f"{units.counted(value, 'peer')} connected",
    "curve": lambda value, role: f"learning curve in {value}",
    "curve_step": lambda value, role: f"curve up to step {units.count(value)}" if value else "",
    "kept_steps": lambda value, role: f"keeps checkpoints of step {', '.join(map(units.count, value))}",
}
