"""``fugaku-gpt ckpt``: list, inspect, verify, export and import checkpoints."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple

import click

from fugaku_gpt.cli.options import PATH, checkpoint_option, format_option
from fugaku_gpt.cli.output import echo, json_document, render_rows
from fugaku_gpt.config import ModelConfig
from fugaku_gpt.errors import EXIT_FINDINGS, EXIT_OK, CheckpointError, DataError

if TYPE_CHECKING:
    from fugaku_gpt.checkpoint.directory import BestCheckpoint
    from fugaku_gpt.checkpoint.hugging_face_tokenizer import CorpusTokenizer
    from fugaku_gpt.checkpoint.manifest import Manifest

_path_argument = click.argument("path", metavar="PATH", type=PATH)


@click.group()
def ckpt() -> None:
    """List, inspect and verify checkpoints, and convert them to and from the format of Hugging Face.

    PATH is a checkpoint (RUN_DIR/checkpoints/step-...), a run directory, or a folder of checkpoints.
    """


@ckpt.command("ls")
@_path_argument
@format_option()
def list_(path: Path, form: str) -> None:
    """List the checkpoints of a run, newest first; their data are not read (see `ckpt verify`)."""
    from fugaku_gpt.checkpoint.directory import tracked_checkpoint
    from fugaku_gpt.checkpoint.manifest import MANIFEST, read_manifest
    from fugaku_gpt.checkpoint.retention import checkpoints_at, summary_line, verify_checkpoint

    rows: List[Dict[str, Any]] = []
    checkpoints = checkpoints_at(path)  # of one folder
    directory = checkpoints[0].absolute().parent
    tracked, best = tracked_checkpoint(directory), _readable_best(directory)
    for checkpoint in checkpoints:
        row: Dict[str, Any] = {"checkpoint": checkpoint.absolute().name}
        try:
            row.update(
                _facts(read_manifest(checkpoint)), problem=summary_line(verify_checkpoint(checkpoint, deep=False))
            )
            row["written_utc"] = _clock((checkpoint / MANIFEST).stat().st_mtime)
        except CheckpointError as error:
            row["problem"] = str(error)
        except FileNotFoundError:
            row["problem"] = "removed meanwhile"
        row["latest"] = "yes" if tracked == checkpoint.absolute() else None
        if best is not None and best.name == checkpoint.absolute().name:
            row["best"] = f"{best.loss} {best.value:.6f}"
        rows.append(row)
    columns = ["checkpoint", "iteration", "samples", "tokens", "files", "bytes", "written_utc", "latest", "problem"]
    if any("best" in row for row in rows):  # where a run keeps one
        columns.insert(-1, "best")
    echo(render_rows(columns, rows, form), nl=False)


def _readable_best(directory: Path) -> "Optional[BestCheckpoint]":
    """The record of the best checkpoint; None if there is none, or it is damaged, which is printed."""
    from fugaku_gpt.checkpoint.directory import read_best

    try:
        return read_best(directory)
    except CheckpointError as error:
        echo(f"fugaku-gpt: note: {error}", err=True)
        return None


@ckpt.command()
@_path_argument
@click.option("--tensors", is_flag=True, help="List the tensors instead.")
@format_option()
def inspect(path: Path, tensors: bool, form: str) -> None:
    """Describe what a checkpoint holds, without reading its data; if there are several, the newest is described."""
    from fugaku_gpt.checkpoint.manifest import read_manifest
    from fugaku_gpt.checkpoint.retention import checkpoints_at

    checkpoint = checkpoints_at(path)[0]
    manifest = read_manifest(checkpoint)
    if tensors:
        columns = ("tensor", "shape", "elements", "kinds", "files")
        echo(render_rows(columns, _tensor_rows(manifest), form), nl=False)
        return
    parameters = sum(math.prod(tensor.shape) for tensor in manifest.tensors.values())
    facts: Dict[str, Any] = {
        "checkpoint": str(checkpoint),
        **_facts(manifest),
        "tensors": len(manifest.tensors),
        "parameters": parameters,
        "kinds": sorted({kind for tensor in manifest.tensors.values() for kind in tensor.kinds}),
        "data_fingerprint": manifest.data_fingerprint or None,
        "build": dict(manifest.build),
        "state": dict(manifest.state),
        "config": dict(manifest.config),
    }
    if form == "json":
        echo(json_document(facts), nl=False)
        return
    rows = [row for name, value in facts.items() for row in _fact_rows(name.replace("_", " "), value)]
    echo(render_rows(("of the checkpoint", "value"), rows, form), nl=False)


@ckpt.command()
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=PATH)
@click.option("--fast", is_flag=True, help="Check only the manifest, and the length and header of each file.")
@format_option()
def verify(paths: Tuple[Path, ...], fast: bool, form: str) -> int:
    """Verify checkpoints: all data are read and compared with their checksums.

    Damage is reported by file, tensor and coordinates, in one row each.

    Exit codes: 0 no damage, 2 usage or no checkpoint, 3 damage.
    """
    from fugaku_gpt.checkpoint import retention

    rows = []
    for checkpoint in (candidate for path in paths for candidate in retention.checkpoints_at(path)):
        problems = retention.verify_checkpoint(checkpoint, deep=not fast)
        damaged = [{"checkpoint": str(checkpoint), "verdict": "damaged", "problem": problem} for problem in problems]
        intact = {"checkpoint": str(checkpoint), "verdict": "lengths and headers are right" if fast else "whole"}
        rows += damaged or [intact]
    echo(render_rows(("checkpoint", "verdict", "problem"), rows, form), nl=False)
    return EXIT_FINDINGS if any("problem" in row for row in rows) else EXIT_OK


@ckpt.command("export")
@_path_argument
@click.argument("out", metavar="OUT", type=PATH)
@checkpoint_option
@click.option(
    "--data",
    metavar="DIR",
    help="Folder made by `data prepare` whose tokenizer is exported; default: the imported one, or the run's.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Type of the exported weights; default: that in which they were imported, else float32.",
)
@click.option(
    "--max-shard-mib",
    type=click.IntRange(min=1),
    default=4096,
    show_default=True,
    help="Largest file of weights, in MiB; a larger tensor has one of its own.",
)
def export(
    path: Path, out: Path, checkpoint: Optional[str], data: Optional[str], dtype: Optional[str], max_shard_mib: int
) -> None:
    """Export the weights of a checkpoint as a Hugging Face folder OUT, with its tokenizer or that of its corpus.

    Of several checkpoints, the newest valid one is exported, or the one of --checkpoint. OUT holds config.json,
    model.safetensors or several files and their index, tokenizer.json and tokenizer_config.json:
    `AutoModelForCausalLM` and `AutoTokenizer` load it, as GPT-2, Llama (a Mistral too), Qwen 2 or Qwen 3, by the
    settings of the model.
    """
    from fugaku_gpt.checkpoint.hugging_face import ExportOptions, export_model
    from fugaku_gpt.checkpoint.hugging_face_models import MODEL_NAMES, export_notes
    from fugaku_gpt.checkpoint.hugging_face_tokenizer import TOKENIZER
    from fugaku_gpt.checkpoint.retention import named_checkpoints_at, newest_valid
    from fugaku_gpt.formulas.parameters import size_name

    newest, rejected = newest_valid(named_checkpoints_at(path, checkpoint), deep=False)
    for name, reason in rejected:
        echo(f"fugaku-gpt: warning: {name} is left out: {reason}", err=True)
    if newest is None:
        raise CheckpointError(f"{path}: none of its checkpoints is complete")
    tokenizer = _tokenizer_to_export(newest, data)
    model, model_type = export_model(newest, out, ExportOptions(tokenizer, dtype, max_shard_mib))
    for note in export_notes(model, model_type):
        echo(f"fugaku-gpt: note: {note}", err=True)
    if tokenizer is not None:
        carried = f", with {tokenizer.path}, whose {tokenizer.end_name} ends a text"
    else:
        carried = ", with the tokenizer that was imported with it" if (out / TOKENIZER).exists() else ""
    echo(f"{out}: {MODEL_NAMES[model_type]} of {size_name(model)} parameters from {newest}{carried}")


def _tokenizer_to_export(checkpoint: Path, data: Optional[str]) -> "Optional[CorpusTokenizer]":
    """The tokenizer of a named corpus, else of those of the checkpoint's run; None if the checkpoint has its own, and,
    with a warning, if they have none.

    Raises:
        DataError: the named corpus has none.
    """
    from fugaku_gpt.checkpoint.hugging_face_tokenizer import TOKENIZER
    from fugaku_gpt.checkpoint.manifest import read_manifest
    from fugaku_gpt.data.corpus import tokenizer_of_corpora

    if data is not None:
        return tokenizer_of_corpora([data])
    if (checkpoint / TOKENIZER).exists():
        return None
    try:
        return tokenizer_of_corpora(read_manifest(checkpoint).config.get("data", {}).get("paths", []))
    except DataError as error:
        echo(f"fugaku-gpt: warning: no tokenizer is exported: {error}; name the corpus with --data DIR", err=True)
        return None


@ckpt.command("import")
@click.argument("source", metavar="SOURCE", type=PATH)
@click.argument("out", metavar="OUT", type=PATH)
def import_(source: Path, out: Path) -> None:
    """Import SOURCE, a Hugging Face folder or a GGUF file, as a checkpoint at iteration 0; the optimiser starts afresh.

    The model of a folder is a GPT-2, Llama, Mistral without a sliding window, Qwen 2 or Qwen 3; that of a file, whose
    quantised weights become float32, has the architecture llama, qwen2, qwen3 or gpt2. The checkpoint has the
    tokenizer as well; where that of a file cannot be carried, a note says why.

    OUT is the folder of checkpoints to write, such as RUN_DIR/checkpoints of a run that will start from it. The
    settings that such a run needs are printed.
    """
    if source.is_file() or source.suffix == ".gguf":
        from fugaku_gpt.checkpoint.gguf_import import import_gguf

        checkpoint, model, notes = import_gguf(source, out)
    else:
        from fugaku_gpt.checkpoint.hugging_face import import_model

        checkpoint, model, notes = import_model(source, out)
    for note in notes:
        echo(f"fugaku-gpt: note: {note}", err=True)
    echo(f"# {checkpoint}: start from it with --resume, and with this model:")
    default_model = ModelConfig()
    changed = {key: value for key, value in asdict(model).items() if value != getattr(default_model, key)}
    echo(f"model: {json.dumps(changed)}")


def _facts(manifest: "Manifest") -> Dict[str, Any]:
    return {
        "iteration": manifest.iteration,
        "samples": manifest.consumed_samples,
        "tokens": manifest.consumed_tokens,
        "files": len(manifest.files),
        "bytes": manifest.data_bytes,
    }


def _tensor_rows(manifest: "Manifest") -> List[Dict[str, Any]]:
    files = [0] * len(manifest.tensors)
    for file in manifest.files:
        for index in file.tensors:
            files[index] += 1
    return [
        {
            "tensor": name,
            "shape": "x".join(map(str, manifest.tensors[name].shape)),
            "elements": math.prod(manifest.tensors[name].shape),
            "kinds": " ".join(f"{kind}:{dtype}" for kind, dtype in sorted(manifest.tensors[name].kinds.items())),
            "files": files[index],
        }
        for index, name in enumerate(manifest.tensor_names)
    ]


_VALUES_SHOWN = 4


def _fact_rows(name: str, value: Any) -> List[Dict[str, Any]]:
    """One row for a value, or one for each leaf of a nested value."""
    if isinstance(value, dict) and value:
        return [row for key, entry in value.items() for row in _fact_rows(f"{name}.{key}", entry)]
    if isinstance(value, (list, dict)):
        shown = [*map(str, value)][:_VALUES_SHOWN]  # a window of losses has a hundred
        more = f" ... and {len(value) - len(shown)} more" if len(value) > len(shown) else ""
        value = ", ".join(shown) + more or None
    return [{"of the checkpoint": name, "value": f"{value:,}" if type(value) is int else value}]


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))
