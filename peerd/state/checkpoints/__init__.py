"""Checkpoints: saving those of stage peers, keeping sets of them on backbones, and recovering a run from them."""
