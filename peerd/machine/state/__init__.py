"""State download: pieces, donors, and the quorum that decides which state is correct."""
