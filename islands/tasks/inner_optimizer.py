"""The inner optimizer and the train step: turns a JAX loss into a :class:`islands.tasks.task.Task`.

One inner step, with gradient g, inner-optimizer transform T and rate r:

    u, state <- T(clip(g), state, params);   params <- params - r * u

The rate does not live in the optimizer: it follows the progress of the whole run
(:class:`islands.tasks.task.Schedule`), while the optimizer's own step count serves bias correction and the ramp of a
fresh optimizer. Reference: DiLoCo, https://arxiv.org/abs/2311.08105, section 3 (AdamW inside);
reference.md, section 4.7.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from broker.base.errors import ConfigError
from islands.tasks.task import Batch, DataShare, OptState, Params, Schedule, Task

#: (schedule, steps of this optimizer) -> rate; all of them float32 scalars under ``jit``.
LearningRate = Callable[[Schedule, jax.Array], jax.Array]
#: The axis of the mesh of an island's devices.
DEVICES = "devices"


class InnerState(NamedTuple):
    """The inner optimizer's state as a tree of arrays, complete for checkpoints and donors."""

    num_steps: jax.Array  # int32 scalar: steps this optimizer has run; 0 after fresh_optimizer
    transform: optax.OptState  # float32 moments, shaped like the parameters


def warm_up_cosine(peak: float, *, warm_up_steps: int, ramp_steps: int = 0, final: float = 0.1) -> LearningRate:
    """Returns a learning rate: warm-up, then a cosine over global progress; ramps for a fresh optimizer.

    With s = schedule.step, S = schedule.total_steps, W = warm_up_steps and t the optimizer's own steps:

        rate = peak * min(1, (s + 1) / W) * (final + (1 - final) * (1 + cos(pi * (s - W) / (S - W))) / 2)
                    * min(1, (t + 1) / ramp_steps)

    The cosine is clamped to [0, pi], and 1 while S is unknown (0). The ramp lets Adam's second moment settle in an
    island that comes back without its state, long after the run's own warm-up.

    Args:
        peak: Highest rate.
        warm_up_steps: W; inner steps.
        ramp_steps: Inner steps of a fresh optimizer to its full rate.
        final: Share of the peak at the end.

    Raises:
        ConfigError: If no rate can be built of these.
    """
    if not (math.isfinite(peak) and peak > 0):
        raise ConfigError("learning_rate", peak, "must be a positive number, such as 0.001")
    if warm_up_steps < 0 or ramp_steps < 0:
        name, value = ("warm_up_steps", warm_up_steps) if warm_up_steps < 0 else ("ramp_steps", ramp_steps)
        raise ConfigError(name, value, "must be 0 or more inner steps")
    if not 0 <= final <= 1:
        raise ConfigError("final", final, "must be a share of the peak, from 0 to 1")

    def rate(schedule: Schedule, num_steps: jax.Array) -> jax.Array:
        step = jnp.asarray(schedule.step, jnp.float32)
        total = jnp.asarray(schedule.total_steps, jnp.float32)
        warm_up = jnp.minimum(1.0, (step + 1) / max(warm_up_steps, 1))
        progress = jnp.clip((step - warm_up_steps) / jnp.maximum(total - warm_up_steps, 1.0), 0.0, 1.0)
        cosine = final + (1 - final) * (1 + jnp.cos(jnp.pi * progress)) / 2
        ramp = jnp.minimum(1.0, (num_steps.astype(jnp.float32) + 1) / max(ramp_steps, 1))
        return peak * warm_up * jnp.where(total > 0, cosine, 1.0) * ramp

    return rate


def adamw(
    *, b1: float = 0.9, b2: float = 0.95, eps: float = 1e-8, weight_decay: float = 0.1, clip_norm: float = 1.0
) -> optax.GradientTransformation:
    """Returns AdamW without a rate: clip by global norm, Adam direction, decoupled decay of matrices.

    Defaults are those of the Decoupled DiLoCo paper's inner optimizer as far as stated (AdamW, clipping at 1), the
    rest GPT-3's (Brown et al., 2020, appendix B). Tensors with fewer than two dimensions are not decayed.
    """
    return optax.chain(
        optax.clip_by_global_norm(clip_norm),
        optax.scale_by_adam(b1=b1, b2=b2, eps=eps),
        _decay_matrices(weight_decay),
    )


def muon(
    *,
    beta: float = 0.95,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    clip_norm: float = 1.0,
    adam: str = "embed|head|router",
) -> optax.GradientTransformation:
    """Returns Muon for matrices and :func:`adamw` for everything else, without a rate.

    A matrix, or each matrix of a stack of them (leading axes), moves along its Nesterov momentum made orthogonal, times
    0.2 * sqrt(its longer side): then its elements' root mean square is about what Adam's is, and one rate and one decay
    serve both. Source: Jordan et al., 2024, Muon; the scale is that of Liu et al., https://arxiv.org/abs/2502.16982,
    section 2.2; as the inner optimizer of DiLoCo: https://arxiv.org/abs/2505.23725.

    Args:
        beta: Decay of the matrices' momentum.
        b1: ``b1`` of Adam, for all other parameters.
        b2: ``b2`` of Adam.
        eps: ``eps`` of Adam.
        weight_decay: Decoupled, of whatever has two dimensions or more.
        clip_norm: Most of the gradient's global norm.
        adam: Regular expression, searched in the path of a parameter (``['layers'][0]['mlp']['up']``): those with two
            dimensions or more that are Adam's all the same.
    """

    def owner(path: tuple[Any, ...], leaf: jax.Array) -> str:
        by_adam = leaf.ndim < 2 or re.search(adam, jax.tree_util.keystr(path))
        return "adam" if by_adam else "muon"

    def last_two_axes(tree: Params) -> Params:
        return jax.tree.map(lambda leaf: MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1), tree)

    orthogonal = optax.chain(
        scale_by_muon(beta=beta, eps=eps, weight_dimension_numbers=last_two_axes),
        optax.stateless_with_tree_map(lambda update, _: update * (0.2 * math.sqrt(max(update.shape[-2:])))),
    )
    return optax.chain(
        optax.clip_by_global_norm(clip_norm),
        optax.partition(
            {"muon": orthogonal, "adam": optax.scale_by_adam(b1=b1, b2=b2, eps=eps)},
            lambda params: jax.tree_util.tree_map_with_path(owner, params),
        ),
        _decay_matrices(weight_decay),
    )


def _decay_matrices(weight_decay: float) -> optax.GradientTransformation:
    return optax.add_decayed_weights(weight_decay, mask=lambda params: jax.tree.map(lambda p: p.ndim >= 2, params))


def jax_task(
    *,
    init: Callable[[jax.Array], Params],
    loss: Callable[[Params, Batch], Any],
    data: Callable[[DataShare], Iterator[Batch]],
    evaluate: Callable[[Params], float | Mapping[str, float]],
    tokens_per_step: int,
    has_aux: bool = False,
    metrics: Mapping[str, str] | None = None,
    corpus: str = "",
    optimizer: optax.GradientTransformation | None = None,
    learning_rate: LearningRate | None = None,
    kinds: Mapping[str, str] | None = None,
    unit_axes: Mapping[str, int] | None = None,
    describe: str = "",
    inner_optimizer: str = "",
) -> Task:
    """Returns the task that minimises a JAX loss function.

    On several devices each has the parameters, and every batch is split among them.

    Args:
        init: Random key -> parameters: any tree of floating-point arrays, float32 or bfloat16. Traced only.
        loss: (params, batch) -> scalar mean loss in nats per token, differentiable in every leaf.
        data: share -> batches (:class:`islands.tasks.task.Task`).
        evaluate: params -> held-out loss, or a mapping of names of metrics to numbers.
        tokens_per_step: Tokens in one batch.
        has_aux: Whether ``loss`` returns (scalar, anything else), as for ``jax.value_and_grad``; that is dropped.
        metrics: Name of a metric -> ``max`` or ``min``, whichever is better (:class:`islands.tasks.task.Task`).
        corpus: Digest of the data; empty when it is not known.
        optimizer: An optax transformation. With ``learning_rate`` its updates are multiplied by minus the rate;
            without, they are added as they are (``optax.sgd(0.1)``). Default: :func:`adamw`. It sees float32
            gradients, parameters and state, whatever the parameters' dtype; only the result is cast back.
        learning_rate: (schedule, optimizer steps) -> rate; such as :func:`warm_up_cosine`.
        kinds: See :class:`islands.tasks.task.Task`.
        unit_axes: See :class:`islands.tasks.task.Task`.
        describe: The number of parameters is put before it.
        inner_optimizer: Its name (:class:`islands.tasks.task.Task`); that of the default optimizer is known.

    Raises:
        ConfigError: If neither an optimizer nor a rate is given, or a parameter is not a floating-point array. In the
            first step: if ``loss`` does not return a scalar.
    """
    if optimizer is None and learning_rate is None:
        raise ConfigError("learning_rate", None, "the default optimizer needs one: warm_up_cosine(0.001, ...)")
    transform = adamw() if optimizer is None else optimizer
    shapes = jax.eval_shape(init, jax.random.key(0))
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            cure = "jax_task trains floating-point leaves only: close over the others, or build a Task yourself"
            raise ConfigError("params" + jax.tree_util.keystr(path), str(leaf.dtype), cure)

    def fresh_optimizer(params: Params) -> InnerState:
        return InnerState(jnp.zeros((), jnp.int32), transform.init(_float32(params)))

    def train(
        params: Params, opt_state: InnerState, batch: Batch, schedule: Schedule
    ) -> tuple[Params, InnerState, jax.Array]:
        value, gradients = jax.value_and_grad(lambda *of: _scalar(loss(*of), has_aux))(params, batch)
        wide = _float32(params)
        updates, inner = transform.update(_float32(gradients), opt_state.transform, wide)
        scale = 1.0 if learning_rate is None else -learning_rate(schedule, opt_state.num_steps)
        stepped = jax.tree.map(lambda p, w, u: (w + scale * u).astype(p.dtype), params, wide, updates)
        return stepped, InnerState(opt_state.num_steps + 1, inner), value

    def start(seed: jax.Array) -> tuple[Params, InnerState]:
        params = init(jax.random.key(seed))
        return params, fresh_optimizer(params)

    devices = LocalDevices()
    jitted_start = devices.jit(start)
    jitted_train = devices.jit(train, donate_argnums=(0, 1))

    def dynamic(schedule: Schedule) -> Schedule:
        # One type always: an int here and a float there would compile the step twice.
        return Schedule(_dynamic(schedule.step), _dynamic(schedule.total_steps))

    def inner_step(params: Params, opt_state: OptState, batch: Batch, schedule: Schedule) -> tuple[Any, Any, Any]:
        return devices.settled(jitted_train(params, opt_state, devices.split(batch), dynamic(schedule)))  # type: ignore[no-any-return]

    num_parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    return Task(
        init=lambda seed: jitted_start(np.uint32(seed % 2**32)),
        train=inner_step,
        data=data,
        evaluate=evaluate,
        tokens_per_step=tokens_per_step,
        corpus=corpus,
        metrics=metrics or {},
        fresh_optimizer=devices.jit(fresh_optimizer),
        kinds=kinds or {},
        unit_axes=unit_axes or {},
        inner_optimizer=inner_optimizer or ("adamw" if optimizer is None else ""),
        describe=f"{num_parameters:,} parameters" + (f", {describe}" if describe else ""),
    )


def _scalar(found: Any, has_aux: bool) -> Any:
    """Returns the scalar loss from the task function's result, while a step is traced.

    Raises:
        ConfigError: It is no scalar.
    """
    if has_aux:
        if not isinstance(found, tuple) or len(found) != 2:
            raise ConfigError("loss", _described(found), "must return (loss, aux) with has_aux=True, or leave that out")
        found = found[0]
    scalar = isinstance(found, float) or getattr(found, "shape", None) == ()
    if scalar and jnp.issubdtype(jnp.result_type(found), jnp.floating):
        return found
    cure = "must return a scalar, the mean loss of the batch"
    if isinstance(found, tuple):
        cure += "; has_aux=True where it returns (loss, aux)"
    raise ConfigError("loss", _described(found), cure)


def _described(found: Any) -> str:
    """Returns a function's result in words, for errors."""
    if isinstance(found, tuple | list):
        return f"{type(found).__name__} of {len(found)}: {', '.join(map(_described, found))}"[:200]
    return f"{found.dtype} array of shape {found.shape}" if hasattr(found, "dtype") else type(found).__name__


def _dynamic(count: Any) -> Any:
    """Returns the count as float32: a numpy value on the host, or a traced one under ``jax.vmap``."""
    return count.astype(jnp.float32) if isinstance(count, jax.Array) else np.float32(count)


def _float32(tree: Params) -> Params:
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


class LocalDevices:
    """All devices of this process, if it has several and is not part of a larger JAX program.

    Parameters are on each device, and a part of every batch. The step stays the same function: XLA splits it by where
    its arguments lie, and adds the gradients up over the devices.
    """

    def __init__(self) -> None:
        """Lists the devices by JAX."""
        devices = jax.local_devices() if jax.process_count() == 1 else []
        self.count = max(1, len(devices))
        if self.count > 1:
            mesh = Mesh(np.array(devices), (DEVICES,))
            self._everywhere = NamedSharding(mesh, PartitionSpec())  # type: ignore[no-untyped-call]
            self._split = NamedSharding(mesh, PartitionSpec(DEVICES))  # type: ignore[no-untyped-call]

    def jit(self, function: Callable[..., Any], *, donate_argnums: tuple[int, ...] = ()) -> Callable[..., Any]:
        """Returns the jitted function; its results are replicated on all devices."""
        if self.count == 1:
            return jax.jit(function, donate_argnums=donate_argnums)
        return jax.jit(function, donate_argnums=donate_argnums, out_shardings=self._everywhere)

    def settled(self, results: Any) -> Any:
        """Returns the results of a step; with several CPU devices waits until they are computed.

        XLA's CPU backend can hang where several steps of one computation over such devices are under way: their
        collective operations wait for each other (seen with JAX 0.10 on two processors, without Atoll too).
        """
        if self.count > 1 and jax.default_backend() == "cpu":
            jax.block_until_ready(results)  # type: ignore[no-untyped-call]
        return results

    def split(self, batch: Batch) -> Batch:
        """Returns the batch sharded over devices: each array whose first axis their number divides.

        Other arrays go to each device whole, which changes nothing but the work. One device gets the batch as it is.

        Raises:
            ConfigError: No array of the batch can be divided, so that every device would do all of the work.
        """
        if self.count == 1:
            return batch
        leaves, structure = jax.tree.flatten(batch)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return batch  # the caller that traces this places its arrays
        divides = [bool(np.shape(leaf)) and np.shape(leaf)[0] % self.count == 0 for leaf in leaves]
        if not any(divides):
            cure = (
                f"must divide among the {self.count} devices of this island along the first axis of its arrays: "
                "change the batch, --devices-per-island or CUDA_VISIBLE_DEVICES"
            )
            raise ConfigError("task.data", ", ".join(str(list(np.shape(leaf))) for leaf in leaves), cure)
        places = [self._split if each else self._everywhere for each in divides]
        return jax.tree.unflatten(structure, jax.device_put(leaves, places))
