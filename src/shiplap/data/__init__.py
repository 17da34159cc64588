"""Training data: token sources, tokenizers, and the batches cut from them. Knows nothing of TP."""

from shiplap.data.batches import Batches
from shiplap.data.byte_source import ByteSource
from shiplap.data.dataset import Data, open_data
from shiplap.data.source import TokenSource
from shiplap.data.token_file import TokenFile, write_token_file
from shiplap.data.tokenizer import BYTES, ByteTokenizer, HuggingFaceTokenizer, Tokenizer, open_tokenizer

__all__ = [
    "BYTES",
    "Batches",
    "ByteSource",
    "ByteTokenizer",
    "Data",
    "HuggingFaceTokenizer",
    "TokenFile",
    "TokenSource",
    "Tokenizer",
    "open_data",
    "open_tokenizer",
    "write_token_file",
]
