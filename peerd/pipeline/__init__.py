"""Calls between trainers and stages, and between stage peers: hand-over, dispatch, hedging."""
