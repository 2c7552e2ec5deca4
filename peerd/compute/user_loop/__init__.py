"""What the model of a user's own loop needs beside it: the outline of its optimizer, and the tail of its sums."""
