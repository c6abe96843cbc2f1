"""``fugaku-gpt data``: make corpora and describe them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence, Tuple

import click

from fugaku_gpt.cli.options import PATH, format_option
from fugaku_gpt.cli.output import echo, render_rows

if TYPE_CHECKING:
    from fugaku_gpt.data.contents import Contents
    from fugaku_gpt.data.rewrite import Written

_LENGTH_TITLES = ("Tokens of a document", "Documents", "Share", "Share of tokens")
_SAMPLE_TITLES = ("Document", "Tokens", "Begins")
_SAMPLE_CHARACTERS = 72
# suffixes of files that are read as prose, though they are not → what stays in the text
_MARKS_OF_TABLES = {".csv": "commas", ".tsv": "tabs", ".html": "tags", ".htm": "tags", ".xml": "tags"}


_LARGEST_SHARE = 1e9
_PART_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def _shares_of_parts(context: click.Context, parameter: click.Parameter, values: Sequence[str]) -> Dict[str, float]:
    """The shares of NAME=SHARE by their names, which become those of folders."""
    shares: Dict[str, float] = {}
    for value in values:
        name, _, share = value.partition("=")
        if not _PART_NAME.fullmatch(name):
            raise click.BadParameter(f"{value!r}: a name has letters, digits, -, _ and ., a letter or digit first")
        if name in shares:
            raise click.BadParameter(f"{value!r}: the name {name} is given twice")
        try:
            shares[name] = float(share)
        except ValueError:
            shares[name] = 0.0
        if not 0 < shares[name] <= _LARGEST_SHARE:
            raise click.BadParameter(f"{value!r}: expected a positive share of 1e9 at most, such as test=2")
    return shares


@click.group()
def data() -> None:
    """Make corpora of tokens from text, and describe them."""


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@data.command()
@click.argument("sources", nargs=-1, metavar="[SOURCE]...", type=PATH)
@click.option("--out", required=True, type=PATH, help="Folder for the corpus.")
@click.option("--stdlib", is_flag=True, help="Use the sources of the Python standard library.")
@click.option(
    "--text-key",
    "text_keys",
    multiple=True,
    default=("text",),
    show_default=True,
    help="Key of the text in JSON and tables; a.b is b within a. Repeatable: the texts of a record become one "
    "document, with a blank line between.",
)
@click.option("--suffix", "suffixes", multiple=True, help="Suffix of the files that are read from folders; repeatable.")
@click.option(
    "--vocab-size", default=32000, show_default=True, help="Number of tokens of the tokenizer that is trained."
)
@click.option("--tokenizer", type=PATH, help="Use this tokenizer.json instead of training a tokenizer.")
@click.option(
    "--end-token",
    metavar="TOKEN",
    help="Token of --tokenizer that ends documents; default: the one that its files declare, or the only special token "
    "with such a name.",
)
@click.option(
    "--workers", type=click.IntRange(1), help="Number of processes that encode; default: usable cores, at most 32."
)
@click.option("--seed", default=1234, show_default=True, help="Seed of the order of files.")
@click.option("--limit-mib", type=click.FloatRange(0, min_open=True), help="Stop after this many MiB of text.")
@click.option("--skip-bad", is_flag=True, help="Leave damaged records and files out, and print how many.")
@click.option(
    "--deduplicate", is_flag=True, help="Leave documents out that equal an earlier one byte for byte; print how many."
)
@click.option("--force", is_flag=True, help="Replace an existing corpus.")
def prepare(suffixes: Tuple[str, ...], workers: Optional[int], **options: Any) -> None:
    """Convert text into a corpus of tokens in Megatron's format.

    A SOURCE is a text file (one document), a file of JSON (lines, or an array: one document per object), a Parquet or
    Arrow file (one document per row), or a folder of them, also one that save_to_disk of Hugging Face's datasets has
    written; gzip, bzip2, xz and Zstandard are unpacked. A file is read as its content shows, whatever its name.
    """
    from fugaku_gpt.data import prepare as preparation
    from fugaku_gpt.data.sources import TEXT_SUFFIXES

    request = preparation.CorpusRequest(
        suffixes=tuple("." + suffix.lstrip(".") for suffix in suffixes) or TEXT_SUFFIXES,
        workers=workers if workers is not None else min(32, _usable_cores()),
        **options,
    )
    manifest, present = preparation.prepare(request)
    _print_what_is_left_out(manifest)
    for source in request.sources:
        marks = next((_MARKS_OF_TABLES[suffix] for suffix in source.suffixes if suffix in _MARKS_OF_TABLES), "")
        if source.is_file() and marks:
            echo(f"fugaku-gpt: note: {source}: is read as one document of text, with its {marks}", err=True)
    vocab_size = manifest["vocab_size"]
    if request.tokenizer is None and vocab_size < request.vocab_size:
        sizes = f"{vocab_size} tokens, not {request.vocab_size}"
        echo(f"fugaku-gpt: warning: the text gives a vocabulary of {sizes}", err=True)
    echo(
        f"{request.out}: {'already prepared' if present else 'prepared'}: {manifest['tokens']:,} tokens in "
        f"{manifest['documents']:,} documents from {manifest['text_bytes'] / 2**20:.1f} MiB of text, "
        f"vocabulary {manifest['vocab_size']:,}, fingerprint {manifest['fingerprint'][:12]}"
    )


def _print_what_is_left_out(manifest: Dict[str, Any]) -> None:
    """Print which files and records the corpus does not hold to standard error; older manifests do not count all."""
    from fugaku_gpt.data.sources import describe_suffixes

    if manifest.get("left_out"):
        echo(
            "fugaku-gpt: note: files of folders that are left out, by suffix: "
            f"{describe_suffixes(manifest['left_out'])}; --suffix names those that are read",
            err=True,
        )
    if manifest.get("duplicate_documents"):
        count = manifest["duplicate_documents"]
        echo(
            f"fugaku-gpt: note: {count:,} document(s) left out by --deduplicate, each equal to an earlier one", err=True
        )
    if manifest.get("text_keys_never_met"):
        keys = ", ".join(manifest["text_keys_never_met"])
        echo(f"fugaku-gpt: warning: no record has a text under --text-key {keys}", err=True)
    undecodable, bad = manifest["undecodable_files"], manifest.get("bad_records")
    if bad:
        examples = _list_of_examples(manifest.get("bad_examples", ()), bad, "; ")
        echo(f"fugaku-gpt: warning: {bad} bad record(s) or file(s) left out by --skip-bad: {examples}", err=True)
    if undecodable:
        examples = _list_of_examples(manifest["undecodable_examples"], undecodable, ", ")
        echo(
            f"fugaku-gpt: warning: {undecodable} file(s) left out, not UTF-8 text, or with NUL bytes: {examples}",
            err=True,
        )


def _list_of_examples(examples: Sequence[str], count: int, separator: str) -> str:
    return separator.join([*examples, *(["..."] if count > len(examples) else [])])


@data.command()
@click.argument("path")
@format_option()
def info(path: str, form: str) -> None:
    """Describe a prepared folder, or the prefix of a Megatron .bin/.idx pair.

    Prints its counts, how many tokens its documents have, the share of unknown tokens, and how five documents begin.
    The sizes of train, valid and test are those of the default data.split. Of more than a million documents, a million
    evenly spaced ones are looked at; unknown tokens are counted among at most four million. The format csv has the
    counts alone.
    """
    from fugaku_gpt.data.contents import look_into
    from fugaku_gpt.data.corpus import open_corpus
    from fugaku_gpt.data.describe import describe_corpus

    corpus = open_corpus(path)
    contents = look_into(corpus)
    facts: Dict[str, Any] = {**describe_corpus(corpus), **contents.facts}
    if contents.problem:
        echo(f"fugaku-gpt: note: no unknown rate, and ids instead of text: {contents.problem}", err=True)
    if contents.documents_read < corpus.index.documents:
        echo(f"fugaku-gpt: note: lengths are those of {contents.documents_read:,} documents, evenly spaced", err=True)
    if form == "csv":
        echo(render_rows(list(facts), [facts], form), nl=False)
    elif form == "json":
        facts["lengths"] = [members._asdict() for members in contents.lengths]
        facts["samples"] = [sample._asdict() for sample in contents.samples]
        echo(render_rows(list(facts), [facts], form), nl=False)
    else:
        rows = [
            {"Of the corpus": name.replace("_", " "), "Value": _with_separators(value)} for name, value in facts.items()
        ]
        tables = [
            render_rows(("Of the corpus", "Value"), rows, form),
            render_rows(_LENGTH_TITLES, _length_rows(contents), form),
            render_rows(_SAMPLE_TITLES, _sample_rows(contents), form),
        ]
        echo("\n".join(tables), nl=False)


def _length_rows(contents: "Contents") -> List[Dict[str, str]]:
    """Rows of the ranges of lengths, with their shares of the documents and of the tokens in percent."""
    tokens = max(sum(members.tokens for members in contents.lengths), 1)
    return [
        dict(zip(_LENGTH_TITLES, (
            f"{members.low:,} to {members.high:,}", f"{members.documents:,}",
            f"{100 * members.documents / contents.documents_read:.1f} %", f"{100 * members.tokens / tokens:.1f} %",
        )))
        for members in contents.lengths
    ]  # fmt: skip


def _sample_rows(contents: "Contents") -> List[Dict[str, str]]:
    """Rows of the documents that are shown, each in one line."""
    return [
        dict(zip(_SAMPLE_TITLES, (
            f"{sample.document:,}", f"{sample.tokens:,}", " ".join(sample.beginning.split())[:_SAMPLE_CHARACTERS],
        )))
        for sample in contents.samples
    ]  # fmt: skip


@data.command()
@click.argument("path")
def verify(path: str) -> None:
    """Check all entries and all tokens of a prepared folder, or of a Megatron .bin/.idx pair.

    Opening a large corpus checks the header, the ends and the sizes of its files, and each look-up the entries that it
    uses. This reads both files from end to end, the token ids and the digests that `data prepare` recorded included,
    and names what is damaged.
    """
    from fugaku_gpt.data.verify import verify_corpus

    verified = verify_corpus(path)
    index = verified.corpus.index
    vocabulary = verified.corpus.vocab_size
    fit = f"fit its vocabulary of {vocabulary:,}" if vocabulary is not None else "are not negative"
    files = "; files and tokenizer are as prepared" if verified.is_fingerprint_checked else ""
    echo(
        f"{path}: sound: {index.tokens:,} tokens in {index.documents:,} documents; "
        f"token ids {verified.lowest_id:,} to {verified.highest_id:,} {fit}{files}"
    )


@data.command()
@click.argument("paths", nargs=-1, required=True, metavar="CORPUS...")
@click.option("--out", required=True, type=PATH, help="Folder for the new corpus.")
def merge(paths: Tuple[str, ...], out: Path) -> None:
    """Write the documents of several corpora into one, in the order in which they are named.

    Prepared folders must have one tokenizer in common. Of Megatron pairs the new corpus is a folder with a pair, whose
    prefix is DIR/corpus.
    """
    from fugaku_gpt.data.rewrite import merge_corpora

    _print_written(merge_corpora(paths, out))


@data.command()
@click.argument("path", metavar="CORPUS")
@click.option("--out", required=True, type=PATH, help="Folder for the new corpora.")
@click.option(
    "--part",
    "shares",
    multiple=True,
    required=True,
    metavar="NAME=SHARE",
    callback=_shares_of_parts,
    help="Name of a part and its share of the documents; repeatable. Only the ratios of shares count.",
)
@click.option("--seed", default=1234, show_default=True, help="Seed of the choice of documents.")
def split(path: str, out: Path, shares: Dict[str, float], seed: int) -> None:
    """Divide the documents of a corpus at random among new ones, OUT/NAME of each part.

    The part train of 98 and the part test of 2 are given by --part train=98 --part test=2.
    """
    from fugaku_gpt.data.rewrite import split_corpus

    for part in split_corpus(path, out, shares, seed):
        _print_written(part)


@data.command()
@click.argument("path", metavar="CORPUS")
@click.option("--out", required=True, type=PATH, help="Folder for the new corpus.")
@click.option("--documents", type=click.IntRange(1), help="Number of documents to draw.")
@click.option("--tokens", type=click.IntRange(1), help="Draw documents until they have this many tokens.")
@click.option("--seed", default=1234, show_default=True, help="Seed of the choice of documents.")
def sample(path: str, out: Path, documents: Optional[int], tokens: Optional[int], seed: int) -> None:
    """Write a random sample of the documents of a corpus, without repeats and in their old order."""
    from fugaku_gpt.data.rewrite import sample_corpus

    if (documents is None) == (tokens is None):
        raise click.UsageError("name either --documents or --tokens")
    _print_written(sample_corpus(path, out, documents, tokens, seed))


def _print_written(written: "Written") -> None:
    echo(f"{written.path}: {written.tokens:,} tokens in {written.documents:,} documents")


def _with_separators(value: Any) -> Any:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if isinstance(value, float) else value
