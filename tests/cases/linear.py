"""One parallel linear layer against the unsharded layer in float64: output and every gradient.

Inputs are drawn in the dtype under test, so they are exact in float64, and what is measured is the layer's own error.
"""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import cycle, product
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shiplap import ColumnParallelLinear, ModelParallelConfig, RowParallelLinear
from shiplap.dist.collectives import Group, rank_in, size_of
from shiplap.overlap.plan import ColumnPlan, RowPlan, column_plan, row_plan
from shiplap.tensor_parallel.placement import along_tp
from tests.cases.pairwise import Setting, pairwise
from tests.cases.plans import column_plans, row_plans
from tests.cases.switches import topologies

BATCH = 2
Kind = Literal["column", "row"]
Mode = Literal["plain", "no_grad", "reentrant", "non_reentrant", "main_grad", "autocast", "skip_bias_add"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One layer, one setting."""

    kind: Kind
    config: ModelParallelConfig
    dtype: torch.dtype
    bias: bool = True
    needs: tuple[bool, bool, bool] = (True, True, True)
    disable_pipeline: bool = False
    plan: ColumnPlan | RowPlan | None = None
    mode: Mode = "plain"
    device: str = "cpu"

    def __str__(self) -> str:
        on = [name.removeprefix("tp_comm_") for name, value in vars(self.config).items() if value is True]
        needs = "".join(name for name, need in zip("xWb", self.needs, strict=True) if need) or "nothing"
        what = f"{self.kind} TP {self.num_ranks} {self.dtype} {self.mode}, bias {self.bias}, gradients of {needs}"
        return f"{what}, pipeline disabled {self.disable_pipeline}, {self.plan or ' '.join(on)}"

    @property
    def num_ranks(self) -> int:
        return self.config.tensor_parallel_size


def tolerance(case: Case) -> float:
    """Largest relative error (norm of the difference over the norm) that rounding explains.

    float32: products of a few dozen terms, 2^-24 each. bfloat16: one rounding is at most 2^-9; a sum over R ranks
    may round once per rank on its way, and its result once more.
    """
    if case.dtype == torch.float32 and case.mode != "autocast":
        return 2e-6
    return (case.num_ranks + 1) * 2.0**-9


def relative_error(result: Tensor, reference: Tensor) -> float:
    difference = (result.double().cpu() - reference).norm() / reference.norm()
    return float(difference)


def _draw(case: Case, *shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn_in = torch.bfloat16 if case.mode == "autocast" else case.dtype
    return torch.randn(*shape, generator=generator).to(drawn_in)


def _sizes(case: Case) -> tuple[int, int, int]:
    """Sequence, input and output size: small, different from each other, divisible by the ranks."""
    # Chunks of features are 8 wide at least.
    width = 8 if "feature_chunks" in str(case.plan) else 1
    return 2 * case.num_ranks, 3 * width * case.num_ranks, 5 * width * case.num_ranks


@dataclass(frozen=True, kw_only=True)
class Full:
    """The unsharded problem and its answer, in float64 on the CPU."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    dy: Tensor
    y: Tensor
    dx: Tensor
    dw: Tensor
    db: Tensor


def reference(case: Case, *, seed: int = 0) -> Full:
    """Solve the unsharded problem with autograd."""
    sequence, inputs, outputs = _sizes(case)
    x = _draw(case, sequence, BATCH, inputs, seed=seed).double().requires_grad_()
    weight = _draw(case, outputs, inputs, seed=1).double().requires_grad_()
    bias = _draw(case, outputs, seed=2).double().requires_grad_()
    dy = _draw(case, sequence, BATCH, outputs, seed=seed + 3).double()
    y = F.linear(x, weight, bias if case.bias else None)
    needed = [x, weight, bias] if case.bias else [x, weight]
    dx, dw, *db = torch.autograd.grad(y, needed, dy)
    return Full(
        x=x.detach(),
        weight=weight.detach(),
        bias=bias.detach(),
        dy=dy,
        y=y.detach(),
        dx=dx,
        dw=dw,
        db=db[0] if db else torch.zeros_like(bias),
    )


def make_layer(case: Case, full: Full, group: Group) -> ColumnParallelLinear | RowParallelLinear:
    """The layer with the unsharded problem's parameters."""
    _, inputs, outputs = _sizes(case)
    layer: ColumnParallelLinear | RowParallelLinear
    if case.kind == "column":
        layer = ColumnParallelLinear(
            inputs,
            outputs,
            case.bias,
            config=case.config,
            group=group,
            disable_tp_comm_pipeline=case.disable_pipeline,
            skip_bias_add=case.mode == "skip_bias_add",
        )
    else:
        layer = RowParallelLinear(
            inputs, outputs, case.bias, config=case.config, group=group, skip_bias_add=case.mode == "skip_bias_add"
        )
    if case.plan is not None:
        layer.plan = case.plan
    layer = layer.to(case.device, torch.float32 if case.mode == "autocast" else case.dtype)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            value = full.weight if name == "weight" else full.bias
            placement = layer.placements.get(name)
            parameter.copy_(placement.take(value, along_tp(group)) if placement else value)
    layer.weight.requires_grad_(case.needs[1])
    if layer.bias is not None:
        layer.bias.requires_grad_(case.needs[2])
    return layer


def rows(case: Case, x: Tensor, group: Group) -> Tensor:
    """This rank's part of a tensor that sequence parallelism shards along dim 0."""
    return x.chunk(size_of(group))[rank_in(group)] if case.config.sequence_parallel else x


def features(x: Tensor, group: Group) -> Tensor:
    """This rank's slice of the last dim."""
    return x.chunk(size_of(group), dim=-1)[rank_in(group)]


def local(case: Case, full: Full, group: Group) -> dict[str, Tensor]:
    """This rank's part of everything, in float64."""
    column = case.kind == "column"
    split_in = (lambda x: rows(case, x, group)) if column else (lambda x: features(x, group))
    split_out = (lambda x: features(x, group)) if column else (lambda x: rows(case, x, group))
    dw = full.dw.chunk(size_of(group), dim=0 if column else 1)[rank_in(group)]
    return {
        "x": split_in(full.x),
        "dy": split_out(full.dy),
        "y": split_out(full.y),
        "dx": split_in(full.dx),
        "dw": dw,
        "db": full.db.chunk(size_of(group))[rank_in(group)] if column else full.db,
    }


def call(case: Case, layer: torch.nn.Module, x: Tensor) -> Tensor:
    """The layer's output in the case's mode."""
    if case.mode in {"reentrant", "non_reentrant"}:
        output: Tensor = checkpoint(layer, x, use_reentrant=case.mode == "reentrant")
        return output
    context: Any = nullcontext()
    if case.mode == "autocast":
        context = torch.autocast(case.device, torch.bfloat16)
    if case.mode == "no_grad":
        context = torch.no_grad()
    with context:
        output = layer(x)
    if case.mode == "skip_bias_add":
        output, bias = output
        output = output if bias is None else output + bias
    return output


def check(case: Case, group: Group) -> list[str]:
    """Run one case on this rank; what is wrong, as text."""
    full = reference(case)
    expected = local(case, full, group)
    layer = make_layer(case, full, group)
    x = expected["x"].to(case.device, layer.weight.dtype).requires_grad_(case.needs[0])
    main_grad = torch.ones(layer.weight.shape, dtype=torch.float32, device=case.device)
    if case.mode == "main_grad":
        layer.weight.main_grad = main_grad  # type: ignore[attr-defined]
    y = call(case, layer, x)

    got: dict[str, Tensor | None] = {"y": y}
    needs = dict(zip(("dx", "dw", "db"), case.needs, strict=True))
    needs["db"] = needs["db"] and case.bias
    if case.mode == "no_grad" or not any(needs.values()):
        return [f"{case}: output requires a gradient"] * y.requires_grad + _compare(case, got, expected)
    if case.mode == "autocast" and y.dtype != torch.bfloat16:
        return [f"{case}: output is {y.dtype}"]
    y.backward(expected["dy"].to(y.dtype).to(case.device))
    grads = {"dx": x.grad, "dw": layer.weight.grad, "db": None if layer.bias is None else layer.bias.grad}
    if case.mode == "main_grad" and needs["dw"]:
        assert grads["dw"] is None
        grads["dw"] = main_grad - 1
    failures = [f"{case}: {name} came unasked" for name, grad in grads.items() if grad is not None and not needs[name]]
    got |= {name: grads[name] for name in grads if needs[name]}
    return failures + _compare(case, got, expected)


def _compare(case: Case, got: dict[str, Tensor | None], expected: dict[str, Tensor]) -> list[str]:
    failures = []
    for name, result in got.items():
        if result is None:
            failures.append(f"{case}: {name} is missing")
        elif result.shape != expected[name].shape:
            failures.append(f"{case}: {name} is {tuple(result.shape)}, not {tuple(expected[name].shape)}")
        elif not (error := relative_error(result.detach(), expected[name])) <= tolerance(case):
            failures.append(f"{case}: {name} is off by {error:.1e}, more than {tolerance(case):.1e}")
    return failures


def of_switches(num_ranks: int, dtype: torch.dtype, device: str) -> list[Case]:
    """Every topology and combination of switches that gives a layer a plan of its own: it sees nothing else of them."""
    cases: dict[Any, Case] = {}
    for config in topologies(num_ranks):
        row = Case(kind="row", config=config, dtype=dtype, device=device)
        cases.setdefault((config.sequence_parallel, row_plan(config)), row)
        for disable in (False, True):
            column = replace(row, kind="column", disable_pipeline=disable)
            cases.setdefault((config.sequence_parallel, column_plan(config, disable_pipeline=disable)), column)
    return list(cases.values())


def of_replaced_plans(num_ranks: int, dtype: torch.dtype, device: str) -> list[Case]:
    """Plans that no switch makes."""
    if num_ranks == 1:
        return []
    config = ModelParallelConfig(tensor_parallel_size=num_ranks, sequence_parallel=True)
    plans: list[tuple[Kind, ColumnPlan | RowPlan]] = [
        *(("column", plan) for plan in column_plans(num_ranks)),
        *(("row", plan) for plan in row_plans(num_ranks)),
    ]
    return [Case(kind=kind, config=config, dtype=dtype, plan=plan, device=device) for kind, plan in plans]


NEEDS: list[tuple[bool, tuple[bool, bool, bool]]] = [
    (bias, (x, weight, needs_bias))
    for bias, x, weight, needs_bias in product((True, False), repeat=4)
    if bias or not needs_bias
]
"""Whether there is a bias, and which of x, W, b need a gradient."""


def names_of_modes(dtype: torch.dtype) -> tuple[Mode, ...]:
    """But `plain`; autocast starts from float32."""
    modes: tuple[Mode, ...] = ("no_grad", "reentrant", "non_reentrant", "main_grad", "skip_bias_add")
    return (*modes, "autocast") if dtype == torch.float32 else modes


SETTINGS_OF_A_PLAN = 4


def every_kind(num_ranks: int, dtype: torch.dtype, device: str) -> list[Case]:
    """Every plan, of switches and replaced, with some of the settings; the next plan goes on where the last one ended.

    The settings are a table in which every pair of a mode, a bias and what needs a gradient comes, so the plans of one
    method, together, meet all of it.
    """
    settings = pairwise({"mode": ("plain", *names_of_modes(dtype)), "bias_and_needs": NEEDS}, _gets_backward)
    plans = [*of_switches(num_ranks, dtype, device), *of_replaced_plans(num_ranks, dtype, device)]
    repeats = SETTINGS_OF_A_PLAN if num_ranks > 1 else len(settings)
    turns = zip((plan for plan in plans for _ in range(repeats)), cycle(settings), strict=False)
    return [
        replace(plan, mode=setting["mode"], bias=setting["bias_and_needs"][0], needs=setting["bias_and_needs"][1])
        for plan, setting in turns
    ]


def _gets_backward(setting: Setting) -> bool:
    """PyTorch's reentrant checkpoint runs no backward where its input needs no gradient."""
    _, (x_needs_it, _, _) = setting["bias_and_needs"]
    return bool(x_needs_it or setting["mode"] != "reentrant")


def matrix(num_ranks: int, dtype: torch.dtype, device: str) -> list[Case]:
    """Every plan of the switches × bias × which of x, W, b need a gradient."""
    cases = of_switches(num_ranks, dtype, device)
    return [replace(case, bias=bias, needs=needs) for case, (bias, needs) in product(cases, NEEDS)]


def replaced_plans(num_ranks: int, dtype: torch.dtype, device: str) -> list[Case]:
    """Plans that no switch makes, with a frozen weight or input and accumulation too."""
    needs = ((True, True, True), (True, False, True), (False, True, False))
    modes: tuple[Mode, ...] = ("plain", "main_grad")
    return [
        replace(case, needs=need, mode=mode)
        for case, need, mode in product(of_replaced_plans(num_ranks, dtype, device), needs, modes)
        if mode == "plain" or need == (True, True, True)
    ]


def modes(num_ranks: int, dtype: torch.dtype, device: str) -> list[Case]:
    """Every mode × a topology of each sort, both kinds, with and without bias, and with a frozen weight."""
    all_topologies = list(topologies(num_ranks))
    chosen = [*all_topologies[:2], all_topologies[-1]]
    kinds: tuple[Kind, ...] = ("column", "row")
    return [
        Case(kind=kind, config=config, dtype=dtype, bias=bias, needs=need, mode=mode, device=device)
        for kind, config, bias, mode, need in product(
            kinds, chosen, (True, False), names_of_modes(dtype), ((True, True, True), (True, False, True))
        )
    ]
