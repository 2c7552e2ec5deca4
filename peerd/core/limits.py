"""Every bound on what a peer may make us hold or do, in one place, each with its reason."""

from __future__ import annotations

from typing import Final

# --- addresses -------------------------------------------------------------------------------------------------
ADDRS_PER_PEER: Final = 16  # more addresses than a peer with several networks and relays needs
ADDR_BYTES: Final = 512  # a circuit address with two peer ids takes about 130

# --- tensor frames ---------------------------------------------------------------------------------------------
FRAME_DIMS: Final = 8  # more axes than any tensor that a model sends
FRAME_ELEMENTS: Final = 1 << 31  # of one tensor; keeps every product far from overflow in foreign code
FRAME_BYTES: Final = 256 << 20  # payload of one frame: 8 x 2048 x 4096 activations in fp32

# --- calls -----------------------------------------------------------------------------------------------------
RPC_NAME_BYTES: Final = 32  # of a method's last word
RPC_BODY_BYTES: Final = 1 << 20  # wall for any body; larger things travel as frames
RPC_DEFAULT_BODY_BYTES: Final = 128 << 10  # what a method takes unless it says otherwise
RPC_FRAMES: Final = 64  # frames of one message
RPC_MESSAGE_FRAME_BYTES: Final = 256 << 20  # payload of all frames of one message
RPC_ERROR_BYTES: Final = 4096  # an error is a sentence, not a document
RPC_ERROR_CHARS: Final = 512  # what we send of a reason, so that it fits in any encoding
RPC_PENDING: Final = 1024  # calls that wait for one peer's service; more means the peer is stuck
RPC_CALLS_PER_STREAM: Final = 1024  # calls of one peer that run at once on one stream
RPC_CALLS_PER_PEER: Final = 256  # default for one method
RPC_CALLS: Final = 2048  # default for one method, all peers together
RPC_DEADLINE_S: Final = 3600.0  # longest time that a caller may ask us to work
RPC_OUTBOX_BYTES: Final = 256 << 10  # unsent replies above which we stop reading that peer's requests
RPC_PARTS_AHEAD: Final = 2  # parts of a streaming call read before someone wants them
RPC_RECEIVING_BYTES: Final = 1 << 30  # payload that all peers together may have us hold
RPC_RECEIVING_BYTES_PER_PEER: Final = 512 << 20  # of these, one peer: two whole messages
RPC_BUDGET_WAIT_S: Final = 2.0  # then it is honest to say that we are overloaded
RPC_IDLE_S: Final = 120.0  # a shared stream that nobody used for so long is closed
