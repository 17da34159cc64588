"""Which window of the corpus each micro-batch of each rank holds: the same whatever the layout over ranks."""

import numpy as np
import numpy.typing as npt
import torch

from shiplap.config import DataOptions, UserError
from shiplap.data.source import TokenSource


class Windows:
    """One split of a source, cut into windows of S + 1 tokens with stride S.

    The first S are inputs, the last S their targets; so every token but the first is a target once, save a
    remainder of fewer than S tokens at the end, which is not used.

    Args:
        source: the corpus.
        split: `training` or `validation`, for error messages.
        start: first token of the split.
        stop: one past its last token.
        sequence_length: S, in tokens.
        vocab_size: the model's; every token must be below it.

    Raises:
        UserError: the split is shorter than one window.
    """

    def __init__(
        self, source: TokenSource, *, split: str, start: int, stop: int, sequence_length: int, vocab_size: int
    ) -> None:
        """Count the windows; reads nothing."""
        if stop - start < sequence_length + 1:
            raise UserError(
                f"{source.name}: the {split} split has {stop - start} of its {len(source)} tokens, but one "
                f"sequence takes --sequence-length + 1 = {sequence_length + 1}. Give more text, a shorter "
                "--sequence-length, or another --validation-fraction."
            )
        self._source = source
        self._start = start
        self._num_windows = (stop - start - 1) // sequence_length
        self._sequence_length = sequence_length
        self._vocab_size = vocab_size

    def __len__(self) -> int:
        """Number of windows."""
        return self._num_windows

    def read(self, index: int) -> npt.NDArray[np.int64]:
        """Window `index`, shape `[S + 1]`.

        Raises:
            UserError: it holds a token outside the model's vocabulary.
        """
        start = self._start + index * self._sequence_length
        tokens = self._source.read(start, self._sequence_length + 1)
        if tokens.max() >= self._vocab_size:
            offset = int(np.argmax(tokens >= self._vocab_size))
            raise UserError(
                f"{self._source.name}: token {tokens[offset]} at position {start + offset} is outside the "
                f"model's vocabulary of {self._vocab_size}. Use the model's own tokenizer, or raise "
                "--vocab-size."
            )
        return tokens


class Batches:
    """Micro-batches by number, so that a run can start at any step.

    The last `validation_fraction` of the tokens is the validation split, also when no validation is asked
    for, so that training sees the same data either way. Counted over the whole run, training samples are
    numbered

        sample(step, m, i) = step · (M · DP · B) + (m · DP + rank) · B + i

    for micro-batch m of M, data-parallel rank of DP, and place i of B: a step's samples depend on the size of
    the whole batch only, not on how it is divided. Each epoch visits every window of the training split once,
    in an order drawn from (seed, epoch).

    Args:
        source: the corpus.
        options: gives B, S, the whole batch and the validation share.
        vocab_size: the model's, in tokens.
        data_parallel_rank: this rank's place among the data-parallel ranks.
        data_parallel_size: DP.
        seed: of the order, at least 0.
        validation: whether `validation_batch` will be called.

    Raises:
        UserError: a split is shorter than one sequence, validation is asked for with --validation-fraction 0,
            or --total-batch-size cannot be divided.
    """

    def __init__(
        self,
        source: TokenSource,
        *,
        options: DataOptions,
        vocab_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        seed: int,
        validation: bool,
    ) -> None:
        """Split the source; reads nothing."""
        if validation and options.validation_fraction == 0.0:
            raise UserError("--validation-fraction 0 leaves no tokens to validate on. Raise it.")
        self._batch_size = options.batch_size
        self._data_parallel_rank = data_parallel_rank
        self._data_parallel_size = data_parallel_size
        self._num_micro_batches = options.num_micro_batches(data_parallel_size)
        self._seed = seed
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

        def windows(split: str, start: int, stop: int) -> Windows:
            return Windows(
                source,
                split=split,
                start=start,
                stop=stop,
                sequence_length=options.sequence_length,
                vocab_size=vocab_size,
            )

        boundary = len(source) - int(len(source) * options.validation_fraction)
        self._train = windows("training", 0, boundary)
        self._validation = windows("validation", boundary, len(source)) if validation else None

    def train_batch(self, step: int, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's micro-batch of an optimizer step.

        Args:
            step: optimizer step, from 0.
            micro_batch: number within the step, from 0.

        Returns:
            Tokens and targets, each int64 `[B, S]` on the CPU; targets are the tokens one place further.

        Raises:
            UserError: a token is outside the model's vocabulary.
        """
        first = self._first_sample(step * self._num_micro_batches + micro_batch)
        return _to_tensors(
            [self._train.read(self._shuffled(sample)) for sample in range(first, first + self._batch_size)]
        )

    def validation_batch(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's part of validation batch `index`: windows in order, starting over after the last.

        Returns:
            Tokens and targets, each int64 `[B, S]` on the CPU.

        Raises:
            UserError: a token is outside the model's vocabulary.
        """
        assert self._validation is not None, "opened with validation=False"
        first = self._first_sample(index)
        samples = range(first, first + self._batch_size)
        return _to_tensors([self._validation.read(sample % len(self._validation)) for sample in samples])

    def _first_sample(self, micro_batch: int) -> int:
        """Number of this rank's first sample in a micro-batch, both counted over the whole run."""
        return (micro_batch * self._data_parallel_size + self._data_parallel_rank) * self._batch_size

    def _shuffled(self, sample: int) -> int:
        """The window that a training sample is."""
        epoch, place = divmod(sample, len(self._train))
        if epoch != self._epoch:
            generator = np.random.Generator(np.random.PCG64([self._seed, epoch]))
            self._order = generator.permutation(len(self._train))
            self._epoch = epoch
        return int(self._order[place])


def _to_tensors(windows: list[npt.NDArray[np.int64]]) -> tuple[torch.Tensor, torch.Tensor]:
    """B windows `[S + 1]` as tokens and targets `[B, S]`."""
    batch = torch.from_numpy(np.stack(windows))
    return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
