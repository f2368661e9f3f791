"""FedAvg in plain PyTorch: as tight a loop as keeps autograd and ordinary modules."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from systems.measure import Outcome, Settings, Stopwatch
from systems.networks import build, logits_of
from systems.problem import Problem

__all__ = ["run"]


def run(problem: Problem, settings: Settings, stopwatch: Stopwatch) -> Outcome:
    """Train in this process, or in several forked ones that share the server's parameters."""
    processes = settings.devices or 1
    torch.set_num_threads(1)
    torch.manual_seed(0)
    trainer = _Trainer(problem, settings.accelerator)
    if processes == 1:
        _in_one_process(trainer, settings, stopwatch)
    else:
        _in_processes(trainer, settings, stopwatch, processes)
    with torch.no_grad():
        torch._foreach_copy_(trainer.params, trainer.x)
    config = {"version": torch.__version__, "processes": processes, "threads": 1, "accelerator": settings.accelerator}
    return Outcome(logits_of(trainer.net), config)


class _Trainer:
    """The clients' work.

    Attributes:
        x: The server's parameters.
    """

    def __init__(self, problem: Problem, accelerator: str) -> None:
        self.problem = problem
        self.device = torch.device("cuda" if accelerator == "gpu" else "cpu")
        self.inputs = torch.from_numpy(problem.x).to(self.device)
        self.targets = torch.from_numpy(problem.y).to(self.device)
        self.net = build(problem).to(self.device)
        self.params = list(self.net.parameters())
        self.x = [p.detach().clone() for p in self.params]

    def train(self, cohort: list[tuple[int, float]], total: list[Tensor]) -> None:
        """Add the weighted models of a cohort of (client, weight) to a total."""
        workload = self.problem.workload
        for client, weight in cohort:
            first, end = self.problem.rows(client)
            with torch.no_grad():
                torch._foreach_copy_(self.params, self.x)
            for _ in range(workload.epochs):
                order = (torch.randperm(end - first) + first).to(self.device)
                batches = zip(self.inputs[order].split(workload.batch), self.targets[order].split(workload.batch))  # noqa: B905
                for inputs, targets in batches:
                    grads = torch.autograd.grad(F.cross_entropy(self.net(inputs), targets), self.params)
                    with torch.no_grad():
                        torch._foreach_add_(self.params, grads, alpha=-workload.lr)
            with torch.no_grad():
                torch._foreach_add_(total, self.params, alpha=weight)

    def shares(self, round: int, processes: int) -> list[list[tuple[int, float]]]:
        """Deal the cohort to processes, the largest client first, each to the one with the least to do."""
        cohort = self.problem.cohort(round)
        sizes = {c: self.problem.rows(c)[1] - self.problem.rows(c)[0] for c in cohort}
        examples = sum(sizes.values())
        loads, shares = [0] * processes, [[] for _ in range(processes)]  # type: ignore[var-annotated]
        for client in sorted(cohort, key=lambda c: -sizes[c]):
            least = loads.index(min(loads))
            loads[least] += sizes[client]
            shares[least].append((client, sizes[client] / examples))
        return shares


def _in_one_process(trainer: _Trainer, settings: Settings, stopwatch: Stopwatch) -> None:
    def tick() -> None:
        if trainer.device.type == "cuda":
            torch.cuda.synchronize()
        stopwatch.tick()

    tick()
    for r in range(settings.total):
        total = [torch.zeros_like(p) for p in trainer.x]
        trainer.train(trainer.shares(r, 1)[0], total)
        torch._foreach_copy_(trainer.x, total)
        tick()


def _in_processes(trainer: _Trainer, settings: Settings, stopwatch: Stopwatch, processes: int) -> None:
    if trainer.device.type != "cpu":
        raise SystemExit("The plain loop runs in several processes on CPUs only.")
    context = torch.multiprocessing.get_context("fork")
    for p in trainer.x:
        p.share_memory_()
    totals = [[torch.zeros_like(p).share_memory_() for p in trainer.x] for _ in range(processes)]
    orders, done = [context.SimpleQueue() for _ in range(processes)], context.SimpleQueue()
    workers = [
        context.Process(target=_work, args=(trainer, rank, processes, totals[rank], orders[rank], done), daemon=True)
        for rank in range(processes)
    ]
    for worker in workers:
        worker.start()
    stopwatch.tick()
    for r in range(settings.total):
        for queue in orders:
            queue.put(r)
        for _ in workers:
            done.get()
        for p, *parts in zip(trainer.x, *totals, strict=True):
            p.copy_(sum(parts))  # type: ignore[arg-type]
        stopwatch.tick()
    for queue in orders:
        queue.put(None)
    for worker in workers:
        worker.join()


def _work(trainer: _Trainer, rank: int, processes: int, total: list[Tensor], orders: Any, done: Any) -> None:
    """Train this process's share of every round that is ordered."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    while (r := orders.get()) is not None:
        torch._foreach_zero_(total)
        trainer.train(trainer.shares(r, processes)[rank], total)
        done.put(rank)
