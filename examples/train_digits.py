"""Train a small network on real handwritten digits, in several processes, and survive being killed.

    python examples/train_digits.py

starts itself as two JAX processes with two CPU devices each (`--num_processes`, `--devices_per_process`) and
saves every epoch with `epochckpt` while the next one trains. Kill it whenever you like (`kill -9` too) and
start it again: it goes on after the last committed epoch, with another number of processes as well. Ctrl-C or
SIGTERM let it finish and save its epoch first. It stops early when the accuracy on held-out images no longer grows,
copies the last epoch to `final/`, and keeps a record of all its runs in `runs.sqlite`. All of that lies in `--workdir`,
by default `~/.cache/epochckpt/digits` (or below `$XDG_CACHE_HOME`); remove the folder to begin anew.

* Same numbers of processes and devices: the final parameters of an interrupted run equal those of an
  undisturbed one bit for bit (compare the printed SHA-256).
* Other numbers: sums are added up in another order, so parameters differ in the last digits and training lets
  that grow. With the default flags no parameter differs by more than `TOLERANCE` (measured: 6e-5; but 0.03
  after 40 epochs). As many devices in all, spread over other processes, gave equal bits here.
"""

import hashlib
import os
import pathlib
import time

import jax
import jax.numpy as jnp
import launch
import numpy as np
import optax
import results
from absl import app, flags
from digits import CLASSES, HIDDEN, PIXELS, accuracy, load_digits, logits
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from launch import say

import epochckpt as ec

TOLERANCE = 1e-3  # largest absolute difference of a final parameter between two topologies

FLAGS = flags.FLAGS
flags.DEFINE_string("workdir", results.folder("digits"), "Where all results go.")
flags.DEFINE_integer("epochs", 10, "Train until this many epochs are complete.", lower_bound=1)
flags.DEFINE_integer("patience", 10, "Stop after so many epochs without better accuracy; 0: never.", lower_bound=0)
flags.DEFINE_integer("batch_size", 32, "Images per step, in the whole job.", lower_bound=1, upper_bound=1437)
flags.DEFINE_float("learning_rate", 1e-3, "Adam's step size.")
flags.DEFINE_integer("seed", 0, "Decides initial parameters, shuffling and dropout.", lower_bound=0)
CKPT = ec.flags.define(max_to_keep=3)  # --ckpt_directory, --ckpt_resume, …; or --flagfile=configs/one_host.flags

# How each parameter is cut over the devices, see `digits.py`.
SPECS = {"w1": P(None, "model"), "b1": P("model"), "w2": P("model", None), "b2": P()}
KEEP = 0.8  # dropout keeps this share of the hidden units


def make_state():
    """Everything the next epoch depends on."""
    key1, key2, dropout_key = jax.random.split(jax.random.key(FLAGS.seed), 3)
    he = jax.nn.initializers.he_normal()
    weights = {"w1": he(key1, (PIXELS, HIDDEN)), "w2": he(key2, (HIDDEN, CLASSES))}
    params = weights | {"b1": jnp.zeros(HIDDEN), "b2": jnp.zeros(CLASSES)}
    adam = optax.adam(FLAGS.learning_rate).init(params)
    return {"params": params, "adam": adam, "key": dropout_key}


def loss_fn(params, images, labels, key):
    mask = jax.random.bernoulli(key, KEEP, (len(images), HIDDEN)) / KEEP
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, images, mask), labels).mean()


def train_epoch(state, images, labels):
    """One pass over images (steps, batch, pixels) as a single program; returns new state and mean loss."""

    def step(state, batch):
        key, step_key = jax.random.split(state["key"])
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], *batch, step_key)
        updates, adam = optax.adam(FLAGS.learning_rate).update(grads, state["adam"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "adam": adam, "key": key}, loss

    state, losses = jax.lax.scan(step, state, (images, labels))
    return state, losses.mean()


def make_job():
    """The job: how to train, and when to stop. Nothing here is about files, or about being interrupted."""
    job = ec.Job()

    @job.setup
    def setup(ws):
        mesh = Mesh(jax.devices(), ("model",))
        ws.live.replicated = replicated = NamedSharding(mesh, P())

        def describe(path, leaf):
            # Adam's moments bear the names of their parameters, so one table serves both; the rest is replicated.
            spec = SPECS.get(getattr(path[-1], "key", None), P())
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

        abstract = jax.tree_util.tree_map_with_path(describe, jax.eval_shape(make_state))
        ws.target("state", abstract)  # so it comes back from a checkpoint: cut over the devices of *this* run
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        # Under jit also Adam's step counter becomes one array of the whole job. A plain optimizer.init(params)
        # leaves one on a local device of each process.
        ws.live.make = jax.jit(make_state, out_shardings=shardings)
        # Donating a state that is still being written is safe: a save begins with a snapshot of its own.
        ws.live.run = jax.jit(train_epoch, donate_argnums=0, out_shardings=(shardings, replicated))
        ws.live.measure = jax.jit(accuracy, out_shardings=replicated)
        ws.live.train_set, held_out = load_digits()
        # The model is cut, not the batch: every process has all the data and hands it to its own devices.
        ws.live.feed = lambda array: jax.make_array_from_process_local_data(replicated, array)
        ws.live.held_out = [ws.live.feed(array) for array in held_out]

    @job.init
    def init(ws):
        ws["state"] = ws.live.make()

    @job.epoch
    def train(ws):
        start = time.perf_counter()
        # The order follows from (seed, epoch) alone: a resumed run sees the batches it would have seen.
        order = np.random.default_rng([FLAGS.seed, ws.epoch]).permutation(len(ws.live.train_set[0]))
        order = order[: len(order) // FLAGS.batch_size * FLAGS.batch_size].reshape(-1, FLAGS.batch_size)
        ws["state"], loss = ws.live.run(ws["state"], *(ws.live.feed(array[order]) for array in ws.live.train_set))
        loss, score = float(loss), float(ws.live.measure(ws["state"]["params"], *ws.live.held_out))
        took = f"epoch took {time.perf_counter() - start:.2f} s"
        say(f"epoch {ws.epoch:3d}  train loss {loss:.4f}  validation accuracy {score:.4f}  {took}")
        return {"loss": loss, "accuracy": score}

    @job.download
    def report(ws):
        params = multihost_utils.process_allgather(ws["state"]["params"], tiled=True)  # whole, in every process
        if jax.process_index() == 0:
            with open(f"{FLAGS.workdir}/final_params.npz.tmp", "wb") as file:
                np.savez(file, **params)
            os.replace(file.name, file.name.removesuffix(".tmp"))  # never half a file
        digest = hashlib.sha256(b"".join(name.encode() + params[name].tobytes() for name in sorted(params)))
        say(f"final accuracy {float(ws.live.measure(ws['state']['params'], *ws.live.held_out)):.4f}")
        say(f"final parameters sha256 {digest.hexdigest()}")

    job.stop_when(ec.stop.max_epochs(FLAGS.epochs) | ec.stop.nan("loss"))
    if FLAGS.patience:
        job.stop_when(ec.stop.no_improvement("accuracy", FLAGS.patience))
    return job


def train():
    folder = pathlib.Path(FLAGS.workdir).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    # Where the flags leave it open. The database gets the epochs and timings of every run, for later.
    # Every epoch is said above: the runner need not show it, too.
    handler = f"sqlite:{folder}/runs.sqlite"
    CKPT.set_defaults(directory=folder / "checkpoints", metadata_handler=handler, progress=False)
    with CKPT.manager() as manager:
        say(f"{jax.process_count()} processes, {jax.device_count()} devices, checkpoints in {manager.directory}")
        # An epoch that turned out to be damaged is trained, and uploaded, again.
        upload = ec.CopyUpload(folder / "final", replace=True)
        runner = CKPT.runner(make_job(), manager, upload_task_group_builder=upload)
        runner.train(ec.DistributedSession())
    result = runner.result
    if result.resumed_from is not None:
        say(f"resumed from epoch {result.resumed_from}")
    say(str(result))
    return result.exit_code


def refusal():
    """Why this cannot be started, if so."""
    if HIDDEN % (FLAGS.num_processes * FLAGS.devices_per_process):
        return f"{HIDDEN} hidden units cannot be cut evenly over all devices; take 1 to 8 devices in all"
    return None


if __name__ == "__main__":
    app.run(lambda _: launch.main(train, refusal))
