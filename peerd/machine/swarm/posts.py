"""Posts: a peer may serve or help several stages of one run, each as a post of its own.

The conductor's machines know posts, by opaque names; messages name peers and stages. Names of one stage's posts sort as
their peers do.
"""

from __future__ import annotations


def post_name(peer: str, stage: int) -> str:
    """The name of a peer's post at one stage."""
    return f"{peer}/{stage}"


def peer_of(post: str) -> str:
    """The peer that holds a post; a peer's own name stays as it is."""
    return post.partition("/")[0]


def stage_of(post: str) -> int:
    """The stage of a post; 0 where the name is a peer's alone."""
    return int(post.partition("/")[2] or 0)


def short(name: str) -> str:
    """The end of a peer's name, as people read it; of a post, its peer's."""
    return f"…{peer_of(name)[-8:]}"
