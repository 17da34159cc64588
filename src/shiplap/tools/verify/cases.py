"""Which cases are checked, and how close is close."""

from dataclasses import dataclass, replace
from itertools import product
from math import sqrt
from typing import Literal

import torch

from shiplap.tools.verify.plans import NO_SEQUENCE_PARALLEL, SEQUENTIAL, Plans, column_plans, pairs, row_plans

Subject = Literal["column", "row", "chain"]
Mode = Literal["plain", "no_grad", "reentrant", "non_reentrant", "main_grad", "autocast", "stream"]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of one problem: `x [S, B, I]`, `W [O, I]`. For a chain, I is the hidden size and O the feed-forward size."""

    sequence: int
    batch: int
    inputs: int
    outputs: int


@dataclass(frozen=True, kw_only=True)
class Case:
    """One problem, in one dtype and mode, solved with one plan.

    Attributes:
        needs: which of x, W, b need a gradient.
        device: `cpu` or `cuda`.
    """

    subject: Subject
    plans: Plans
    sizes: Sizes
    dtype: torch.dtype
    device: str
    bias: bool = True
    needs: tuple[bool, bool, bool] = (True, True, True)
    mode: Mode = "plain"

    def __str__(self) -> str:
        """What tells it from the other cases of its group."""
        sizes = self.sizes
        needs = "".join(name for name, need in zip("xWb", self.needs, strict=True) if need) or "nothing"
        shapes = f"x [{sizes.sequence}, {sizes.batch}, {sizes.inputs}], W [{sizes.outputs}, {sizes.inputs}]"
        return f"{self.mode}, {'bias' if self.bias else 'no bias'}, gradients of {needs}, {shapes}"

    @property
    def parameter_dtype(self) -> torch.dtype:
        """Autocast computes in the dtype under test, with parameters in float32."""
        return torch.float32 if self.mode == "autocast" else self.dtype

    @property
    def sequential(self) -> "Case":
        """The same problem, nothing overlapped."""
        return replace(self, plans=SEQUENTIAL if self.plans.sequence_parallel else NO_SEQUENCE_PARALLEL)


@dataclass(frozen=True, kw_only=True)
class CaseGroup:
    """A row of the table: the cases of one plan in one dtype."""

    name: str
    cases: list[Case]

    @property
    def dtype(self) -> str:
        """As in the table."""
        return str(self.cases[0].dtype).removeprefix("torch.")

    def tolerance(self, num_ranks: int) -> float:
        """Largest relative error (norm of the difference over the norm) that rounding explains.

        float32: sums of at most a few hundred terms, 2^-24 each; and of what a `main_grad` held before, 1, another
        2^-24. Largest seen: 2.3e-7.

        bfloat16: a rounding is at most 2^-8 of a number, and in the norm, over many numbers, less than 2^-9. A sum over
        R ranks may round once per rank on its way; these roundings are independent of each other, so they add up as a
        square root. The bias or the buffer that comes on top rounds once more. Largest seen: 2.4e-3 at TP 1, 4.8e-3 at
        TP 8, some 2/3 of what is allowed at any TP size.

        A chain is four layers deep, each followed by tanh or a residual connection, which round too, and backward
        follows forward. Largest seen: 4.4e-7 and 1.4e-2.

        Seen on CPU at TP 1, 2, 4, 8, and on one and two H200, 2026-11-30.
        """
        depth = 8 if self.cases[0].subject == "chain" else 1
        if self.cases[0].dtype == torch.float32:
            return depth * 2e-6
        return depth * (1 + sqrt(num_ranks)) * 2.0**-9


def all_groups(num_ranks: int, dtype: torch.dtype, *, device: str, quick: bool) -> list[CaseGroup]:
    """The rows of the table for one dtype. What nothing overlaps in comes before what is compared with it."""
    columns, rows = column_plans(num_ranks, quick=quick), row_plans(num_ranks, quick=quick)
    subjects: list[tuple[Subject, dict[str, Plans]]] = [("column", columns), ("row", rows)]
    groups = []
    for subject, plans_by_name in subjects:
        for name, plans in plans_by_name.items():
            usual = Case(subject=subject, plans=plans, sizes=_sizes(subject, num_ranks), dtype=dtype, device=device)
            groups.append(CaseGroup(name=name, cases=_of_one_layer(usual, _odd_sizes(subject, num_ranks))))
    for name, plans in pairs(num_ranks):
        usual = Case(subject="chain", plans=plans, sizes=_sizes("chain", num_ranks), dtype=dtype, device=device)
        groups.append(CaseGroup(name=f"chain {name}", cases=_of_a_chain(usual, _odd_sizes("chain", num_ranks))))
    return groups


def _sizes(subject: Subject, num_ranks: int) -> Sizes:
    """Enough rows and features for a device's ordinary kernels; the dim that is divided, a multiple of the ranks."""
    inputs, outputs = (32 * num_ranks, 48) if subject == "row" else (48, 32 * num_ranks)
    return Sizes(sequence=8 * num_ranks, batch=2, inputs=inputs, outputs=outputs)


def _odd_sizes(subject: Subject, num_ranks: int) -> Sizes:
    """Odd shards, and dims that the ranks don't divide where they don't have to."""
    inputs, outputs = (7 * num_ranks, 13) if subject == "row" else (13, 7 * num_ranks)
    return Sizes(sequence=5 * num_ranks, batch=3, inputs=inputs, outputs=outputs)


def _modes(case: Case) -> list[Mode]:
    modes: list[Mode] = ["reentrant", "non_reentrant", "main_grad"]
    if case.dtype == torch.bfloat16:
        modes.append("autocast")
    if case.device == "cuda":
        modes.append("stream")
    return modes


def _of_one_layer(usual: Case, odd: Sizes) -> list[Case]:
    """With and without bias: which of x, W, b need a gradient; the modes, with a frozen weight too; odd sizes."""
    cases = []
    for bias in (True, False):
        for needs in product((True, False), (True, False), (True, False) if bias else (False,)):
            cases.append(replace(usual, bias=bias, needs=needs))
        all_needed = replace(usual, bias=bias, needs=(True, True, bias))
        frozen = replace(all_needed, needs=(True, False, bias))
        cases.append(replace(all_needed, mode="no_grad"))
        cases += [replace(case, mode=mode) for mode, case in product(_modes(usual), (all_needed, frozen))]
        modes: list[Mode] = ["plain", "no_grad", *_modes(usual)]
        cases += [replace(all_needed, sizes=odd, mode=mode) for mode in modes]
    return cases


def _of_a_chain(usual: Case, odd: Sizes) -> list[Case]:
    modes: list[Mode] = ["plain", *_modes(usual)]
    return [replace(usual, sizes=sizes, mode=mode) for sizes, mode in product((usual.sizes, odd), modes)]
