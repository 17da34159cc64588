"""What a layer keeps: bytes saved for backward, and full-sequence storages that are still alive."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Storages(TorchDispatchMode):
    """Remembers the operations inside, the shapes of their results, and weakly every storage that they made."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.results: list[tuple[str, tuple[int, ...]]] = []
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(str(func))
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.results.append((str(func), tuple(result.shape)))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def alive(self, at_least: int, *, but: tuple[Tensor, ...]) -> list[int]:
        """Sizes in bytes of the storages of at least that size that stay alive and are not those of `but`.

        Gloo's thread lets go of a buffer a moment after the communication is waited for, so this looks again for a
        while before it calls a storage kept. Nothing here collects garbage: a reference cycle counts as kept.
        """
        deadline = time.monotonic() + 10
        while (kept := self._alive(at_least, but)) and time.monotonic() < deadline:
            os.sched_yield()
        return kept

    def _alive(self, at_least: int, but: tuple[Tensor, ...]) -> list[int]:
        excused = {tensor.untyped_storage()._cdata for tensor in but}
        return [
            size
            for cdata, (reference, size) in self._made.items()
            if size >= at_least and cdata not in excused and not reference.expired()
        ]


@contextmanager
def saved_for_backward(layer: nn.Module) -> Iterator[list[int]]:
    """Collects the size in bytes of every storage saved for backward inside that is not a parameter's."""
    parameters = {parameter.untyped_storage()._cdata for parameter in layer.parameters()}
    seen: dict[int, int] = {}
    sizes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            seen[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes
    sizes.extend(seen.values())
