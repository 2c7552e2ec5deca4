"""Home routers on loopback: one that speaks NAT-PMP over UDP, one that speaks UPnP over HTTP."""

from __future__ import annotations

import re
import socket
import struct
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import trio

_SERVICE = "urn:schemas-upnp-org:service:WANIPConnection:1"
_DEVICES = ("InternetGatewayDevice", "WANDevice", "WANConnectionDevice")


class FakeNatPmp:
    """`mapped[inside] = outside`. `result`: what it answers; `silent`: how many requests it ignores; `promise`: a port
    and a lease that it names, whatever is asked."""

    def __init__(self) -> None:
        self.port = 0
        self.ip = "9.8.7.6"
        self.mapped: dict[int, int] = {}
        self.taken: set[int] = set()
        self.result = self.silent = 0
        self.promise: tuple[int, int] | None = None
        self.asked = 0

    def answer(self, request: bytes) -> bytes | None:
        self.asked += 1
        if self.silent > 0:
            self.silent -= 1
            return None
        head = struct.pack("!BBHI", 0, 128 + request[1], self.result, 77)
        if request[1] == 0:
            return head + (b"" if self.result else socket.inet_aton(self.ip))
        _, inside, outside, lease_s = struct.unpack("!HHHI", request[2:])
        if self.promise is not None:
            return head + struct.pack("!HHI", inside, *self.promise)
        if lease_s == 0:
            self.mapped.pop(inside, None)
            return head + struct.pack("!HHI", inside, 0, 0)
        while outside in self.taken:
            outside += 1
        self.mapped[inside] = outside
        return head + struct.pack("!HHI", inside, outside, min(lease_s, 1200))


@asynccontextmanager
async def natpmp_router() -> AsyncIterator[FakeNatPmp]:
    """A NAT-PMP router at `127.0.0.1`, `port`."""
    router = FakeNatPmp()
    with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        await sock.bind(("127.0.0.1", 0))
        router.port = sock.getsockname()[1]

        async def serve() -> None:
            while True:
                request, asker = await sock.recvfrom(64)
                answer = router.answer(request)
                if answer is not None:
                    await sock.sendto(answer, asker)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            yield router
            nursery.cancel_scope.cancel()


class FakeIgd:
    """`mapped[outside] = (inside, lease in seconds)`; `faults[outside]` is its answer to a request for that port."""

    def __init__(self) -> None:
        self.url = ""
        self.ip = "9.8.7.6"
        self.mapped: dict[int, tuple[int, int]] = {}
        self.faults: dict[int, str] = {}
        self.for_ever_only = False

    def act(self, action: str, body: str) -> str:
        """Answer to the action; LookupError holds a UPnP error's number and name."""

        def field(name: str) -> str:
            found = re.search(f"<New{name}>([^<]*)<", body)
            return found[1] if found else ""

        if action == "GetExternalIPAddress":
            return f"<NewExternalIPAddress>{self.ip}</NewExternalIPAddress>"
        if action == "AddPortMapping":
            outside, lease_s = int(field("ExternalPort")), int(field("LeaseDuration"))
            if outside in self.faults:
                raise LookupError(self.faults[outside])
            if self.for_ever_only and lease_s:
                raise LookupError("725 OnlyPermanentLeasesSupported")
            self.mapped[outside] = (int(field("InternalPort")), lease_s)
        if action == "DeletePortMapping":
            self.mapped.pop(int(field("ExternalPort")), None)
        return ""


@contextmanager
def igd_router() -> Iterator[FakeIgd]:
    """A UPnP router that describes itself at `url`."""
    router = FakeIgd()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._say(200, _description())

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            action = self.headers["SOAPAction"].strip('"').partition("#")[2]
            try:
                inner, status = f'<u:{action}Response xmlns:u="{_SERVICE}">{router.act(action, body)}', 200
                inner += f"</u:{action}Response>"
            except LookupError as error:
                number, _, name = str(error.args[0]).partition(" ")
                detail = f"<errorCode>{number}</errorCode><errorDescription>{name}</errorDescription>"
                detail = f'<UPnPError xmlns="urn:schemas-upnp-org:control-1-0">{detail}</UPnPError>'
                inner, status = f"<s:Fault><faultcode>s:Client</faultcode><detail>{detail}</detail></s:Fault>", 500
            envelope = '<s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/">'
            self._say(status, f"{envelope}<s:Body>{inner}</s:Body></s:Envelope>")

        def _say(self, status: int, text: str) -> None:
            raw = f'<?xml version="1.0"?>{text}'.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = False
        router.url = f"http://127.0.0.1:{server.server_port}/root.xml"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield router
        finally:
            server.shutdown()
            thread.join()


def _description() -> str:
    inner = f"<serviceType>{_SERVICE}</serviceType><serviceId>urn:upnp-org:serviceId:WANIPConn1</serviceId>"
    inner += "<controlURL>/ctl</controlURL><eventSubURL>/evt</eventSubURL><SCPDURL>/scpd.xml</SCPDURL>"
    inner = f"<serviceList><service>{inner}</service></serviceList>"
    for number, kind in enumerate(reversed(_DEVICES)):
        kind = f"<deviceType>urn:schemas-upnp-org:device:{kind}:1</deviceType><UDN>uuid:{number}</UDN>"
        inner = f"<device>{kind}{inner}</device>"
        if number < len(_DEVICES) - 1:
            inner = f"<deviceList>{inner}</deviceList>"
    return f'<root xmlns="urn:schemas-upnp-org:device-1-0"><specVersion><major>1</major></specVersion>{inner}</root>'
