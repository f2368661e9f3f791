"""FedJAX: its algorithms over its client data sets, in float64.

Its training batches are always full: a short last one is filled up. Client data sets that give the batches of the case
take their place, a choice of data that leaves the algorithms as they are.
"""

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_enable_x64", True)

import fedjax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from conformance.adapter import Adapter  # noqa: E402
from conformance.cases import Case, Values  # noqa: E402

__all__ = ["adapter"]


def adapter() -> "FedJAX":
    """Return the adapter."""
    return FedJAX()


class FedJAX(Adapter):
    """FedAvg, FedProx, Mime, MimeLite and server optimizers."""

    packages = ("fedjax", "jax", "optax")

    def offers(self, case: Case) -> Mapping[str, str]:
        """Return the algorithm."""
        if case.method == "fedprox":
            return {"": "algorithms.fed_prox.fed_prox"}
        if case.method in ("mime", "mimelite"):
            name = {"mime": "mime.mime", "mimelite": "mime_lite.mime_lite"}[case.method]
            return {"": f"algorithms.{name} with optimizers.sgd(lr (1 - b), momentum=b)"}
        if case.method == "fedopt":
            return {"": f"algorithms.fed_avg with optimizers.{case.options['server']} at the server"}
        return {"": "algorithms.fed_avg.federated_averaging"} if case.method == "fedavg" else {}

    def run(self, case: Case, way: str) -> list[Values]:
        """Apply the algorithm to the cohorts."""
        method = _method(case)
        return _play(case, method, method.init(_start(case)), range(case.rounds))[0]

    def resume(self, case: Case, way: str, folder: Path) -> list[Values] | None:
        """Pickle the server's state and load it, as fedjax.training.save_checkpoint does, which needs TensorFlow."""
        method = _method(case)
        _, state = _play(case, method, method.init(_start(case)), range(case.restart))
        with (folder / "state").open("wb") as file:
            pickle.dump(jax.device_get(state), file)
        with (folder / "state").open("rb") as file:
            state = pickle.load(file)  # noqa: S301
        return _play(case, _method(case), state, range(case.restart, case.rounds))[0]


def _start(case: Case) -> dict[str, Any]:
    return {name: jnp.asarray(value) for name, value in case.problem.start.items()}


def _loss(params: dict[str, Any], batch: dict[str, Any], rng: Any) -> Any:
    log_p = jax.nn.log_softmax(batch["x"] @ params["weight"].T + params["bias"])
    return -jnp.take_along_axis(log_p, batch["y"][:, None], 1)[:, 0]


class _Client(fedjax.ClientDataset):
    """A client whose training batches are those of the case."""

    def __init__(self, case: Case, i: int) -> None:
        super().__init__({"x": case.problem.x[i], "y": case.problem.y[i].astype(np.int32)})
        self.slices = case.batches(i)

    def shuffle_repeat_batch(self, hparams: Any = None, **kwargs: Any) -> Iterator[dict[str, Any]]:
        """Yield the batches of all epochs."""
        for rows in self.slices:
            yield {name: value[rows] for name, value in self.raw_examples.items()}


def _method(case: Case) -> Any:
    options = case.options
    batches = fedjax.ShuffleRepeatBatchHParams(case.problem.batch_size, num_epochs=options["local_epochs"])
    client = fedjax.optimizers.sgd(options["client_lr"], momentum=options.get("client_momentum"))
    if case.method in ("mime", "mimelite"):
        build = {"mime": fedjax.algorithms.mime.mime, "mimelite": fedjax.algorithms.mime_lite.mime_lite}[case.method]
        base = fedjax.optimizers.sgd(options["client_lr"] * (1 - options["beta"]), momentum=options["beta"])
        full = fedjax.PaddedBatchHParams(batch_size=case.problem.batch_size)
        return build(_loss, base, batches, full, server_learning_rate=1.0)
    if case.method == "fedprox":
        return fedjax.algorithms.fed_prox.fed_prox(
            _loss, client, fedjax.optimizers.sgd(1.0), batches, proximal_weight=options["mu"]
        )
    server = fedjax.optimizers.sgd(1.0)
    if case.method == "fedopt":
        lr, tau = options["server_lr"], options["tau"]
        betas = {"b1": options["beta1"], "b2": options["beta2"]}
        server = {
            "adam": lambda: fedjax.optimizers.adam(lr, **betas, eps=tau),
            "yogi": lambda: fedjax.optimizers.yogi(lr, **betas, eps=tau),
            "adagrad": lambda: fedjax.optimizers.adagrad(lr, initial_accumulator_value=tau**2, eps=tau),
        }[options["server"]]()
    return fedjax.algorithms.fed_avg.federated_averaging(fedjax.grad(_loss), client, server, batches)


def _play(case: Case, method: Any, state: Any, rounds: range) -> tuple[list[Values], Any]:
    found = []
    clients = {i: _Client(case, i) for i in range(len(case.problem.sizes))}
    for r in rounds:
        keys = jax.random.split(jax.random.PRNGKey(r), len(case.cohorts[r]))
        state, _ = method.apply(state, [(i, clients[i], key) for i, key in zip(case.cohorts[r], keys, strict=True)])
        found.append({name: np.asarray(value) for name, value in state.params.items()})
    return found, state
