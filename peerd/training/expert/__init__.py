"""Hosting of experts: their life, their checkpoints, and the adoption of orphans."""
