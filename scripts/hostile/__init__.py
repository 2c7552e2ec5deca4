"""Hostile peers: what strangers and liars do to a swarm, over real sockets. For tests and for scripts/soak.py.

`field` names their targets, `session` speaks below calls (a hand-shake that is right, then any bytes), `attacks_*` are
what they do, `process` is one hostile process that does one thing after another. Each attack is named after a finding
(C1 ... M5, F1) that it repeats, and must stay without effect.
"""
