"""Evaluation with ``validation_step``: the server's model across processes, and models on single clients."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from inspect import signature
from itertools import islice
from types import MethodType
from typing import Any

import torch

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.compat.package import pl
from lightning_fed.compat.private import _EvaluationLoop, call, is_param_in_hook_signature
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.origin import options_of
from lightning_fed.core.seeds import Purpose, derive_seed, generator, preserved_random_state, seed_global
from lightning_fed.core.types import ClientId, State, Vector
from lightning_fed.data.batches.batches import ClientBatches, LoaderBatches, TensorBatches
from lightning_fed.data.batches.counting import count_examples, sampled_length
from lightning_fed.data.batches.evaluation import EvaluationLoader
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.engines.base import Engine
from lightning_fed.engines.batch_hooks import is_users_own
from lightning_fed.engines.gradients import prepare_batch, preserved_modes
from lightning_fed.engines.logged import EvaluationResults
from lightning_fed.engines.processor import lstm_errors
from lightning_fed.server.client_states.state import PERSONAL, ClientState, method_part
from lightning_fed.strategies import ClientsStrategy
from lightning_fed.strategies.processes import Ranks, metrics_alone


class SharedEvaluationLoop(_EvaluationLoop):
    """Lightning's evaluation loop, in which process k mod n evaluates batch k under its index k.

    When a loader is done, values logged in steps are combined exactly, and metric objects exchange their states. A step
    exchanges nothing. Every process evaluates everything if sharing would change the result. This is the case with the
    user's own loaders, with fewer batches than processes, and with hooks that see the outputs of all batches.
    """

    _results: EvaluationResults
    _ranks = Ranks()
    _is_shared = False

    def setup_data(self) -> None:
        """Create the loaders, and keep this process's part of them."""
        before = self._combined_loader
        super().setup_data()
        combined = self._combined_loader
        if combined is None or combined is before:
            return
        self._ranks = Ranks.of(self.trainer)
        self._is_shared = self._ranks.size > 1 and self._can_share(combined.flattened)
        self._results.processes = self._ranks.size if self._is_shared else 1
        if self._is_shared:
            rank, size = self._ranks.rank, self._ranks.size
            loaders = zip(combined.flattened, self._max_batches, strict=True)
            combined.flattened = [loader.part(rank, size, stop=int(batches)) for loader, batches in loaders]

    def run(self) -> Any:
        """Evaluate. After an error, return the module to the modes from before: a fit would train in eval mode."""
        modes = [(part, part.training) for part in self.trainer.lightning_module.modules()]
        try:
            with ExitStack() as self._alone:
                return super().run()
        except BaseException:
            for part, training in modes:
                part.training = training
            raise

    def on_run_start(self) -> None:
        """Call the hooks that start an evaluation."""
        self._alone.enter_context(metrics_alone(self.trainer))
        super().on_run_start()

    def _evaluation_step(self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
        if dataloader_iter is None and self._is_sequential:
            self._results.count = partial(self._count, batch, batch_idx, dataloader_idx)
        if self._is_shared:
            batch_idx = batch_idx * self._ranks.size + self._ranks.rank
        try:
            with lstm_errors(self.trainer), self._refusing_exchanges():
                super()._evaluation_step(batch, batch_idx, dataloader_idx, dataloader_iter)
        finally:
            self._results.count = None

    def _refusing_exchanges(self) -> AbstractContextManager[None]:
        """Refuse exchanges by user code in a step, since other processes do not take it at the same time."""
        strategy: Any = self.trainer.strategy
        return strategy.working_alone("evaluates its own batches") if self._is_shared else nullcontext()

    def _count(self, batch: Any, batch_idx: int, dataloader_idx: int) -> int | None:
        """Return the number of examples in a batch, or None if neither loader, user nor batch determines it."""
        assert self._combined_loader is not None
        length = sampled_length(self._combined_loader.flattened[dataloader_idx], batch_idx)
        if length is not None:
            return length
        data = self.trainer.datamodule
        batch_size_of = data.batch_size_of if isinstance(data, FederatedDataModule) else None
        if batch_size_of is not None:
            return count_examples(batch, batch_size_of)
        try:
            return count_examples(batch)
        except FederatedError:
            return None  # Lightning warns that the batch is ambiguous

    def _store_dataloader_outputs(self) -> None:
        if self._is_shared:
            self._alone.close()
            self._results.share(self._ranks)
        super()._store_dataloader_outputs()
        if self._is_shared:
            self._alone.enter_context(metrics_alone(self.trainer))

    def _can_share(self, loaders: Sequence[Any]) -> bool:
        trainer, module, stage = self.trainer, self.trainer.lightning_module, self._stage.dataloader_prefix
        enough = all(batches >= self._ranks.size for batches in self._max_batches)
        if not enough or not all(isinstance(loader, EvaluationLoader) for loader in loaders):
            return False
        prefix = "on_test" if stage == "test" else "on_validation"
        hooks = [f"{prefix}_{name}" for name in ("batch_end", "epoch_end", "end")]
        return not any(is_users_own(owner, hook) for owner in (module, *trainer.callbacks) for hook in hooks)


def validation_batches(data: FederatedDataModule, client_id: ClientId) -> ClientBatches:
    """Return the batches of a client's own validation set, of ``eval_batch_size`` examples each."""
    dataset = data.client_val_dataset(client_id)
    settings = replace(data.batch_settings, full_batch_size=data.eval_batch_size or 256)
    batches = None if dataset is None else TensorBatches.of(dataset, settings) or LoaderBatches(dataset, settings)
    if batches is None or batches.size == 0:
        raise FederatedError(f"Client {client_id!r} has no validation set: name it in client_val of the data module.")
    return batches


def own_model(algorithm: Algorithm, x: Vector, server: State, client: ClientState) -> Vector:
    """Return the parameters [P + Q] of a client's personal model."""
    shared = algorithm.evaluate_client_at(x, server, method_part(client.own))
    return torch.cat([shared, client.own.get(PERSONAL, x[:0])])


def mean_loss(client_id: ClientId, total: float, examples: int) -> float:
    """Return a client's mean training loss, given the sum over its examples."""
    if not examples:
        raise FederatedError(f"Client {client_id!r} has no training examples, and so no training loss. Leave it out.")
    return total / examples


class ClientEvaluation:
    """Evaluates a model on single clients with the module's own ``validation_step``.

    It restores parameters, buffers, gradients, metrics, optimizer, random state and the trainer's logged values. It
    calls only two validation hooks: the module's ``on_validation_epoch_start`` and ``on_validation_epoch_end``.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.trainer = engine.trainer
        self.seed = derive_seed(engine.seed, Purpose.MEASUREMENT)
        self._alone = "evaluates its own clients" if isinstance(self.trainer.strategy, ClientsStrategy) else ""

    def of_client(
        self, x: Vector, buffers: State, client_id: ClientId, index: int, on: str, steps: int, round: int
    ) -> dict[str, float]:
        """Return the values that ``validation_step`` logs on a client's examples, after some fine-tuning steps.

        ``x`` are the initial parameters [P + Q], personal ones last, and ``buffers`` the initial buffers. ``on`` is
        "val" or "train" for the client's validation or training set, and ``index`` is its stored index.
        """
        data, engine, y = self.trainer.datamodule, self.engine, x.clone()
        train = data.client_batches(client_id)
        examples = train if on == "train" else validation_batches(data, client_id)
        with preserved_random_state(y.device), engine.gradients.silent():
            engine.buffers.write(buffers)
            if steps:
                self._fine_tune(y, train, steps, round, index)
            engine.flat.bind(engine.flat.cut(y))
            seed_global(derive_seed(self.seed, Purpose.VALIDATION, round, index), y.device)
            stream = generator(self.seed, Purpose.VALIDATION, round, index)
            logged = self._validate(examples.unaugmented(stream))
        if not logged:
            raise FederatedError(
                f"{type(self.trainer.lightning_module).__name__}.validation_step logged nothing: there is nothing to"
                " compare between clients. Call self.log in it."
            )
        return logged

    def _fine_tune(self, y: Vector, train: ClientBatches, steps: int, round: int, index: int) -> None:
        """Take plain local steps (``training_step``, gradient, clipping, optimizer) with a new optimizer state."""
        engine, base = self.engine, self.engine.optimizer.base
        seed_global(derive_seed(self.seed, Purpose.TRAINING, round, index), y.device)
        batches = _epochs(train, generator(self.seed, Purpose.BATCHES, round, index), engine.shuffle)
        state = dict(base.state)
        groups = options_of(base)
        base.state.clear()
        schedule = engine.optimizer.schedule
        if schedule is not None:  # start as for a new client
            schedule.begin(schedule.start_of({}), steps)
        try:
            for i, batch in enumerate(islice(batches, steps)):
                self._step(y, prepare_batch(self.trainer, batch), i)
                if schedule is not None:
                    schedule.advance()
        finally:
            base.state.clear()
            base.state.update(state)
            if schedule is not None:
                schedule.rest()
            for group, kept in zip(base.param_groups, groups, strict=True):
                group.update(kept)

    def _step(self, y: Vector, batch: Any, batch_idx: int) -> None:
        flat, optimizer, trainer = self.engine.flat, self.engine.optimizer, self.trainer
        g = torch.zeros_like(y)
        self.engine.gradients.add(flat.cut(y), batch, batch_idx, g, 1.0)
        for p, part in zip(flat.params, flat.cut(g), strict=True):
            p.grad = None if p.grad is None else part
        if optimizer.clip is not None:
            optimizer.clip()
        else:
            call._call_lightning_module_hook(
                trainer,
                "configure_gradient_clipping",
                optimizer,
                gradient_clip_val=trainer.gradient_clip_val,
                gradient_clip_algorithm=trainer.gradient_clip_algorithm,
            )
        optimizer.base.step()

    @torch.no_grad()
    def _validate(self, batches: Iterator[tuple[Any, int]]) -> dict[str, float]:
        trainer, module = self.trainer, self.trainer.lightning_module
        takes_index = is_param_in_hook_signature(module.validation_step, "batch_idx", min_args=2)
        loader = {"dataloader_idx": 0} if "dataloader_idx" in signature(module.validation_step).parameters else {}
        results, connector = EvaluationResults(training=False), trainer._logger_connector
        with self._validating(results), preserved_modes(module), _logging(module), metrics_alone(trainer, self._alone):
            module.eval()
            call._call_lightning_module_hook(trainer, "on_validation_epoch_start")
            for i, (batch, examples) in enumerate(batches):
                results.batch_size, connector._first_loop_iter = examples, i == 0
                batch = prepare_batch(trainer, batch)
                call._call_strategy_hook(
                    trainer, "validation_step", *((batch, i) if takes_index else (batch,)), **loader
                )
            results.batch_size = None
            connector.epoch_end_reached()
            call._call_lightning_module_hook(trainer, "on_validation_epoch_end")
            return {name: float(value) for name, value in results.metrics(on_step=False)["callback"].items()}

    @contextmanager
    def _validating(self, results: EvaluationResults) -> Iterator[None]:
        """Redirect ``self.log`` to ``results``, in place of the trainer's own results during validation."""
        trainer, connector = self.trainer, self.trainer._logger_connector
        loop = trainer.fit_loop.epoch_loop.val_loop
        names = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics", "_first_loop_iter", "_current_fx")
        kept = {name: getattr(connector, name) for name in names}
        own, stage = loop._results, trainer.state.stage
        for name in names[:3]:
            setattr(connector, name, dict(kept[name]))
        loop._results, trainer.validating = results, True
        try:
            yield
        finally:
            loop._results, trainer.state.stage = own, stage
            for name, value in kept.items():
                setattr(connector, name, value)


def _epochs(batches: ClientBatches, stream: torch.Generator, shuffle: bool) -> Iterator[Any]:
    has_any = True
    while has_any:
        has_any = False
        for batch, _ in batches.epoch(stream, shuffle):
            has_any = True
            yield batch


@contextmanager
def _logging(module: pl.LightningModule) -> Iterator[None]:
    """Enable ``self.log`` within a silent pass, and let it find the metrics that replace the module's own."""
    attributes: dict[str, Any] = module.__dict__
    silenced = {name: attributes[name] for name in ("log", "log_dict")}
    attributes.update({name: MethodType(getattr(type(module), name), module) for name in silenced})
    found, module._metric_attributes = module._metric_attributes, None
    try:
        yield
    finally:
        module._metric_attributes = found
        attributes.update(silenced)
