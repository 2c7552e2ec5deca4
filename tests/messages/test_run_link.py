"""One line to join by, and the run file behind it: written and read, never anything else, signed where it must be."""

from __future__ import annotations

import contextlib
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.core.addr import parse_addr
from peerd.core.errors import ConfigError, ProtocolViolation
from peerd.core.keys import Keypair
from peerd.messages.encoding import encode
from peerd.messages.run_link import DOMAIN, JoinLink, RunFileAnswer, RunFileRequest, best_link, shared_file, shared_run
from peerd.run.runfile import (
    AccessSection,
    AllowedCode,
    DataSection,
    LimitsSection,
    LineSection,
    ModelSection,
    PipelineSection,
    RunFile,
    SourceSection,
)

ANN, BOB = Keypair.from_seed(b"a" * 32), Keypair.from_seed(b"b" * 32)
PEER = ANN.peer_id.text
HOSTS = st.one_of(
    st.ip_addresses().map(str),
    st.from_regex(r"[a-z]([a-z0-9-]{0,20}[a-z0-9])?(\.[a-z]{2,5})?", fullmatch=True),
)
NAMES = st.from_regex(r"[A-Za-z0-9_-]([A-Za-z0-9 ._-]{0,60}[A-Za-z0-9_-])?", fullmatch=True)


@pytest.mark.slow
@given(HOSTS, st.integers(1, 65535), NAMES)
def test_a_line_is_read_as_it_was_written(host: str, port: int, run: str) -> None:
    link = JoinLink(host, port, ANN.peer_id, run)
    assert JoinLink.parse(link.text) == link
    assert str(link.addr).endswith(f"/tcp/{port}/p2p/{PEER}")


def test_a_line_names_what_it_leads_to() -> None:
    link = JoinLink.parse(f"peerd://[2001:db8::7]:31337/{PEER}/my%20run")
    assert (link.host, link.port, link.run) == ("2001:db8::7", 31337, "my run")
    assert link.addr == parse_addr(f"/ip6/2001:db8::7/tcp/31337/p2p/{PEER}")
    assert JoinLink.parse(f"peerd://a.example:1/{PEER}/r").addr == parse_addr(f"/dns/a.example/tcp/1/p2p/{PEER}")


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "peerd://",
            "http://h:1/p/r",
            f"peerd://h/{PEER}/r",
            f"peerd://h:0/{PEER}/r",
            f"peerd://h:65536/{PEER}/r",
        ),
        *(f"peerd://h:1/{PEER}", f"peerd://h:1/{PEER}/", f"peerd://h:1/{PEER}/a/b", f"peerd://h:1/{PEER}/a b"),
        *(
            f"peerd://h:1/{PEER}/a?x",
            f"peerd://u@h:1/{PEER}/a",
            f"peerd://h:1/{PEER[:-1]}/a",
            f"peerd://::1:1/{PEER}/a",
        ),
        *(f"peerd://256.1.1.1:1/{PEER}/a", f"peerd://1.2.3:1/{PEER}/a", f"peerd://[1.2.3.4]:1/{PEER}/a"),
        *(f"peerd://h:1/{PEER}/%1b[2J", f"peerd://h:1/{PEER}/%61", f"peerd://h:1/{PEER}/%ff", f"peerd://h:01/{PEER}/a"),
        *(f"peerd://h:1/{PEER}/a\n", f"peerd://h:1/{PEER}/" + "a" * 65, f"peerd://h:1/{PEER}/" + "a" * 2000),
    ],
)
def test_what_is_no_such_line_is_named_with_its_form(text: str) -> None:
    with pytest.raises(ConfigError, match=r"form peerd://HOST:PORT/PEER/RUN"):
        JoinLink.parse(text)


@given(st.integers())
def test_a_mutated_line_is_a_line_or_one_message(seed: int) -> None:
    rng = random.Random(seed)
    text = list(f"peerd://[2001:db8::7]:31337/{PEER}/my%20run")
    for _ in range(rng.randint(1, 4)):
        text[rng.randrange(len(text))] = rng.choice("abc:/[]%0 \x1b\u00e9.@")
    with contextlib.suppress(ConfigError):
        assert JoinLink.parse("".join(text)).text == "".join(text)


def test_the_line_that_is_published_leads_there_from_farthest() -> None:
    texts = ["/ip4/127.0.0.1/tcp/1", "/ip4/192.168.1.2/tcp/2", "/ip6/2001:db8::7/tcp/3", "/ip4/198.51.100.7/tcp/4"]
    addrs = [parse_addr(f"{text}/p2p/{PEER}") for text in texts]
    circuit = parse_addr(f"/ip4/198.51.100.9/tcp/5/p2p/{BOB.peer_id.text}/p2p-circuit/p2p/{PEER}")
    found = [best_link([circuit, *addrs[:n]], ANN.peer_id, "r") for n in (0, 1, 2, 3, 4)]
    assert [link.port if link else None for link in found] == [None, 1, 2, 3, 4]
    named = best_link([parse_addr(f"/dns/backbone.example.org/tcp/5/p2p/{PEER}"), *addrs], ANN.peer_id, "r")
    assert named is not None
    assert JoinLink.parse(named.text).addr == parse_addr(f"/dns/backbone.example.org/tcp/5/p2p/{PEER}")


def test_a_volunteers_own_part_and_the_publishers_paths_stay_at_home() -> None:
    run = RunFile(
        run="r",
        bootstrap=["/ip4/198.51.100.7/tcp/1"],
        listen=["/ip4/0.0.0.0/tcp/7"],
        announce=["/ip4/203.0.113.5/tcp/7"],
        model=ModelSection(vocab="/home/ann/secret/tok.json", layers=2),
        pipeline=PipelineSection(stages=2),
        data=DataSection(sources=[SourceSection(path="/home/ann/*.txt"), SourceSection(path="https://h.example/x")]),
        limits=LimitsSection(upload_mbit=3, hours="22:00-08:00"),
        access=AccessSection(allow="tokens", organizer=PEER, token="/home/ann/t", revoked="/home/ann/r"),
        line=LineSection(link="peerd://x", data="/home/ann/d", code=[AllowedCode(path="ann.py", digest="d")]),
    )
    told = shared_file(run)
    for secret in (b"ann", b'"line"', b"limits", b"bootstrap", b"listen", b"announce", b"hours"):
        assert secret not in told
    found = shared_run(RunFileAnswer(told, ANN.sign(DOMAIN + told)), "r")
    assert found.model == ModelSection(layers=2, vocab="tok.json")
    assert [source.path for source in found.data.sources] == ["*.txt", "https://h.example/x"]
    assert found.access == AccessSection(allow="tokens", organizer=PEER)
    assert shared_file(RunFile(run="r")) == b'{"run":"r"}'


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "the run file that it sent is not valid"),
        (b"[1]", "the run file that it sent is not valid"),
        (b"[" * 60000, "the run file that it sent is not valid"),
        (b'{"run":"other"}', "of another run"),
        (b'{"run":"r","limits":{"nice":0}}', r"sets limits\.nice"),
        (b'{"run":"r","bootstrap":["/ip4/198.51.100.7/tcp/1"]}', "sets bootstrap"),
        (b'{"run":"r","listen":[]}', "sets listen"),
        (b'{"run":"r","announce":["/ip4/1.2.3.4/tcp/5"]}', "sets announce"),
        (b'{"run":"r","line":{"link":"x","data":"/home/you"}}', "sets line"),
        (b'{"run":"r","access":{"token":"/etc/passwd"}}', r"sets access\.token"),
        (b'{"run":"r","access":3}', "Expected `object`, got `int`"),
        (b'{"run":"r","model":{"layers":"2"}}', r"Expected `int`, got `str` - at `\$\.model\.layers`"),
        (b'{"run":"r","modell":{}}', "unknown field `modell`"),
        (
            b'{"run":"r","access":{"allow":"tokens","organizer":"' + PEER.encode() + b'"}}',
            "not signed by the organizer",
        ),
        (b'{"run":"r","access":{"allow":"tokens","organizer":[1]}}', "Expected `str`"),
        (b'{"run":"r","access":{"allow":"tokens","organizer":"me"}}', "not signed by the"),
    ],
)
def test_a_file_that_nobody_may_set_for_another_is_refused(text: bytes, why: str) -> None:
    with pytest.raises(ProtocolViolation, match=why):
        shared_run(RunFileAnswer(text, b""), "r")


def test_a_signature_counts_when_it_is_the_organizers_and_of_this_file() -> None:
    text = shared_file(RunFile(run="r", access=AccessSection(allow="tokens", organizer=PEER)))
    assert shared_run(RunFileAnswer(text, ANN.sign(DOMAIN + text)), "r").run == "r"
    for signature in (BOB.sign(DOMAIN + text), ANN.sign(text), ANN.sign(DOMAIN + text + b" "), b"short"):
        with pytest.raises(ProtocolViolation, match="not signed by the organizer"):
            shared_run(RunFileAnswer(text, signature), "r")
    with pytest.raises(ProtocolViolation, match="names no organizer"):
        shared_run(RunFileAnswer(b'{"run":"r"}', ANN.sign(b"x")), "r")


@given(st.binary(max_size=300))
def test_whatever_a_backbone_gives_is_a_run_file_or_a_violation(data: bytes) -> None:
    for text in (data, b'{"run":"r","data":' + data + b"}", b'{"run":"r","access":' + data + b"}"):
        with contextlib.suppress(ProtocolViolation):
            assert shared_run(RunFileAnswer(text, b""), "r").run == "r"


def test_the_bytes_on_the_wire_stay_as_they_are() -> None:
    assert encode(RunFileRequest("r")).hex() == "91a172"
    assert encode(RunFileAnswer(b'{"run":"r"}', b"")).hex() == "92c40b7b2272756e223a2272227dc400"
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode([b"x" * 65537, b""]), type=RunFileAnswer)
