"""AES support of a processor, as Linux reports it."""

from __future__ import annotations

import pytest

from peerd.wire.link.cpu import tells_aes

X86 = "processor\t: 0\nmodel name\t: {model}\nflags\t\t: fpu {flags} sse2\n\nprocessor\t: 1\n"
ARM = "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd {flags} crc32\nCPU part\t: 0xd0c\n"


@pytest.mark.parametrize(
    ("cpuinfo", "has"),
    [
        (X86.format(model="new", flags="aes pclmulqdq vaes"), True),
        (X86.format(model="aes pclmulqdq", flags="ssse3"), False),
        (X86.format(model="half", flags="aes"), False),
        (X86.format(model="other", flags="vaes vpclmulqdq"), False),
        (ARM.format(flags="aes pmull sha1"), True),
        (ARM.format(flags=""), False),
        ("", False),
        ("flags\n: aes pclmulqdq", False),
    ],
)
def test_a_processor_has_aes_if_its_flags_name_all_that_gcm_needs(cpuinfo: str, has: bool) -> None:
    assert tells_aes(cpuinfo) is has
