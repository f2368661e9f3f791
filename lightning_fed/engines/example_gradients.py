"""The gradient of a local step under record-level privacy: clipped gradients of single examples, with noise."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from lightning_fed.compat.package import pl
from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.core.flat import FlatParameters
from lightning_fed.core.seeds import KeyedStream, Purpose, preserved_random_state
from lightning_fed.engines.base import OnlySequentialError
from lightning_fed.engines.batch_hooks import hooked_parameter, overridden_hooks
from lightning_fed.engines.changes import Snapshot, TensorMarks, without_metrics
from lightning_fed.engines.gradients import unlogged
from lightning_fed.engines.vectorized.batches import flatten
from lightning_fed.engines.vectorized.module_step import ModuleStep, OwnStreams, Reads
from lightning_fed.server.privacy import ClientPrivacy, gaussian_noise


class ExampleGradients:
    """Sets the module's gradients to the noisy mean of the clipped gradients of a batch's examples.

    An example's gradient is the gradient of ``training_step`` on a batch of this example alone.
    """

    def __init__(self, trainer: pl.Trainer, flat: FlatParameters, privacy: ClientPrivacy) -> None:
        self.flat, self.privacy = flat, privacy
        self._module = trainer.lightning_module
        self._check_hooks(trainer)
        self._step = ModuleStep(trainer, flat)
        self._noise = KeyedStream()
        self._expected: float | None = None
        self._batches, self._is_checked = 0, False  # batches in the fit; whether this client's side effects are checked
        self.skips_not_finite = False  # set on a real site: an error would reveal something about an example

    def _check_hooks(self, trainer: pl.Trainer) -> None:
        """Raise for hooks between batch and step, which would see no backward pass."""
        if hooks := overridden_hooks(trainer, of_batches=()):
            raise FederatedError(
                f"client_privacy={self.privacy!r} cannot be combined with {hooks[0]}: gradients of single examples do"
                " not go through hooks between batch and step. Remove it."
            )
        if (name := hooked_parameter(self._module)) is not None:
            raise FederatedError(
                f"client_privacy={self.privacy!r} cannot be combined with the hook of the parameter {name!r}: gradients"
                " of single examples do not go through it. Remove it, or leave parameters that it masks out of the"
                " optimizer."
            )

    def begin_client(self, seed: int, round: int, index: int, expected_size: float | None) -> None:
        """Start a client's local work; sums are divided by ``expected_size``, or by each batch's size if it is None."""
        self._noise, self._expected = KeyedStream(seed, Purpose.CLIENT_NOISE, round, index), expected_size
        self._is_checked = False

    def set(self, batch: Any, batch_idx: int, examples: int) -> Tensor | None:
        """Set the parameters' gradients; return the batch's mean loss, or None if ``batch`` is None (no examples)."""
        params, loss, size = self.flat.params, None, 0
        sums = [torch.zeros_like(p) for p in params]
        if batch is not None:
            leaves, spec = flatten(batch)
            size = self._size_of(leaves, examples)
            losses, point = [], [p.detach().clone() for p in params]
            try:
                with self._checked(), unlogged(self._module), torch.no_grad():  # logged values would have no noise
                    if self._batches == 1:
                        self._check_loss([leaf[:1] for leaf in leaves], spec, batch_idx, size > 1)
                    for grads, own in self._each(leaves, spec, batch_idx, size):
                        self._add_clipped(sums, grads)
                        losses.append(own)
            finally:
                self.flat.bind()
            if not all(map(torch.equal, point, params)):
                raise FederatedError(
                    f"{type(self._module).__name__}.training_step changes trained parameters, which client_privacy does"
                    " not cover: the change has no noise. Set them before the fit, from no client's data."
                )
            loss = torch.cat(losses).mean()
        count = float(size) if self._expected is None else self._expected
        std = self.privacy.noise_multiplier * self.privacy.max_grad_norm
        for p, total in zip(params, sums, strict=True):
            if std > 0:
                total.add_(gaussian_noise(total.numel(), std, self._noise).to(total).view(total.shape))
            p.grad = total.div_(count)
        return loss

    def _check_loss(self, leaves: Sequence[Tensor], spec: Any, batch_idx: int, several: bool) -> None:
        """Raise if the loss of an example has no gradient (``torch.func`` returns zeros), or draws from own streams.

        For ``several`` examples at once, raise as well if it uses parameters that ``torch.func`` does not replace, or
        goes on after an error.
        """
        streams, reads = OwnStreams(), Reads(self.flat)
        try:
            with preserved_random_state(self.flat.y.device):
                with streams:
                    self._step.own_gradient(self.flat.params, leaves, spec, batch_idx)
                if several and self.privacy.examples_at_once != 1:
                    with reads:
                        self._together(self.flat.views, [torch.cat([leaf, leaf]) for leaf in leaves], spec, batch_idx)
        except RuntimeError as error:
            if "does not require grad" in str(error):
                raise FederatedError(
                    f"{type(self._module).__name__}.training_step returns a loss that depends on no trained parameter:"
                    f" with client_privacy={self.privacy!r} there would be noise alone. Return it with its graph, not"
                    " detached."
                ) from error
        except OnlySequentialError:
            return  # _each reports it
        what = None if reads.caught is None else "goes on after an error of PyTorch"
        if reads.found is not None:
            what = f"uses the parameter {reads.found!r} from elsewhere than its layer, such as from a list"
        if what is not None:
            raise FederatedError(
                f"{type(self._module).__name__}.training_step {what}, which gives examples at once other gradients than"
                " one after another. Let errors end the step, read parameters from their layers, as self.parameters()"
                " does, or pass ClientPrivacy(examples_at_once=1)."
            )
        if streams.found is not None and self.privacy.examples_at_once != 1:
            raise FederatedError(
                f"{type(self._module).__name__}.training_step {streams.found}, which gives examples at once other"
                " numbers than one after another. Draw from torch's global generator, or pass"
                " ClientPrivacy(examples_at_once=1)."
            )

    def _size_of(self, leaves: Sequence[Any], examples: int) -> int:
        """Return the number of examples in a batch; raise unless all of its tensors have one row per example.

        Several rows of an example would be clipped one by one, and the norm of their sum may exceed the bound.
        """
        kinds = sorted({type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor)})
        lengths = {len(leaf) if leaf.ndim else 0 for leaf in leaves if isinstance(leaf, Tensor)}
        if kinds or lengths != {examples}:
            found = f"a batch with {', '.join(kinds)}" if kinds else f"tensors of lengths {sorted(lengths)}"
            raise FederatedError(
                f"{self.privacy!r} takes gradients of single examples, so a batch must consist of tensors with one row"
                f" for each example, found {found} for {examples} examples. Let collate_fn return such batches."
            )
        return examples

    def _each(
        self, leaves: Sequence[Tensor], spec: Any, batch_idx: int, size: int
    ) -> Iterator[tuple[Sequence[Tensor], Tensor]]:
        """Yield gradients [m, ...], one per parameter, and losses [m] of m examples at a time."""
        point = [p.detach() for p in self.flat.params]
        several = self.privacy.examples_at_once or size
        try:
            for start in range(0, size, several):
                some = [leaf[start : start + several] for leaf in leaves]
                if len(some[0]) == 1:
                    found, loss, _ = self._step.own_gradient(self.flat.params, some, spec, batch_idx)
                    grads = [torch.zeros_like(v) if g is None else g for g, v in zip(found, point, strict=True)]
                    yield [g[None] for g in grads], loss.reshape(1)
                    continue
                yield self._together(point, some, spec, batch_idx)
        except OnlySequentialError as error:
            raise FederatedError(
                f"{type(self._module).__name__}.training_step must return a loss for every example with"
                f" client_privacy={self.privacy!r}: every example counts in the step."
            ) from error

    def _together(
        self, point: Sequence[Tensor], leaves: Sequence[Tensor], spec: Any, batch_idx: int
    ) -> tuple[Sequence[Tensor], Tensor]:
        def of_one(*example: Tensor) -> tuple[Sequence[Tensor], Tensor]:
            grads, loss, _ = self._step.gradient(point, [leaf[None] for leaf in example], spec, batch_idx)
            return tuple(grads), loss

        try:
            found: tuple[Sequence[Tensor], Tensor] = vmap(of_one, randomness="different")(*leaves)
        except FederatedError:
            raise
        except RuntimeError as error:
            raise FederatedError(
                f"The gradients of single examples of {type(self._module).__name__} cannot be computed at once with"
                f" torch.func.vmap ({str(error).splitlines()[0][:200]}). Pass ClientPrivacy(examples_at_once=1), which"
                " takes one after another."
            ) from error
        return found

    def _add_clipped(self, sums: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Add the clipped gradients of some examples to the sums."""
        of_each = torch.stack([torch.linalg.vector_norm(g.flatten(1), dim=1) for g in grads])
        norms = torch.linalg.vector_norm(of_each, dim=0)
        is_finite = torch.isfinite(norms)
        if self.skips_not_finite:
            grads = [torch.where(is_finite.view(-1, *[1] * (g.ndim - 1)), g, 0.0) for g in grads]
            norms = torch.where(is_finite, norms, 0.0)
        elif not bool(is_finite.all()):
            raise ClientError(
                "the gradient of an example is not finite, which clipping cannot bound. Lower the learning rate, or"
                " look at its data."
            )
        factors = (self.privacy.max_grad_norm / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(max=1.0)
        for total, g in zip(sums, grads, strict=True):  # a matrix product could round to 8 or 11 bits, past the bound
            total.add_((g * factors.view(-1, *[1] * (g.ndim - 1))).sum(0))

    @contextmanager
    def _checked(self) -> Iterator[None]:
        """Raise if ``training_step`` remembers examples; check one batch of each client.

        Skip the first batch of a fit, since it may fill caches.
        """
        self._batches += 1
        if self._is_checked or self._batches == 1:
            yield
            return
        self._is_checked, module = True, self._module
        attributes, tensors = Snapshot(without_metrics(module)), TensorMarks(module)
        yield
        if (found := attributes.changed() or tensors.changed()) is not None:
            kind, name = found
            raise FederatedError(
                f"{type(module).__name__}.training_step changes the {kind} {name!r}, which client_privacy does not"
                " cover: it remembers clients' examples without noise, and is changed for every example or for several"
                " at once. Leave it unchanged in training_step."
            )
