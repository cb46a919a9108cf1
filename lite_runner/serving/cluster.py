"""serve.engine=ray: the server as a deployment of Ray Serve, which starts replicas, routes to them
and replaces those that die."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import ray
from ray import serve as ray_serve

from lite_runner import progress
from lite_runner.config.api_key import read_key
from lite_runner.errors import EnvironmentFault
from lite_runner.plan.plan import Plan
from lite_runner.plugins import registered
from lite_runner.serving.options import ServeOptions
from lite_runner.serving.replica import Ingress, Replica
from lite_runner.serving.server import listen
from lite_runner.system.signals import offered

APP = "lite-runner"
_RETRIES = 2  # of a replica that cannot be started
_ONGOING = 10_000  # requests of a replica: its engine refuses what is too much, with 429


def serve_on_ray(plan: Plan) -> None:
    """Serve on the Ray cluster of this machine until SIGTERM or Ctrl-C; where there is none, on a
    cluster of this machine alone. Raises RunnerError."""
    config = plan.config
    assert isinstance(config, ServeOptions)
    key = read_key("serve.api_key", config.serve.api_key)
    with closing(listen(config.serve.host, config.serve.port)) as bound:
        host, port = bound.getsockname()[:2]  # it is free; Ray binds it anew
    # As quiet as the server here: Guard logs the requests.
    logs = {"log_level": "WARNING", "enable_access_log": False}
    with _cluster(), _stopping() as stopping:
        options = {"host": host, "port": port}
        ray_serve.start(proxy_location="HeadOnly", http_options=options, logging_config=logs)
        if others := sorted(ray_serve.status().applications):
            raise EnvironmentFault(
                f"serve.engine=ray: the cluster serves {', '.join(others)} already",
                "serve shutdown ends what Ray Serve runs there",
            )
        try:
            _deploy(config, plan, key, logs)
            shown = f"[{host}]" if ":" in host else host
            progress.note(
                f"serving {config.model_name} on http://{shown}:{port} with"
                f" {config.serve.replicas} replicas on Ray (Ctrl-C ends it)"
            )
            stopping.wait()
            progress.note("ending: running requests are completed; Ctrl-C again ends them")
        finally:
            ray_serve.delete(APP)
            ray_serve.shutdown()


def _deploy(config: ServeOptions, plan: Plan, key: bytes | None, logs: dict[str, object]) -> None:
    """Start replicas and ingress, and wait until they are ready."""
    adapters = plan.work.adapters
    names = tuple(one.name for one in adapters.adapters) if adapters else ()
    ending = {
        "graceful_shutdown_timeout_s": config.serve.drain_timeout,
        "graceful_shutdown_wait_loop_s": 0.1,
        "max_constructor_retry_count": _RETRIES,
        "max_ongoing_requests": _ONGOING,
    }
    replicas = ray_serve.deployment(
        Replica,
        num_replicas=config.serve.replicas,
        ray_actor_options={"num_cpus": config.context.threads or 1},
        health_check_period_s=1,
        **ending,
    )
    ingress = ray_serve.deployment(
        ray_serve.ingress()(Ingress), ray_actor_options={"num_cpus": 0}, **ending
    )
    bound = replicas.bind(config.to_dict(), registered(), str(Path.cwd()), key)
    try:
        ray_serve.run(ingress.bind(bound, names), name=APP, logging_config=logs)
    except RuntimeError as error:
        raise EnvironmentFault(
            f"serve.engine=ray: the replicas do not start: {str(error).strip()}",
            "serve.engine=local runs one in this process and shows its error",
        ) from error


@contextmanager
def _cluster() -> Iterator[None]:
    """A connection to the cluster of this machine. Raises EnvironmentFault."""
    try:
        ray.init(include_dashboard=False, logging_level="warning")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise EnvironmentFault(
            f"serve.engine=ray: no connection to the cluster: {str(error).strip()}",
            "ray start --head on this machine, ray start --address=... on workers",
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _stopping() -> Iterator[threading.Event]:
    """Set by SIGTERM or the first Ctrl-C; the second one raises KeyboardInterrupt."""
    stopping = threading.Event()

    def take() -> bool:
        if stopping.is_set():
            return False
        stopping.set()
        return True

    before = signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    try:
        with offered(take):
            yield stopping
    finally:
        signal.signal(signal.SIGTERM, before)
