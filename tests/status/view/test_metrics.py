"""Metrics of a snapshot: lines that Prometheus reads, whatever strangers have put into it."""

from __future__ import annotations

import re
from typing import Any

from peerd.status.snapshot import StatusSnapshot, decode_status
from peerd.status.view.metrics import metrics_text

LINE = re.compile(r'[a-z][a-z0-9_]*\{([a-z]+="([^"\\\n]|\\.)*")(,[a-z]+="([^"\\\n]|\\.)*")*\} -?[0-9.e+-]+')


def snapshot(**changes: Any) -> dict[str, Any]:
    swarm = {
        **{"step": 12, "loss": 2.5, "valid_loss": None, "samples_per_s": 3.0, "standstill": {"for_s": 40, "why": "x"}},
        "stages": [{"stage": 0, "peers": [{}, {}]}, {"stage": 1, "peers": []}],
    }
    roles = [{"role": "expert", "state": "running", "waits_for": None, "hosted": 8, "loss": "nan", "ready": True}]
    base = {"run": "demo", "uptime_s": 5.5, "swarm": swarm, "network": {"bytes_in": 10, "peers": [{}]}, "roles": roles}
    return base | changes


def test_figures_stand_one_a_line_under_a_help_and_a_type() -> None:
    lines = metrics_text(decode_status(snapshot(), StatusSnapshot)).splitlines()
    assert 'peerd_swarm_step{run="demo"} 12' in lines
    assert 'peerd_swarm_standstill_seconds{run="demo"} 40' in lines
    assert 'peerd_swarm_stage_peers{run="demo",stage="1"} 0' in lines
    assert 'peerd_role_hosted{run="demo",role="expert"} 8' in lines
    assert 'peerd_role_working{run="demo",role="expert"} 1' in lines
    assert not any("valid_loss" in line for line in lines)  # unknown
    figures = [line for line in lines if not line.startswith("#")]
    assert all(LINE.fullmatch(line) for line in figures), figures
    named = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert sorted(named) == sorted({line.partition("{")[0] for line in figures})


def test_what_strangers_say_breaks_no_line() -> None:
    evil = 'a"} 1\npeerd_swarm_step{run="b'
    roles = [{"role": evil, "state": "running", evil: 3, "rate": float("inf"), "n": 10**400}]
    lines = metrics_text(
        decode_status(snapshot(run=evil, roles=roles, swarm={"step": None, "loss": "nan"}), StatusSnapshot)
    ).splitlines()
    assert all(line.startswith("# ") or LINE.fullmatch(line) for line in lines)
    assert not any(line.startswith("peerd_swarm_step") for line in lines)


def test_a_part_that_a_daemon_does_not_know_is_as_one_that_it_does_not_name() -> None:
    unknown = dict.fromkeys(("limits", "reachability", "network", "faults", "peer", "swarm", "dht", "run"))
    assert decode_status({"version": "9", **unknown}, StatusSnapshot) == StatusSnapshot(version="9")


def test_a_resting_daemon_shows_no_figures_that_look_like_a_restart() -> None:
    text = metrics_text(decode_status({"run": "demo", "roles": []}, StatusSnapshot))
    assert "peerd_swarm_standstill_seconds" in text
    assert not any(name in text for name in ("peerd_uptime", "peerd_network", "peerd_faults"))


def test_a_daemon_that_knows_nothing_yet_has_figures_too() -> None:
    assert "peerd_uptime_seconds" in metrics_text(StatusSnapshot(uptime_s=0.1))
