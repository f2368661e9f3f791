"""The state between rounds: x, the server state, client states, and the step of the server optimizer."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.devices import are_equal
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.flat import Layout
from lightning_fed.core.origin import CHECKPOINT, Origin
from lightning_fed.core.plain import plain_options
from lightning_fed.core.rounds import AdvanceSolver, Cohort
from lightning_fed.core.torch_optimizers import is_plain_sgd, refuse_unsupported
from lightning_fed.core.types import ClientId, State, Vector, Weighting
from lightning_fed.server.aggregation.lora import ExactLora, ProductSums, lora_needs_mean
from lightning_fed.server.client_states.state import LOCAL_STEPS, PERSONAL, ExpectedState
from lightning_fed.server.client_states.store import ClientStore, MemoryClientStore
from lightning_fed.server.participation import Participation
from lightning_fed.server.privacy import PrivacyLedger

ServerOptimizerFactory: TypeAlias = Callable[[Iterable[Tensor]], Optimizer]
"""A function from parameters to a torch optimizer, such as ``functools.partial(torch.optim.Adam, lr=0.01)``."""

ServerSchedulerFactory: TypeAlias = Callable[[Optimizer], LRScheduler]
"""A function from the server's optimizer to a learning rate scheduler, which steps once a round."""


def plain_sgd(params: Iterable[Tensor]) -> Optimizer:
    """Return SGD with rate one, which sets the server model to the mean of the client models."""
    return torch.optim.SGD(params, lr=1.0)


@contextmanager
def steps_not_counted() -> Iterator[None]:
    """Suppress torch's warning about scheduler.step() before optimizer.step(); a round may have no step."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*before.*")
        yield


class ServerStep:
    """The server parameters ``x`` [P] and their optimizer.

    The optimizer gets parameters with the model's shapes (some need them) and the negative direction as gradient.
    """

    def __init__(
        self,
        build: ServerOptimizerFactory,
        x: Vector,
        layout: Layout,
        build_scheduler: ServerSchedulerFactory | None = None,
    ) -> None:
        self.x = x.clone()
        self.params = [nn.Parameter(view) for view in layout.views(self.x)]
        self.layout, self._is_checked = layout, False
        self.optimizer = build(self.params)
        if not isinstance(self.optimizer, Optimizer):
            raise FederatedError(
                f"server_optimizer must return a torch optimizer, found {self.optimizer!r}. Pass a callable such as"
                " functools.partial(torch.optim.SGD, lr=1.0)."
            )
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        if held != {id(p) for p in self.params}:
            raise FederatedError("server_optimizer must be built from the parameters that it is handed, all of them.")
        refuse_unsupported(self.optimizer, "server_optimizer")
        self.scheduler = None if build_scheduler is None else build_scheduler(self.optimizer)
        if build_scheduler is not None and (
            not isinstance(self.scheduler, LRScheduler) or isinstance(self.scheduler, ReduceLROnPlateau)
        ):
            raise FederatedError(
                "server_lr_scheduler must return a torch scheduler that steps without a metric, found"
                f" {type(self.scheduler).__name__}. Pass a callable such as functools.partial(StepLR, step_size=100)."
            )

    @property
    def takes_mean(self) -> bool:
        """True if the optimizer is plain SGD with rate one: its step along the mean change gives the mean model."""
        (group, *others) = self.optimizer.param_groups
        return is_plain_sgd(self.optimizer) and not others and group["lr"] == 1 and not group["weight_decay"]

    def step(self, direction: Vector, models: Vector | None) -> None:
        """Move ``x`` along a direction [P].

        ``models`` is the mean of the client models if ``direction`` equals ``models - x``. Plain SGD with rate one then
        sets ``x`` to it, without the rounding of ``x + (mean - x)``.
        """
        if models is not None and self.takes_mean:
            self.x.copy_(models)
            return
        for p, g in zip(self.params, self.layout.views(-direction), strict=True):
            p.grad = g
        before = None if self._is_checked else self._counts()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._is_checked = True
        if before is not None and (
            changed := [name for name, value in self._counts().items() if before[name] != value]
        ):
            raise FederatedError(
                f"server_optimizer {type(self.optimizer).__name__} changes its attribute {changed[0]!r} as it steps,"
                " and checkpoints hold no attributes. Keep it in self.state[parameter], or in a parameter group."
            )

    def _counts(self) -> dict[str, Any]:
        """Return the numbers in attributes of the optimizer, except those of schedulers."""
        named = vars(self.optimizer).items()
        return {name: value for name, value in named if type(value) in (int, float) and not name.startswith("_")}

    def end_round(self) -> None:
        """Step the scheduler, which must exist, even after a round without clients."""
        assert self.scheduler is not None
        with steps_not_counted():
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Return ``x``, the states of optimizer and scheduler, and their class names."""
        return {
            "x": self.x.clone(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": None if self.scheduler is None else self.scheduler.state_dict(),
            "classes": [type(self.optimizer).__name__, type(self.scheduler).__name__],
        }

    def load_state_dict(self, state: dict[str, Any], origin: Origin = CHECKPOINT) -> None:
        """Load the result of :meth:`state_dict`, including rates and options; raise if the classes differ."""
        mine = [type(self.optimizer).__name__, type(self.scheduler).__name__]
        for name, saved, here in zip(("server_optimizer", "server_lr_scheduler"), state["classes"], mine, strict=True):
            if saved != here:
                raise FederatedError(
                    f"{origin.name}'s {name} is {saved}, {origin.this}'s is {here}. {origin.remedy(f'the {name}')}"
                )
        self.x.copy_(state["x"])
        self.optimizer.load_state_dict(state["optimizer"])
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        has_dtype = state["x"].dtype == self.x.dtype
        # PyTorch casts all statistics to the parameters' dtype, also those of another one, such as NAdam's product
        for number, saved in state["optimizer"]["state"].items() if has_dtype else ():
            if isinstance(number, int) and number < len(held):
                self.optimizer.state[held[number]] = _with_dtypes(self.optimizer.state[held[number]], saved)
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["schedule"])


def _with_dtypes(loaded: Any, saved: Any) -> Any:
    """Return loaded statistics of an optimizer, those with another dtype than the saved ones replaced by these."""
    if isinstance(loaded, Tensor) and isinstance(saved, Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device, copy=True)
    if type(loaded) is dict and type(saved) is dict:
        return {name: _with_dtypes(value, saved.get(name)) for name, value in loaded.items()}
    if type(loaded) in (list, tuple) and type(saved) is type(loaded):
        return type(loaded)(map(_with_dtypes, loaded, saved))
    return loaded


FORMAT = 3  # the format of :meth:`Server.state_dict`; increment it when older versions cannot read a change

_WEIGHTINGS = ("examples", "uniform", "steps")


def resolve_weighting(algorithm: Algorithm, weighting: Weighting | None) -> Weighting:
    """Return the run's weighting; raise if it is invalid or the method does not use it."""
    resolved = algorithm.default_weighting if weighting is None else weighting
    if resolved not in _WEIGHTINGS and (not callable(resolved) or isinstance(resolved, type)):
        raise FederatedError(
            f"weighting must be one of {_WEIGHTINGS} or a function of (client_id, size, steps), found {resolved!r}."
        )
    if weighting is None:
        return resolved
    if "weighting" not in algorithm.reduces.values():
        raise FederatedError(
            f"weighting={weighting!r} does not apply to {type(algorithm).__name__}: its averages are"
            f" {dict(algorithm.reduces)} by derivation, and it has no weighted form. Leave weighting unset."
        )
    if weighting == "steps" and not algorithm.local_work:
        raise FederatedError(
            f"weighting='steps' does not apply to {type(algorithm).__name__}, whose clients take no local steps. Set"
            " 'examples' or 'uniform', or leave weighting unset."
        )
    return weighting


class Server:
    """The server's state in a run, committed as a whole after each round; ``ids`` are in their stored order."""

    def __init__(
        self,
        algorithm: Algorithm,
        x: Vector,
        layout: Layout,
        build_optimizer: ServerOptimizerFactory,
        build_scheduler: ServerSchedulerFactory | None,
        ids: Sequence[ClientId],
        seed: int,
    ) -> None:
        self.algorithm = algorithm
        self.ids = ids
        self.seed = seed
        self.round = 0
        self.step = ServerStep(build_optimizer, x, layout, build_scheduler)
        self.state: State = algorithm.init_server(self.x.clone())
        self.clients: ClientStore = MemoryClientStore()
        self.start = self.x.clone() if algorithm.init_client_at_start else x.new_empty(0)  # x^0, if needed
        self.personal = x.new_empty(0)  # the personal parameters [Q] of a new client
        self.num_parameters = len(layout.sizes)  # trained tensors, with personal ones that the server lacks
        self.buffers: State = {}
        self.kept_buffers: frozenset[str] = frozenset()  # buffers that clients keep
        self.moved_buffers: set[str] = set()  # buffers that differ from the module's initial ones
        self.lora: ExactLora | None = None  # with lora="exact"
        self.bytes_up = 0
        self.bytes_down = 0
        self.counts_steps = False  # whether clients keep the number of their local steps
        self.longest_steps: int | None = 0  # sum over rounds of the most local steps of a client; None if unknown
        self.advance_solver: AdvanceSolver | None = None  # steps the local optimizer's state, for methods that mimic it
        self.ledger: PrivacyLedger | None = None  # the ledger of record-level privacy
        self._participation = Participation(len(ids))
        self._options: dict[str, Any] | None = plain_options(algorithm.options())  # compared after the first round

    @property
    def x(self) -> Vector:
        """The server parameters [P]."""
        return self.step.x

    @property
    def seen(self) -> int:
        """The number of clients that have participated."""
        return len(self._participation)

    def evaluation_x(self) -> Vector:
        """Return the parameters [P] used for validation and checkpoints."""
        return self.algorithm.evaluate_at(self.x, self.state)

    @cached_property
    def _new_client(self) -> State:
        """The names, shapes and types of a new client's state, on the meta device."""
        return {name: value.to("meta") for name, value in self.new_client().items()}

    def new_client(self) -> State:
        """Return the state of a client that has not participated yet."""
        own = {PERSONAL: self.personal} if self.personal.numel() else {}
        own |= {LOCAL_STEPS: torch.tensor(0)} if self.counts_steps else {}
        x = self.start if self.algorithm.init_client_at_start else self.x
        return {**self.algorithm.init_client(x), **own}

    @property
    def expected_state(self) -> ExpectedState:
        """The expected names, shapes and types of the clients' states."""
        buffers = {name: self.buffers[name] for name in self.kept_buffers}
        method, device = type(self.algorithm).__name__, self.x.device
        return ExpectedState(method, self._new_client, buffers, self.num_parameters, self.ids, device)

    def client_state(self, index: int) -> State:
        """Return a client's state, a new one if it has not participated yet."""
        kept = self.clients.get(index)
        return self.new_client() if kept is None else self.expected_state.to_device(kept)

    def close_round(
        self,
        mean: State,
        models: Vector | None,
        state: State,
        cohort: Cohort,
        buffers: State,
        products: ProductSums | None = None,
    ) -> float:
        """Take the server's step, keep the round's states, and return the Euclidean norm of the step.

        ``mean`` has the averaged messages; if no client participated it is empty, and x stays as it is. ``models`` is
        the mean of the client models if "delta" is their change, and ``state`` the server state during the round.
        """
        norm = 0.0
        if mean:
            before = self.x.clone()
            found = self.algorithm.update_server(before, state, mean, cohort)
            if not (isinstance(found, tuple) and len(found) == 2):
                raise FederatedError(
                    f"{type(self.algorithm).__name__}.update_server() must return a direction and the server state,"
                    f" found {type(found).__name__}. Return mean['delta'], server to leave both as they are."
                )
            direction, state = found
            if not isinstance(direction, Tensor) or (direction.shape, direction.dtype) != (before.shape, before.dtype):
                kind = f"{list(direction.shape)} of {direction.dtype}" if isinstance(direction, Tensor) else direction
                raise FederatedError(
                    f"{type(self.algorithm).__name__}.update_server() must return a direction like x, which is"
                    f" {list(before.shape)} of {before.dtype}, found {kind}."
                )
            models = models if direction is mean.get("delta") else None
            if self.lora is not None and not (models is not None and self.step.takes_mean):
                raise FederatedError(lora_needs_mean(f"{self.algorithm!r} does more"))
            self.step.step(direction, models)
            if self.lora is not None and products is not None:
                self.lora.close_round(before, self.x, products)
            norm = _distance(self.x, before)
        self.state = {name: value.detach() for name, value in state.items()}
        if buffers is not self.buffers:
            self.take_buffers(buffers)
        self.clients.commit()
        if self.step.scheduler is not None:
            self.step.end_round()
        self.round += 1
        if self._options is not None:
            options, self._options = self._options, None
            self._check_options(options)
        return norm

    def _check_options(self, before: Mapping[str, Any]) -> None:
        """Raise if the method's options changed in the first round: a resumed run would lose the change."""
        now = plain_options(self.algorithm.options())
        for key in now.keys() | before.keys():
            if now.get(key) != before.get(key):
                raise FederatedError(
                    f"{type(self.algorithm).__name__} has changed its attribute {key!r} in a round. A method keeps"
                    " hyper-parameters in attributes and all else in the states that its hooks return, so that it can"
                    " be resumed. A value that depends on the round is a state, too: begin_round(x, server, cohort)"
                    " may compute it from cohort.round. If a callback sets it, give the method the value of the"
                    " first round."
                )

    def take_buffers(self, buffers: State) -> None:
        """Replace the buffers and record which of them changed."""
        same = are_equal((buffers[name], old) for name, old in self.buffers.items())
        self.moved_buffers |= {name for name, is_same in zip(self.buffers, same, strict=True) if not is_same}
        self.buffers = buffers

    def count(self, indices: Sequence[int], bytes_up: int, bytes_down: int, longest_steps: int = 0) -> None:
        """Add a round to the run's totals: participating clients, bytes up and down, the most steps of a client."""
        self._participation.add(indices)
        if self.longest_steps is not None:
            self.longest_steps += longest_steps
        self.bytes_up += bytes_up
        self.bytes_down += bytes_down

    def identity(self) -> dict[str, Any]:
        """Return copies of the method's name and options, the client ids and the seed."""
        clients: Any = len(self.ids)
        if self.ids != range(clients):  # loading NumPy numbers would run code
            clients = [i.item() if hasattr(i, "item") else i for i in self.ids]
        return {
            "seed": self.seed,
            "algorithm": type(self.algorithm).__name__,
            "options": plain_options(self.algorithm.options()),
            "clients": clients,
        }

    def state_dict(self, client_states: Mapping[Any, Any] | None = None) -> dict[str, Any]:
        """Return the state after the last completed round; ``client_states`` replaces the states of all clients."""
        return {
            "format": FORMAT,
            "round": self.round,
            **self.identity(),
            "step": self.step.state_dict(),
            "state": dict(self.state),
            "client_states": self.clients.state_dict() if client_states is None else client_states,
            "buffers": dict(self.buffers),
            "personal": self.personal,
            "start": self.start,
            "moved_buffers": sorted(self.moved_buffers),
            "seen": self._participation.saved(),
            "bytes": [self.bytes_up, self.bytes_down],
            **({} if self.lora is None else {"lora": self.lora.state_dict()}),
            "longest_steps": self.longest_steps,
            **({} if self.ledger is None else {"ledger": self.ledger.saved()}),
        }

    def load_state_dict(
        self,
        saved: dict[str, Any],
        any_seed: bool = False,
        is_mine: Callable[[int], bool] = lambda index: True,
        origin: Origin = CHECKPOINT,
    ) -> None:
        """Load the result of :meth:`state_dict`; raise if method, options, clients or model differ.

        Without ``any_seed``, the seed must not differ either. ``is_mine`` selects the clients, by stored index, whose
        states are kept in this process.
        """
        mine = self.identity()
        for key, what in _IDENTITY.items():
            if saved[key] != mine[key] and not (key == "seed" and any_seed):
                there, here = _short(saved[key], mine[key]), _short(mine[key], saved[key])
                by_hook = (
                    " If a callback set them in that run, give the method its last values." if key == "options" else ""
                )
                raise FederatedError(
                    f"{origin.name}'s {what} is {there}, {origin.this}'s is {here}. {origin.remedy(f'the {what}')}"
                    f"{by_hook}"
                )
        for kind, frozen, own, model in (
            ("trainable", "frozen", saved["step"]["x"], self.x),
            ("personal", "personal", saved["personal"], self.personal),
        ):
            if own.shape != model.shape:
                raise FederatedError(
                    f"{origin.name} {origin.has} {own.numel():,} {kind} parameters, the model has {model.numel():,}."
                    f" {origin.remedy(f'the model and the {frozen} parameters')}"
                )
        for name, value in self.state.items():
            if (there := saved["state"].get(name, value)).shape != value.shape:
                raise FederatedError(
                    f"{origin.name}'s server state {name!r} has shape {list(there.shape)}, {origin.this}'s"
                    f" {list(value.shape)}. {origin.remedy('the method')}"
                )
        device = self.x.device
        self.round, self.seed = int(saved["round"]), int(saved["seed"])
        self.step.load_state_dict(saved["step"], origin)
        self.state = {name: value.to(device) for name, value in saved["state"].items()}
        self.clients.load_state_dict(saved["client_states"], is_mine)
        self.buffers = {name: value.to(device) for name, value in saved["buffers"].items()}
        self.personal, self.start = saved["personal"].to(device), saved["start"].to(device)
        self.moved_buffers = {name for name in saved["moved_buffers"] if name in self.buffers}
        self._participation.load(saved["seen"])
        self.bytes_up, self.bytes_down = saved["bytes"]
        if self.lora is not None:
            self.lora.load_state_dict(saved["lora"], origin)
        longest = saved.get("longest_steps")  # absent in checkpoints of earlier versions
        self.longest_steps = None if longest is None else int(longest)
        if self.ledger is not None:  # the settings were compared before, so the other run had one too
            self.ledger.load(saved["ledger"])


_IDENTITY = {"algorithm": "method", "options": "method options", "clients": "client list", "seed": "seed"}

_BLOCK = 2**16  # numbers per block, so that intermediate results stay in a CPU's cache


def _distance(one: Vector, other: Vector) -> float:
    """Return the Euclidean distance of two vectors [P] without allocating their difference on the CPU."""
    if one.device.type != "cpu":
        return float(torch.linalg.vector_norm(one - other))
    blocks = zip(one.split(_BLOCK), other.split(_BLOCK), strict=True)
    return math.hypot(*(float(torch.linalg.vector_norm(a - b)) for a, b in blocks))


def _short(value: Any, other: Any) -> str:
    """Return a value as text; a long list starts at its first difference from the other one."""
    text, before = repr(value), ""
    if len(text) > 80 and isinstance(value, list) and isinstance(other, list):
        start = next((n for n, (a, b) in enumerate(zip(value, other, strict=False)) if a != b), len(other))
        if start := min(start, len(value) - 1):
            before, text = f"{len(value):,} long, from number {start:,} on ", repr(value[start:])
    return before + (text if len(text) <= 80 else f"{text[:77]}...")
