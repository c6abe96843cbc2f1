"""``fugaku-gpt generate``: text from prompts, by a trained model in any layout of ranks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import click

from fugaku_gpt.cli.model_ranks import (
    JoiningRank,
    ModelRanks,
    is_first_rank,
    join_model_ranks,
    model_ranks,
    on_joined_ranks,
    start_model_ranks,
)
from fugaku_gpt.cli.numbers import FiniteRange
from fugaku_gpt.cli.options import PATH, checkpoint_option, options_as
from fugaku_gpt.cli.output import echo
from fugaku_gpt.cli.streamed_input import InputFile, read_input
from fugaku_gpt.errors import UsageError
from fugaku_gpt.limits import PROMPTS_TEXT

if TYPE_CHECKING:
    from fugaku_gpt.inference.continuation import Continuation, GenerationLimits, Speed
    from fugaku_gpt.inference.model_source import ModelSource, ReplicaLayout
    from fugaku_gpt.inference.sampling import Sampling
    from fugaku_gpt.inference.text import TextTokenizer


@dataclass(frozen=True)
class SamplingOptions:
    """Options of ``generate`` that say which token is chosen, and where a text ends."""

    temperature: float
    top_k: Optional[int]
    top_p: float
    repetition_penalty: float
    seed: int
    max_tokens: int
    stop: Tuple[str, ...]
    batch: int


@click.command()
@click.argument("source", metavar="RUN_OR_CHECKPOINT", type=PATH)
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="Text to continue; repeatable.")
@click.option(
    "--prompts",
    "prompt_file",
    type=PATH,
    metavar="FILE",
    help="One prompt in each line, - for standard input; "
    'JSON in a .jsonl file: a text, {"prompt": ...} or {"messages": [...]}.',
)
@click.option("--chat", is_flag=True, help="A prompt is what a user says: use the chat template of the model.")
@click.option("--max-tokens", type=click.IntRange(1), default=128, show_default=True, help="Most tokens of a text.")
@click.option(
    "--temperature",
    type=FiniteRange(min=0.0),
    default=0.0,
    show_default=True,
    help="Divides the logits; 0 takes the most probable token.",
)
@click.option("--top-k", type=click.IntRange(min=1), help="Choose from this many of the most probable tokens.")
@click.option(
    "--top-p",
    type=FiniteRange(min=0.0, max=1.0, min_open=True),
    default=1.0,
    show_default=True,
    help="Choose from the fewest tokens that have this probability together.",
)
@click.option(
    "--repetition-penalty",
    type=FiniteRange(min=0.0, min_open=True),
    default=1.0,
    show_default=True,
    help="Above 1, tokens that the text already has become less probable.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Another seed gives another text.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End a text where it contains this; repeatable.")
@click.option("--batch", type=click.IntRange(min=1), default=8, show_default=True, help="Texts that grow together.")
@click.option(
    "--format",
    "form",
    type=click.Choice(("text", "jsonl")),
    default="text",
    show_default=True,
    help="Print texts, or a line of JSON for each prompt.",
)
@checkpoint_option
@model_ranks
@options_as(SamplingOptions, "sampling")
def generate(
    source: Path,
    checkpoint: Optional[str],
    prompts: Tuple[str, ...],
    prompt_file: Optional[Path],
    chat: bool,
    form: str,
    model_ranks: ModelRanks,
    sampling: SamplingOptions,
) -> None:
    """Continue prompts with the newest valid checkpoint of RUN_OR_CHECKPOINT, or with the one of --checkpoint.

    A prompt is read as the beginning of a document. The same seed gives the same text, whatever the layout of ranks.
    The text of a single prompt is printed as it grows. Speeds are printed on standard error.

    Exit codes: 0 all texts are printed, 1 a rank failed, 2 usage error, 128 + N ended by signal N.
    """
    from fugaku_gpt.inference.model_source import ReplicaLayout, find_model

    if bool(prompts) == (prompt_file is not None):
        raise UsageError("give prompts: --prompt TEXT (repeatable), or --prompts FILE")
    if "" in sampling.stop:
        raise UsageError("--stop: an empty text would end every text at its beginning")
    start_model_ranks(model_ranks, [InputFile("--prompts", prompt_file, PROMPTS_TEXT)] if prompt_file else [])
    rank = JoiningRank()
    prepared = rank.prepare(lambda: _prepare(find_model(source, checkpoint), prompts, prompt_file, chat, model_ranks))
    for note in prepared.source.notes if is_first_rank() else ():
        echo(f"fugaku-gpt: note: {note}", err=True)
    layout = ReplicaLayout(model_ranks.tp, model_ranks.pp, model_ranks.dtype, join_model_ranks(model_ranks))
    on_joined_ranks(lambda: _generate(prepared, layout, sampling, form, rank.report_joined))


class _Prepared(NamedTuple):
    """The model, its tokenizer, and the prompts as they were given and as token ids."""

    source: "ModelSource"
    tokenizer: "TextTokenizer"
    prompts: Sequence[object]
    encoded: List[List[int]]


def _prepare(
    model_source: "ModelSource", prompts: Tuple[str, ...], prompt_file: Optional[Path], chat: bool, options: ModelRanks
) -> _Prepared:
    """Read everything before MPI starts: a chat template is rendered in a fork."""
    from fugaku_gpt.inference.model_source import find_tokenizer, has_read_documents, model_of
    from fugaku_gpt.inference.prompts import Prompt, encode_prompts, read_prompts
    from fugaku_gpt.inference.text import TextTokenizer

    path = find_tokenizer(model_source, options.tokenizer)
    tokenizer = TextTokenizer(path, options.end_token, begins_after_end=has_read_documents(model_source))
    texts: List[Prompt] = list(prompts)
    if prompt_file is not None:
        texts = read_input("--prompts", prompt_file, options.copies, read_prompts)
    model = model_of(model_source)
    if tokenizer.vocab_size > model.vocab_size:
        raise UsageError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, more than model.vocab_size {model.vocab_size}: "
            "it is another model's; name the right one with --tokenizer FILE"
        )
    return _Prepared(model_source, tokenizer, texts, encode_prompts(texts, tokenizer, chat, model.seq_len))


def _generate(
    prepared: _Prepared,
    layout: "ReplicaLayout",
    sampling: SamplingOptions,
    form: str,
    on_joined: Callable[[], None],
) -> None:
    from fugaku_gpt.inference.run import generate_on_every_rank

    source, tokenizer, prompts, encoded = prepared
    streams = len(encoded) == 1 and form == "text" and is_first_rank()
    on_text = (lambda text: echo(text, nl=False)) if streams else None
    results = generate_on_every_rank(
        source, layout, encoded, tokenizer, _sampling(sampling), _limits(sampling, tokenizer), on_text, on_joined
    )
    if results is not None:
        texts, speed = results
        _print(texts, prompts, form, streams)
        echo(_speed_line(speed), err=True)


def _sampling(options: SamplingOptions) -> "Sampling":
    from fugaku_gpt.inference.sampling import Sampling

    return Sampling(options.temperature, options.top_k, options.top_p, options.repetition_penalty, options.seed)


def _limits(options: SamplingOptions, tokenizer: "TextTokenizer") -> "GenerationLimits":
    from fugaku_gpt.inference.continuation import GenerationLimits

    return GenerationLimits(options.max_tokens, tokenizer.stops, options.stop, options.batch)


def _print(results: "Dict[int, Continuation]", prompts: Sequence[object], form: str, has_streamed: bool) -> None:
    if has_streamed:
        echo()
        return
    for number, result in results.items():
        if form == "jsonl":
            row = {
                "prompt": prompts[number],
                "text": result.text,
                "reason": result.reason,
                "prompt_tokens": len(result.prompt_ids),
                "tokens": len(result.ids),
            }
            echo(json.dumps(row))
        else:
            echo(f"{'' if number == 0 else chr(10)}=== prompt {number + 1}\n{result.text}")


def _speed_line(speed: "Speed") -> str:
    parts = []
    for name, tokens, seconds in (
        ("prompts read", speed.prefill_tokens, speed.prefill_seconds),
        ("generated", speed.decode_tokens, speed.decode_seconds),
    ):
        if tokens:
            parts.append(f"{name}: {tokens} tokens, {tokens / seconds:.1f} tokens/s")
    return f"fugaku-gpt: {'; '.join(parts)}; cache of keys and values: {speed.cache_bytes / 2**20:.1f} MiB a rank"
