"""`config.json` of a Hugging Face directory: read, with nothing overlooked that changes a model, and written."""

import re
from pathlib import Path
from typing import Any

from shiplap.config.json_fields import JsonFields, read_json_object
from shiplap.config.model import TransformerConfig
from shiplap.config.option import UserError
from shiplap.families import FAMILIES, Family

CONFIG_FILE = "config.json"
# They say where a model comes from, in which dtype it stands in the files, what is returned beside the logits, how
# text is generated, or what a classifier would be. None changes the logits.
_HARMLESS = (
    "_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "tokenizer_class", "dtype", "torch_dtype",
    "torchscript", "gradient_checkpointing", "use_cache", "chunk_size_feed_forward", "pretraining_tp",
    "return_dict", "return_dict_in_generate", "output_attentions", "output_hidden_states", "output_scores",
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "forced_bos_token_id",
    "forced_eos_token_id", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "max_length", "max_new_tokens",
    "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "num_return_sequences",
    "diversity_penalty", "length_penalty", "repetition_penalty", "exponential_decay_length_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "temperature", "top_k", "top_p", "typical_p",
    "remove_invalid_values", "prefix", "id2label", "label2id", "num_labels", "problem_type", "task_specific_params",
    "finetuning_task",
)  # fmt: skip


def read_config(directory: str, family: str | None) -> tuple[str, TransformerConfig]:
    """The model that a Hugging Face directory describes.

    Args:
        directory: with a `config.json`, as any release of `transformers` writes it.
        family: what the model must be, such as `llama3`; None: any family that shiplap has.

    Returns:
        The family, and the sizes.

    Raises:
        UserError: the file is missing or broken, is of another family, lacks a field, or describes something that
            shiplap does not compute. A field that shiplap does not know is refused too.
    """
    if not Path(directory).is_dir():
        raise UserError(
            f"{directory}: there is no such folder. It must be a Hugging Face model on this machine: shiplap downloads "
            "nothing, but `hf download MODEL --local-dir FOLDER` does."
        )
    path = Path(directory) / CONFIG_FILE
    fields = JsonFields(str(path), read_json_object(path))
    found = _family(fields, family)
    fields.ignore(*_HARMLESS)
    fields.every("architectures", *found.classes)
    if fields.has("quantization_config"):
        raise UserError(
            f"{path}: quantization_config: the weights are quantized. shiplap reads float32, bfloat16 and float16 "
            "ones; use the model they were made from."
        )
    sizes = found.read_sizes(fields)
    fields.refuse_others()
    try:
        return found.name, TransformerConfig(**sizes)
    except UserError as error:
        by_flag = {"--" + ours.replace("_", "-"): theirs for ours, theirs in found.size_names.items()}
        message = re.sub(r"--[a-z-]+", lambda match: by_flag.get(match[0], match[0]), str(error))
        raise UserError(f"{path}: {message}") from None


def _family(fields: JsonFields, asked: str | None) -> Family:
    model_type = fields.text("model_type")
    by_type = {family.model_type: family for family in FAMILIES.values()}
    wanted = "" if asked is None else f", and {asked} was asked for"
    if model_type not in by_type:
        raise UserError(
            f"{fields.path}: model_type {model_type} is not supported{wanted}; there is {', '.join(by_type)}."
        )
    found = by_type[model_type]
    if asked not in (None, found.name):
        raise UserError(
            f"{fields.path}: model_type {model_type} is shiplap's {found.name}{wanted}. Ask for {found.name}."
        )
    return found


def to_huggingface(family: str, config: TransformerConfig, *, dtype: str) -> dict[str, Any]:
    """The `config.json` from which `transformers` makes the same model.

    It uses the names that every release reads: `torch_dtype`, `rope_theta`, `rope_scaling`. Dropout of families
    other than GPT-2 is left out, since their models in `transformers` have none in these places.

    Args:
        family: such as `llama3`.
        config: the model's sizes.
        dtype: of the weights in the files, such as `float32`.

    Raises:
        UserError: `transformers` has no such model.
    """
    of_family = FAMILIES[family]
    if config.num_experts and not of_family.architecture.has_experts:
        raise UserError(f"{family} has no experts, but --num-experts is {config.num_experts}.")
    return {
        "architectures": [of_family.classes[0]],
        "model_type": of_family.model_type,
        "torch_dtype": dtype,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": config.tie_embeddings,
        # Absent, they would be those of the tokenizer that the family's first model came with.
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        **of_family.written_sizes(config),
    }
