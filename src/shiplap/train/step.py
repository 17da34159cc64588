"""One optimizer step: forward and backward over the micro-batches, clipping, update."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from shiplap.config import OptimizerOptions, UserError
from shiplap.dist import GlobalEnv
from shiplap.dist.agreement import AgreedError, fail_together
from shiplap.dist.collectives import Group, all_reduce, size_of
from shiplap.dist.hooks import ExposedTime, measuring
from shiplap.layers.moe import Balance
from shiplap.models.decoder import DecoderModel
from shiplap.optim import clip_gradients, learning_rate_at, set_learning_rate
from shiplap.parallel import accumulating

Batch = tuple[Tensor, Tensor]
"""Tokens and targets, each int64 `[B, S]`."""
_MEASURED_ON_CUDA = 10
"""Waits are measured in one of so many steps there. A wait's two events cost 15 µs of a host whose launches cost 10
(one H200, 2026-11-30); `llama3-1b` at TP 2 has some 200 waits a step, so measuring every step could cost 3 ms of 120
where launches are the limit. In one step of ten that is a quarter of a percent. On the CPU a wait costs a
microsecond."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step found; the same on all ranks, but for the time.

    Attributes:
        loss: mean cross-entropy over the micro-batches and data-parallel ranks.
        grad_norm: of the whole model, before clipping.
        learning_rate: used in this step.
        exposed_tp_comm_ms: see `StepRecord`; this rank's own.
        balance_loss: see `StepRecord`.
        tokens_per_expert: see `StepRecord`.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    exposed_tp_comm_ms: float | None
    balance_loss: float | None = None
    tokens_per_expert: list[list[int]] | None = None


@dataclass(frozen=True, kw_only=True)
class TrainStep:
    """What a step needs; called with the step's number and data.

    Attributes:
        model: this rank's shard of the model.
        replica: the model as `parallel.apply` gave it.
        optimizer: of the model's parameters.
        options: rates and clipping.
        dtype: `float32` or `bfloat16`.
        balance_coefficient: weight of the load-balancing loss in the model's loss.
        env: device and groups.
        exposed: measures the waits for communication.
    """

    model: DecoderModel
    replica: nn.Module
    optimizer: AdamW
    options: OptimizerOptions
    dtype: str
    balance_coefficient: float
    env: GlobalEnv
    exposed: ExposedTime

    def __call__(self, step: int, micro_batches: list[Batch]) -> StepResult:
        """Take step `step`, counted from 0.

        Raises:
            AgreedError: on every rank, if the norm is infinite or not a number.
        """
        learning_rate = learning_rate_at(step, self.options)
        set_learning_rate(self.optimizer, learning_rate)
        self.optimizer.zero_grad()
        measures = self.env.device.type == "cpu" or step % _MEASURED_ON_CUDA == 0
        with measuring(self.exposed) if measures else nullcontext():
            own_loss = self._accumulate_gradients(micro_batches)
            norm = clip_gradients(self.model, max_norm=self.options.grad_clip, group=self.env.group("tp"))
        balance = self.model.take_balance()
        group = self.env.group("dp")
        loss = all_reduce(own_loss, group).wait() / size_of(group)
        self.optimizer.step()
        # The step's only wait for the device: the check comes after the update, which nobody will use if it fails.
        loss_value, norm_value = torch.stack([loss, norm]).tolist()
        if not math.isfinite(norm_value):
            raise AgreedError(
                f"step {step + 1}/{self.options.num_iteration}: the gradient's norm is {norm_value}, with a train loss "
                f"of {loss_value}. Lower --learning-rate, or raise --warmup-iteration."
            )
        result = StepResult(
            loss=loss_value,
            grad_norm=norm_value,
            learning_rate=learning_rate,
            exposed_tp_comm_ms=self.exposed.take_milliseconds() if measures else None,
        )
        return result if balance is None else self._with_balance(result, balance)

    def _with_balance(self, result: StepResult, balance: Balance) -> StepResult:
        """The result with the use of experts in all replicas, its part of the loss taken out."""
        group = self.env.group("dp")
        # float64 counts exactly.
        numbers = torch.cat([balance.loss[None], balance.tokens_per_expert.flatten()]).double()
        loss, *counts = all_reduce(numbers, group).wait().tolist()
        num_experts = balance.tokens_per_expert.shape[1]
        loss /= size_of(group)
        return replace(
            result,
            loss=result.loss - self.balance_coefficient * loss,
            balance_loss=loss,
            tokens_per_expert=[
                [int(count) for count in counts[start : start + num_experts]]
                for start in range(0, len(counts), num_experts)
            ],
        )

    def _accumulate_gradients(self, micro_batches: list[Batch]) -> Tensor:
        """Add up the gradients of all micro-batches; the mean loss over them."""
        total = torch.zeros((), device=self.env.device)
        for number, (tokens, targets) in enumerate(micro_batches, start=1):
            with accumulating(self.replica, last=number == len(micro_batches)):
                with computing_in(self.dtype, self.env.device):
                    loss = self.replica(tokens.to(self.env.device), targets.to(self.env.device))
                (loss / len(micro_batches)).backward()
            total += loss.detach()
        return total / len(micro_batches)


def computing_in(dtype: str, device: torch.device) -> torch.autocast:
    """Run a forward pass inside: `bfloat16` means autocast, `float32` nothing. Parameters are float32 either way."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == "bfloat16")


def read_together(read: Callable[[], list[Batch]], data_parallel_group: Group) -> list[Batch]:
    """What `read` gives, if all ranks can read theirs.

    TP ranks of a replica read the same, so they fail alike. Replicas read different parts of the data, so they ask
    each other, with one number a call: this runs in every step, and `fail_together` takes five times as long.

    Raises:
        AgreedError: on every rank, if `read` raised a `UserError` on any.
    """
    batches: list[Batch] = []
    found: UserError | None = None
    try:
        batches = read()
    except UserError as error:
        found = error
    failures = all_reduce(torch.tensor(float(found is not None)), data_parallel_group).wait()
    if failures > 0:
        with fail_together():
            if found is not None:
                raise found
    return batches
