"""Tracing some steps of a training run. The command line is generated from these dataclasses."""

import dataclasses
from dataclasses import dataclass

from shiplap.config.option import UserError, check_at_least, option
from shiplap.config.train import TrainConfig


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """Which steps are traced, and where the files go."""

    trace_steps: int = option(3, "Optimizer steps that are traced.")
    trace_warmup: int = option(2, "Optimizer steps before them; the profiler warms up in the last of these.")
    trace_dir: str | None = option(None, "Folder for the trace's files. Default: runs/trace-MODEL-DATE-TIME.")

    def __post_init__(self) -> None:
        """Refuse to trace nothing, or without a step to warm up in."""
        check_at_least(self, 1, "trace_steps", "trace_warmup")

    @property
    def num_steps(self) -> int:
        """All steps that are taken."""
        return self.trace_warmup + self.trace_steps


@dataclass(frozen=True, kw_only=True)
class TraceConfig(TrainConfig):
    """One call of `shiplap trace`: the run that it is about, and which of its steps are traced."""

    trace: TraceOptions = dataclasses.field(default_factory=TraceOptions)

    def __post_init__(self) -> None:
        """Refuse steps that the run does not have."""
        super().__post_init__()
        if self.trace.num_steps > self.optimizer.num_iteration:
            raise UserError(
                f"--trace-warmup {self.trace.trace_warmup} and --trace-steps {self.trace.trace_steps} are "
                f"{self.trace.num_steps} steps, more than the run's --num-iteration {self.optimizer.num_iteration}."
            )

    def ignored(self) -> list[str]:
        """Flags that were given and ask for what a trace does not do: it takes steps, and nothing between them."""
        return [
            flag
            for flag, asked in (
                ("--run-dir", self.run.run_dir is not None),
                ("--log-every", self.run.log_every is not None),
                ("--val-loss-every", self.run.val_loss_every > 0),
                ("--sample-every", self.run.sample_every > 0),
                ("--save", self.run.save is not None),
                ("--lora-save-path", self.lora.lora_save_path is not None),
            )
            if asked
        ]

    def steps_only(self) -> TrainConfig:
        """The run without what comes between steps: as `shiplap train` would take its steps."""
        groups = {field.name: getattr(self, field.name) for field in dataclasses.fields(TrainConfig)}
        groups["run"] = dataclasses.replace(
            self.run, run_dir=None, val_loss_every=0, sample_every=0, save=None, save_interval=0
        )
        groups["lora"] = dataclasses.replace(self.lora, lora_save_path=None)
        return TrainConfig(**groups)
