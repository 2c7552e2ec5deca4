"""Formats a role's own figures for the details column of `peerd status`.

Figures of the built-in roles have specific phrases. Those of other roles are shown by name, value and unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from peerd.screen import units

Told = Mapping[str, Any]

_WAYS: Final = {"direct": "directly", "relay": "over a relay", "trainer": "over the trainer"}
_NEXT_SHOWN: Final = 3  # most peers of the next stage that are named

_ELSEWHERE: Final = {
    *("waits_for", "role", "state", "restarts", "failure", "posts", "members", "evaluations", "valid_step"),
    *("replica", "member"),
}


def parts_of(role: Told) -> list[Told]:
    """Rows of a role: one for each of its posts, and one for the replica of a trainer."""
    rows: list[Told] = [{**role, **post} for post in role.get("posts") or [{}]]
    for name in ("replica", "member"):
        if isinstance(role.get(name), dict):
            rows.append({"state": role.get("state"), **role[name], "role": "replica"})
    return rows


def details(role: Told) -> Iterator[str]:
    """Phrases on a role's figures, in the order of its keys."""
    for key, value in role.items():
        if key in _ELSEWHERE or value is None or value is False or value in ("", [], {}):
            continue
        phrase = _PHRASES.get(key)
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


def _averaging(told: Any, role: Told) -> str:
    if not isinstance(told, dict):
        return ""
    if not told.get("rounds"):
        return f"averaging failed: {told['last_failure']}" if told.get("last_failure") else ""
    phrase = f"{units.counted(told['rounds'], 'round')} averaged, the last in {units.took(told.get('last_s'))}"
    if told.get("failed"):
        phrase += f", {units.count(told['failed'])} failed ({told.get('last_failure') or 'for no known reason'})"
    return phrase


def _microbatches(told: Any, role: Told) -> str:
    if not isinstance(told, dict):
        return f"{units.count(told)} microbatches"
    phrase = f"{units.count(told.get('counted', 0))} microbatches counted"
    if told.get("in_flight") and role.get("in_flight_why"):
        why = f": {role['in_flight_why']}" if not role.get("waits_for") else ""
        phrase += f", {units.count(told['in_flight'])} in flight{why}"
    outcomes = {"redone": "repeated", "requeued": "restarted", "lost": "lost", "not_finite": "dropped as not finite"}
    for key, words in outcomes.items():
        if told.get(key):
            phrase += f", {units.count(told[key])} {words}"
    return phrase


def _next_step(value: Any, role: Told) -> str:
    """Phrase on when the next step is due. Returns "" if it is overdue and the role shows what it waits for."""
    due_in_s = units.known(value)
    return f"next step {units.soon(due_in_s)}" if due_in_s or (due_in_s == 0 and not role.get("waits_for")) else ""


def _handover(told: Any, role: Told) -> str:
    """Phrase on the microbatches that a stage peer holds, and on the peers that it forwards them to."""
    if not isinstance(told, dict):
        return ""
    phrase = f"{units.count(told.get('in_flight', 0))} microbatches in flight"
    if told.get("queue"):
        phrase += f", {units.count(told['queue'])} waiting"
    if told.get("kept_bytes"):
        phrase += f", {units.size(told['kept_bytes'])} of {units.size(told.get('room_bytes'))} kept"
    if told.get("refused_full"):
        phrase += f", {units.count(told['refused_full'])} refused for lack of room"
    ways = told.get("next")
    if isinstance(ways, dict) and ways:
        shown = [f"to {units.short(str(name))} {_WAYS.get(way, way)}" for name, way in ways.items()][:_NEXT_SHOWN]
        phrase += f", forwards {', '.join(shown)}"
        if len(ways) > _NEXT_SHOWN:
            phrase += f" and {len(ways) - _NEXT_SHOWN} more"
    return phrase


def _experts(told: Any, role: Told) -> str:
    """Phrase on the expert updates and microbatches of a trainer."""
    if not isinstance(told, dict) or "updates" not in told:
        return _plain("experts", told)
    phrase = f"{units.counted(told['updates'], 'update')} of experts"
    staleness = told.get("staleness")
    if isinstance(staleness, dict) and told["updates"]:
        mean, most = units.brief(staleness.get("mean")), units.count(staleness.get("most"))
        phrase += f", {mean} stale on average, {most} at most"
    if told.get("in_flight") and not role.get("in_flight_why"):  # else the microbatches' own phrase says so
        phrase += f", {units.count(told['in_flight'])} microbatches in flight"
    if told.get("too_old"):
        phrase += f", {units.count(told['too_old'])} too old for the trunk"
    if told.get("not_summed"):
        phrase += f", {units.count(told['not_summed'])} with gradients too large for the trunk"
    again = told.get("began_again")
    if isinstance(again, dict) and again:
        phrase += f", {units.count(sum(again.values()))} restarted"
    calls = told.get("calls")
    if isinstance(calls, dict) and calls.get("lost_updates"):
        phrase += f", {units.counted(calls['lost_updates'], 'update')} lost with their hosts"
    return phrase


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
