"""Times `generate` beside Hugging Face's ``generate`` with its cache, on the same weights, prompts and threads.

    .venv/bin/python benchmarks/generation.py                                # smollm2-135m, 512 + 32 tokens, one text
    .venv/bin/python benchmarks/generation.py --texts 8 --prompt 128 --turns 5

Both take turns, each in a process of its own (see ``turns.py``). In a turn each reads its prompts and generates
greedily. The time to the first token of each text (prefill) and that of all further tokens (decode) are counted apart:
Hugging Face's from two calls, of which one generates a single token. Below the table is how many tokens are equal.
Every figure is a median over the turns, with the smallest and the largest; ratios are taken within a turn.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, Sequence

from contestants import Lacking, threads
from turns import Several, Turn, Work, middle, serve, take_turns, thread_environment, write_samples

from fugaku_gpt.checkpoint.hugging_face import export_model
from fugaku_gpt.config import RunConfig, load_run_config
from fugaku_gpt.launch.rank_variables import thread_variables
from fugaku_gpt.machine.local import processor_name, usable_cores

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [path for path in [str(ROOT)] if path not in sys.path]
from tests.support.checkpoints import save_model  # noqa: E402

PHASES = ("prefill", "decode")


def prompts_of(options: argparse.Namespace, vocab_size: int) -> List[List[int]]:
    """The same random tokens for both."""
    import numpy as np

    return np.random.RandomState(0).randint(1, vocab_size, (options.texts, options.prompt)).tolist()


def ours(options: argparse.Namespace, checkpoint: Path) -> Work:
    """Generation by this package on one rank."""
    import torch

    from fugaku_gpt.comm import ProcessGrid
    from fugaku_gpt.inference.continuation import GenerationLimits
    from fugaku_gpt.inference.generation import Generator
    from fugaku_gpt.inference.model_source import ReplicaLayout, find_model, inference_config
    from fugaku_gpt.inference.replica import ModelReplica
    from fugaku_gpt.inference.sampling import Sampling
    from fugaku_gpt.training.startup import agree_on_kernels, prepare_process

    prepare_process(threads())
    source, grid = find_model(checkpoint), ProcessGrid.alone()
    config = inference_config(source, ReplicaLayout(dtype=options.dtype), 1)
    agree_on_kernels(config, grid.world)
    replica = ModelReplica(config, grid)
    replica.load(source)
    prompts = dict(enumerate(prompts_of(options, config.model.vocab_size)))
    limits = GenerationLimits(options.tokens, slots=options.texts)
    assert torch.get_num_threads() == threads()

    def work() -> Dict[str, Any]:
        generator = Generator(replica, lambda context, ids: "", Sampling(), limits)
        texts = generator.run(prompts)
        speed = generator.speed
        seconds = {"prefill": speed.prefill_seconds, "decode": speed.decode_seconds}
        return {**seconds, "texts": [text.ids for text in texts.values()]}

    return work


def hugging_face(options: argparse.Namespace, folder: Path) -> Work:
    """Generation by ``transformers``, with its cache.

    Raises:
        Lacking: there is no ``transformers`` here.
    """
    import torch

    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise Lacking(str(error)) from None
    torch.set_num_threads(threads())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, options.dtype)).eval()
    model.generation_config.pad_token_id = 0
    prompts = torch.tensor(prompts_of(options, model.config.vocab_size))

    def generate(tokens: int) -> Any:
        with torch.no_grad():
            mask = torch.ones_like(prompts)
            return model.generate(
                prompts,
                attention_mask=mask,
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                do_sample=False,
                use_cache=True,
            )

    def work() -> Dict[str, Any]:
        started = time.perf_counter()
        generate(1)
        first = time.perf_counter()
        texts = generate(options.tokens)
        ended = time.perf_counter()
        prefill = first - started
        texts = texts[:, options.prompt :].tolist()
        return {"prefill": prefill, "decode": ended - first - prefill, "texts": texts}

    return work


def table(options: argparse.Namespace, turns: Sequence[Turn]) -> List[str]:
    """A line for each phase and contestant, and how many times as fast ours is."""
    counts = {"prefill": options.texts * options.prompt, "decode": options.texts * (options.tokens - 1)}
    lines = [f"{'':24}{'seconds':>22}{'tokens/s':>10}{'ours is':>26}"]
    for phase in PHASES:
        for name in turns[0]:
            seconds = [turn[name].value[phase] for turn in turns]
            rate = counts[phase] / statistics.median(seconds)
            ratios = [turn[name].value[phase] / turn["ours"].value[phase] for turn in turns]
            ours_is = f"{middle(ratios)} x" if name != "ours" else ""
            lines.append(f"{phase:10}{name:14}{middle(seconds):>22}{rate:10.1f}{ours_is:>26}")
    return lines


def equal_texts(turns: Sequence[Turn]) -> str:
    """A line that says how many tokens are generated alike until the first that differs."""
    texts = {name: turns[-1][name].value["texts"] for name in turns[-1]}
    if len(texts) < 2:
        return ""
    (a, b) = texts.values()
    equal = sum(next((n for n, (x, y) in enumerate(zip(p, q)) if x != y), len(p)) for p, q in zip(a, b))
    return f"equal tokens: {equal} of {sum(map(len, a))}"


def random_checkpoint(config: RunConfig, folder: Path) -> Path:
    """A checkpoint of random weights, large enough that the most probable token is far from the next."""
    return save_model(folder, config.model, ranks=1)


def main() -> None:
    """Starts both contestants and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--texts", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=512, help="Tokens of a prompt.")
    parser.add_argument("--tokens", type=int, default=32, help="Tokens of a text.")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(usable_cores()))
    parser.add_argument("--samples", type=Path, help="Write every turn's figures as JSON.")
    parser.add_argument("--serve", nargs=3, metavar=("NAME", "FOLDER", "SOCKET"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        name, folder, path = options.serve
        setup = {"ours": ours, "transformers": hugging_face}[name]
        serve(path, lambda: setup(options, Path(folder)))
        return
    config = load_run_config(preset=options.preset)
    print(f"{options.preset}, {options.dtype}, {options.texts} x ({options.prompt} + {options.tokens}) tokens")
    print(f"{processor_name()}, {options.threads} threads")
    arguments = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder, Several() as workers:
        checkpoint = random_checkpoint(config, Path(folder) / "checkpoints")
        export_model(checkpoint, Path(folder) / "hf")
        argv = [sys.executable, __file__, *arguments, "--serve"]
        for name, source, environment in (
            ("ours", checkpoint, thread_variables(options.threads)),
            ("transformers", Path(folder) / "hf", thread_environment(options.threads)),
        ):
            workers.start(name, [*argv, name, str(source)], environment)
        for name, reason in workers.lacking.items():
            print(f"{name}: {reason}")
        turns = take_turns(workers.workers, options.turns)
    print("\n".join([*table(options, turns), equal_texts(turns)]))
    write_samples(options.samples, {"arguments": arguments}, turns)


if __name__ == "__main__":
    main()
