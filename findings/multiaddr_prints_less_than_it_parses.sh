#!/bin/sh
# multiaddr 0.2.0 (Python) stores host names that it cannot print.
#
# The binary form of /dns4/my_node/tcp/4001 is well formed: go-multiaddr and js-multiaddr write and print it. The Python
# package builds a Multiaddr of these bytes and compares it, but str() and repr() raise BinaryParseError, because they
# validate the name by IDNA and the constructor does not. A program that logs addresses of other peers meets the error
# wherever it prints. A host name that is also a protocol's name is the reverse: /dns4/ws/tcp/4001 is printed, and this
# text is refused when it is parsed.
#
# Output seen:
#   multiaddr 0.2.0
#   my_node: constructed, equal to itself, str() raises BinaryParseError
#   a..b: constructed, equal to itself, str() raises BinaryParseError
#   ws: printed as /dns4/ws/tcp/4001, which raises StringParseError when it is parsed
#
# Exits with 0 while the package behaves so, and with 1 when that changes. Needs python3 (3.10 or later) with venv and
# pip; works in a temporary folder.
set -eu

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install --quiet --disable-pip-version-check \
    multiaddr==0.2.0 idna==3.20 base58==2.1.1 py-cid==0.5.0
cat >"$folder/show.py" <<'PYTHON'
from importlib.metadata import version

from multiaddr import Multiaddr

TCP = b"\x06\x0f\xa1"  # /tcp/4001


def binary(name: str) -> bytes:
    return b"\x36" + bytes([len(name)]) + name.encode() + TCP  # /dns4/<name>/tcp/4001


print("multiaddr", version("multiaddr"))
for name in ("my_node", "a..b"):
    addr = Multiaddr(binary(name))
    equal = "equal to itself" if addr == Multiaddr(binary(name)) else "not equal to itself"
    try:
        print(f"{name}: constructed, {equal}, printed as {addr}")
    except Exception as error:
        print(f"{name}: constructed, {equal}, str() raises {type(error).__name__}")
text = str(Multiaddr(binary("ws")))
try:
    print(f"ws: printed as {text}, which is parsed as {Multiaddr(text)}")
except Exception as error:
    print(f"ws: printed as {text}, which raises {type(error).__name__} when it is parsed")
PYTHON
cat >"$folder/expected" <<'TEXT'
multiaddr 0.2.0
my_node: constructed, equal to itself, str() raises BinaryParseError
a..b: constructed, equal to itself, str() raises BinaryParseError
ws: printed as /dns4/ws/tcp/4001, which raises StringParseError when it is parsed
TEXT
"$folder/env/bin/python" "$folder/show.py" >"$folder/seen"
cat "$folder/seen"
diff "$folder/expected" "$folder/seen"
