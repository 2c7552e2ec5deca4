"""The command line: each command, and the options that several share."""
