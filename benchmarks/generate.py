"""Writing with and without the cache of keys and values, interleaved in one run; random weights of a named size.

    .venv/bin/python benchmarks/generate.py --output generate.jsonl

One round runs every variant once, in an order that rotates. Reported are medians over the rounds: seconds to the first
token, which reads the prompt, and tokens per second from then on.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from shiplap import ModelParallelConfig
from shiplap.config import TransformerConfig
from shiplap.families import preset
from shiplap.generation import generate
from shiplap.generation.options import SamplingOptions
from shiplap.models.decoder import build_model

Writer = Callable[[], Iterator[list[int | None]]]


def random_model(family: str, config: TransformerConfig, dtype: torch.dtype, device: str) -> nn.Module:
    """The whole model on one device."""
    torch.set_default_dtype(dtype)
    model = build_model(family, config, parallel=ModelParallelConfig(), group=None, seed=0)
    torch.set_default_dtype(torch.float32)
    return model.to(device).eval()


@torch.no_grad()
def without_cache(model: nn.Module, prompt: Tensor, num_tokens: int) -> Iterator[list[int | None]]:
    """Every token anew for every token; of the last one alone the logits, as with the cache."""
    tokens = prompt.to(next(model.parameters()).device)
    for _ in range(num_tokens):
        new = model(tokens, last_only=True)[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, new], dim=1)
        yield new[:, 0].tolist()


def measure(writers: dict[str, Writer], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Of every variant in every round, seconds to the first token and seconds from then to the last."""
    names, times = list(writers), {name: list[tuple[float, float]]() for name in writers}
    for round_index in range(-1, rounds):  # the first warms up
        for offset in range(len(names)):
            name = names[(round_index + offset) % len(names)]
            start = time.perf_counter()
            steps = writers[name]()
            next(steps)
            first = time.perf_counter()
            for _ in steps:
                pass
            if round_index >= 0:
                times[name].append((first - start, time.perf_counter() - first))
    return times


def main() -> None:
    """Measure, print, and write a line of JSON for each variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="gpt2", help="such as llama3")
    parser.add_argument("--preset", default="gpt2-124m", help="a named size of the family")
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--new", type=int, default=64, help="tokens")
    parser.add_argument("--batch", type=int, default=1, help="texts at once")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=1, help="of the CPU")
    parser.add_argument("--rounds", type=int, default=5, help="how often each variant runs")
    parser.add_argument("--output", type=Path, help="append the results, as lines of JSON")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    config = preset(arguments.family, arguments.preset)
    model = random_model(arguments.family, config, getattr(torch, arguments.dtype), arguments.device)
    prompt = torch.randint(config.vocab_size, (arguments.batch, arguments.prompt))

    def with_cache() -> Iterator[list[int | None]]:
        return generate(
            model,
            prompt,
            num_tokens=arguments.new,
            max_sequence_length=config.max_sequence_length,
            sampling=SamplingOptions(temperature=0.0),
        )

    writers: dict[str, Writer] = {
        "with cache": with_cache,
        "without cache": lambda: without_cache(model, prompt, arguments.new),
    }
    if arguments.dtype == "float32":
        assert list(writers["with cache"]()) == list(writers["without cache"]()), "they write different texts"
    for name, times in measure(writers, arguments.rounds).items():
        first, later = (statistics.median(column) for column in zip(*times, strict=True))
        speed = arguments.batch * (arguments.new - 1) / later
        print(f"{name:<14} first token {1e3 * first:7.1f} ms, then {speed:6.1f} tokens/s", flush=True)
        record = {
            "variant": name,
            "preset": arguments.preset,
            "prompt_tokens": arguments.prompt,
            "new_tokens": arguments.new,
            "batch_size": arguments.batch,
            "dtype": arguments.dtype,
            "device": arguments.device if arguments.device == "cpu" else torch.cuda.get_device_name(),
            "num_threads": arguments.threads,
            "torch": torch.__version__,
            "machine": platform.machine(),
            "first_token_s": [first for first, _ in times],
            "later_tokens_s": [later for _, later in times],
            "median_later_tokens_per_s": speed,
        }
        if arguments.output:
            with arguments.output.open("a") as file:
                file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
