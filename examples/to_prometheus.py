"""Forwards the checkpoint events of `jax.monitoring` to Prometheus; docs/monitoring.md lists them.

to_prometheus.forward()
prometheus_client.start_http_server(9400)  # or, at times: write_to_textfile("run.prom", prometheus_client.REGISTRY)
"""

import functools
from typing import Any

import jax
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Summary

OURS = ("/epochckpt/", "/jax/orbax/", "/jax/checkpoint/")


def forward(registry: CollectorRegistry = REGISTRY) -> None:
    """Events become counters, durations summaries (their sum and count), numbers gauges; their tags are labels."""

    @functools.cache
    def metric(kind: Any, name: str, labels: tuple[str, ...]) -> Any:
        return kind(name[1:].replace("/", "_"), name, labels, registry=registry)

    def listener(kind: Any, use: str) -> Any:
        def listen(name: str, value: float = 1, **tags: Any) -> None:
            if name.startswith(OURS):
                found = metric(kind, name, tuple(tags))
                getattr(found.labels(**tags) if tags else found, use)(value)

        return listen

    jax.monitoring.register_event_listener(listener(Counter, "inc"))
    jax.monitoring.register_event_duration_secs_listener(listener(Summary, "observe"))
    jax.monitoring.register_scalar_listener(listener(Gauge, "set"))
