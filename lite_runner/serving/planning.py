"""The plan of a server."""

from __future__ import annotations

import socket
import ssl
from dataclasses import replace

from lite_runner.config import bytes_of
from lite_runner.config.generation import sampled
from lite_runner.errors import ConfigError, EnvironmentFault
from lite_runner.plan import Plan
from lite_runner.plan.session import plan_session
from lite_runner.serving.options import Serve, ServeOptions
from lite_runner.system import environment
from lite_runner.system.memory import bound
from lite_runner.system.secret import named_keys, read_key

MOST_RUNNING = 8  # sequences, with serve.max_running=auto
_BACKLOG = 128  # connections that the kernel holds


def plan_serving(config: ServeOptions) -> Plan:
    """Packages, files, adapters, backend and memory, all validated. Raises RunnerError."""
    environment.check_packages("serve")
    if config.serve.engine == "ray":
        environment.check_packages("ray")
    if config.serve.memory is not None:
        bound(bytes_of(config.serve.memory))
    running, length = config.serve.max_running, config.serve.max_length
    named_keys(read_key("serve.api_key", config.serve.api_key))
    check_certificate(config.serve)
    plan = plan_session(
        config,
        slots=range(1, MOST_RUNNING + 1) if running == "auto" else [running],
        length=length,
        least=2,  # one long request holds up nobody
        all_logits=not config.in_lite,
    )
    adapters = plan.work.adapters.adapters if plan.work.adapters else ()
    for adapter in adapters:
        if adapter.name in config.served_names:
            raise ConfigError(
                f"adapter {adapter.name} has the name of the model: requests could not mean it",
                f"serve.model_name=NAME gives the model another one than {adapter.name}",
            )
    # OpenAI's default, whatever the model's.
    defaults = replace(plan.work.generation, do_sample=sampled(vars(config)) is not False)
    return replace(plan, job=replace(plan.work, generation=defaults))


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
