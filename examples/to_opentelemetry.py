"""Forwards the checkpoint events of `jax.monitoring` to OpenTelemetry; docs/monitoring.md lists them.

to_opentelemetry.forward(MeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter())]))
"""

import functools
from typing import Any

import jax
from opentelemetry.metrics import MeterProvider, get_meter_provider

OURS = ("/epochckpt/", "/jax/orbax/", "/jax/checkpoint/")


def forward(provider: MeterProvider | None = None) -> None:
    """Events become counters, durations histograms, numbers gauges; their tags are attributes."""
    meter = (provider or get_meter_provider()).get_meter("epochckpt")
    counter, gauge = functools.cache(meter.create_counter), functools.cache(meter.create_gauge)
    histogram = functools.cache(functools.partial(meter.create_histogram, unit="s"))

    def listener(make: Any, use: str) -> Any:
        def listen(name: str, value: float = 1, **tags: Any) -> None:
            if name.startswith(OURS):
                getattr(make(name[1:].replace("/", ".")), use)(value, tags)

        return listen

    jax.monitoring.register_event_listener(listener(counter, "add"))
    jax.monitoring.register_event_duration_secs_listener(listener(histogram, "record"))
    jax.monitoring.register_scalar_listener(listener(gauge, "set"))
