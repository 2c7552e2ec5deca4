"""What all peers of a run agree on: posts, the roster, the directory of members, links between them."""
