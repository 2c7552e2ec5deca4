"""Every parser of bytes that a peer sends, each with a golden corpus: the one table behind the fuzz tests.

A parser that appears later in peerd joins by one `@parser` function here; messages join by themselves (they are found
through their base class). A function gets one hostile input and does with it what the program would.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from peerd.codec.format import frame
from peerd.codec.format.frame import TensorFrame
from peerd.core import varint
from peerd.core.addr import (
    circuit_place,
    decode_addr,
    is_dialable,
    is_relayed,
    normal,
    parse_addr,
    reach,
    split_peer,
    tcp_place,
)
from peerd.core.errors import ConfigError, Refused
from peerd.core.ids import Key, PeerId
from peerd.core.keys import Keypair, verify
from peerd.core.limits import RPC_MESSAGE_FRAME_BYTES
from peerd.core.record import Record
from peerd.dht.codec import (
    FindMessage,
    NearMessage,
    PingMessage,
    RecordsMessage,
    StoredMessage,
    StoreMessage,
    reply_from_wire,
    reply_to_wire,
    request_from_wire,
    request_to_wire,
)
from peerd.dht.node import messages as q
from peerd.dht.node.routing_table import Contact
from peerd.dht.node.store import Verdict
from peerd.messages.encoding import decode, encode
from peerd.messages.settings import differences, read_settings
from peerd.rpc.methods import message_codec
from peerd.wire.buffers import BufferPool
from peerd.wire.identify_message import Identify, NoisePayload, decode_public_key, encode_public_key
from peerd.wire.noise.multistream import HEADER, NOT_AVAILABLE, MultistreamSelector, Proposal, encode_line
from peerd.wire.noise.noise import AES, CHACHA, SEALED_BYTES, NoiseHandshake, Opener, Sealer, Secrets
from peerd.wire.yamux import session as yamux
from peerd.wire.yamux.session import YamuxSession
from peerd.wire.yamux.stream import YamuxConfig
from tests.kit.examples import example, message_types
from tests.kit.frames import mended

Corpus = Sequence[bytes]
KEYS = Keypair.from_seed(bytes(range(32)))
OTHER = Keypair.from_seed(bytes(range(1, 33)))
ADDRS = [
    "/ip4/127.0.0.1/tcp/4001",
    "/ip6/2001:db8::1/tcp/31337",
    "/dns4/bootstrap.example.org/tcp/443/wss",
    f"/ip4/198.51.100.7/tcp/31337/p2p/{KEYS.peer_id}",
    f"/ip4/198.51.100.7/tcp/31337/p2p/{KEYS.peer_id}/p2p-circuit/p2p/{OTHER.peer_id}",
    "/ip4/198.51.100.7/udp/4001/quic-v1",
]
ACCEPT_BYTES_MAX = 1 << 20  # payloads above it are skipped here, as a driver does that has no budget left


@dataclass(frozen=True, slots=True)
class Parser:
    """`parse` gets hostile bytes; `allowed` are answers besides ProtocolViolation that are no one's fault."""

    name: str
    corpus: Callable[[], Corpus]
    parse: Callable[[bytes], object]
    allowed: tuple[type[Exception], ...] = ()
    share: float = 1.0  # of the inputs a test asks for; less for those that sign and agree keys


PARSERS: list[Parser] = []


def parser(
    name: str, corpus: Callable[[], Corpus], allowed: tuple[type[Exception], ...] = (), share: float = 1.0
) -> Callable[[Callable[[bytes], object]], Callable[[bytes], object]]:
    def add(parse: Callable[[bytes], object]) -> Callable[[bytes], object]:
        PARSERS.append(Parser(name, cache(corpus), parse, allowed, share))
        return parse

    return add


def in_pieces(data: bytes) -> list[bytes]:
    """The same bytes as three arrivals."""
    third = len(data) // 3
    return [data[:third], data[third : third + 1], data[third + 1 :]]


# --- core ----------------------------------------------------------------------------------------------------------
@parser("varint", lambda: [varint.encode_varint(1 << bits) for bits in (0, 6, 7, 14, 31, 62)])
def _varint(data: bytes) -> None:
    varint.decode_varint(data)


@parser("multiaddr", lambda: [parse_addr(addr).to_bytes() for addr in ADDRS])
def _addr(data: bytes) -> None:
    addr = decode_addr(data)
    assert addr.to_bytes() == data
    text = str(addr)  # an accepted address can always be shown
    assert len(data) > 80 or parse_addr(text) is not None  # the text of a long one has a bound of its own
    is_dialable(addr), is_relayed(addr), reach(addr), split_peer(addr), tcp_place(addr), circuit_place(addr)
    assert decode_addr(normal(addr).to_bytes()) == normal(normal(addr))


@parser("public key", lambda: [encode_public_key(KEYS.peer_id)])
def _public_key(data: bytes) -> None:
    key = decode_public_key(data)
    assert decode_public_key(encode_public_key(key)) == key


def _noise_payloads() -> Corpus:
    signature = KEYS.sign(b"anything")
    names = ("/yamux/1.0.0", "/mplex/6.7.0")
    return [NoisePayload(peer=KEYS.peer_id, signature=signature, muxers=muxers).encode() for muxers in ((), names)]


@parser("noise payload", _noise_payloads)
def _noise_payload(data: bytes) -> None:
    payload = NoisePayload.decode(data)
    assert NoisePayload.decode(payload.encode()) == payload
    if len(data) % 16 == 0:  # checking every signature would take most of the time
        verify(payload.peer, b"anything", payload.signature)


def _identifies() -> Corpus:
    addrs = tuple(parse_addr(addr).to_bytes() for addr in ADDRS)
    full = Identify(
        peer=KEYS.peer_id,
        listen_addrs=addrs,
        protocols=("/ipfs/id/1.0.0", "/ipfs/ping/1.0.0", "/peerd/dht/4"),
        observed_addr=addrs[0],
        protocol_version="ipfs/0.1.0",
        agent_version="peerd/1",
    )
    return [full.encode(), Identify(agent_version="p2pd/0.1").encode(), Identify(listen_addrs=addrs[:1]).encode()]


@parser("identify", _identifies)
def _identify(data: bytes) -> None:
    message = Identify.decode(data)
    assert Identify.decode(message.encode()) == message
    for text in (message.agent_version, message.protocol_version, *message.protocols):
        text.encode()


def frame_headers() -> Corpus:
    frames = [
        TensorFrame("float32", (2, 3), bytes(24)),
        TensorFrame("float64", (4,), bytes(8), "bf16"),
        TensorFrame("int64", (), bytes(8)),
        TensorFrame("uint8", (0, 7), b""),
        TensorFrame("bfloat16", (1, 1, 1, 1, 1, 1, 1, 2), bytes(4)),
        TensorFrame("float32", (2, 3), bytes(4 + 4 + 6), "dynamic8", 256),
        TensorFrame("float16", (65,), bytes(8 + 4 + 33), "nf4", 64),
        TensorFrame("float32", (1000,), bytes(77), lossless=True),
        TensorFrame("float32", (40,), bytes(21), "int4", 4096, lossless=True),
    ]
    return [frame.encode_header(one) for one in frames]


@parser("tensor header", frame_headers)
def _frame_header(data: bytes) -> None:
    header, end = frame.decode_header(data)
    assert end <= len(data)
    raw = frame.expected_bytes(header.dtype, header.shape, header.coding, header.block)
    least, most = frame.lossless_bounds(raw) if header.lossless else (raw, raw)
    assert 0 <= raw == header.raw_bytes <= frame.FRAME_BYTES
    assert least <= header.payload_bytes <= most


@parser("tensor header, checksum mended", frame_headers)
def _mended_header(data: bytes) -> None:
    _frame_header(mended(data))  # so that the checks behind the checksum are reached


def _records() -> Corpus:
    records = [
        Record(Key.of("a"), KEYS.peer_id, b"", b"value", 1, 1_800_000_000_000),
        Record(Key.of("b"), KEYS.peer_id, b"suffix", bytes(300), 7, 1_800_000_000_000),
        Record(Key.of("b"), OTHER.peer_id, b"s", b"", 8, 1_800_000_000_000, tombstone=True),
    ]
    return [record.signed(KEYS if record.publisher == KEYS.peer_id else OTHER).encode() for record in records]


@parser("dht record", _records)
def _record(data: bytes) -> None:
    record = Record.decode(data)
    assert record.encode() == data  # one encoding only
    if len(data) % 16 == 0:
        record.is_signed(verify)


# --- multistream and Noise ---------------------------------------------------------------------------------------
def _negotiations() -> Corpus:
    asked = [encode_line("/peerd/dht/4"), encode_line("/ipfs/id/1.0.0"), encode_line("/other/1"), NOT_AVAILABLE]
    return [HEADER + asked[0] + b"request", HEADER + asked[2] + asked[1], HEADER + asked[3], HEADER + asked[0]]


@parser("multistream, accepting", _negotiations)
def _selector(data: bytes) -> None:
    selector = MultistreamSelector(lambda name: name == "/peerd/dht/4")
    for piece in in_pieces(data):
        _, chosen, _ = selector.feed(piece)
        if chosen is not None:
            assert chosen == "/peerd/dht/4"
            return


def _answers() -> Corpus:
    agreed = HEADER + encode_line("/peerd/dht/4")
    return [agreed, agreed + b"the first answer", HEADER + NOT_AVAILABLE]


@parser("multistream, proposing", _answers, allowed=(Refused,))
def _proposal(data: bytes) -> None:
    proposal = Proposal("/peerd/dht/4")
    for piece in in_pieces(data):
        if proposal.feed(piece) is not None:
            return


FIRST_SECRETS = Secrets(KEYS, bytes(range(2, 34)), bytes(range(3, 35)))
SECOND_SECRETS = Secrets(OTHER, bytes(range(4, 36)), bytes(range(5, 37)))
MUXERS = ("/yamux/1.0.0",)


def _initiator() -> tuple[NoiseHandshake, bytes]:
    side = NoiseHandshake(FIRST_SECRETS, initiator=True, muxers=MUXERS)
    return side, side.start()


def _responder() -> NoiseHandshake:
    return NoiseHandshake(SECOND_SECRETS, initiator=False, muxers=MUXERS)


@cache
def _handshake_messages() -> tuple[bytes, bytes, bytes]:
    """A whole hand-shake: always the same bytes, because the secrets are."""
    initiator, first = _initiator()
    responder = _responder()
    second = responder.feed(first)
    third = initiator.feed(second)
    responder.feed(third)
    assert responder.result is not None
    return first, second, third


@parser("noise message 1", lambda: _handshake_messages()[:1], share=0.3)
def _noise_first(data: bytes) -> None:
    _responder().feed(data)


@parser("noise message 2", lambda: _handshake_messages()[1:2], share=0.3)
def _noise_second(data: bytes) -> None:
    side, _ = _initiator()
    side.feed(data)
    assert side.result is None or data.startswith(_handshake_messages()[1])


@parser("noise message 3", lambda: _handshake_messages()[2:], share=0.4)
def _noise_third(data: bytes) -> None:
    side = _responder()
    side.feed(_handshake_messages()[0])
    side.feed(data)
    assert side.result is None or data.startswith(_handshake_messages()[2])


def _sealed() -> Corpus:
    sealer, into = Sealer(bytes(32)), memoryview(bytearray(1 << 17))
    at = 0
    for size in (0, 1, 100, 3000):
        at += sealer.seal(bytes(size), into[at:])
    return [bytes(into[:at])]


@parser("noise frames", _sealed)
def _opener(data: bytes) -> None:
    pool = BufferPool(SEALED_BYTES, keep=4)
    opener = Opener(bytes(32), pool if len(data) % 2 else None, AES if len(data) % 3 == 0 else CHACHA)
    for piece in in_pieces(data):
        for plain in opener.feed(piece):
            if isinstance(plain, memoryview):
                pool.give(plain.obj)


# --- yamux -------------------------------------------------------------------------------------------------------
YAMUX = YamuxConfig(streams_inbound=8, streams_outbound=8)


def yamux_frame(kind: int, flags: int, stream: int, length: int, body: bytes = b"") -> bytes:
    return yamux.HEADER.pack(0, kind, flags, stream, length) + body


def _yamux_talks() -> Corpus:
    opening = yamux_frame(yamux.DATA, yamux.SYN, 1, 5, b"hello")
    own = yamux_frame(yamux.WINDOW, yamux.ACK, 2, 65536) + yamux_frame(yamux.DATA, 0, 2, 5, b"reply")
    return [
        opening + yamux_frame(yamux.DATA, yamux.FIN, 1, 0),
        yamux_frame(yamux.WINDOW, yamux.SYN, 1, 1000) + yamux_frame(yamux.WINDOW, yamux.SYN, 3, 0) + own,
        own + yamux_frame(yamux.DATA, yamux.FIN, 2, 3, b"end") + yamux_frame(yamux.WINDOW, yamux.RST, 4, 0),
        opening + yamux_frame(yamux.WINDOW, yamux.RST, 1, 0) + yamux_frame(yamux.DATA, 0, 1, 4, b"late"),
        yamux_frame(yamux.PING, yamux.SYN, 0, 7) * 3 + yamux_frame(yamux.PING, yamux.ACK, 0, 1),
        b"".join(yamux_frame(yamux.DATA, yamux.SYN, stream, 2, b"ab") for stream in range(1, 25, 2)),
        own + yamux_frame(yamux.GO_AWAY, 0, 0, 0) + opening,
        opening + yamux_frame(yamux.DATA, 0, 1, 300) + bytes(300) + yamux_frame(yamux.WINDOW, 0, 1, 1 << 20),
    ]


@parser("yamux frames", _yamux_talks)
def _yamux(data: bytes) -> None:
    session = YamuxSession(initiator=False, now=0.0, config=YAMUX)
    out = memoryview(bytearray(4096))
    for own in (session.open(0.0), session.open(0.0)):
        session.write(own, b"request")
    session.wake(0.0)
    session.fill(out)
    for now, piece in enumerate(in_pieces(data)):
        for event in session.receive(piece, float(now)):
            if isinstance(event, yamux.Opened | yamux.Changed):
                yamux_answers(session, event.stream, float(now))
        while session.fill(out):
            pass
        yamux_check(session)


def yamux_answers(session: YamuxSession, stream: yamux.YamuxStream, now: float) -> None:
    """A handler that reads, answers, and lets go."""
    if stream.inbox_bytes:
        taken = stream.take(1 << 16)
        session.consumed(stream, now)
        if not stream.fin_due and not stream.was_reset:
            session.write(stream, taken[:64])
    if (stream.fin_received or stream.was_reset) and not stream.abandoned:
        session.abandon(stream)


def yamux_check(session: YamuxSession) -> None:
    assert len(session.streams) <= YAMUX.streams_inbound + YAMUX.streams_outbound
    assert 0 <= session.inbound <= YAMUX.streams_inbound
    assert 0 <= session.outbound <= YAMUX.streams_outbound
    for stream in session.streams.values():
        assert stream.credit >= 0
        held = stream.held.bytes if stream.held is not None else 0
        assert stream.inbox_bytes + held + stream.credit <= stream.target
        assert stream.inbox_bytes == sum(len(piece) for piece in stream.inbox)


# --- calls and messages --------------------------------------------------------------------------------------------
def _calls() -> Corpus:
    frames = [
        TensorFrame("float32", (2,), b"12345678"),
        TensorFrame("uint8", (0,), b""),
        TensorFrame("float32", (2,), bytes(9), "int4", 64),
        TensorFrame("uint8", (300,), bytes(12), lossless=True),
    ]
    headers, payloads = message_codec.encode_frames(frames)
    sent = b"".join(bytes(payload) for payload in payloads)
    return [
        message_codec.encode_call(message_codec.REQUEST, 1, b"find", 10.0, b"who?"),
        message_codec.encode_call(message_codec.OPEN, 2, b"take", 1.5, b"body", headers, 4) + sent,
        message_codec.encode_message(message_codec.REPLY, 1, b"answer", headers, 4)
        + sent
        + message_codec.encode_message(message_codec.END, 3),
        message_codec.encode_failure(3, Refused("no")) + message_codec.encode_message(message_codec.CANCEL, 1),
    ]


@parser("call messages", _calls)
def _call(data: bytes) -> None:
    messages = message_codec.MessageParser()
    for piece in in_pieces(data):
        left = piece
        while left or not messages.wanted:
            if messages.wanted:
                part, left = left[: messages.wanted], left[messages.wanted :]
                messages.fill(part)
                continue
            _take_messages(messages, messages.feed(left))
            left = b""
            if not messages.wanted:
                break


@parser("call messages, checksums mended", _calls)
def _mended_call(data: bytes) -> None:
    _call(mended(data))


def _take_messages(messages: message_codec.MessageParser, found: list[message_codec.RpcMessage]) -> None:
    for message in found:
        if message.kind == message_codec.ERROR:
            message_codec.decode_failure(message.body, KEYS.peer_id)
        if message.headers:
            assert message.frame_bytes <= RPC_MESSAGE_FRAME_BYTES
            if message.payload_bytes <= ACCEPT_BYTES_MAX:
                messages.accept()
            else:
                messages.skip()


def _add_messages() -> None:
    for kind in message_types():

        def corpus(kind: type = kind) -> Corpus:
            rng = random.Random(kind.__qualname__)
            return [encode(example(kind, rng)) for _ in range(16)]

        def parse(data: bytes, kind: type = kind) -> None:
            body = encode(decode(kind, data))
            assert encode(decode(kind, body)) == body

        PARSERS.append(Parser(f"message {kind.__qualname__}", cache(corpus), parse, share=0.1))


_add_messages()


# --- the DHT -------------------------------------------------------------------------------------------------------
CONTACTS = (Contact(OTHER.peer_id, tuple(parse_addr(addr).to_bytes() for addr in ADDRS[:2])),)
HELLO = q.Hello((parse_addr(ADDRS[0]).to_bytes(),))


def _dht_requests() -> Corpus:
    records = tuple(Record.decode(record) for record in _records())
    asked = [q.Find((Key.of("a"), Key.of("b")), False, HELLO), q.StoreRecords(records, HELLO), q.Ping(None)]
    return [bytes([index]) + encode(request_to_wire(one, 1.8e9)[1]) for index, one in enumerate(asked)]


@parser("dht requests", _dht_requests)
def _dht_request(data: bytes) -> None:
    kind = (FindMessage, StoreMessage, PingMessage)[data[0] % 3 if data else 0]
    request_from_wire(decode(kind, data[1:]))


def _dht_replies() -> Corpus:
    records = tuple(Record.decode(record) for record in _records())
    found = q.Found((records, ()), CONTACTS, HELLO)
    said = [(found, True), (q.Found(((),), CONTACTS, None), False), (q.Stored(((Verdict.STORED, 1),), HELLO), False)]
    replies = [reply_to_wire(reply, 1.8e9, values=values) for reply, values in said]
    return [bytes([index]) + encode(reply) for index, reply in enumerate(replies)]


@parser("dht replies", _dht_replies)
def _dht_reply(data: bytes) -> None:
    kind = (RecordsMessage, NearMessage, StoredMessage)[data[0] % 3 if data else 0]
    reply_from_wire(decode(kind, data[1:]), asked=2)


# --- text ----------------------------------------------------------------------------------------------------------
@parser("peer id text", lambda: [str(KEYS.peer_id).encode()], allowed=(ValueError,), share=0.3)
def _peer_text(data: bytes) -> None:
    PeerId.parse(data.decode("latin-1"))


@parser("multiaddr text", lambda: [addr.encode() for addr in ADDRS], allowed=(ConfigError,), share=0.3)
def _addr_text(data: bytes) -> None:
    str(parse_addr(data.decode("utf-8", "surrogateescape")))


SETTINGS = b'{"run":"r","model":{"kind":"gpt","heads":8},"seed":17,"data":[1,2.5,null]}'
READ = b'{"run":"r","corpus":{"data":"%s"},"token":"YWJj"}' % (b"ab" * 32)


@parser("published settings", lambda: [SETTINGS, SETTINGS, READ, b"[" * 1500, b'{"a":' * 1500], share=0.3)
def _settings(data: bytes) -> None:
    told = read_settings(data)
    assert all(len(digest) == 64 for digest in told.corpus.values())
    assert all(found.isprintable() and len(found) < 1000 for found in differences(SETTINGS, told.shared))
