"""A column and a row layer with a residual connection, used twice, over two micro-batches whose gradients add up.

As in a transformer's feed-forward, with weights shared by two blocks: `h = h + Row(tanh(Column(h)))`, twice.
"""

from functools import cache, partial
from math import log2

import torch
import torch.nn.functional as F
from torch import Tensor

from shiplap.dist.collectives import Group, rank_in, size_of
from shiplap.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
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

_NUM_USES = 2
_NUM_MICRO_BATCHES = 2


def solve_chain(case: Case, group: Group) -> Solution:
    """Forward and backward of both micro-batches."""
    full = _solve_unsharded(case.sizes, case.dtype)
    column = new_column(case, full["W1"], full["b1"], group)
    row = new_row(case, full["W2"], full["b2"], group)
    weights = {"dW1": column.weight, "dW2": row.weight}
    main_grads = {name: give_main_grad(weight) for name, weight in weights.items()} if case.mode == "main_grad" else {}
    inputs = [place(case, tokens(case, full[f"x{i}"], group)).requires_grad_() for i in range(_NUM_MICRO_BATCHES)]
    outputs = []
    with surroundings(case):
        for i, x in enumerate(inputs):
            y = x
            for _ in range(_NUM_USES):
                y = call(case, partial(_block, column, row), y)
            y.backward(place(case, tokens(case, full[f"dy{i}"], group)))
            outputs.append(y.detach())

    assert column.bias is not None
    assert row.bias is not None
    grads = {"db1": column.bias.grad, "db2": row.bias.grad} | {name: weight.grad for name, weight in weights.items()}
    mistakes = [f"{name} is in weight.grad, beside main_grad" for name in main_grads if grads[name] is not None]
    grads |= {name: main_grad - 1 for name, main_grad in main_grads.items()}
    grads |= {"dx": torch.stack([x.grad for x in inputs if x.grad is not None])}
    return Solution(
        got={"y": torch.stack(outputs)} | {name: grad for name, grad in grads.items() if grad is not None},
        expected=_local(case, full, group),
        mistakes=mistakes,
        replicated={"db2"} if case.plans.sequence_parallel else {"y", "dx", "db2"},
    )


def _block(column: ColumnParallelLinear, row: RowParallelLinear, h: Tensor) -> Tensor:
    hidden = column(h)
    assert isinstance(hidden, Tensor)
    result: Tensor = h + row(hidden.tanh())
    return result


@cache
def _solve_unsharded(sizes: Sizes, dtype: torch.dtype) -> Tensors:
    """The whole problem and its answer, in float64: the same for every plan and mode."""
    hidden, ffn = sizes.inputs, sizes.outputs
    # Scaled by a power of two, which is exact, so that `tanh` is bent but not flat.
    given = {
        "W1": draw(dtype, ffn, hidden, seed=1) * _near_inverse_root(hidden),
        "b1": draw(dtype, ffn, seed=2),
        "W2": draw(dtype, hidden, ffn, seed=3) * _near_inverse_root(ffn),
        "b2": draw(dtype, hidden, seed=4),
    }
    for i in range(_NUM_MICRO_BATCHES):
        given[f"x{i}"] = draw(dtype, sizes.sequence, sizes.batch, hidden, seed=5 + i)
    for value in given.values():
        value.requires_grad_()
    full = {}
    for i in range(_NUM_MICRO_BATCHES):
        h = given[f"x{i}"]
        for _ in range(_NUM_USES):
            h = h + F.linear(F.linear(h, given["W1"], given["b1"]).tanh(), given["W2"], given["b2"])
        full[f"y{i}"] = h
        full[f"dy{i}"] = draw(dtype, *h.shape, seed=7 + i)
        h.backward(full[f"dy{i}"])
    full |= {f"d{name}": value.grad for name, value in given.items() if value.grad is not None}
    return {name: value.detach() for name, value in (given | full).items()}


def _near_inverse_root(size: int) -> float:
    return 2.0 ** -round(log2(size) / 2)


def _local(case: Case, full: Tensors, group: Group) -> Tensors:
    """This rank's part of what should come out; the micro-batches one behind the other."""
    num_ranks, rank = size_of(group), rank_in(group)
    return {
        "y": torch.stack([tokens(case, full[f"y{i}"], group) for i in range(_NUM_MICRO_BATCHES)]),
        "dx": torch.stack([tokens(case, full[f"dx{i}"], group) for i in range(_NUM_MICRO_BATCHES)]),
        "dW1": full["dW1"].chunk(num_ranks)[rank],
        "db1": features(full["db1"], group),
        "dW2": full["dW2"].chunk(num_ranks, dim=1)[rank],
        "db2": full["db2"],
    }
