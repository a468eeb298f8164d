"""Train under SLURM, as an indexed job of Kubernetes, or alone: one JAX process per task or pod, one directory for all.

    sbatch examples/slurm.sbatch --ckpt_directory=/shared/my_run
    kubectl apply -f examples/kubernetes.yaml
    python examples/train_cluster.py --ckpt_directory=my_run

Schedulers give notice by SIGTERM. The job then stops within a step, saves its state, also in the middle of an epoch,
and ends with exit code 75, on which the scheduler starts it again. docs/jobs.md has the other exit codes. Started
again, on the same or another number of processes, the job goes on with the next step.
"""

import os
import sys
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import epochckpt as ec

FLAGS = flags.FLAGS
flags.DEFINE_integer("steps", 100_000, "Train until this many steps are done.", lower_bound=1)
flags.DEFINE_integer("steps_per_epoch", 1000, "Steps between two looks at metrics and stop conditions.", lower_bound=1)
flags.DEFINE_integer(
    "batch_size", 240, "Examples per step, in the whole job: a multiple of its devices.", lower_bound=1
)
# A failed last save shows in the exit code, 74, and not as an error; every ten minutes are saved.
CKPT = ec.flags.define(max_to_keep=3, raise_if_not_saved=False, save_every_secs=600, progress=False)

WIDTH = 64
OPTIMIZER = optax.adam(1e-3)


def connect():
    """Joins the job that the scheduler has started, if it has; returns whether the job has several processes."""
    if "JOB_COMPLETION_INDEX" in os.environ:  # an indexed job of Kubernetes, see kubernetes.yaml
        processes = int(os.environ["NUM_PROCESSES"])
        if processes > 1:
            jax.distributed.initialize(os.environ["COORDINATOR"], processes, int(os.environ["JOB_COMPLETION_INDEX"]))
    elif "SLURM_STEP_NODELIST" in os.environ and int(os.environ["SLURM_NTASKS"]) > 1:  # a task of srun
        jax.distributed.initialize()  # JAX knows the variables of SLURM
    return jax.process_count() > 1


def make_state():
    key1, key2 = jax.random.split(jax.random.key(0))
    he = jax.nn.initializers.he_normal()
    params = {"up": he(key1, (WIDTH, 4 * WIDTH)), "down": he(key2, (4 * WIDTH, 1))}
    return {"params": params, "adam": OPTIMIZER.init(params)}


def loss_fn(params, x):
    wanted = jnp.sin(x.sum(-1, keepdims=True))
    return jnp.square(jax.nn.relu(x @ params["up"]) @ params["down"] - wanted).mean()


def make_job():
    job = ec.Job(unit="step", steps_per_epoch=FLAGS.steps_per_epoch)

    @job.setup
    def setup(ws):
        mesh = Mesh(jax.devices(), ("data",))
        everywhere, cut = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
        ws.live.make = jax.jit(make_state, out_shardings=everywhere)
        abstract = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere), jax.eval_shape(make_state)
        )
        ws.target("state", abstract)  # so it comes back: on the devices of *this* start

        def step(state, number):
            # The batch follows from the number of the step, and from nothing that a start or a process has of its own.
            x = jax.random.normal(jax.random.fold_in(jax.random.key(1), number), (FLAGS.batch_size, WIDTH))
            x = jax.lax.with_sharding_constraint(x, cut)
            loss, grads = jax.value_and_grad(loss_fn)(state["params"], x)
            updates, adam = OPTIMIZER.update(grads, state["adam"], state["params"])
            return {"params": optax.apply_updates(state["params"], updates), "adam": adam}, loss

        ws.live.step = jax.jit(step, donate_argnums=0, out_shardings=everywhere)

    @job.init
    def init(ws):
        ws["state"], ws["done"] = ws.live.make(), 0

    @job.epoch(resumable=True)
    def train(ws):
        losses = []
        for number in range(ws["done"], ws.steps.stop):  # an epoch that was left goes on where it was left
            if ws.should_stop():
                break
            ws["state"], loss = ws.live.step(ws["state"], number)
            losses.append(loss)
            ws["done"] = number + 1
        if not losses:
            return {}
        mean = float(np.mean(jax.device_get(losses)))
        say(f"step {ws['done']:6d}  loss {mean:.4f}")
        return {"loss": mean}

    job.stop_when(ec.stop.max_steps(FLAGS.steps) | ec.stop.nan("loss"))
    return job


def say(text):
    if jax.process_index() == 0:
        print(text, flush=True)


def train():
    with CKPT.manager() as manager:
        say(f"{jax.process_count()} processes, {jax.device_count()} devices, checkpoints in {manager.directory}")
        runner = CKPT.runner(make_job(), manager)
        runner.train()
    return runner.result.exit_code


def main(_):
    distributed = connect()
    try:
        code = train()
        if distributed:
            jax.distributed.shutdown()  # a barrier: no process ends before all have done what they had to do
    except BaseException:
        if not distributed:
            raise
        # An ordinary exit would wait minutes in JAX's shutdown barrier for the others, and they wait for us.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.exit(code)


if __name__ == "__main__":
    app.run(main)
