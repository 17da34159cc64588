"""Models on disk: what others published, read and written in their own formats."""

from shiplap.checkpoint.huggingface_writer import check_can_write, save_huggingface, write_huggingface
from shiplap.checkpoint.llmc import load_llmc
from shiplap.checkpoint.peft import MergedAdapters, load_adapters, read_adapters, save_adapters
from shiplap.checkpoint.pretrained import LoadedModel, check_huggingface, load_huggingface, newest_checkpoint
from shiplap.checkpoint.stored_model import StoredModel, open_stored_model

__all__ = [
    "LoadedModel",
    "MergedAdapters",
    "StoredModel",
    "check_can_write",
    "check_huggingface",
    "load_adapters",
    "load_huggingface",
    "load_llmc",
    "newest_checkpoint",
    "open_stored_model",
    "read_adapters",
    "save_adapters",
    "save_huggingface",
    "write_huggingface",
]
