"""`peerd status`, once and live, and the line a minute of `peerd join`: what is known of a run, and how it is said."""
