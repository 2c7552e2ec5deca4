"""The system's counters of one TCP connection: the fields of Linux's TCP_INFO that peerd uses.

On other systems `tcp_info` returns None, and callers use estimates. Offsets: struct tcp_info of linux/tcp.h, to which
new fields are only appended.
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
    """Counters since the connection was made. Bytes are payload; segments are packets, including empty ones."""

    header_bytes: int  # of one packet: IP and TCP
    min_rtt_s: float  # of the last minutes
    bytes_acked: int  # cumulative and selective acknowledgements: earlier bytes may still be lost
    bytes_received: int  # in order
    segs_out: int  # this and the next wrap around at 2^32
    segs_in: int
    bytes_repeated: int
    data_segs_in: int  # packets with payload; wraps around at 2^32
    segs_refused: int  # dropped by the system as duplicates or for lack of memory; wraps around at 2^32
    segment_bytes: int  # payload of a full incoming packet
    rtt_s: float  # current, from acknowledgements
    receive_rtt_s: float  # current, from incoming data, so known also if only acknowledgements are sent; 0: unknown

    def received_since(self, before: TcpInfo) -> int:
        """Bytes that arrived since `before`. Bytes behind a lost packet, which the system reports only once the gap is
        filled, do not count in the interval in which it is filled.

        The bytes that arrived are bounded by the number of packets that arrived. If a virtual machine's network merges
        packets, that number is too low; then all bytes that the system reports are counted.
        """
        came = self.bytes_received - before.bytes_received
        if self.bytes_received > self.data_segs_in * self.segment_bytes:
            return came
        return min(came, (self.data_segs_in - before.data_segs_in) % _SEGS * self.segment_bytes)

    def overhead_since(self, before: TcpInfo | None) -> tuple[int, int]:
        """Bytes sent and received beyond the payload: headers, acknowledgements and retransmissions.

        Dropped incoming packets count as full ones, since their sizes are unknown.
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
    """Bytes of the IP and TCP headers of one packet."""
    return (40 if family == socket.AF_INET6 else 20) + 20 + (12 if timestamps else 0)


def tcp_info(sock: socket.socket) -> TcpInfo | None:
    """The counters of this socket, or None if the system does not provide them."""
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
    """Number of incoming segments that the system dropped; 0 if unknown."""
    try:
        data = sock.getsockopt(socket.SOL_SOCKET, _MEMORY, _DROPS.size)
    except OSError:
        return 0
    return int(_DROPS.unpack(data)[0]) if len(data) == _DROPS.size else 0
