"""``fugaku-gpt eval``: losses of texts, and answers to questions, by a trained model in any layout of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

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
from fugaku_gpt.cli.options import PATH, checkpoint_option, format_option, options_as
from fugaku_gpt.cli.output import echo, render_rows
from fugaku_gpt.cli.streamed_input import InputFile, read_input
from fugaku_gpt.errors import UsageError
from fugaku_gpt.limits import DOCUMENT, PROMPTS_TEXT

if TYPE_CHECKING:
    from fugaku_gpt.config import RunConfig
    from fugaku_gpt.data.scored_text import ScoredText, TextLoss
    from fugaku_gpt.inference.model_source import Joining, ModelSource, ReplicaLayout
    from fugaku_gpt.inference.questions import Answers, Question
    from fugaku_gpt.inference.text import TextTokenizer

_COLUMNS = ("text", "tokens", "bytes", "loss", "perplexity", "bits per byte")
_QUESTION_COLUMNS = ("questions", "right", "accuracy", "right by byte", "accuracy by byte")
_DIGITS = {"loss": 6, "perplexity": 4, "bits per byte": 6, "accuracy": 4, "accuracy by byte": 4}  # behind the point


@dataclass(frozen=True)
class WindowOptions:
    """Options of ``eval`` that say how texts are cut, and how many parts are computed together."""

    stride: Optional[int]
    batch: int


@dataclass(frozen=True)
class EvalInputs:
    """Inputs of ``eval``: a corpus or files, for their losses; or questions, for the answers to them."""

    data: Optional[str]
    text: Tuple[Path, ...]
    questions: Optional[Path]
    documents: Optional[int]
    per_document: bool

    @property
    def files(self) -> List[InputFile]:
        """The files of these inputs, of which a corpus has none that can be a stream."""
        questions = [] if self.questions is None else [InputFile("--questions", self.questions, PROMPTS_TEXT)]
        return [*questions, *(InputFile("--text", path, DOCUMENT) for path in self.text)]

    def check(self) -> None:
        """Raise a ``UsageError`` unless one kind of input is given."""
        kinds = [self.data is not None, bool(self.text), self.questions is not None]
        if sum(kinds) != 1:
            raise UsageError("give one of --data CORPUS, --text FILE (repeatable) and --questions FILE")
        if self.documents is not None and self.data is None:
            raise UsageError("--documents: goes with --data")
        if self.per_document and self.questions is not None:
            raise UsageError("--per-document: goes with --data or --text")


@click.command("eval")
@click.argument("source", metavar="RUN_OR_CHECKPOINT", type=PATH)
@click.option("--data", metavar="PATH", help="A corpus: folder made by `data prepare`, or prefix of a .bin/.idx pair.")
@click.option(
    "--documents", type=click.IntRange(min=1), help="Documents of --data that count, from the first; default: all."
)
@click.option(
    "--text",
    type=PATH,
    multiple=True,
    metavar="FILE",
    help="A text file, as one document; of .jsonl, each line under the key text; repeatable; - for standard input.",
)
@click.option(
    "--questions",
    type=PATH,
    metavar="FILE",
    help='Multiple choice, JSON lines: {"question": ..., "choices": [...], "answer": number from 0}.',
)
@click.option("--per-document", is_flag=True, help="Print a row for each document, too.")
@click.option(
    "--stride",
    type=click.IntRange(min=1),
    help="Tokens between the beginnings of windows; fewer give more context, and take longer; default: model.seq_len.",
)
@click.option("--batch", type=click.IntRange(min=1), default=8, show_default=True, help="Windows computed together.")
@checkpoint_option
@model_ranks
@format_option()
@options_as(EvalInputs, "inputs")
@options_as(WindowOptions, "windows")
def eval_(
    source: Path,
    checkpoint: Optional[str],
    form: str,
    model_ranks: ModelRanks,
    inputs: EvalInputs,
    windows: WindowOptions,
) -> None:
    """Compute the loss of texts with the newest valid checkpoint of RUN_OR_CHECKPOINT, or with the one of --checkpoint.

    Each document is predicted on its own, its end included: loss in nats for each token, perplexity, and bits for each
    byte of text, by which models with other tokenizers can be compared. With --questions, the choice with the largest
    probability counts, and the one with the largest for each byte.

    Exit codes: 0 the table is printed, 1 a rank failed, 2 usage error, 128 + N ended by signal N.
    """
    from fugaku_gpt.inference.model_source import ReplicaLayout, find_model

    inputs.check()
    start_model_ranks(model_ranks, inputs.files)
    rank = JoiningRank()
    prepared = rank.prepare(lambda: _prepare(find_model(source, checkpoint), inputs, windows.stride, model_ranks))
    for note in prepared.source.notes if is_first_rank() else ():
        echo(f"fugaku-gpt: note: {note}", err=True)
    layout = ReplicaLayout(model_ranks.tp, model_ranks.pp, model_ranks.dtype, join_model_ranks(model_ranks))
    joining = _joining(rank, prepared, windows, model_ranks.memory_check)
    losses = on_joined_ranks(lambda: _losses(prepared, layout, windows, joining))
    if not is_first_rank():
        return
    if prepared.questions:
        from fugaku_gpt.inference.questions import count_right_answers

        row = _row_of_questions(count_right_answers(prepared.questions, losses))
        echo(_rendered(_QUESTION_COLUMNS, [row], form), nl=False)
        return
    rows = [_row(loss) for loss in losses] if inputs.per_document else []
    echo(_rendered(_COLUMNS, [*rows, _row(_total(losses))], form), nl=False)


class _Prepared(NamedTuple):
    """The model, the questions, if they are asked, and the texts whose losses are computed."""

    source: "ModelSource"
    questions: "List[Question]"
    texts: "List[ScoredText]"


def _prepare(model_source: "ModelSource", inputs: EvalInputs, stride: Optional[int], options: ModelRanks) -> _Prepared:
    from fugaku_gpt.data.scored_text import documents_of_corpus, require_vocabulary
    from fugaku_gpt.inference.model_source import (
        find_tokenizer,
        has_read_documents,
        model_of,
        tokenizer_at,
        tokenizer_of_corpus,
    )
    from fugaku_gpt.inference.questions import read_questions
    from fugaku_gpt.inference.text import TextTokenizer

    questions: List[Question] = []
    model = model_of(model_source)
    if stride is not None and stride > model.seq_len:
        raise UsageError(f"--stride {stride}: valid: 1 to {model.seq_len}, model.seq_len")
    path = tokenizer_at(options.tokenizer) if options.tokenizer is not None else None
    if inputs.data is not None and path is None:
        path = tokenizer_of_corpus(inputs.data)  # none of a Megatron pair, which was encoded by the model's
    path = path if path is not None else find_tokenizer(model_source, None)
    tokenizer = TextTokenizer(path, options.end_token, begins_after_end=has_read_documents(model_source))
    if inputs.questions is not None:
        questions = read_input(
            "--questions", inputs.questions, options.copies, lambda path: read_questions(path, tokenizer)
        )
        texts = [choice for question in questions for choice in question.choices]
    elif inputs.data is not None:
        decode = tokenizer.decode if is_first_rank() else None  # other ranks print no bits for each byte
        texts = documents_of_corpus(inputs.data, tokenizer.end, decode, inputs.documents)
    else:
        texts = [document for file in inputs.text for document in _documents(file, tokenizer, options)]
    for name, group in [(inputs.data, texts)] if inputs.data is not None else [(text.name, [text]) for text in texts]:
        require_vocabulary(name, group, model.vocab_size)
    return _Prepared(model_source, questions, texts)


def _documents(file: Path, tokenizer: "TextTokenizer", options: ModelRanks) -> "List[ScoredText]":
    from fugaku_gpt.inference.documents import documents_of_file

    return read_input("--text", file, options.copies, lambda path: documents_of_file(path, tokenizer, str(file)))


def _joining(rank: JoiningRank, prepared: _Prepared, windows: WindowOptions, has_check: bool) -> "Joining":
    from fugaku_gpt.inference.model_source import Joining
    from fugaku_gpt.planner.trainer.memory_check import local_node_limits
    from fugaku_gpt.planner.trainer.use_check import refuse_too_large_evaluation

    if not has_check:
        return Joining(rank.report_joined)
    limits = local_node_limits()

    def check(config: "RunConfig", ranks: Sequence[int]) -> None:
        stride = windows.stride or config.model.seq_len
        most = sum(-(-len(text.ids) // stride) for text in prepared.texts)
        refuse_too_large_evaluation(config, min(windows.batch, most), limits, ranks)

    return Joining(rank.report_joined, check)


def _losses(
    prepared: _Prepared, layout: "ReplicaLayout", windows: WindowOptions, joining: "Joining"
) -> "List[TextLoss]":
    from fugaku_gpt.data.progress import show_progress
    from fugaku_gpt.inference.run import losses_on_every_rank

    source, _, texts = prepared
    if not is_first_rank():
        return losses_on_every_rank(source, layout, texts, windows.stride, windows.batch, joining=joining)
    with show_progress("losses", sum(len(text.ids) - text.first for text in texts), "tokens") as advance:
        return losses_on_every_rank(source, layout, texts, windows.stride, windows.batch, advance, joining=joining)


def _total(losses: "Sequence[TextLoss]") -> "TextLoss":
    sizes = [loss.bytes for loss in losses if loss.bytes is not None]
    size = sum(sizes) if len(sizes) == len(losses) else None
    name = f"all {len(losses)}" if len(losses) > 1 else losses[0].name
    return losses[0]._replace(
        name=name, nats=sum(loss.nats for loss in losses), tokens=sum(loss.tokens for loss in losses), bytes=size
    )


def _row(loss: "TextLoss") -> Dict[str, Any]:
    values = (loss.name, loss.tokens, loss.bytes, loss.loss, loss.perplexity, loss.bits_per_byte)
    return dict(zip(_COLUMNS, values))


def _row_of_questions(answers: "Answers") -> Dict[str, Any]:
    count = answers.questions
    values = (count, answers.right, answers.right / count, answers.right_by_byte, answers.right_by_byte / count)
    return dict(zip(_QUESTION_COLUMNS, values))


def _rendered(columns: Sequence[str], rows: Sequence[Mapping[str, Any]], form: str) -> str:
    """Return rows with as many digits as are the same in every layout of ranks; in JSON, as numbers."""
    shown = []
    for row in rows:
        figures = {name: f"{row[name]:.{digits}f}" for name, digits in _DIGITS.items() if row.get(name) is not None}
        numbers = {name: float(text) for name, text in figures.items()}
        shown.append({**row, **(numbers if form == "json" else figures)})
    return render_rows(columns, shown, form)
