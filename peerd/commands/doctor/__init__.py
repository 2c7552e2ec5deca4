"""`peerd doctor`: tries what a peer needs, one file for each subject."""
