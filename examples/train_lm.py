"""Train a small language model on real text, leave it in the middle of an epoch, and go on at the very next byte.

    python examples/train_lm.py

A byte-level transformer learns the reference manual that comes with Python. The data come from a Grain pipeline, one
per process; its position is checkpointed with everything else, so a resumed run reads on where it was, also inside an
epoch: the epoch is declared resumable, and asks before each step whether to stop. You may kill the program at any time,
or ask it to stop with Ctrl-C or SIGTERM: it then saves the unfinished epoch and exits with status 75. Start it again,
and it goes on. The loss curve in `loss.jsonl`, one line per step, equals the curve of an undisturbed run, bit for bit.

With other numbers of processes or devices it sees the same batches, and the curve is the same but for rounding.
"""

import hashlib
import json
import os
import pathlib
import pydoc_data.topics

import grain
import jax
import jax.numpy as jnp
import launch
import numpy as np
import optax
import results
from absl import app, flags
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from launch import say

import epochckpt as ec

FLAGS = flags.FLAGS
flags.DEFINE_string("workdir", results.folder("lm"), "Where all results go.")
flags.DEFINE_integer("epochs", 5, "Train until this many epochs are complete.", lower_bound=1)
flags.DEFINE_integer("steps", 200, "Steps per epoch.", lower_bound=1)
flags.DEFINE_integer("batch_size", 32, "Sequences per step, in the whole job.", lower_bound=1)
flags.DEFINE_integer("context", 64, "Bytes that the model sees at once.", lower_bound=1)
flags.DEFINE_integer("width", 64, "Size of the hidden states, a multiple of 16.", lower_bound=16)
flags.DEFINE_integer("layers", 2, "Transformer blocks.", lower_bound=1)
flags.DEFINE_float("learning_rate", 3e-3, "Adam's step size, after 20 steps of warming up.")
flags.DEFINE_integer("seed", 0, "Decides initial parameters and the order of the data.", lower_bound=0)
flags.DEFINE_integer("say_every", 50, "Steps between two lines about the loss.", lower_bound=1)
CKPT = ec.flags.define(max_to_keep=2)  # --ckpt_directory, --ckpt_resume, …; or --flagfile=configs/one_host.flags

HEAD = 16  # size of an attention head


def load_text():
    """The text as bytes: 460 KB of Python's reference manual."""
    topics = pydoc_data.topics.topics
    return np.frombuffer("\n".join(topics[name] for name in sorted(topics)).encode(), np.uint8)


def unigram_entropy(text):
    """The loss, in nats per byte, of a model that knows how frequent each byte is, and nothing else."""
    share = np.bincount(text) / len(text)
    return -sum(p * np.log(p) for p in share if p)


def batches(text):
    """This process's part of every batch, without end: an iterator whose position can be saved."""
    span = FLAGS.context + 1  # the model predicts the input, one byte later
    windows = grain.MapDataset.range(len(text) // span).shuffle(seed=FLAGS.seed).repeat()
    # Batch k is windows k*n … (k+1)*n of the whole job, however many processes there are. So all of them are always at
    # the same position, and it means the same to any number of processes.
    mine = windows[jax.process_index() :: jax.process_count()]
    cut = mine.map(lambda i: text[i * span : (i + 1) * span].astype(np.int32))
    local = cut.batch(FLAGS.batch_size // jax.process_count())
    return iter(local.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=8)))


def optimizer():
    schedule = optax.linear_schedule(0.0, FLAGS.learning_rate, 20)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))


def make_state():
    """Everything that steps change."""
    width, layers = FLAGS.width, FLAGS.layers
    shapes = {
        "embed": (256, width),
        "position": (FLAGS.context, width),
        "qkv": (layers, width, 3 * width),
        "out": (layers, width, width),
        "up": (layers, width, 4 * width),
        "down": (layers, 4 * width, width),
    }
    keys = jax.random.split(jax.random.key(FLAGS.seed), len(shapes))
    scale = {name: (0.02 if len(shape) == 2 else shape[1] ** -0.5) for name, shape in shapes.items()}
    params = {name: scale[name] * jax.random.normal(key, shapes[name]) for name, key in zip(shapes, keys, strict=True)}
    return {"params": params, "adam": optimizer().init(params)}


def norm(x):
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


def logits(params, tokens):
    """Scores of the next byte after every one of `tokens` (batch, context)."""

    def block(x, p):
        heads = (*x.shape[:2], FLAGS.width // HEAD, HEAD)
        q, k, v = (part.reshape(heads) for part in jnp.split(norm(x) @ p["qkv"], 3, axis=-1))
        x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ p["out"]
        return x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"], None

    x = params["embed"][tokens] + params["position"]
    x, _ = jax.lax.scan(block, x, {name: params[name] for name in ("qkv", "out", "up", "down")})
    return norm(x) @ params["embed"].T


def loss_fn(params, batch):
    scores = logits(params, batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(scores, batch[:, 1:]).mean()


def train_step(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    updates, adam = optimizer().update(grads, state["adam"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "adam": adam}, loss


def make_job():
    """The job: how to train, and when to stop. Of being interrupted it knows one question, of files nothing."""
    job = ec.Job()

    @job.setup
    def setup(ws):
        mesh = Mesh(jax.devices(), ("data",))
        everywhere, cut = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
        abstract = jax.eval_shape(make_state)
        shardings = jax.tree.map(lambda leaf: everywhere, abstract)
        # so it comes back from a checkpoint: on the devices of *this* run
        ws.target(
            "state", jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), abstract)
        )
        ws.live.make = jax.jit(make_state, out_shardings=shardings)
        # Donating a state that is still being written is safe: a save begins with a snapshot of its own.
        ws.live.step = jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, everywhere))
        ws.live.feed = lambda batch: jax.make_array_from_process_local_data(cut, batch)
        ws["data"] = batches(load_text())  # it has get_state and set_state: its position is what is checkpointed

    @job.init
    def init(ws):
        ws["state"] = ws.live.make()
        ws["history"] = np.zeros(0, np.float32)  # the loss of every step: how far the epoch is follows from its length

    @job.epoch(resumable=True)
    def train(ws):
        while (done := len(ws["history"])) < ws.epoch * FLAGS.steps and not ws.should_stop():
            ws["state"], loss = ws.live.step(ws["state"], ws.live.feed(next(ws["data"])))
            ws["history"] = np.append(ws["history"], np.float32(loss))
            if (done + 1) % FLAGS.say_every == 0:
                say(f"epoch {ws.epoch:3d}  step {done + 1:5d}  loss {ws['history'][-FLAGS.say_every :].mean():.4f}")
        losses = ws["history"][(ws.epoch - 1) * FLAGS.steps :]
        return {"loss": float(losses.mean())} if len(losses) else {}

    @job.download
    def report(ws):
        history = ws["history"]
        if jax.process_index() == 0:
            with open(f"{FLAGS.workdir}/loss.jsonl.tmp", "w") as file:
                file.writelines(f"{json.dumps({'step': i + 1, 'loss': float(x)})}\n" for i, x in enumerate(history))
            os.replace(file.name, file.name.removesuffix(".tmp"))  # never half a file
        params = jax.tree.map(lambda leaf: np.asarray(leaf.addressable_data(0)), ws["state"]["params"])
        digest = hashlib.sha256(b"".join(name.encode() + params[name].tobytes() for name in sorted(params)))
        say(f"unigram entropy {unigram_entropy(load_text()):.4f} nats per byte; loss {history[-20:].mean():.4f}")
        say(f"final parameters sha256 {digest.hexdigest()}")

    job.stop_when(ec.stop.max_epochs(FLAGS.epochs) | ec.stop.nan("loss"))
    return job


def train():
    folder = pathlib.Path(FLAGS.workdir).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    # Where the flags leave it open. What an epoch has learned is said above: the runner need not show it, too.
    CKPT.set_defaults(directory=folder / "checkpoints", progress=False)
    with CKPT.manager() as manager:
        say(f"{jax.process_count()} processes, {jax.device_count()} devices, checkpoints in {manager.directory}")
        runner = CKPT.runner(make_job(), manager)
        # A process that is alone hears of SIGTERM itself, and at once; several ask JAX, which looks once a second.
        runner.train()
    result = runner.result
    if result.resumed_from is not None:
        say(f"resumed from epoch {result.resumed_from}")
    say(str(result))
    return result.exit_code


def refusal():
    """Why this cannot be started, if so."""
    if FLAGS.batch_size % (FLAGS.num_processes * FLAGS.devices_per_process):
        return f"{FLAGS.batch_size} sequences cannot be cut evenly over all devices; choose another --batch_size"
    if FLAGS.width % HEAD:
        return f"--width must be a multiple of {HEAD}"
    return None


if __name__ == "__main__":
    app.run(lambda _: launch.main(train, refusal))
