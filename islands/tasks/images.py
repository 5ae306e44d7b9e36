"""A second built-in task: a small convolutional network for handwritten digits, with accuracy.

The data are the 1,797 images of 8 x 8 pixels that scikit-learn carries (a part of UCI's Optical Recognition of
Handwritten Digits; Alpaydin and Kaynak, 1998), so nothing is downloaded. One image in five is held out. A token is an
image. scikit-learn is asked for its file alone and never imported: that would take a second and 80 MB of each island.

Measured on one core, 64 images per inner step, float32: 53,002 parameters, 1.5 ms. One island alone is right about 97 %
of the held-out images after 64,000 images and 99 % after 128,000; four islands on two busy cores are after 1,500,000,
in a minute and a half.
"""

from __future__ import annotations

import gzip
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
import xxhash

from broker.base.errors import ConfigError
from islands.tasks.data import sequence_numbers, shuffled
from islands.tasks.inner_optimizer import adamw, jax_task, warm_up_cosine
from islands.tasks.task import DataShare, Task

CLASSES: Final = 10
SIDE: Final = 8
#: Largest value of a pixel: black dots of 16 in its cell.
MOST: Final = 16.0
HELD_OUT_ONE_IN: Final = 5

#: Where the images are in an installed scikit-learn: 64 pixels and the digit a line.
_FILE: Final = Path("datasets", "data", "digits.csv.gz")

Params = dict[str, dict[str, jax.Array]]


class Images(NamedTuple):
    """Images, float32 (n, side, side, 1) from 0 to 1, and the digits on them, int32 (n,)."""

    pixels: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int32]


def task(
    *,
    batch: int = 64,
    hidden: int = 128,
    channels: int = 32,
    shift: int = 1,
    learning_rate: float = 3e-3,
    warm_up_steps: int = 20,
    ramp_steps: int = 10,
    weight_decay: float = 0.01,
) -> Task:
    """Returns the task that trains a classifier of digits.

    Args:
        batch: Images per inner step; one image is one token.
        hidden: Units of the layer before the last one.
        channels: The channels of the first convolution; the second one has twice as many.
        shift: Training images are also moved by up to ``shift`` pixels in each direction; 0: not.
        learning_rate: Peak of the inner optimizer, AdamW.
        warm_up_steps: Inner steps to the peak.
        ramp_steps: Inner steps to the full rate of an optimizer that starts afresh in the middle of a run.
        weight_decay: Decoupled, of matrices and kernels.

    Raises:
        ConfigError: If an option cannot work, or scikit-learn is not installed; it names the cure.
    """
    for name, value in (("batch", batch), ("hidden", hidden), ("channels", channels)):
        if value < 1:
            raise ConfigError(name, value, "must be at least 1")
    if not 0 <= shift < SIDE:
        raise ConfigError("shift", shift, f"must be from 0 to {SIDE - 1} pixels; 1 suits these images")
    if not weight_decay >= 0:
        raise ConfigError("weight_decay", weight_decay, "must be 0 or more, such as 0.01")
    images = load_digits()
    train, held_out = split(images)
    variants = moved(train, shift)
    pixels, labels = jnp.asarray(held_out.pixels), jnp.asarray(held_out.labels)

    @jax.jit
    def measured(params: Params) -> dict[str, jax.Array]:
        logits = apply(params, pixels)
        return {"loss": cross_entropy(logits, labels), "accuracy": jnp.mean(jnp.argmax(logits, axis=-1) == labels)}

    return jax_task(
        init=lambda key: init(key, channels=channels, hidden=hidden),
        loss=lambda params, some: cross_entropy(apply(params, some.pixels), some.labels),
        data=lambda share: batches(variants, share, batch=batch),
        evaluate=lambda params: {name: float(value) for name, value in measured(params).items()},
        metrics={"accuracy": "max"},
        tokens_per_step=batch,
        optimizer=adamw(weight_decay=weight_decay),
        inner_optimizer="adamw",
        learning_rate=warm_up_cosine(learning_rate, warm_up_steps=warm_up_steps, ramp_steps=ramp_steps),
        corpus=xxhash.xxh3_128_hexdigest(images.pixels.tobytes() + images.labels.tobytes()),
        describe=f"{batch} images per step, {len(train.labels)} to train on and {len(held_out.labels)} held out",
    )


# --- the data -------------------------------------------------------------------------------------------------------


def load_digits() -> Images:
    """Returns the images that come with scikit-learn, in its order.

    Raises:
        ConfigError: scikit-learn is not installed, or has them elsewhere.
    """
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        cure = "needs the images that scikit-learn carries: pip install scikit-learn, on every island"
        raise ConfigError("task", "islands.images:task", cure)
    path = Path(package.origin).parent / _FILE
    try:
        with gzip.open(path, "rt", encoding="ascii") as file:
            rows = np.loadtxt(file, delimiter=",", dtype=np.float32)
        pixels = (rows[:, :-1] / MOST).reshape(-1, SIDE, SIDE, 1)
    except (OSError, ValueError, IndexError) as err:
        cure = f"does not hold the digits as expected ({err}): install scikit-learn 1.5 to 1.9"
        raise ConfigError("task", str(path), cure) from err
    return Images(pixels, rows[:, -1].astype(np.int32))


def split(images: Images) -> tuple[Images, Images]:
    """Returns the training images, and the held-out ones, every fifth."""
    held_out = np.arange(len(images.labels)) % HELD_OUT_ONE_IN == 0
    return Images(*(each[~held_out] for each in images)), Images(*(each[held_out] for each in images))


def moved(images: Images, most: int) -> Images:
    """Returns images moved by up to ``most`` pixels in each direction, (variants, n, side, side, 1)."""
    around = [(0, 0), (most, most), (most, most), (0, 0)]
    padded = np.pad(images.pixels, around)
    offsets = [(y, x) for y in range(2 * most + 1) for x in range(2 * most + 1)]
    pixels = np.stack([padded[:, y : y + SIDE, x : x + SIDE] for y, x in offsets])
    return Images(pixels, images.labels)


def batches(variants: Images, share: DataShare, *, batch: int) -> Iterator[Images]:
    """Yields the share's batches without end, from ``share.cursor`` (:mod:`islands.tasks.data`).

    In an epoch no image is in two batches, whatever islands they go to. Each epoch has an order of its own, and which
    variant of an image is taken follows from the image's place in the order of all epochs.
    """
    while True:
        index, count, cursor, seed = share.take()
        numbers = sequence_numbers(cursor, index, count, batch=batch)
        chosen = shuffled(numbers, len(variants.labels), seed=seed)
        variant = shuffled(numbers, len(variants.pixels), seed=seed + 1)
        yield Images(variants.pixels[variant, chosen], variants.labels[chosen])


# --- the model ------------------------------------------------------------------------------------------------------


def init(key: jax.Array, *, channels: int, hidden: int) -> Params:
    """Returns fresh parameters: two convolutions of 3 x 3, each halving the image, and two dense layers.

    Weights are normal with variance 2 / fan-in (He et al., 2015), biases 0. The last layer begins at 0, so that the
    first loss is ln(classes).
    """
    wide = 2 * channels
    flat = wide * (SIDE // 4) ** 2
    first, second, third = jax.random.split(key, 3)

    def layer(key: jax.Array, *shape: int) -> dict[str, jax.Array]:
        deviation = np.sqrt(2 / np.prod(shape[:-1]))
        return {"weight": deviation * jax.random.normal(key, shape, jnp.float32), "bias": jnp.zeros(shape[-1])}

    return {
        "convolution": layer(first, 3, 3, 1, channels),
        "wider": layer(second, 3, 3, channels, wide),
        "dense": layer(third, flat, hidden),
        "head": {"weight": jnp.zeros((hidden, CLASSES)), "bias": jnp.zeros(CLASSES)},
    }


def apply(params: Params, pixels: jax.Array) -> jax.Array:
    """Returns logits (n, classes) of images (n, side, side, 1)."""
    features = pixels
    for name in ("convolution", "wider"):
        layout = ("NHWC", "HWIO", "NHWC")
        kernel, bias = params[name]["weight"], params[name]["bias"]
        features = jax.lax.conv_general_dilated(features, kernel, (2, 2), "SAME", dimension_numbers=layout)
        features = jax.nn.relu(features + bias)
    flat = features.reshape(len(features), -1)
    dense = jax.nn.relu(flat @ params["dense"]["weight"] + params["dense"]["bias"])
    return dense @ params["head"]["weight"] + params["head"]["bias"]


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean loss in nats per image."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))
