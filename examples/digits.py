"""The network and the data of `train_digits.py` and `evaluate_digits.py`: real handwritten digits, 8x8 pixels each."""

import jax
import numpy as np

# The hidden layer is cut over all devices: each computes its own hidden units and a partial sum of the
# logits, and one all-reduce per step adds these up. JAX cuts only evenly, and 840 is the least number that
# every device count from 1 to 8 divides. The output bias, ten numbers, stays whole on every device.
PIXELS, HIDDEN, CLASSES = 64, 840, 10


def logits(params, images, mask=1.0):
    hidden = jax.nn.relu(images @ params["w1"] + params["b1"]) * mask
    return hidden @ params["w2"] + params["b2"]


def accuracy(params, images, labels):
    return (logits(params, images).argmax(axis=-1) == labels).mean()


def load_digits():
    """Returns 1437 images of 8x8 pixels to train on, and 360 held out, with labels; always split the same way."""
    from sklearn import datasets  # here, because the launcher does without it

    digits = datasets.load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(images))
    return tuple((images[part], labels[part]) for part in (order[360:], order[:360]))
