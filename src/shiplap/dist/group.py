"""A process group that can be let go of, whoever still holds it."""

import torch.distributed as dist

from shiplap.dist.pacing import Turns


class RankGroup:
    """Some ranks, and this rank's place among them.

    Layers, models and autograd graphs hold this rather than torch's process group, so that `destroy_all_env` can end
    the group while they live on. Gloo's threads end with the group; one that still runs when the interpreter ends can
    abort the process.

    Attributes:
        size: number of ranks.
        rank: this rank's place, in 0 … size - 1.
        turns: that transfers between the ranks take; None where they are all started at once.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        """The ranks of a process group that this rank belongs to."""
        self._process_group: dist.ProcessGroup | None = process_group
        self.size = dist.get_world_size(process_group)
        self.rank = dist.get_rank(process_group)
        self.turns: Turns | None = None
        self._in_turns: RankGroup | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> "RankGroup":
        """The same ranks: a copied layer communicates with the ranks that the original does."""
        return self

    @property
    def in_turns(self) -> "RankGroup":
        """The same ranks, whose transfers take turns."""
        if self._in_turns is None:
            self._in_turns = RankGroup(self.process_group)
            self._in_turns.turns = Turns()
        return self._in_turns

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Torch's process group.

        Raises:
            RuntimeError: after `close`.
        """
        if self._process_group is None:
            raise RuntimeError("This process group is gone: destroy_all_env() was called. Make the layer again.")
        return self._process_group

    def close(self) -> None:
        """Let go of the process group, and of the thread that uses it."""
        self._process_group = None
        if self._in_turns is not None:
            self._in_turns.close()
        if self.turns is not None:
            self.turns.close()
