"""Write a model as a Hugging Face directory, which is there whole or not at all."""

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor, nn

from shiplap.checkpoint.huggingface import INDEX_FILE, SINGLE_FILE
from shiplap.config import TransformerConfig, UserError
from shiplap.config.json_fields import read_json_object
from shiplap.dist.collectives import Group
from shiplap.families import Stored, huggingface_names
from shiplap.families.config_json import CONFIG_FILE, to_huggingface
from shiplap.tensor_parallel.parameters import gather_to_first, named_placements

MAX_FILE_BYTES = 5 * 10**9
_COPIED_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def save_huggingface(
    model: nn.Module,
    directory: str,
    *,
    family: str,
    config: TransformerConfig,
    dtype: torch.dtype = torch.float32,
    group: Group,
    tokenizer_from: str | None = None,
    end_of_text: int | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write a model, gathering one parameter at a time on the first rank, which writes.

    All TP ranks of one replica must call it. The first may fail alone, so run it inside `fail_together()`.

    Args:
        model: this rank's shard. Parameters that the family does not have, such as adapters, are left out.
        directory: as for `write_huggingface`, which see for the other arguments too.
        family: of the model.
        config: sizes of the full model.
        dtype: of the tensors in the files.
        group: the TP ranks.
        tokenizer_from: what to copy beside the model.
        end_of_text: the token that ends a text.
        max_file_bytes: limit of one file.

    Raises:
        UserError: on the first rank, if the directory cannot be written.
    """
    tensors = _gathered(model, set(huggingface_names(family, config)), group)
    if group is not None and group.rank > 0:
        assert not list(tensors)
        return
    try:
        write_huggingface(
            directory,
            family=family,
            config=config,
            dtype=dtype,
            tensors=tensors,
            tokenizer_from=tokenizer_from,
            end_of_text=end_of_text,
            max_file_bytes=max_file_bytes,
        )
    except UserError:
        for _ in tensors:
            pass  # The other ranks go on sending: they cannot know.
        raise


def _gathered(model: nn.Module, names: Set[str], group: Group) -> Iterator[tuple[str, Tensor]]:
    """The whole parameters of these names, on the first rank."""
    parameters = dict(model.named_parameters())
    for name, placement in named_placements(model):
        if name in names:
            whole = gather_to_first(parameters[name], placement, group)
            if whole is not None:
                yield name, whole
            del whole  # before the next one is there


def write_huggingface(
    directory: str,
    *,
    family: str,
    config: TransformerConfig,
    dtype: torch.dtype | None,
    tensors: Iterable[tuple[str, Tensor]],
    tokenizer_from: str | None = None,
    end_of_text: int | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write whole parameters as the tensors that `transformers` reads. Holds one file's tensors, and one parameter.

    Everything is written into a folder beside `directory` that gets its name at the end.

    Args:
        directory: absent or empty.
        family: of the model, such as `llama3`.
        config: its sizes.
        dtype: of the tensors in the files: float32, bfloat16 or float16; None: each as it is given.
        tensors: every parameter of the model, whole, with its name in the model here; in any order, and not to be
            changed afterwards.
        tokenizer_from: a folder, whose tokenizer files, `generation_config.json` and special tokens are taken over; or
            a `tokenizer.json`; None: nothing is copied.
        end_of_text: the token that ends a text, where `tokenizer_from` is no folder that says so itself.
        max_file_bytes: limit of one file; only a single tensor may be larger.

    Raises:
        UserError: there is something in the directory, it cannot be written, `transformers` has no such model, or a
            value is too large for the dtype.
    """
    fields = to_huggingface(family, config, dtype="")  # that is known at the end
    fields |= {"eos_token_id": end_of_text} | _token_ids(tokenizer_from)
    stored = huggingface_names(family, config)
    with whole_or_not_at_all(Path(directory)) as folder:
        files = _WeightFiles(folder, max_file_bytes)
        for name, whole in tensors:
            files.add(_as_stored(name, whole, stored.pop(name), dtype=dtype))
            del whole  # before the next one is there
        assert not stored, f"no tensor was given for {', '.join(stored)}"
        fields["torch_dtype"] = files.finish()
        (folder / CONFIG_FILE).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        if tokenizer_from is not None:
            _copy_tokenizer(Path(tokenizer_from), folder)


def _token_ids(tokenizer_from: str | None) -> dict[str, Any]:
    """The special tokens of the model that a folder holds."""
    if tokenizer_from is None or not (path := Path(tokenizer_from) / CONFIG_FILE).is_file():
        return {}
    source = read_json_object(path)
    return {name: source[name] for name in _TOKEN_IDS if name in source}


def _copy_tokenizer(source: Path, folder: Path) -> None:
    if not source.is_dir():
        shutil.copyfile(source, folder / "tokenizer.json")
        return
    for name in _COPIED_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _as_stored(name: str, whole: Tensor, where: Stored, *, dtype: torch.dtype | None) -> dict[str, Tensor]:
    parts = whole.split([rows for _, rows in where.parts])
    dtype = dtype or whole.dtype
    tensors = {}
    for (stored_name, _), part in zip(where.parts, parts, strict=True):
        tensor = (part.t() if where.transposed else part).to(dtype).contiguous()  # where nothing changes, no copy
        if dtype != whole.dtype and not tensor.isfinite().all() and part.isfinite().all():
            raise UserError(f"{name} has values that {dtype} cannot hold. Take bfloat16 or float32.")
        tensors[stored_name] = tensor
    return tensors


class _WeightFiles:
    """Tensors one after the other, in files of at most so many bytes."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._waiting: dict[str, Tensor] = {}
        self._written: list[list[str]] = []
        self._total_bytes = 0
        self._elements_by_dtype: Counter[torch.dtype] = Counter()

    def add(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if self._waiting and _num_bytes(*self._waiting.values(), tensor) > self._max_bytes:
                self._flush()
            self._waiting[name] = tensor
            self._elements_by_dtype[tensor.dtype] += tensor.numel()

    def finish(self) -> str:
        """Write what is waiting, and give all files their names, which say how many there are.

        Returns:
            The dtype of most of what was written.
        """
        self._flush()
        count = len(self._written)
        names = (
            [SINGLE_FILE] if count == 1 else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
        )
        for number, name in enumerate(names):
            self._path(number).rename(self._folder / name)
        if count > 1:
            places = {tensor: name for name, tensors in zip(names, self._written, strict=True) for tensor in tensors}
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": dict(sorted(places.items()))}
            (self._folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        [(dtype, _)] = self._elements_by_dtype.most_common(1)
        return str(dtype).removeprefix("torch.")

    def _flush(self) -> None:
        from safetensors.torch import save_file

        save_file(self._waiting, self._path(len(self._written)), metadata={"format": "pt"})
        self._written.append(list(self._waiting))
        self._total_bytes += _num_bytes(*self._waiting.values())
        self._waiting = {}

    def _path(self, number: int) -> Path:
        return self._folder / f"part-{number}"


def _num_bytes(*tensors: Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def check_can_write(what: str) -> None:
    """Refuse to write where safetensors is not installed; a run asks before its first step, not after its last.

    Raises:
        UserError: naming what was to be written.
    """
    try:
        import safetensors  # noqa: F401
    except ImportError:
        raise UserError(f"writing {what} needs safetensors: pip install 'shiplap[train]'.") from None


@contextmanager
def whole_or_not_at_all(directory: Path) -> Iterator[Path]:
    """A new folder beside `directory`, which becomes it if all goes well, and is removed if not.

    Args:
        directory: absent or empty.

    Raises:
        UserError: there is something in the directory, it cannot be written, or safetensors is not installed.
    """
    check_can_write(str(directory))
    from safetensors import SafetensorError

    folder = directory.parent / f".{directory.name}-unfinished-{uuid4().hex[:8]}"
    try:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise UserError(f"{directory} is there already, and nothing is written over. Name another folder.")
        folder.mkdir(parents=True)
        yield folder
        for file in folder.iterdir():
            with file.open("rb+") as opened:
                os.fsync(opened.fileno())  # else a power failure could leave the name with nothing behind it
        folder.rename(directory)
    except OSError as error:
        raise UserError(f"{directory}: cannot write there: {error.strerror}.") from None
    except SafetensorError as error:
        raise UserError(f"{directory}: cannot write there: {error}.") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
