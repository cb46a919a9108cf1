"""The socket that a server listens on, and the check of its certificate."""

from __future__ import annotations

import socket
import ssl

from lite_runner.errors import ConfigError, EnvironmentFault
from lite_runner.serving.options import Serve

_BACKLOG = 128  # connections that the kernel holds


def check_certificate(serve: Serve) -> None:
    """Raises ConfigError where TLS cannot be had with the files of a server."""
    if not serve.tls_cert:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(serve.tls_cert, serve.tls_key, password=lambda: "")
    except OSError as error:  # ssl.SSLError too
        raise ConfigError(
            f"serve.tls_cert={serve.tls_cert}, serve.tls_key={serve.tls_key}: {error}",
            "give PEM files of a certificate and of its key, which has no password",
        ) from None


def listen(host: str, port: int) -> socket.socket:
    """A socket that is bound and listens. Raises EnvironmentFault."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        bound = socket.socket(family)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(_BACKLOG)
    except OSError as error:
        raise EnvironmentFault(
            f"serve.host={host}, serve.port={port}: {error.strerror or error}",
            "serve.port=0 takes a free one",
        ) from error
    return bound
