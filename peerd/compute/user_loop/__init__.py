"""Parts of a user's own loop beside its model: the outline of its optimizer, and the tail of its sums."""
