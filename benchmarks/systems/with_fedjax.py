"""FedJAX's FedAvg, compiled for the CPU.

By default one core for the fully connected networks, which run slower on more, and all of them for the ResNet. The last
batch of a client is filled up with examples that it has seen already: FedJAX keeps the shapes of batches fixed.
"""

import os
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import numpy as np

from systems.measure import Outcome, Settings, Stopwatch, usable_cores
from systems.problem import BLOCKS, Array, Problem

__all__ = ["run"]


def run(problem: Problem, settings: Settings, stopwatch: Stopwatch) -> Outcome:
    """Train on so many cores; before the clock, all rounds are run once, since every new client size is compiled."""
    cores = settings.devices or (1 if problem.workload.layers else usable_cores())
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    import fedjax  # after the cores are chosen: XLA makes its threads at import
    import jax

    workload = problem.workload
    network = _fully_connected if workload.layers else _resnet

    def loss(params: list[Any], batch: dict[str, Any], rng: Any) -> Any:
        log_p = jax.nn.log_softmax(network(params, batch["x"]))
        return -jax.numpy.take_along_axis(log_p, batch["y"][:, None], 1)[:, 0]

    method = fedjax.algorithms.fed_avg.federated_averaging(
        fedjax.grad(loss),
        fedjax.optimizers.sgd(workload.lr),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=workload.batch, num_epochs=workload.epochs, seed=0),
    )
    clients = _clients(problem, settings.total)

    def train(state: Any, r: int) -> Any:
        cohort = problem.cohort(r)
        keys = jax.random.split(jax.random.PRNGKey(r), len(cohort))
        state, _ = method.apply(state, [(c, clients[c], key) for c, key in zip(cohort, keys, strict=True)])
        return jax.block_until_ready(state)

    initial = [jax.numpy.asarray(_in_jax_layout(value)) for value in problem.initial()]
    state = method.init(initial)
    for r in range(settings.total if len(set(np.diff(problem.offsets))) > 1 else 1):
        state = train(state, r)
    state = method.init(initial)
    stopwatch.tick()
    for r in range(settings.total):
        state = train(state, r)
        stopwatch.tick()
    config = {"version": f"{version('fedjax')}, jax {jax.__version__}", "processes": 1, "cores": cores}
    return Outcome(lambda x: np.asarray(network(state.params, x)), config)


def _clients(problem: Problem, rounds: int) -> dict[int, Any]:
    import fedjax

    targets = problem.y.astype(np.int32)
    taking_part = {c for r in range(rounds) for c in problem.cohort(r)}
    rows = {c: slice(*problem.rows(c)) for c in taking_part}
    return {c: fedjax.ClientDataset({"x": problem.x[rows[c]], "y": targets[rows[c]]}) for c in taking_part}


def _in_jax_layout(value: Array) -> Array:
    """Turn weights [out, in] and [out, in, height, width] so that the channels come last."""
    return value.transpose(2, 3, 1, 0) if value.ndim == 4 else value.T


def _fully_connected(params: list[Any], x: Any) -> Any:
    import jax

    for k in range(0, len(params), 2):
        x = x @ params[k] + params[k + 1]
        x = jax.nn.relu(x) if k + 2 < len(params) else x
    return x


def _resnet(params: list[Any], x: Any) -> Any:
    import jax

    left = iter(params)
    x = jax.numpy.transpose(x, (0, 2, 3, 1))
    x = jax.nn.relu(_normed_convolution(left, x, 1))
    for fan_in, width, stride in BLOCKS:
        h = jax.nn.relu(_normed_convolution(left, x, stride))
        h = _normed_convolution(left, h, 1)
        x = jax.nn.relu(h + (_normed_convolution(left, x, stride) if width != fan_in else x))
    return x.mean((1, 2)) @ next(left) + next(left)


def _normed_convolution(left: Iterator[Any], x: Any, stride: int) -> Any:
    """Take the next three parameters: a convolution's, and scale and shift of a group normalization in two groups."""
    import jax

    weight, scale, shift = next(left), next(left), next(left)
    pad = weight.shape[0] // 2
    x = jax.lax.conv_general_dilated(
        x, weight, (stride, stride), ((pad, pad), (pad, pad)), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    n, height, width, channels = x.shape
    groups = x.reshape(n, height * width, 2, channels // 2)
    centred = groups - groups.mean((1, 3), keepdims=True)
    normed = centred * jax.lax.rsqrt((centred**2).mean((1, 3), keepdims=True) + 1e-5)
    return normed.reshape(x.shape) * scale + shift
