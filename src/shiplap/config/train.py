"""One training run: model, data, optimizer, machine. The command line is generated from these dataclasses."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from shiplap.config.lora import LoraOptions
from shiplap.config.option import UserError, check_at_least, flag_of, option
from shiplap.config.parallel import ModelParallelConfig, PlanOptions


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model: a named size, and what to change about it."""

    preset: str | None = option(
        None, "Named size of the family, such as gpt2-124m or llama3-8b. Default: the family's debug size."
    )
    hf_checkpoint: str | None = option(
        None,
        "Folder with a Hugging Face model to go on from: its sizes, its weights and, if it has one, its tokenizer.",
    )
    llmc_filepath: str | None = option(
        None, "Model file of llm.c (.bin) to go on from: its sizes and its weights; GPT-2 and LLaMA 3."
    )
    vocab_size: int | None = option(None, "Number of tokens, instead of the preset's.")
    hidden_size: int | None = option(None, "Width of the residual stream, instead of the preset's.")
    num_layers: int | None = option(None, "Number of decoder blocks, instead of the preset's.")
    num_attention_heads: int | None = option(None, "Number of attention heads, instead of the preset's.")
    num_key_value_heads: int | None = option(None, "Number of key and value heads, instead of the preset's.")
    ffn_hidden_size: int | None = option(None, "Width of the feed-forward layer, instead of the preset's.")
    max_sequence_length: int | None = option(
        None, "Longest sequence the model takes, in tokens, instead of the preset's or the checkpoint's."
    )
    num_experts: int | None = option(None, "Experts of each block, instead of the preset's; Mixtral only.")
    router_aux_loss_coefficient: float | None = option(
        None,
        "Weight of the loss that evens out the use of experts, instead of the preset's or the checkpoint's; Mixtral "
        "only.",
    )
    dropout: float | None = option(None, "Dropout probability, instead of the preset's 0 or the checkpoint's.")
    recompute: Literal["none", "selective", "full"] = option(
        "none",
        "What backward computes again instead of keeping: nothing, the attention core, or each whole block.",
    )

    def __post_init__(self) -> None:
        """Refuse flags that a checkpoint leaves nothing to say about."""
        checkpoints = [
            f"{flag} {place}"
            for flag, place in (("--hf-checkpoint", self.hf_checkpoint), ("--llmc-filepath", self.llmc_filepath))
            if place is not None
        ]
        if not checkpoints:
            return
        if len(checkpoints) > 1:
            raise UserError(f"{' and '.join(checkpoints)} both say where the weights come from; drop one.")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and field.name not in _BESIDE_A_CHECKPOINT:
                raise UserError(
                    f"{flag_of(field)} {value} cannot be had with {checkpoints[0]}, which is a model of its own size. "
                    "Drop one of the two."
                )


# What may be said about a model that is there already: it changes no weight's shape.
_BESIDE_A_CHECKPOINT = (
    "hf_checkpoint", "llmc_filepath", "max_sequence_length", "router_aux_loss_coefficient", "dropout", "recompute",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """What to train on, and how many tokens at a time."""

    data: tuple[str, ...] = option(
        ("stdlib",),
        "Text files and folders; or `stdlib`, the source text of the installed Python's standard library.",
    )
    input_bin: str | None = option(None, "A token file in llm.c's .bin format, instead of --data.")
    tokenizer: str | None = option(
        None,
        "A Hugging Face tokenizer.json, or a folder with one; or `bytes`. Default: the checkpoint's, else bytes.",
    )
    validation_fraction: float = option(0.05, "Share of the tokens, at the end, kept for validation.")
    batch_size: int = option(8, "Sequences in one micro-batch, per data-parallel rank.")
    sequence_length: int = option(128, "Tokens in one sequence. TP need not divide it: it is padded inside.")
    total_batch_size: int | None = option(
        None,
        "Tokens in one optimizer step over all ranks; reached by gradient accumulation. Default: one micro-batch.",
    )

    def __post_init__(self) -> None:
        """Refuse two corpora at once, and sizes that make no batch."""
        if self.input_bin is not None and self.data != ("stdlib",):
            raise UserError(
                f"--input-bin {self.input_bin} and --data {' '.join(self.data)} both say what to train on; drop one."
            )
        if not self.data:
            raise UserError("--data names no file; drop it for the standard library's text.")
        check_at_least(self, 1, "batch_size", "sequence_length", "total_batch_size")
        if not 0.0 <= self.validation_fraction < 1.0:
            raise UserError(f"--validation-fraction must be in [0, 1), got {self.validation_fraction}.")

    def num_micro_batches(self, data_parallel_size: int) -> int:
        """Micro-batches that each rank runs per optimizer step.

        Raises:
            UserError: `total_batch_size` is not a multiple of batch × sequence × DP.
        """
        tokens = self.batch_size * self.sequence_length * data_parallel_size
        if self.total_batch_size is None:
            return 1
        if self.total_batch_size % tokens:
            raise UserError(
                f"--total-batch-size {self.total_batch_size} is not a multiple of --batch-size × --sequence-length × "
                f"data-parallel size = {self.batch_size} × {self.sequence_length} × {data_parallel_size} = {tokens}."
            )
        return self.total_batch_size // tokens


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """AdamW, with a linear warm-up and a cosine decay of the learning rate."""

    num_iteration: int = option(100, "Optimizer steps.")
    learning_rate: float = option(1e-3, "Peak learning rate, reached after the warm-up.")
    warmup_iteration: int = option(10, "Steps over which the learning rate rises from 0.")
    min_learning_rate: float = option(0.0, "Learning rate at the end of the cosine.")
    weight_decay: float = option(0.1, "Decoupled weight decay of matrices; biases and norms have none.")
    adam_beta1: float = option(0.9, "Decay rate of the first moment.")
    adam_beta2: float = option(0.95, "Decay rate of the second moment.")
    grad_clip: float = option(1.0, "Largest norm of the whole model's gradient; 0 turns clipping off.")

    def __post_init__(self) -> None:
        """Refuse numbers that AdamW or the schedule cannot use."""
        check_at_least(self, 1, "num_iteration")
        check_at_least(self, 0, "warmup_iteration", "learning_rate", "min_learning_rate", "weight_decay", "grad_clip")
        for flag, beta in (("--adam-beta1", self.adam_beta1), ("--adam-beta2", self.adam_beta2)):
            if not 0.0 <= beta < 1.0:
                raise UserError(f"{flag} must be in [0, 1), got {beta}.")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where and how it runs, and what it writes."""

    device: Literal["cpu", "cuda"] = option("cpu", "Device of every rank.")
    dtype: Literal["float32", "bfloat16"] = option(
        "float32", "Compute type. bfloat16 means autocast: parameters and optimizer stay in float32."
    )
    nproc: int | None = option(
        None,
        "Local workers to start when not under torchrun; more than TP × PP adds data parallelism. Default: TP × PP.",
    )
    seed: int = option(1234, "Seed of initial weights, data order and dropout.")
    deterministic: bool = option(
        False,
        "Make the run repeat: started again alike on the same machine, it gives the same losses, samples and weights "
        "to the bit. Overlap stays on. Another number of ranks or threads, or other versions, still give other bits.",
    )
    run_dir: str | None = option(None, "Folder for this run's files. Default: runs/MODEL-DATE-TIME.")
    log_every: int | None = option(
        None,
        "Steps between lines of output; the first and the last step always have one, and metrics.jsonl has every step. "
        "Default: about 30 lines in all.",
    )
    val_loss_every: int = option(0, "Steps between validation losses; 0: none.")
    val_num_batches: int = option(8, "Micro-batches in one validation loss, per data-parallel rank.")
    sample_every: int = option(0, "Steps between samples of what the model writes; 0: none.")
    sample_num_tokens: int = option(200, "Tokens in one sample.")
    save: str | None = option(
        None, "Folder to save the model in, at the end and as step-N, in Hugging Face's format and float32."
    )
    save_interval: int = option(
        0, "Steps between saved models, or adapters; 0: only at the end. Needs --save or --lora-save-path."
    )

    def __post_init__(self) -> None:
        """Refuse counts that mean nothing."""
        check_at_least(self, 1, "nproc", "log_every", "val_num_batches", "sample_num_tokens")
        check_at_least(self, 0, "val_loss_every", "sample_every", "save_interval", "seed")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run, whole."""

    parallel: ModelParallelConfig = dataclasses.field(default_factory=ModelParallelConfig)
    plan: PlanOptions = dataclasses.field(default_factory=PlanOptions)
    model: ModelOptions = dataclasses.field(default_factory=ModelOptions)
    data: DataOptions = dataclasses.field(default_factory=DataOptions)
    optimizer: OptimizerOptions = dataclasses.field(default_factory=OptimizerOptions)
    lora: LoraOptions = dataclasses.field(default_factory=LoraOptions)
    run: RunOptions = dataclasses.field(default_factory=RunOptions)

    def __post_init__(self) -> None:
        """Refuse options that say nothing without another, or contradict it."""
        if self.run.save_interval and self.run.save is None and self.lora.lora_save_path is None:
            raise UserError(
                f"--save-interval {self.run.save_interval} does not say what and where: give --save FOLDER or "
                "--lora-save-path FOLDER too."
            )
        if self.plan.tp_comm_plan is not None and not self.parallel.tp_comm_overlap:
            raise UserError(
                f"--tp-comm-plan {self.plan.tp_comm_plan} says how to overlap, so it needs --tp-comm-overlap. Add it, "
                "or drop --tp-comm-plan."
            )
        if self.plan.is_auto and self.run.deterministic:
            raise UserError(
                "--tp-comm-plan auto chooses by the clock, and some methods differ in the last bits, so it cannot be "
                "had with --deterministic. Run `shiplap tune` once, and give its file with --tp-comm-plan."
            )

    @property
    def num_workers(self) -> int:
        """Local ranks to start where no launcher starts them."""
        return self.run.nproc or self.parallel.model_parallel_size

    @property
    def log_every(self) -> int:
        """Steps between lines of output."""
        return self.run.log_every or max(1, round(self.optimizer.num_iteration / 30))
