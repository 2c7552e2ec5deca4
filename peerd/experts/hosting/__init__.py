"""Hosting of experts: their choice and announcement, checkpoints, adoption of orphans, and sharing between hosts."""
