"""Calls between a trainer and the stages, and between stage peers: routes, schedules, hand-over, dispatch."""
