"""The examples that forward the events of `jax.monitoring` to Prometheus and OpenTelemetry, with their libraries."""

import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("prometheus_client")
pytest.importorskip("opentelemetry.sdk")

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PROGRAM = """
import json, sys, urllib.request
import jax.numpy as jnp, orbax.checkpoint as ocp, prometheus_client
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
import epochckpt as ec, to_opentelemetry, to_prometheus

directory, textfile = sys.argv[1:]
reader = InMemoryMetricReader()
to_prometheus.forward()
to_opentelemetry.forward(MeterProvider([reader]))
with ec.CheckpointManager(directory) as manager:
    for epoch in (1, 2):
        manager.save(epoch, args=ocp.args.StandardSave({"w": jnp.ones(9)}))
    manager.wait_until_finished()
    manager.restore(None)
prometheus_client.write_to_textfile(textfile, prometheus_client.REGISTRY)
server, thread = prometheus_client.start_http_server(0, addr="127.0.0.1")
page = urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics").read().decode()
server.shutdown(); server.server_close(); thread.join()
print(json.dumps({"page": page, "metrics": json.loads(reader.get_metrics_data().to_json())}))
"""


@pytest.mark.slow
def test_saves_reach_prometheus_and_opentelemetry(tmp_path: pathlib.Path) -> None:
    """Two commits are counted, their times added up, and the node that wrote is a label."""
    textfile = tmp_path / "run.prom"
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "run"), str(textfile)]
    environment = {"PYTHONPATH": f"{ROOT}/examples:{ROOT}", "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for page in (found["page"], textfile.read_text(encoding="utf-8")):
        lines = page.splitlines()
        assert "jax_orbax_write_success_total 2.0" in lines
        assert "epochckpt_write_blocked_secs_count 2.0" in lines
        assert 'epochckpt_write_node_secs_count{node="process_0"} 2.0' in lines
        assert any(line.startswith("jax_orbax_write_gbytes ") for line in lines)
    (scope,) = found["metrics"]["resource_metrics"][0]["scope_metrics"]
    points: dict[str, Any] = {metric["name"]: metric["data"]["data_points"] for metric in scope["metrics"]}
    assert points["jax.orbax.write.success"][0]["value"] == 2
    (wrote,) = points["epochckpt.write.node_secs"]
    assert (wrote["count"], wrote["attributes"]) == (2, {"node": "process_0"})
    assert points["jax.checkpoint.read.gbytes"][0]["value"] > 0
