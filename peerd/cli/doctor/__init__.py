"""`peerd doctor`: checks everything that a peer needs, one file per subject."""
