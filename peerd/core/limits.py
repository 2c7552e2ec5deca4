"""Every bound on what a peer may make us hold or do, in one place, each with its reason."""

from __future__ import annotations

from typing import Final

# --- addresses -------------------------------------------------------------------------------------------------
ADDRS_PER_PEER: Final = 16  # more addresses than a peer with several networks and relays needs
ADDR_BYTES: Final = 512  # a circuit address with two peer ids takes about 130
