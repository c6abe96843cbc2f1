"""``fugaku-gpt generate``: text from prompts, by a trained model in any layout of ranks."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, List, NamedTuple, Optional, Sequence, Tuple

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
from fugaku_gpt.cli.output import echo, echo_at_once
from fugaku_gpt.cli.streamed_input import InputFile, read_input
from fugaku_gpt.errors import UsageError
from fugaku_gpt.limits import PROMPTS_TEXT

if TYPE_CHECKING:
    from fugaku_gpt.cli.chat import ChatUser, Lines
    from fugaku_gpt.config import ModelConfig, RunConfig
    from fugaku_gpt.inference.continuation import Continuation, GenerationLimits, Speed
    from fugaku_gpt.inference.model_source import Joining, ModelSource, ReplicaLayout
    from fugaku_gpt.inference.sampling import Sampling
    from fugaku_gpt.inference.text import TextTokenizer


@dataclass(frozen=True)
class PromptOptions:
    """Options of ``generate`` that say what is continued; none of them with ``chat``: what a user types.

    Attributes:
        interactive: the ranks' launcher passes on the lines of a terminal.
    """

    prompts: Tuple[str, ...]
    prompt_file: Optional[Path]
    chat: bool
    interactive: bool

    @property
    def is_conversation(self) -> bool:
        """Whether the user's messages are read one by one."""
        return self.chat and not self.prompts and self.prompt_file is None

    @property
    def files(self) -> List[InputFile]:
        """The file of prompts, if there is one."""
        return [] if self.prompt_file is None else [InputFile("--prompts", self.prompt_file, PROMPTS_TEXT)]

    def check(self, form: str) -> None:
        """Raise a ``UsageError`` unless there is one source of prompts, which goes with the form of the output."""
        if self.is_conversation and form != "text":
            raise UsageError(f"--format {form}: goes with --prompt or --prompts, not with a conversation")
        if not self.is_conversation and bool(self.prompts) == (self.prompt_file is not None):
            raise UsageError(
                "give prompts: --prompt TEXT (repeatable), or --prompts FILE; or converse, with --chat alone"
            )


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
@click.option(
    "--chat",
    is_flag=True,
    help="A prompt is what a user says, in the model's chat template; without prompts, read messages and answer each.",
)
@click.option("--interactive", is_flag=True, hidden=True, help="On ranks that --ranks has started at a terminal.")
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
@options_as(PromptOptions, "prompts")
def generate(
    source: Path,
    checkpoint: Optional[str],
    prompts: PromptOptions,
    form: str,
    model_ranks: ModelRanks,
    sampling: SamplingOptions,
) -> None:
    """Continue prompts with the newest valid checkpoint of RUN_OR_CHECKPOINT, or with the one of --checkpoint.

    A prompt is read as the beginning of a document. The same seed gives the same text, whatever the layout of ranks.
    The text of a single prompt is printed as it grows; lines of --format jsonl as their texts end. Speeds are printed
    on standard error.

    With --chat and no prompt, a line that you type is a message, and the model answers: Ctrl-C stops an answer, Ctrl-D
    ends the conversation. Where standard input is no terminal, each of its lines is a message.

    Exit codes: 0 all texts are printed, 1 a rank failed, 2 usage error, 128 + N ended by signal N.
    """
    from fugaku_gpt.inference.model_source import ReplicaLayout, find_model

    prompts.check(form)
    if "" in sampling.stop:
        raise UsageError("--stop: an empty text would end every text at its beginning")
    start_model_ranks(model_ranks, prompts.files, converses=prompts.is_conversation)
    rank = JoiningRank()
    prepared = rank.prepare(lambda: _prepare(find_model(source, checkpoint), prompts, model_ranks))
    for note in prepared.source.notes if is_first_rank() else ():
        echo(f"fugaku-gpt: note: {note}", err=True)
    has_user = prompts.is_conversation and is_first_rank()
    user = rank.prepare(lambda: _chat_user(prepared, prompts.interactive)) if has_user else None
    layout = ReplicaLayout(model_ranks.tp, model_ranks.pp, model_ranks.dtype, join_model_ranks(model_ranks))
    joining = _joining(rank, prepared, sampling, model_ranks.memory_check)
    if prompts.is_conversation:
        speed = on_joined_ranks(lambda: _converse(prepared, layout, sampling, user, joining))
    else:
        speed = on_joined_ranks(lambda: _generate(prepared, layout, sampling, form, joining))
    if speed is not None:
        echo(_speed_line(speed), err=True)


class _Prepared(NamedTuple):
    """The model, its tokenizer, and the prompts as they were given and as token ids."""

    source: "ModelSource"
    tokenizer: "TextTokenizer"
    model: "ModelConfig"
    prompts: Sequence[object]
    encoded: List[List[int]]


def _prepare(model_source: "ModelSource", options: PromptOptions, ranks: ModelRanks) -> _Prepared:
    """Read everything before MPI starts: a chat template is rendered in a fork."""
    from fugaku_gpt.inference.model_source import find_tokenizer, has_read_documents, model_of
    from fugaku_gpt.inference.prompts import Prompt, encode_prompts, read_prompts
    from fugaku_gpt.inference.text import TextTokenizer

    path = find_tokenizer(model_source, ranks.tokenizer)
    tokenizer = TextTokenizer(path, ranks.end_token, begins_after_end=has_read_documents(model_source))
    texts: List[Prompt] = list(options.prompts)
    if options.prompt_file is not None:
        texts = read_input(
            "--prompts", options.prompt_file, ranks.copies, lambda path: read_prompts(path, options.prompt_file)
        )
    model = model_of(model_source)
    if tokenizer.vocab_size > model.vocab_size:
        raise UsageError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, more than model.vocab_size {model.vocab_size}: "
            "it is another model's; name the right one with --tokenizer FILE"
        )
    if options.is_conversation:
        tokenizer.require_chat_template()
    encoded = encode_prompts(texts, tokenizer, options.chat, model.seq_len)
    return _Prepared(model_source, tokenizer, model, texts, encoded)


def _chat_user(prepared: _Prepared, is_relayed: bool) -> "ChatUser":
    """The user of a conversation, whose messages are encoded in a process that is forked here, before MPI starts."""
    from fugaku_gpt.cli.chat import ChatUser, PipeLines, RelayedLines, TerminalLines
    from fugaku_gpt.inference.conversation import ChatEncoder, Conversation

    encoder = ChatEncoder(prepared.tokenizer)  # before lines are read in a thread
    lines: "Lines" = TerminalLines() if sys.stdin.isatty() else PipeLines()
    if is_relayed:
        lines = RelayedLines()
    return ChatUser(Conversation(encoder, prepared.model.seq_len, lines.note), lines)


def _joining(rank: JoiningRank, prepared: _Prepared, sampling: SamplingOptions, has_check: bool) -> "Joining":
    from fugaku_gpt.inference.model_source import Joining
    from fugaku_gpt.planner.trainer.generation_memory import GenerationSize
    from fugaku_gpt.planner.trainer.memory_check import local_node_limits
    from fugaku_gpt.planner.trainer.use_check import refuse_too_large_generation

    if not has_check:
        return Joining(rank.report_joined)
    limits, most, encoded = local_node_limits(), prepared.model.seq_len, prepared.encoded
    longest = max(map(len, encoded), default=most)  # a conversation grows until it fills the context

    def check(config: "RunConfig", ranks: Sequence[int]) -> None:
        texts = min(sampling.batch, -(-max(1, len(encoded)) // config.layout.dp))
        size = GenerationSize(texts, min(most, longest + sampling.max_tokens))
        refuse_too_large_generation(config, size, limits, ranks)

    return Joining(rank.report_joined, check)


def _generate(
    prepared: _Prepared,
    layout: "ReplicaLayout",
    sampling: SamplingOptions,
    form: str,
    joining: "Joining",
) -> "Optional[Speed]":
    from fugaku_gpt.inference.run import Listener, generate_on_every_rank

    source, tokenizer, _, prompts, encoded = prepared
    streams = len(encoded) == 1 and form == "text" and is_first_rank()
    listener = Listener(on_end=lambda text: _print(text, prompts[text.prompt], form))
    if streams:
        listener = Listener(lambda piece: echo(piece, nl=False), lambda text: echo())
    of_sampling, limits = _sampling(sampling), _limits(sampling, tokenizer)
    return generate_on_every_rank(source, layout, encoded, tokenizer, of_sampling, limits, listener, joining)


def _converse(
    prepared: _Prepared,
    layout: "ReplicaLayout",
    sampling: SamplingOptions,
    user: "Optional[ChatUser]",
    joining: "Joining",
) -> "Optional[Speed]":
    from fugaku_gpt.inference.run import converse_on_every_rank

    source, tokenizer, *_ = prepared
    of_sampling, limits = _sampling(sampling), _limits(sampling, tokenizer)
    return converse_on_every_rank(source, layout, user, tokenizer, of_sampling, limits, joining)


def _sampling(options: SamplingOptions) -> "Sampling":
    from fugaku_gpt.inference.sampling import Sampling

    return Sampling(options.temperature, options.top_k, options.top_p, options.repetition_penalty, options.seed)


def _limits(options: SamplingOptions, tokenizer: "TextTokenizer") -> "GenerationLimits":
    from fugaku_gpt.inference.continuation import GenerationLimits

    return GenerationLimits(options.max_tokens, tokenizer.stops, options.stop, options.batch)


def _print(text: "Continuation", prompt: object, form: str) -> None:
    if form == "jsonl":
        row = {
            "prompt": prompt,
            "text": text.text,
            "reason": text.reason,
            "prompt_tokens": len(text.prompt_ids),
            "tokens": len(text.ids),
        }
        echo_at_once(json.dumps(row))
    else:
        echo(f"{'' if text.prompt == 0 else chr(10)}=== prompt {text.prompt + 1}\n{text.text}")


def _speed_line(speed: "Speed") -> str:
    parts = []
    for name, tokens, seconds in (
        ("prompts read", speed.prefill_tokens, speed.prefill_seconds),
        ("generated", speed.decode_tokens, speed.decode_seconds),
    ):
        if tokens:
            parts.append(f"{name}: {tokens} tokens, {tokens / seconds:.1f} tokens/s")
    return f"fugaku-gpt: {'; '.join(parts)}; cache of keys and values: {speed.cache_bytes / 2**20:.1f} MiB a rank"
