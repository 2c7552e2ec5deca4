"""States of a stage: pieces, donors, the quorum that decides which is correct, serving and download."""
