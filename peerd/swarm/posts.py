"""Names of posts. A post is one stage that a peer of a run serves or helps; a peer may have several posts.

To the conductor's machines, post names are opaque; messages name peers and stages. Posts of one stage sort like their
peers.
"""

from __future__ import annotations


def post_name(peer: str, stage: int) -> str:
    """The name of a peer's post at one stage."""
    return f"{peer}/{stage}"


def peer_of(post: str) -> str:
    """The peer that has a post. The name of a peer itself is returned unchanged."""
    return post.partition("/")[0]


def stage_of(post: str) -> int:
    """The stage of a post, or 0 if the name is that of a peer."""
    return int(post.partition("/")[2] or 0)


def short(name: str) -> str:
    """The end of a peer's name, or of the name of a post's peer, for display."""
    return f"…{peer_of(name)[-8:]}"
