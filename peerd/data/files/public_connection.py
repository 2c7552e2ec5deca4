"""HTTPS connections to the public internet only, for addresses given by strangers.

A name is resolved once per connection, and the connection uses one of the checked addresses, so a name server gains
nothing by a different second answer. Redirects open connections of their own, which are checked alike. Through a proxy
of this machine, the checked address is requested instead of the name; the proxy is the user's own and may be anywhere.
The certificate is always checked against the name.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import urllib.request
from functools import partial
from typing import Any, Final

from peerd.core.errors import ConfigError
from peerd.run.public_ip import is_public

_ADDRESSES: Final = 8  # addresses tried per name


def public_addresses(host: str, port: int) -> list[str]:
    """Public IP addresses of `host`, IPv4 first; ConfigError if it has only private ones, OSError if it has none."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(place[0]) for *_, place in sorted(found, key=lambda one: one[0])))
    public = [text for text in addresses if is_public(ipaddress.ip_address(text.partition("%")[0]))]
    if not public:
        raise ConfigError(
            f"https://{host}:{port} is at {', '.join(addresses[:3])}; allowed in a run joined by a link: "
            "addresses on the public internet, or your own text (--data PATH)"
        )
    return public[:_ADDRESSES]


class PublicConnection(http.client.HTTPSConnection):
    """An HTTPS connection to a checked public address."""

    def __init__(self, host: str, *, tls: ssl.SSLContext, **settings: Any) -> None:
        super().__init__(host, context=tls, **settings)
        self._tls, self._name, self._proxied = tls, self.host, False

    def set_tunnel(self, host: str, port: int | None = None, headers: Any = None) -> None:
        """Ask a proxy for the checked address of `host`."""
        name, _, digits = host.partition(":") if port is None else (host, "", "")
        number = port or (int(digits) if digits.isdigit() else http.client.HTTPS_PORT)
        self._name, self._proxied = name, True
        super().set_tunnel(public_addresses(name, number)[0], number, headers)

    def connect(self) -> None:
        """Connect to the proxy, or to the first public address that answers, and check the certificate."""
        if self._proxied:
            http.client.HTTPConnection.connect(self)
        else:
            self.sock = self._dial(public_addresses(self.host, self.port))
        self.sock = self._tls.wrap_socket(self.sock, server_hostname=self._name)

    def _dial(self, addresses: list[str]) -> socket.socket:
        failure: OSError = OSError(f"{self.host} has no address")
        for address in addresses:
            try:
                return socket.create_connection((address, self.port), self.timeout)
            except OSError as error:
                failure = error
        raise failure


class PublicHandler(urllib.request.HTTPSHandler):
    """Opens https addresses with `PublicConnection`."""

    def __init__(self, tls: ssl.SSLContext) -> None:
        super().__init__(context=tls)
        self._tls = tls

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        """Send a request and return the response."""
        return self.do_open(partial(PublicConnection, tls=self._tls), req)
