"""The system's figures of one TCP connection: Linux's TCP_INFO, the fields that we use.

Nothing elsewhere: `tcp_info` gives None, and its callers make do with estimates. Offsets: struct tcp_info of
linux/tcp.h, which only ever grows at its end.
"""

from __future__ import annotations

import socket
import struct
import sys
from dataclasses import dataclass
from typing import Final

_OPTION: Final = getattr(socket, "TCP_INFO", None) if sys.platform == "linux" else None
_TIMESTAMPS: Final = 1
_SEGS: Final = 1 << 32
_BYTES: Final = 216  # up to tcpi_bytes_retrans; kernels since 4.19 have it
# options; snd_mss, rcv_mss, sacked; rtt; rcv_rtt; bytes_acked, bytes_received, segs_out, segs_in; min_rtt,
# data_segs_in; bytes_retrans.
_FIELDS: Final = struct.Struct("=5xB10xII4xI36xI20xI24xQQII4xII52xQ")
_MEMORY: Final = 55  # SO_MEMINFO of linux/socket.h; kernels since 4.12 have it
_DROPS: Final = struct.Struct("=32xI")  # SK_MEMINFO_DROPS of linux/sock_diag.h


@dataclass(frozen=True, slots=True)
class TcpInfo:
    """Figures since the connection was made; bytes are payload, segments are packets, empty ones included."""

    header_bytes: int  # of one packet: IP and TCP
    min_rtt_s: float  # of the last minutes
    bytes_acked: int  # that the other side has, though some before them may have been lost
    bytes_received: int  # without what came ahead of its turn
    segs_out: int  # this and the next start again after 2^32
    segs_in: int
    bytes_repeated: int
    data_segs_in: int  # packets that were not empty; starts again as well
    segs_refused: int  # packets that came for nothing: they had come before, or had no room; starts again as well
    segment_bytes: int  # payload of a full packet that comes in
    rtt_s: float  # as it is now, by acknowledgements
    receive_rtt_s: float  # as it is now, by what comes in: also where nothing is sent but acknowledgements; 0: unknown

    def received_since(self, before: TcpInfo) -> int:
        """Bytes that came in: what waited for a lost packet counts when it came, or not at all.

        Except where a virtual machine's network hands over many packets as one: those that came are not known then.
        """
        came = self.bytes_received - before.bytes_received
        if self.bytes_received > self.data_segs_in * self.segment_bytes:
            return came
        return min(came, (self.data_segs_in - before.data_segs_in) % _SEGS * self.segment_bytes)

    def overhead_since(self, before: TcpInfo | None) -> tuple[int, int]:
        """Bytes sent and received beyond payload: headers, acknowledgements, and what was sent again.

        What came again counts as full packets: its own sizes are not known.
        """
        out, into, repeated, refused = self.segs_out, self.segs_in, self.bytes_repeated, self.segs_refused
        if before is not None:
            out, into = out - before.segs_out, into - before.segs_in
            repeated, refused = repeated - before.bytes_repeated, refused - before.segs_refused
        return (
            out % _SEGS * self.header_bytes + repeated,
            into % _SEGS * self.header_bytes + refused % _SEGS * self.segment_bytes,
        )


def header_bytes(family: int, *, timestamps: bool) -> int:
    """Bytes of the headers of one packet of a TCP connection."""
    return (40 if family == socket.AF_INET6 else 20) + 20 + (12 if timestamps else 0)


def tcp_info(sock: socket.socket) -> TcpInfo | None:
    """The figures of this socket; None where the system does not say, or says less."""
    if _OPTION is None:
        return None
    try:
        data = sock.getsockopt(socket.IPPROTO_TCP, _OPTION, _BYTES)
    except OSError:
        return None
    if len(data) < _FIELDS.size:
        return None
    options, mss_out, mss_in, sacked, rtt, rtt_in, acked, received, out, into, min_rtt, data_in, again = _FIELDS.unpack(
        data[: _FIELDS.size]
    )
    return TcpInfo(
        header_bytes=header_bytes(sock.family, timestamps=bool(options & _TIMESTAMPS)),
        min_rtt_s=min(min_rtt, rtt) / 1e6,
        bytes_acked=acked + sacked * mss_out,
        bytes_received=received,
        segs_out=out,
        segs_in=into,
        bytes_repeated=again,
        data_segs_in=data_in,
        segs_refused=_segs_refused(sock),
        segment_bytes=mss_in,
        rtt_s=rtt / 1e6,
        receive_rtt_s=rtt_in / 1e6,
    )


def _segs_refused(sock: socket.socket) -> int:
    """Segments that the system dropped; 0 where the system does not say."""
    try:
        data = sock.getsockopt(socket.SOL_SOCKET, _MEMORY, _DROPS.size)
    except OSError:
        return 0
    return int(_DROPS.unpack(data)[0]) if len(data) == _DROPS.size else 0
