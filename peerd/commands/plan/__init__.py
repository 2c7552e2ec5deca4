"""`peerd plan`: which device should serve which stage, and what a run asks of devices and lines. No torch."""
