"""Which module is running: hooks on the modules that have parameters."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shiplap.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from shiplap.tools.trace.recorder import Recorder
from shiplap.tools.trace.spans import LayerKind


def layer_kinds(model: nn.Module) -> Mapping[str, LayerKind]:
    """The parallel layers, by module path."""
    kinds: dict[str, LayerKind] = {}
    for path, module in model.named_modules():
        if isinstance(module, ColumnParallelLinear):
            kinds[path] = "column"
        elif isinstance(module, RowParallelLinear):
            kinds[path] = "row"
    return kinds


@contextmanager
def telling_modules(model: nn.Module, optimizer: Optimizer, recorder: Recorder) -> Iterator[None]:
    """Tell `recorder` which module's forward is running, and when the optimizer is."""
    running: list[tuple[nn.Module | Optimizer, ExitStack]] = []
    handles: list[Any] = []
    is_forward = False

    def begin(module: nn.Module | Optimizer, path: str, direction: str) -> None:
        entered = ExitStack()
        entered.enter_context(recorder.module(path, direction))
        running.append((module, entered))

    def end(module: nn.Module | Optimizer) -> None:
        assert running[-1][0] is module
        running.pop()[1].close()

    def hook(module: nn.Module, path: str) -> None:
        def before(*_: Any) -> None:
            nonlocal is_forward
            is_forward = is_forward or module is model
            # After the model's forward, only backward runs modules: again, because it needs what was not kept.
            begin(module, path, "forward" if is_forward else "recompute")

        def after(*_: Any) -> None:
            nonlocal is_forward
            is_forward = is_forward and module is not model
            end(module)

        handles.append(module.register_forward_pre_hook(before))
        # Recomputation ends with an exception as soon as it has all that is needed: the hook must come then too.
        handles.append(module.register_forward_hook(after, always_call=True))

    for path, module in model.named_modules():
        if any(True for _ in module.parameters()) and not isinstance(module, nn.ModuleList):
            hook(module, path)
    handles.append(optimizer.register_step_pre_hook(lambda *_: begin(optimizer, "optimizer", "")))
    handles.append(optimizer.register_step_post_hook(lambda *_: end(optimizer)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
