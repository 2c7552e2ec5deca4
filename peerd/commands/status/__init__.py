"""`peerd status`, printed once or live, and the progress line of `peerd join`: collect and format a run's status."""
