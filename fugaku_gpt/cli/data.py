"""``fugaku-gpt data``: make corpora and look at them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Dict, Optional, Tuple

import click

from fugaku_gpt.cli.output import format_option, render_rows


@click.group()
def data() -> None:
    """Make corpora of tokens from text, and look at them."""


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@data.command()
@click.argument("sources", nargs=-1, metavar="[SOURCE]...", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to make.")
@click.option("--stdlib", is_flag=True, help="Take the Python standard library's own sources.")
@click.option("--text-key", default="text", show_default=True, help="Key of the text in JSON lines.")
@click.option("--suffix", "suffixes", multiple=True, help="Suffix of files to take from folders; may be repeated.")
@click.option("--vocab-size", default=32000, show_default=True, help="Tokens of the tokenizer that is trained.")
@click.option("--tokenizer", type=click.Path(path_type=Path), help="A tokenizer.json to use instead of training one.")
@click.option("--workers", type=click.IntRange(1), help="Processes that encode; default: the usable cores, at most 32.")
@click.option("--seed", default=1234, show_default=True, help="Seed of the order of files.")
@click.option("--limit-mib", type=click.FloatRange(0, min_open=True), help="Stop after this much text.")
@click.option("--force", is_flag=True, help="Replace a prepared corpus that is there.")
def prepare(
    sources: Tuple[Path, ...],
    out: Path,
    stdlib: bool,
    text_key: str,
    suffixes: Tuple[str, ...],
    vocab_size: int,
    tokenizer: Optional[Path],
    workers: Optional[int],
    seed: int,
    limit_mib: Optional[float],
    force: bool,
) -> None:
    """Turn text into a corpus of tokens in Megatron's format.

    A SOURCE is a text file (one document), a .jsonl file (one document a line), either as .gz, or a folder of them.
    """
    from fugaku_gpt.data import prepare as preparation
    from fugaku_gpt.data.sources import TEXT_SUFFIXES

    request = preparation.Request(
        out=out,
        sources=sources,
        stdlib=stdlib,
        suffixes=tuple("." + suffix.lstrip(".") for suffix in suffixes) or TEXT_SUFFIXES,
        text_key=text_key,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        seed=seed,
        limit_mib=limit_mib,
        workers=workers if workers is not None else min(32, _usable_cores()),
        force=force,
    )
    manifest, present = preparation.prepare(request)
    skipped = manifest["undecodable_files"]
    if skipped:
        examples = ", ".join(manifest["undecodable_examples"]) + (", ..." if skipped > 5 else "")
        click.echo(f"fugaku-gpt: warning: {skipped} file(s) left out, not UTF-8 text: {examples}", err=True)
    wanted = request.vocab_size
    if tokenizer is None and manifest["vocab_size"] < wanted:
        got = manifest["vocab_size"]
        click.echo(f"fugaku-gpt: warning: the text gives a vocabulary of {got} tokens, not {wanted}", err=True)
    click.echo(
        f"{out}: {'already prepared' if present else 'prepared'}: {manifest['tokens']:,} tokens in "
        f"{manifest['documents']:,} documents from {manifest['text_bytes'] / 2**20:.1f} MiB of text, "
        f"vocabulary {manifest['vocab_size']:,}, fingerprint {manifest['fingerprint'][:12]}"
    )


@data.command()
@click.argument("path")
@format_option
def info(path: str, form: str) -> None:
    """Describe a prepared folder, or the prefix of a Megatron .bin/.idx pair.

    The sizes of train, valid and test are those of the default data.split.
    """
    from fugaku_gpt.data.describe import describe_corpus

    facts: Dict[str, Any] = describe_corpus(path)
    if form in ("csv", "json"):
        click.echo(render_rows(list(facts), [facts], form), nl=False)
    else:
        rows = [{"Of the corpus": name.replace("_", " "), "Value": _words(value)} for name, value in facts.items()]
        click.echo(render_rows(("Of the corpus", "Value"), rows, form), nl=False)


def _words(value: Any) -> Any:
    return f"{value:,}" if isinstance(value, int) else value
