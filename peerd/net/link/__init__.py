"""One authenticated connection and the streams on it."""
