"""Score every epoch of `train_digits.py` while it trains, and let the scores decide which epochs are kept.

    python examples/train_digits.py --ckpt_best_metric=robust_accuracy --ckpt_max_to_keep=2
    python examples/evaluate_digits.py --flagfile=configs/evaluator.flags

in two terminals, or on two machines that share the directory (`--workdir`). This program waits for no process of the
other one, and needs only the network from its code. It scores epochs on images that training does not see: held-out
images, moved by a pixel in every direction. If an epoch is deleted meanwhile, the evaluator passes over it. If an epoch
is trained again after a rollback, the evaluator scores it again. The trainer keeps an epoch until it has a score, and
then the best ones. Started again, the evaluator goes on with the epochs that have no score.
"""

import pathlib

import jax
import numpy as np
import results
from absl import app, flags
from digits import accuracy, load_digits

import epochckpt as ec

FLAGS = flags.FLAGS
flags.DEFINE_string("workdir", results.folder("digits"), "Where the trainer's results go.")
CKPT = ec.flags.define(read_only=True, follow_timeout_secs=600)  # ends when no epoch came for so long

METRIC = "robust_accuracy"


def moved(images):
    """The images, moved by up to one pixel in each direction: (9 * count, 64)."""
    square = np.pad(images.reshape(-1, 8, 8), ((0, 0), (1, 1), (1, 1)))
    places = [(y, x) for y in range(3) for x in range(3)]
    return np.concatenate([square[:, y : y + 8, x : x + 8].reshape(-1, 64) for y, x in places])


def main(_):
    CKPT.set_defaults(directory=pathlib.Path(FLAGS.workdir).absolute() / "checkpoints")
    images, labels = load_digits()[1]
    images, labels, score = moved(images), np.tile(labels, 9), jax.jit(accuracy)
    manager = None
    for epoch in CKPT.follow():  # also waits for the directory itself
        manager = manager or CKPT.manager()
        try:
            if METRIC in (manager.metrics(epoch) or {}):
                continue
            save_id = manager.save_id(epoch)  # a rollback may bring another epoch of this number
            leaves = manager.restore_leaves(epoch, "params/*", item="state")  # not the optimizer's state
            params = {name.removeprefix("params/"): leaf for name, leaf in leaves.items()}
            found = float(score(params, images, labels))
            ec.attach_metrics(manager.directory, epoch, {METRIC: found}, source="evaluator", save_id=save_id)
        except (ec.errors.EpochNotFoundError, ec.errors.DamagedError) as error:  # deleted meanwhile, or not readable
            print(f"epoch {epoch:3d}  is passed over: {error}", flush=True)
            continue
        print(f"epoch {epoch:3d}  {METRIC} {found:.4f}", flush=True)


if __name__ == "__main__":
    app.run(main)
