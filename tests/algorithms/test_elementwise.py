"""The local hooks are elementwise: they apply to a vector, to a parameter's view of it, and to a stacked cohort."""

import pytest
import torch
from torch.func import vmap

from lightning_fed.algorithms import (
    Adam,
    CMime,
    FedAvg,
    FedCM,
    FedDane,
    FedDyn,
    FedNova,
    FedProx,
    Mime,
    MimeLite,
    MimeMVR,
    RMSProp,
    Scaffold,
    SGDm,
)
from lightning_fed.core.rounds import Run, Step

S, P = 3, 5
METHODS = [
    FedAvg("normalized"),
    FedProx(0.5),
    FedDane(0.5),
    Scaffold(),
    Scaffold("i"),
    Mime(),
    Mime(SGDm()),
    MimeLite(Adam()),
    CMime(Adam(stats="old", v0="grad")),
    CMime(RMSProp()),
    MimeMVR(0.3),
    FedCM(0.3),
    FedDyn(0.3, "inverse_size"),
    FedNova(),
]


class Cohort:
    """Random inputs of every client, and the hooks' records for any part of the vector."""

    def __init__(self, algorithm):
        generator = torch.Generator().manual_seed(0)

        def draw(*shape):
            return torch.rand(*shape, generator=generator, dtype=torch.float64) + 0.1

        self.x, self.g, self.y, self.anchor = draw(P), draw(S, P), draw(S, P), draw(S, P)
        self.server = {k: draw(P) if v.ndim else v + 2 for k, v in algorithm.init_server(self.x).items()}
        self.client = {k: draw(S, P) for k in algorithm.init_client(self.x)}
        local = algorithm.init_local(self.x, self.server, {})
        self.local = {k: draw(S, P) if v.ndim else draw(S, 1) for k, v in local.items()}
        self.full, self.center = {"x": draw(S, P)}, {"x": draw(P), "x_prev": draw(P)}
        self.sizes, self.path, self.lr_sum = draw(S, 1), draw(S, P), draw(S, 1)

    def shared(self, part=slice(None)):
        cut = lambda state: {k: v[part] if v.ndim else v for k, v in state.items()}  # noqa: E731
        return {"x": self.x[part], "server": cut(self.server), "cohort_grad": cut(self.center), "mean_examples": 2.0}

    def stacked(self):
        """The values that differ between clients, as arguments for vmap."""
        return self.g, self.y, self.anchor, self.client, self.local, self.full, self.sizes, self.path, self.lr_sum

    def one(self, i):
        return torch.utils._pytree.tree_map(lambda v: v[i], self.stacked())


def local_step(algorithm, shared, g, y, anchor, client, local, full, sizes, path, lr_sum):
    step = Step(client=client, local=local, anchor_grad=anchor, full_grad=full, num_examples=sizes, lr=0.1, **shared)
    return algorithm.correct(g, y, step), algorithm.advance(g, y, step)


def finish(algorithm, shared, g, y, anchor, client, local, full, sizes, path, lr_sum):
    record = {"client": client, "local": local, "full_grad": full, "num_examples": sizes, "num_steps": 2, **shared}
    update = algorithm.finish(y, Run(delta=y - shared["x"], path=lambda: path, lr_sum=lr_sum, **record))
    return update.send, update.keep


@pytest.mark.parametrize("algorithm", METHODS, ids=repr)
@pytest.mark.parametrize("hook", [local_step, finish])
def test_stacked_cohort_matches_individual_clients(algorithm, hook):
    cohort = Cohort(algorithm)
    before = torch.utils._pytree.tree_map(torch.clone, (cohort.stacked(), cohort.shared()["server"]))
    together = hook(algorithm, cohort.shared(), *cohort.stacked())
    mapped = vmap(lambda *client: hook(algorithm, cohort.shared(), *client))(*cohort.stacked())
    for i in range(S):
        alone = hook(algorithm, cohort.shared(), *cohort.one(i))
        for got in (together, mapped):
            got = torch.utils._pytree.tree_map(lambda v, i=i: v[i] if v.ndim else v, got)
            torch.testing.assert_close(got, alone, rtol=1e-10, atol=1e-14, check_stride=False)
    torch.testing.assert_close((cohort.stacked(), cohort.shared()["server"]), before, rtol=0, atol=0)


@pytest.mark.parametrize("algorithm", METHODS, ids=repr)
def test_slice_of_vector_gives_slice_of_direction(algorithm):
    cohort, part = Cohort(algorithm), slice(1, 4)
    whole, _ = local_step(algorithm, cohort.shared(), *cohort.one(0))
    inputs = torch.utils._pytree.tree_map(lambda v: v[part] if v.numel() == P else v, cohort.one(0))
    viewed, _ = local_step(algorithm, cohort.shared(part), *inputs)
    torch.testing.assert_close(viewed, whole[part], rtol=1e-10, atol=0)


@pytest.mark.parametrize("algorithm", METHODS, ids=repr)
def test_half_precision_is_kept(algorithm):
    cohort = Cohort(algorithm)
    half = lambda v: v.to(torch.bfloat16) if isinstance(v, torch.Tensor) and v.shape[-1:] == (P,) else v  # noqa: E731
    shared, inputs = (torch.utils._pytree.tree_map(half, v) for v in (cohort.shared(), cohort.one(0)))
    direction, _ = local_step(algorithm, shared, *inputs)
    assert direction.dtype == torch.bfloat16
