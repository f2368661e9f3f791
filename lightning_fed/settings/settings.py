"""The settings of a federated run: the trainer's arguments, checked and completed."""

import copy
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args, get_origin

from torch.optim import Optimizer

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.algorithms.fedavg import FedAvg
from lightning_fed.core.arguments import (
    check_count,
    check_number,
    check_one_of,
    check_paths,
    check_patterns,
    check_seed,
)
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.origin import CHECKPOINT, Origin
from lightning_fed.core.types import LocalScheduleMode, Weighting
from lightning_fed.server.aggregation.compression import Compressor
from lightning_fed.server.aggregation.lora import lora_needs_mean, takes_mean_model
from lightning_fed.server.aggregation.mean import Aggregator
from lightning_fed.server.asynchronous import Asynchronous, FedAsync
from lightning_fed.server.attacks import Attack
from lightning_fed.server.heterogeneity import SystemsHeterogeneity
from lightning_fed.server.optimal_sampling import OptimalClientSampling, check_sends_changes
from lightning_fed.server.privacy import ClientPrivacy, DifferentialPrivacy, accountant
from lightning_fed.server.sampling import Sampler, UniformSampler, learns
from lightning_fed.server.server import ServerOptimizerFactory, ServerSchedulerFactory, plain_sgd, resolve_weighting

MAX_FAILED_SHARE = 0.5
MAX_UPDATE_RATIO = 1e6

_TRAINER = "FederatedTrainer"
_WORK = (
    "local_epochs",
    "local_steps",
    "local_schedule",
    "sampler",
    "heterogeneity",
    "attack",
    "weighting",
    "buffers",
    "gradient_clip_on",
    "local_optimizer_state",
    "gradient_sampler",
)


@dataclass(frozen=True)
class Settings:
    """The settings of rounds: arguments of :class:`lightning_fed.FederatedTrainer`, which documents them.

    ``__post_init__`` checks and completes them: attributes have the values that the run uses, even if the trainer got
    None.

    Attributes:
        seed_is_given: Whether the seed is the trainer's argument rather than that of ``seed_everything``.
        is_private: Whether noise hides the messages of single clients.
        keeps_solver: Whether clients keep the state of their local optimizer from round to round.
        drops_failed: Whether failed clients are dropped from the round instead of stopping the run.
        has_personal_parameters: Whether parameters or buffers stay on each client.
        sampler_learns: Whether the sampler reads reports; :attr:`sampler` is then a copy of the user's.
        sampler_start: The state of such a sampler at the start of a run.
    """

    algorithm: Algorithm
    personal: Sequence[str]
    as_buffers: Sequence[str]
    lora: Literal["separate", "frozen_a", "exact"]
    clients_per_round: int | float | None
    local_epochs: int | None
    local_steps: int | None
    local_schedule: LocalScheduleMode | None
    server_optimizer: ServerOptimizerFactory
    server_lr_scheduler: ServerSchedulerFactory | None
    heterogeneity: SystemsHeterogeneity | None
    sampler: Sampler
    gradient_sampler: Sampler
    weighting: Weighting
    aggregator: Aggregator | None
    attack: Attack | None
    client_privacy: ClientPrivacy | None
    asynchronous: Asynchronous | None
    compression: Compressor | None
    engine: Literal["sequential", "vectorized", "auto"]
    chunk_size: int | None
    seed: int
    buffers: Literal["average", "server", "local"]
    local_optimizer_state: Literal["reset", "keep"]
    gradient_clip_on: Literal["gradient", "corrected"]
    client_states: Literal["memory", "disk", "auto"]
    client_states_dir: str | None
    on_client_error: Literal["raise", "drop"]
    max_failed_share: float
    max_update_ratio: float | None
    seed_is_given: bool = field(init=False)
    is_private: bool = field(init=False)
    keeps_solver: bool = field(init=False)
    drops_failed: bool = field(init=False)
    has_personal_parameters: bool = field(init=False)
    sampler_learns: bool = field(init=False)
    sampler_start: dict[str, Any] = field(init=False)

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> "Settings":
        """Return the settings in a trainer's arguments by name, defaults included."""
        return cls(**{one.name: arguments[one.name] for one in fields(cls) if one.init})

    def __post_init__(self) -> None:
        """Check the arguments, and replace unset ones."""
        self._set(seed_is_given=self.seed is not None)
        seed = check_seed(_TRAINER, self.seed) if self.seed_is_given else int(os.environ.get("PL_GLOBAL_SEED", "0"))
        self._set(seed=seed)
        self._set(is_private=isinstance(self.aggregator, DifferentialPrivacy))
        self._set(keeps_solver=self.local_optimizer_state == "keep", drops_failed=self.on_client_error == "drop")
        self._set(algorithm=FedAvg() if self.algorithm is None else self.algorithm)
        self._set(server_optimizer=plain_sgd if self.server_optimizer is None else self.server_optimizer)
        self._check_algorithm()
        self._set(personal=check_patterns(_TRAINER, self.personal))
        self._set(has_personal_parameters=bool(self.personal) or self.algorithm.overrides("personal_names"))
        self._set(as_buffers=check_patterns(_TRAINER, self.as_buffers, name="as_buffers"))
        self._check_choices()
        self._check_numbers()
        self._check_local_work()
        self._check_local_schedule()
        self._check_callables()
        self._check_participation()
        self._check_lora()
        self._settle_messages()
        self._settle_learning()
        self._set(client_states_dir=self._folder())

    def _set(self, **values: Any) -> None:
        vars(self).update(values)  # the class is frozen for other code

    # ------------------------------------------------------------------ derived settings

    @property
    def clients_keep_state(self) -> bool:
        """True if clients are known to keep any state from round to round."""
        feeds_back = self.compression is not None and self.compression.error_feedback
        is_asked = self.keeps_solver or self.buffers == "local" or self.has_personal_parameters
        is_asked = is_asked or self.local_schedule == "continue"
        return self.algorithm.overrides("init_client") or is_asked or feeds_back

    @property
    def has_own_models(self) -> bool:
        """True if clients have personal models that differ from the server's."""
        return self.has_personal_parameters or self.algorithm.overrides("evaluate_client_at")

    def steps(self, num_batches: int, accumulated: int) -> int:
        """Return a client's requested number of optimizer steps, given its batches per local epoch and per step."""
        if not self.algorithm.local_work or num_batches == 0:
            return 0
        if self.local_epochs is not None:
            return -(-num_batches // accumulated) * self.local_epochs
        return self.local_steps or 0

    def first_step(self, round: int, longest_steps: int | None) -> int:
        """Return the run's step when the clients of a round begin; 0 unless schedules count steps of the run.

        ``longest_steps`` is the sum, over earlier rounds, of the largest number of steps of a client; None if unknown.
        """
        if self.local_schedule != "total":
            return 0
        if self.local_steps is not None:
            return round * self.local_steps
        if longest_steps is None:
            raise FederatedError(
                "local_schedule='total' with local_epochs needs the steps of the earlier rounds, and the checkpoint is"
                " of an earlier version, which did not count them. Set local_steps instead, or start from its weights"
                " alone: Model.load_from_checkpoint(path), then fit without ckpt_path."
            )
        return longest_steps

    # ------------------------------------------------------------------ settings in checkpoints

    def transport(self) -> dict[str, str]:
        """Return the settings for combining messages, for checkpoints."""
        noted = {"aggregator": repr(self.aggregator), "compression": repr(self.compression)}
        noted |= {"client_privacy": repr(self.client_privacy)} if self.client_privacy else {}
        noted |= {"personal": repr(list(self.personal))} if self.personal else {}
        noted |= {"as_buffers": repr(list(self.as_buffers))} if self.as_buffers else {}
        noted |= {"lora": repr(self.lora)} if self.lora != "separate" else {}
        # privacy accounting depends on the sampler's probability
        return {**noted, "sampler": repr(self.sampler)} if self.is_private else noted

    def check_transport(self, saved: Mapping[str, str], origin: Origin = CHECKPOINT) -> None:
        """Raise if this run continues one that combined messages in a different way, given its :meth:`transport`."""
        mine = self.transport()
        for name in sorted({*saved, *mine}):
            unset = repr("separate") if name == "lora" else "None"
            if (there := saved.get(name, unset)) != (here := mine.get(name, unset)):
                why = (
                    f": the privacy spent so far is accounted for with its probability. {origin.remedy('the sampler')}"
                    if name == "sampler"
                    else f". {origin.remedy(f'the {name}')}"
                )
                raise FederatedError(f"{origin.name}'s {name} is {there}, {origin.this}'s is {here}{why}")

    def work(self) -> dict[str, str]:
        """Return the settings for sampling, weights and local work, for checkpoints."""
        chosen = {name: getattr(self, name) for name in _WORK}
        noted = {name: repr(value) for name, value in chosen.items()}
        for name in [name for name, text in noted.items() if " at 0x" in text]:  # addresses differ between processes
            noted[name] = str(getattr(chosen[name], "__qualname__", type(chosen[name]).__name__))
        return noted | ({"gradient_sampler": "the sampler"} if self.gradient_sampler is self.sampler else {})

    # ------------------------------------------------------------------ checks

    def _check_algorithm(self) -> None:
        if not isinstance(self.algorithm, Algorithm):
            made = f"; write {self.algorithm.__name__}()" if isinstance(self.algorithm, type) else ""
            raise FederatedError(f"algorithm must be an Algorithm such as FedAvg(), found {self.algorithm!r}{made}.")

    def _check_choices(self) -> None:
        """Raise for values that an argument does not allow, and choices that the method rules out."""
        for one in fields(self):
            if get_origin(one.type) is Literal:
                check_one_of(_TRAINER, one.name, getattr(self, one.name), get_args(one.type))
        if self.keeps_solver and self.algorithm.uses_solver_state:
            raise FederatedError(
                f"local_optimizer_state='keep' cannot be combined with {self.algorithm!r}, which loads the server's"
                " statistics into the local optimizer before every step. Leave it at 'reset'."
            )
        if self.keeps_solver:
            self._check_has_local_work("local_optimizer_state", "Leave it at 'reset'.")

    def _check_has_local_work(self, name: str, remedy: str = "Leave it unset.") -> None:
        if not self.algorithm.local_work:
            raise FederatedError(
                f"{name}={getattr(self, name)!r} does not apply to {type(self.algorithm).__name__}, whose clients take"
                f" no local steps. {remedy}"
            )

    def _given(self, *names: str) -> Iterator[tuple[str, Any, str]]:
        """Yield the name and value of each of these arguments that is not at its default, and how to unset it."""
        for name in names:
            if (value := getattr(self, name)) not in (None, "raise"):
                yield name, value, "Leave it at 'raise'." if value == "drop" else "Leave it unset."

    def _check_numbers(self) -> None:
        for name in ("chunk_size", "local_epochs", "local_steps"):
            if (value := getattr(self, name)) is not None:
                self._set(**{name: check_count(_TRAINER, name, value)})
        if self.chunk_size is not None and self.engine == "sequential":
            raise FederatedError(
                f"chunk_size={self.chunk_size} is of no use to engine='sequential', which runs one client at a time."
                " Leave it unset."
            )
        check_number(_TRAINER, "max_failed_share", self.max_failed_share, "(0, 1]")
        if self.max_failed_share != MAX_FAILED_SHARE and not self.drops_failed:
            raise FederatedError(
                f"max_failed_share={self.max_failed_share} is of no use to on_client_error='raise', which stops the run"
                " at the first client that fails. Leave it unset, or pass on_client_error='drop'."
            )
        if self.max_update_ratio not in (None, math.inf):
            check_number(_TRAINER, "max_update_ratio", self.max_update_ratio, "(1, inf)")

    def _check_local_work(self) -> None:
        for name in ("local_epochs", "local_steps"):
            if getattr(self, name) is not None:
                self._check_has_local_work(name)
        if self.local_epochs is not None and self.local_steps is not None:
            raise FederatedError(
                f"Pass local_epochs or local_steps, not both; found local_epochs={self.local_epochs} and"
                f" local_steps={self.local_steps}."
            )
        if self.algorithm.local_work and self.local_epochs is None and self.local_steps is None:
            raise FederatedError(
                f"{type(self.algorithm).__name__} needs local work: pass local_epochs (passes over a client's data) or"
                " local_steps (optimizer steps)."
            )

    def _check_local_schedule(self) -> None:
        chosen = self.local_schedule
        if chosen is None:
            return
        check_one_of(_TRAINER, "local_schedule", chosen, get_args(LocalScheduleMode))
        self._check_has_local_work("local_schedule")
        if chosen == "total" and self.local_steps is None and self.is_private:
            raise FederatedError(
                f"local_schedule='total' with local_epochs cannot be combined with aggregator={self.aggregator!r}: the"
                " rates would reveal the size of the largest client of each round, which the accounting leaves out. Set"
                " local_steps instead, or use local_schedule='restart'."
            )

    def _check_callables(self) -> None:
        for name in ("sampler", "gradient_sampler", "server_optimizer", "server_lr_scheduler", "heterogeneity"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                found = f"an instance of {type(value).__name__}" if isinstance(value, Optimizer) else repr(value)
                hint = " Write functools.partial(FedAdam, lr=0.1), say." if name == "server_optimizer" else ""
                raise FederatedError(f"{name} must be callable, found {found}.{hint}")
            if isinstance(value, type) and not name.startswith("server_"):
                raise FederatedError(f"{name}={value.__name__} is a class: make one, as in {value.__name__}(...).")

    def _check_lora(self) -> None:
        if self.lora != "exact":
            return
        for name, value, _ in self._given("aggregator", "asynchronous", "compression"):
            raise FederatedError(lora_needs_mean(f"{name}={value!r} changes it"))
        if self.attack is not None and self.attack.changes_messages:
            raise FederatedError(lora_needs_mean(f"attack={self.attack!r} changes what clients send"))
        if getattr(self.sampler, "probabilities", None) is not None:
            raise FederatedError(lora_needs_mean(f"sampler={self.sampler!r} makes an estimate of it"))
        if self.algorithm.population_loss or not takes_mean_model(self.algorithm):
            raise FederatedError(lora_needs_mean(f"{self.algorithm!r} does more"))

    def _check_participation(self) -> None:
        if self.sampler is not None and self.clients_per_round is not None:
            raise FederatedError(
                f"Both sampler={self.sampler!r} and clients_per_round={self.clients_per_round!r} were given: the"
                " sampler decides how many clients take part. Leave clients_per_round unset."
            )
        method = self.algorithm
        has_own_cohort = method.full_grad_at and method.full_grad_for != "client" and method.grad_cohort == "own"
        if self.gradient_sampler is not None and not has_own_cohort:
            own = ", or choose grad_cohort='own'" if "grad_cohort" in method.options() else ""
            raise FederatedError(
                f"gradient_sampler={self.gradient_sampler!r} does not apply to {method!r}, which does not average"
                f" gradients over their own cohort. Leave it unset{own}."
            )
        if self.heterogeneity is not None:
            self._check_has_local_work("heterogeneity")

    def _settle_messages(self) -> None:
        """Set the samplers, the aggregator and the weighting of messages, and check them."""
        aggregator, sampler = self.aggregator, self.sampler
        if self.asynchronous is not None:
            self._check_asynchronous()
            aggregator = sampler = self.asynchronous
        if sampler is None:
            sampler = UniformSampler(1.0 if self.clients_per_round is None else self.clients_per_round)
        weighting = resolve_weighting(self.algorithm, self.weighting)
        if aggregator is not None:
            if not isinstance(aggregator, Aggregator):
                raise FederatedError(
                    f"aggregator must be an Aggregator such as CoordinateMedian(), found {aggregator!r}."
                )
            aggregator = aggregator.for_run(self.algorithm, self.weighting, sampler)
            weighting = weighting if aggregator.weighted else "uniform"
            sampler = aggregator if isinstance(aggregator, Asynchronous) else sampler
        self._set(aggregator=aggregator, sampler=sampler, weighting=weighting)
        self._set(gradient_sampler=sampler if self.gradient_sampler is None else self.gradient_sampler)
        if self.is_private:
            self._check_private()
        if self.attack is not None and not isinstance(self.attack, Attack):
            raise FederatedError(f"attack must be an Attack such as SignFlipAttack(0.2), found {self.attack!r}.")
        if self.client_privacy is not None:
            self._check_client_privacy()
        if self.compression is not None and not isinstance(self.compression, Compressor):
            raise FederatedError(f"compression must be a Compressor such as TopK(0.01), found {self.compression!r}.")
        feeds_back = self.compression is not None and self.compression.error_feedback
        if feeds_back and isinstance(self.aggregator, OptimalClientSampling):
            raise FederatedError(
                f"compression={self.compression!r} cannot be combined with aggregator={self.aggregator!r}: a client"
                " that is not drawn would have to take back the residual of a message that it has not sent. Use a"
                " compression without error feedback, such as QSGD()."
            )

    def _settle_learning(self) -> None:
        """Give the run its own copy of a learning sampler, and check settings for a sampler with probabilities."""
        sampler: Any = self.sampler
        is_learning, start = learns(sampler), dict[str, Any]()
        if self.gradient_sampler is not sampler and learns(self.gradient_sampler):
            raise FederatedError(
                f"gradient_sampler={self.gradient_sampler!r} learns from reports, which only clients that train send."
                " Pass it as sampler, or a gradient_sampler that does not learn."
            )
        if is_learning:
            try:
                own = copy.deepcopy(sampler)
            except Exception as error:
                raise FederatedError(
                    f"sampler={sampler!r} learns from reports, and so each run works on a copy of it; making one ended"
                    f" in {type(error).__name__}: {error}. Keep what cannot be copied outside, or define __deepcopy__."
                ) from error
            start = copy.deepcopy(own.state_dict())
            self._set(gradient_sampler=own if self.gradient_sampler is sampler else self.gradient_sampler, sampler=own)
        self._set(sampler_learns=is_learning, sampler_start=start)
        if hasattr(sampler, "probabilities"):
            self._check_estimate()

    def _check_estimate(self) -> None:
        """Raise if the sum over the cohort would not be an unbiased estimate of the mean over all clients."""
        who = f"sampler={self.sampler!r} weights clients by their probabilities, and so"
        check_sends_changes(who, self.algorithm)
        if self.weighting not in ("examples", "uniform"):
            raise FederatedError(
                f"{who} cannot be combined with weighting={self.weighting!r}, which is unknown for clients outside the"
                " cohort. Set 'examples' or 'uniform'."
            )
        reasons = {
            "aggregator": "is no weighted sum",
            "heterogeneity": "may drop clients that were drawn, or some of their work",
            "on_client_error": "drops clients that were drawn",
        }
        for name, value, remedy in self._given(*reasons):
            raise FederatedError(f"{who} cannot be combined with {name}={value!r}, which {reasons[name]}. {remedy}")

    def _check_asynchronous(self) -> None:
        if not isinstance(self.asynchronous, Asynchronous):
            raise FederatedError(
                "asynchronous must be an Asynchronous such as FedBuff(size=10, concurrency=100), found"
                f" {self.asynchronous!r}."
            )
        names = ("clients_per_round", "sampler", "aggregator", "heterogeneity", "on_client_error")
        for name, value, remedy in self._given(*names):
            raise FederatedError(
                f"{name}={value!r} cannot be combined with asynchronous={type(self.asynchronous).__name__}(...), which"
                f" determines who begins when, how long clients take and how their answers count. {remedy}"
            )
        sends_gradients = getattr(self.algorithm, "pseudo_grad", "raw") == "normalized"
        if isinstance(self.asynchronous, FedAsync) and sends_gradients:
            raise FederatedError(
                "asynchronous=FedAsync(...) moves the server towards the models of clients, and those of"
                f" {self.algorithm!r} send mean gradients. Set pseudo_grad='raw', or use FedBuff(...)."
            )

    def _check_private(self) -> None:
        reasons = {
            "compression": ": what compression leaves out of one round and sends in another is not bounded by the"
            " clipping",
            "heterogeneity": ", whose guarantee is for cohorts that the sampler's probability alone decides",
            "on_client_error": ": which clients are dropped depends on others in the cohort, and the guarantee is about"
            " the sum over those drawn",
        }
        for name, value, remedy in self._given(*reasons):
            raise FederatedError(
                f"{name}={value!r} cannot be combined with aggregator={self.aggregator!r}{reasons[name]}. {remedy}"
            )

    def _check_client_privacy(self) -> None:
        privacy, method = self.client_privacy, self.algorithm
        if not isinstance(privacy, ClientPrivacy):
            raise FederatedError(
                "client_privacy must be a ClientPrivacy such as ClientPrivacy(noise_multiplier=1.0, max_grad_norm=1.0),"
                f" found {privacy!r}."
            )
        accountant("ClientPrivacy")  # raises without Opacus
        if (use := method.reads_beyond_steps) is not None:
            raise FederatedError(
                f"client_privacy={privacy!r} cannot be combined with {method!r}, {use}, without noise. Use a method"
                " that reads data through one gradient per step only, such as FedAvg, FedProx or Scaffold(option='ii')."
            )
        reasons = {
            "engine='vectorized'": (self.engine == "vectorized", "runs no single examples. Set engine='sequential'"),
            "asynchronous=...": (self.asynchronous is not None, "does not count what a client spends. Leave it unset"),
            "on_client_error='drop'": (self.drops_failed, "depends on clients' data. Leave it at 'raise'"),
            f"sampler={self.sampler!r}": (
                learns(self.sampler) or hasattr(self.sampler, "needs_losses_of"),
                "chooses clients by losses or reports, to which no noise is added. Use another sampler",
            ),
        }
        for name, (is_set, reason) in reasons.items():
            if is_set:
                raise FederatedError(f"client_privacy={privacy!r} cannot be combined with {name}, which {reason}.")

    def _folder(self) -> str | None:
        folder: Any = self.client_states_dir
        if folder is None:
            return None
        check_paths(_TRAINER, client_states_dir=folder)
        if self.client_states == "memory":
            raise FederatedError(
                f"client_states_dir={str(folder)!r} is of no use to client_states='memory'. Leave it unset, or"
                " pass client_states='disk'."
            )
        return str(folder)


def cut(steps: int, num_batches: int, accumulated: int) -> tuple[int, ...]:
    """Return the batches of each local epoch for ``steps`` optimizer steps; the last epoch may be shorter."""
    if steps == 0:
        return ()
    whole, rest = divmod(steps, -(-num_batches // accumulated))
    return (num_batches,) * whole + ((min(num_batches, rest * accumulated),) if rest else ())
