"""The weights of a Hugging Face directory; nothing is ever unpickled."""

import re
from collections.abc import Iterator
from pathlib import Path

from shiplap.checkpoint.safetensors_files import SafetensorsFiles
from shiplap.config import UserError
from shiplap.config.json_fields import JsonFields, read_json_object

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Masks and rotary frequencies that older releases of transformers stored beside the parameters; they follow from the
# sizes.
_BUFFER = re.compile(
    r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)|model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
)
# GPT-2 was published as the part of the model that is called `transformer` in the files of later ones.
_GPT2_WITHOUT_PREFIX = re.compile(r"(wte|wpe|h\.\d+|ln_f)\..*")


class HuggingFaceFiles(SafetensorsFiles):
    """The tensors of a Hugging Face directory that may be parameters, by their names in current `transformers`."""

    def __init__(self, directory: str) -> None:
        """Open all files and read their headers.

        Args:
            directory: with `model.safetensors`, or several files and `model.safetensors.index.json`.

        Raises:
            UserError: safetensors is not installed; a file is missing, damaged, or not safetensors; a tensor comes
                twice, or is of a dtype other than float32, bfloat16 and float16.
        """
        super().__init__(directory, _files(Path(directory)), _current_name)

    def set_aside(self, name: str) -> None:
        """Leave a tensor out of `shapes`; it can still be read."""
        self.shapes = {other: shape for other, shape in self.shapes.items() if other != name}


def _current_name(name: str) -> str | None:
    if _BUFFER.fullmatch(name):
        return None
    return f"transformer.{name}" if _GPT2_WITHOUT_PREFIX.fullmatch(name) else name


def _files(directory: Path) -> list[Path]:
    """The files that hold the tensors."""
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if single.exists() and index.exists():
        raise UserError(f"{directory} holds both {SINGLE_FILE} and {INDEX_FILE}. Remove the one that is not the model.")
    if single.exists():
        return [single]
    if not index.exists():
        pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern))
        if pickled:
            raise UserError(
                f"{directory} holds {pickled[0]} but no {SINGLE_FILE}. The former is a pickle, which can run any "
                "program when it is loaded, so shiplap never reads one. Where you trust it, transformers makes the "
                "latter: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)."
            )
        raise UserError(f"{directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}, so there are no weights in it.")
    return list(_indexed(directory, index))


def _indexed(directory: Path, index: Path) -> Iterator[Path]:
    """The files that an index names, each of them once."""
    names = JsonFields(str(index), read_json_object(index)).mapping("weight_map")
    for name in dict.fromkeys(map(str, names.values())):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise UserError(f"{index}: {name} is not the name of a safetensors file in {directory}.")
        if not (directory / name).exists():
            raise UserError(f"{index} names {name}, which is not there. Is the download complete?")
        yield directory / name
    # The tensors themselves are taken from the files: which of them are missing is found by comparing with the model.
