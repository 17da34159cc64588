"""Parts of a model that are longer than a layer, alone on this rank's device, to be run under any plans and timed.

A part is a block's attention, its feed-forward layer or experts, or the whole block. What is timed is a step of it:
forward, then backward with the gradient of the input and of every trained parameter, returned and not accumulated.

From sizes alone, everything trained, no dropout unless the sizes say so, no rotary positions:

    workload = Workload(sequence=4096, batch=1, dtype="bfloat16")  # of shiplap.tuning.probe
    part = attention_part(sizes, parallel, workload, env)          # a TransformerConfig, a ModelParallelConfig
    part = mlp_part(sizes, parallel, workload, env, feed_forward="swiglu")

or those of a model's block, from its skeleton, with all that it has: rotary positions, norms, adapters, recomputation:

    parts = block_parts(model, 0, workload, env)                   # {"attention": …, "mlp": …, "block": …}

Then, on all ranks at the same time, each giving milliseconds of the slowest rank, alike on all:

| call | what is timed |
|---|---|
| `part.milliseconds({"qkv": ColumnPlan(…), "proj": RowPlan(…)})` | the step under these plans |
| `part.milliseconds({})` | under the switches' own: layers that are not named keep theirs |
| `part.products_milliseconds()` | all that it computes, without communication |
| `part.communication_milliseconds(plans)` | its layers' communication, without anything computed |
| `part.timed("DTensor", step)` | anything else, run and timed in the same way |

`part.layers["qkv"]` is a `ParallelLayer`: for `candidates(part.layers["qkv"], "forward", parallel)` and for `Probe`.
`part.run(module)` is the step of another module in the part's place: it is given the same input and the same gradient,
and what it returns can be compared with `part.run(part.module)`. Peers (`shiplap.tools.bench.peers`) are such modules:
`step = seat(PEERS["dtensor"], part)` gives a step that was compared with ours, or a text that says why there is none.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from shiplap.config import ModelParallelConfig, TransformerConfig
from shiplap.dist import GlobalEnv
from shiplap.dist.collectives import size_of
from shiplap.families import Architecture
from shiplap.inspection.layers import ParallelLayer, parallel_layers
from shiplap.layers.moe import MixtureOfExperts
from shiplap.layers.norm import LayerNorm, RMSNorm
from shiplap.models.block import DecoderBlock
from shiplap.models.build import Build
from shiplap.models.decoder import DecoderModel
from shiplap.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from shiplap.tensor_parallel.parameters import PlacedModule
from shiplap.tensor_parallel.placement import TP
from shiplap.tuning.alone import sharing, without_communication
from shiplap.tuning.probe import ParallelLinear, Plan, Probe, Repeats, Stopwatch, Workload, slowest_rank

Plans = Mapping[str, Plan]
"""By the layer's name: `qkv`, `proj`, `fc1`, `fc2`."""
Step = Callable[[], object]
_Module = TypeVar("_Module", bound=nn.Module)


class Part:
    """A part of a model that can be timed.

    Attributes:
        name: `attention`, `mlp`, `experts` or `block`.
        module: with memory and weights: `[S/R, B, H]` to `[S/R, B, H]`. Its layers' plans are those that were set last.
        layers: its parallel layers by their name, without memory, in the order in which they run.
        workload: what it is run on.
        env: this rank's place.
        x: its input.
        dy: the gradient of its output.
    """

    def __init__(
        self, name: str, module: nn.Module, *, layers: Mapping[str, ParallelLayer], workload: Workload, env: GlobalEnv
    ) -> None:
        """From a module that has memory already.

        Args:
            name: of the part.
            module: of this rank; with sequence parallelism.
            layers: its parallel layers, from a model without memory.
            workload: what it is run on.
            env: this rank's place.
        """
        self.name = name
        self.module = module
        self.layers = layers
        self.workload = workload
        self.env = env
        self._linears = {path.rpartition(".")[2]: linear for path, linear in _linears(module)}
        assert list(self._linears) == list(layers), (list(self._linears), list(layers))
        self._own_plans: Plans = {name: linear.plan for name, linear in self._linears.items()}
        first = next(iter(layers.values()))
        # The residual stream is in float32 whatever is computed in; a norm hands it on, and here the cast is done.
        is_residual = isinstance(module, DecoderBlock)
        dtype = torch.float32 if is_residual else getattr(torch, workload.dtype)
        shape = (workload.sequence // size_of(env.group("tp")), workload.batch, first.module.weight.shape[1])
        generator = torch.Generator(env.device).manual_seed(env.coordinate("tp"))
        self.x, self.dy = (torch.randn(shape, generator=generator, device=env.device).to(dtype) for _ in range(2))
        self.x.requires_grad_(first.has_dgrad)
        self._repeats = Repeats()
        self._alone: nn.Module | None = None
        self._probes: dict[str, Probe] = {}

    @property
    def has_backward(self) -> bool:
        """Whether a step has one: something is trained here or before."""
        return self.x.requires_grad or any(parameter.requires_grad for parameter in self.module.parameters())

    def milliseconds(self, plans: Plans) -> float:
        """The step under these plans; layers that are not named have the switches' own."""
        self.set(plans)
        return self.timed(str(plans), lambda: self.run(self.module))

    def products_milliseconds(self) -> float:
        """All that this rank computes in a step, without communication: as if the others' tokens were there already.

        Not only the parallel layers' products: attention, activations, norms and residuals are in it too.
        """
        alone = self._alone
        if alone is None:
            alone = self._alone = without_communication(self.module, size_of(self.env.group("tp")))
        return self.timed("products", lambda: self.run(alone))

    def communication_milliseconds(self, plans: Plans) -> float:
        """The communication of the parallel layers in a step, as these plans do it, with nothing to hide it behind.

        Each layer's forward and backward by itself. The small messages of norms and routers are not in it.
        """
        total = 0.0
        for name, layer in self.layers.items():
            probe, plan = self._probe(name), plans.get(name, self._own_plans[name])
            total += self.num_forwards(layer) * probe.communication_milliseconds("forward", plan)
            if layer.has_backward:
                total += probe.communication_milliseconds("backward", plan)
        return total

    def num_forwards(self, layer: ParallelLayer) -> int:
        """How often a step runs a layer's forward: once more where backward computes the whole block again."""
        return 2 if layer.is_recomputed and isinstance(self.module, DecoderBlock) else 1

    def timed(self, key: str, step: Step) -> float:
        """Milliseconds of a step on the slowest rank; all ranks must ask for the same at the same time.

        Args:
            key: names the step.
            step: what is run, several times in a row if it is short.
        """
        return self._repeats.milliseconds(key, lambda repeats: self._time(step, repeats))

    def set(self, plans: Plans) -> None:
        """Give the module's layers these plans; those that are not named the switches' own."""
        unknown = [name for name in plans if name not in self.layers]
        assert not unknown, f"{self.name} has no {unknown}, but {list(self.layers)}"
        for name, linear in self._linears.items():
            linear.plan = plans.get(name, self._own_plans[name])

    def run(
        self, module: nn.Module, complete: Callable[[Sequence[Tensor]], Sequence[Tensor]] | None = None
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """A step of a module that stands in the part's place.

        Args:
            module: takes `x` and gives this rank's output, perhaps in a tuple with something else.
            complete: makes the gradients whole that are not so yet, as part of the step.

        Returns:
            The output; and the gradients of the input, if it needs one, and of the module's trained parameters.
        """
        device = self.env.device
        with torch.autocast(device.type, torch.bfloat16, enabled=self.workload.dtype == "bfloat16"):
            y = module(self.x)
        y = y[0] if isinstance(y, tuple) else y
        _wait_for(y)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        needed = [self.x, *trained] if self.x.requires_grad else trained
        if not needed:
            return y, ()
        gradients: Sequence[Tensor] = torch.autograd.grad(y, needed, self.dy)
        if complete is not None:
            gradients = complete(gradients)
        _wait_for(gradients[0])
        return y, gradients

    def _probe(self, name: str) -> Probe:
        if name not in self._probes:
            linear = sharing(self._linears[name])
            self._probes[name] = Probe(self.layers[name], self.workload, self.env, module=linear)
        return self._probes[name]

    def _time(self, step: Step, repeats: int) -> float:
        stopwatch = Stopwatch(self.env.device)
        with stopwatch.running():
            for _ in range(repeats):
                step()
        return slowest_rank(stopwatch.milliseconds(), self.env)


def attention_part(
    sizes: TransformerConfig, parallel: ModelParallelConfig, workload: Workload, env: GlobalEnv, *, bias: bool = False
) -> Part:
    """Attention with these heads, without rotary positions.

    Args:
        sizes: of the model; hidden size, heads, key-value heads and dropout are read.
        parallel: the switches.
        workload: what it is run on.
        env: this rank's place.
        bias: whether the projections have one.
    """
    with torch.device("meta"):
        module = Build(
            architecture=Architecture(norm="rms", positions="learned", has_biases=bias, feed_forward="swiglu"),
            config=sizes,
            parallel=parallel,
            group=env.group("tp"),
        ).attention()
    return _new_part("attention", module, workload, env)


def mlp_part(
    sizes: TransformerConfig,
    parallel: ModelParallelConfig,
    workload: Workload,
    env: GlobalEnv,
    *,
    feed_forward: Literal["gelu", "swiglu"] = "swiglu",
) -> Part:
    """A feed-forward layer.

    Args:
        sizes: of the model; hidden and feed-forward size are read.
        parallel: the switches.
        workload: what it is run on.
        env: this rank's place.
        feed_forward: which of the two.
    """
    with torch.device("meta"):
        module = Build(
            architecture=Architecture(norm="rms", positions="learned", has_biases=False, feed_forward=feed_forward),
            config=sizes,
            parallel=parallel,
            group=env.group("tp"),
        ).mlp()
    return _new_part("mlp", module, workload, env)


def block_parts(model: DecoderModel, number: int, workload: Workload, env: GlobalEnv) -> dict[str, Part]:
    """A block's attention, its feed-forward layer or experts, and the block itself, by name; one memory for all.

    Args:
        model: this rank's skeleton (`shiplap.inspection.meta_model`).
        number: of the block.
        workload: what it is run on.
        env: this rank's place.
    """
    skeleton = model.blocks[str(number)]
    assert isinstance(skeleton, DecoderBlock)
    block = with_memory(skeleton, env)
    second = "experts" if isinstance(block.mlp, MixtureOfExperts) else "mlp"
    layers = {layer.path: layer for layer in parallel_layers(model)}
    modules: dict[str, tuple[str, nn.Module]] = {
        "attention": (".attention", block.attention),
        second: (".mlp", block.mlp),
        "block": ("", block),
    }
    return {
        name: Part(
            name,
            module,
            layers={
                path.rpartition(".")[2]: layer
                for path, layer in layers.items()
                if path.startswith(f"blocks.{number}{path_in_block}.")
            },
            workload=workload,
            env=env,
        )
        for name, (path_in_block, module) in modules.items()
    }


def _new_part(name: str, skeleton: nn.Module, workload: Workload, env: GlobalEnv) -> Part:
    layers = {
        path: ParallelLayer(
            path=path,
            module=linear,
            has_dgrad=True,
            has_wgrad=True,
            has_bias_grad=linear.bias is not None,
            adapter=None,
            experts=None,
            is_recomputed=False,
            width=linear.weight.shape[1] if isinstance(linear, ColumnParallelLinear) else linear.weight.shape[0],
        )
        for path, linear in _linears(skeleton)
    }
    return Part(name, with_memory(skeleton, env), layers=layers, workload=workload, env=env)


def _linears(module: nn.Module) -> Iterator[tuple[str, ParallelLinear]]:
    for path, child in module.named_modules():
        if isinstance(child, ColumnParallelLinear | RowParallelLinear):
            yield path, child


def with_memory(skeleton: _Module, env: GlobalEnv) -> _Module:
    """A copy of a module without memory on this rank's device, with random weights.

    What all ranks hold is alike on all of them, and what is divided differs.
    """
    module = copy.deepcopy(skeleton).to_empty(device=env.device)
    size = size_of(env.group("tp"))
    for number, child in enumerate(module.modules()):
        if getattr(child, "group", None) is not None:
            # A skeleton knows only how many ranks there are.
            setattr(child, "group", env.group("tp"))  # noqa: B010 - mypy does not know which modules have one
        placements = child.placements if isinstance(child, PlacedModule) else {}
        for name, parameter in child.named_parameters(recurse=False):
            # Ranks that share some heads have these alike; if all heads are alike, they surely are.
            split = placements[name].splits.get(TP) if name in placements else None
            is_own = split is not None and not split.is_shared(size)
            generator = torch.Generator(env.device)
            generator.manual_seed(1000 * number + (1 + env.coordinate("tp") if is_own else 0))
            nn.init.normal_(parameter.detach(), std=0.02, generator=generator)
        if isinstance(child, LayerNorm | RMSNorm):
            child.weight.detach().add_(1.0)
        for buffer in child.buffers(recurse=False):
            # Rotary frequencies: which ones makes no difference to time.
            nn.init.uniform_(buffer, generator=torch.Generator(env.device).manual_seed(number))
    return module


def _wait_for(x: Tensor) -> None:
    """Let what comes after wait for what is still on its way to `x`; DTensor leaves that to the first who uses it.

    On CUDA the stream waits, and the host goes on.
    """
    local = x.to_local() if hasattr(x, "to_local") else x
    local.detach().flatten()[:1] + 0
