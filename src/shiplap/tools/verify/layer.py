"""One parallel linear layer, against the unsharded layer in float64."""

from functools import cache

import torch
import torch.nn.functional as F

from shiplap.dist.collectives import Group, rank_in, size_of
from shiplap.tools.verify.cases import Case, Sizes
from shiplap.tools.verify.solution import (
    Solution,
    Tensors,
    call,
    draw,
    features,
    give_main_grad,
    new_column,
    new_row,
    place,
    surroundings,
    tokens,
)


def solve_layer(case: Case, group: Group) -> Solution:
    """Forward and backward of one layer."""
    full = _solve_unsharded(case.sizes, case.bias, case.dtype)
    expected = _local(case, full, group)
    x, dy = place(case, expected.pop("x")).requires_grad_(case.needs[0]), place(case, expected.pop("dy"))
    layer = (new_column if case.subject == "column" else new_row)(case, full["W"], full.get("b"), group)
    weight, bias = layer.weight.requires_grad_(case.needs[1]), layer.bias
    if bias is not None:
        bias.requires_grad_(case.needs[2])
    main_grad = give_main_grad(weight) if case.mode == "main_grad" else None
    with surroundings(case):
        y = call(case, layer, x)
        if y.requires_grad:
            y.backward(dy.to(y.dtype))

    needed = {name for name, need in zip(("dx", "dW", "db"), case.needs, strict=True) if need}
    if case.mode == "no_grad":
        needed.clear()
    mistakes = [] if y.requires_grad == bool(needed) else [f"y.requires_grad is {y.requires_grad}"]
    grads = {"dx": x.grad, "dW": weight.grad, "db": None if bias is None else bias.grad}
    if main_grad is not None and "dW" in needed:
        mistakes += ["dW is in weight.grad, beside main_grad"] * (weight.grad is not None)
        grads["dW"] = main_grad - 1
    mistakes += [f"{name} came unasked" for name in grads if grads[name] is not None and name not in needed]
    return Solution(
        got={"y": y.detach()} | {name: grad for name, grad in grads.items() if grad is not None},
        expected={name: value for name, value in expected.items() if name in needed | {"y"}},
        mistakes=mistakes,
        replicated=_replicated(case),
    )


@cache
def _solve_unsharded(sizes: Sizes, has_bias: bool, dtype: torch.dtype) -> Tensors:
    """The whole problem and its answer, in float64: the same for every plan and mode."""
    x = draw(dtype, sizes.sequence, sizes.batch, sizes.inputs, seed=0)
    weight = draw(dtype, sizes.outputs, sizes.inputs, seed=1)
    bias = draw(dtype, sizes.outputs, seed=2) if has_bias else None
    dy = draw(dtype, sizes.sequence, sizes.batch, sizes.outputs, seed=3)
    given = {"x": x, "W": weight} | ({} if bias is None else {"b": bias})
    for value in given.values():
        value.requires_grad_()
    y = F.linear(x, weight, bias)
    grads = torch.autograd.grad(y, list(given.values()), dy)
    answer = {f"d{name}": grad for name, grad in zip(given, grads, strict=True)}
    return {name: value.detach() for name, value in (given | {"dy": dy, "y": y} | answer).items()}


def _local(case: Case, full: Tensors, group: Group) -> Tensors:
    """This rank's part of what goes in and of what should come out."""
    is_column = case.subject == "column"
    local = {}
    for name in ("x", "dx"):
        local[name] = tokens(case, full[name], group) if is_column else features(full[name], group)
    for name in ("y", "dy"):
        local[name] = features(full[name], group) if is_column else tokens(case, full[name], group)
    local["dW"] = full["dW"].chunk(size_of(group), dim=0 if is_column else 1)[rank_in(group)]
    if case.bias:
        local["db"] = features(full["db"], group) if is_column else full["db"]
    return local


def _replicated(case: Case) -> set[str]:
    """What all ranks hold whole."""
    if case.subject == "column":
        return set() if case.plans.sequence_parallel else {"dx"}
    return {"db"} if case.plans.sequence_parallel else {"y", "db"}
