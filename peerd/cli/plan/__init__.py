"""`peerd plan`: plans which device serves which stage, and what a run needs of devices and links. Needs no torch."""
