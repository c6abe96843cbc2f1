"""The readers of untrusted files: the file of each, seeds of our writers and by hand, and the files around it."""

from __future__ import annotations

import gzip
import json
import math
import struct
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

from tests.fuzz import readers
from tests.fuzz.mutations import BINARY, JSON, LINES, TEXT
from tests.fuzz.readers import Reader
from tests.report.traces import FIRST_CALLS, FIRST_RANK, write_rank
from tests.support.grids import arc_tasks

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "v0.1.0"
RUN = GOLDEN / "runs" / "finished"
COMPARED = GOLDEN / "runs" / "compared" / "pair-001" / "a"
CHECKPOINT = RUN / "checkpoints" / "step-00000006"

TRACE_FILE = "000/rank-000000.trace"

BOMB = b"a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + b"".join(
    b"a%d: &a%d [%s]\n" % (level, level, b", ".join([b"*a%d" % (level - 1)] * 9)) for level in range(1, 9)
)
SWEEP = b"""name: s
defaults: {training.iterations: 60}
matrix: {layout.dp: [1, 2], node.tcmalloc: [false, true]}
zip: {job.nodes: [1, 2], training.global_batch: [8, 16]}
variants: {base: {}, fast: {node.freq_mhz: 2200}}
where: layout.dp * layout.tp <= 8
exclude: [{layout.dp: 1}, layout.dp == 2 and node.freq_mhz == 2200]
include: [{label: t, layout.tp: 2}]
repeats: 3
"""
SCRIPT = b"""#!/bin/bash
#PJM -L "node=4x2:torus:strict,elapse=1:00:00,rscgrp=small" --mpi "proc=8,max-proc-per-node=1"
#PJM -g hp000000 -x PJM_LLIO_GFSCACHE=/vol0004 -s -j  # noqa: PJM101
#PJM -L freq=2200,eco_state=0 --llio localtmp-size=30Gi
export OMP_NUM_THREADS=12
mpiexec -n 8 -stdout-proc ./out/%j/%/1000r/stdout python train.py "$(hostname)" <<EOT
text
EOT
"""
TABLE = b"""# A64FX, NLAYERS=24 / NHIDDEN=2048 / NHEADS=32 / SEQ_LEN=1024 / VOCAB=50257

| Nodes | Size | DP | TP | PP | MBS | GBS | Mem | Sec/it | TFLOPs | Est. Aggr. PetaFLOPs | Notes |
| ----: | ---: | -: | -: | -: | --: | --: | --: | -----: | -----: | -------------------: | ----: |
| 4 (2.2GHz) | 1.3B | 1 | 4 | 1 | 2 | 1024 | 20.1 GiB | 3231.4 | 0.90 | 0.004 | 11-14, OOM |
| 8 | 1.3B | 2 | 4 | 1 | 2 | 1,024 | ~20 | 1600s | - | - | |
"""
CSV = b"""\
id,hardware,layers,hidden,heads,vocab,seq_len,nodes,ranks_per_node,dp,tp,pp,micro_batch,global_batch,sec_per_it
t.1,A64FX,24,2048,32,50257,1024,4,1,1,4,1,2,1024,3231.4
t.2,A64FX,24,2048,32,50257,1024,8,1,2,4,1,2,1024,
"""
BULLETS = b"""# Rates
## vision1 on 4x L4, bf16, bucket=16
- global batch size 64, remat=True, fp32: ~ 50 images/s (best)
  * batch size: 1,024, remat=False, seq_len=128: OOM
1. global batch size 96, recompute=selective, dp=2, flat: 1,234.5 samples per second
- global batch size 128: hang
"""
SHEET = {
    "version": 1, "imported": 1.0, "sheets": [{"file": "s.md", "bullets": [
        {"global_batch": 64, "model": "m", "hardware": "4x L4", "recompute": "full", "dtype": "bfloat16", "seq_len": 8,
         "more": ["flat"], "rate": 50.0, "sample": "images", "status": "ok", "remark": "best", "line": 3},
        {"global_batch": 128, "status": "oom"}]}],
}  # fmt: skip
LOG = b"""------------------------ arguments ------------------------
  num_layers ...................................... 24
  hidden_size ..................................... 2048
  world_size ...................................... 4
  make_vocab_size_divisible_by .................... 128
  vocab_size ...................................... 50257
  global_batch_size ............................... 1024
  seq_length ...................................... 1024
  tensor_model_parallel_size ...................... 4
-------------------- end of arguments ---------------------
[default7]: iteration 1/ 3 | consumed samples: 1024 | elapsed time per iteration (s): 36.1 | lm loss: 1.9E+00 |
 iteration 2/ 3 | consumed samples: 2048 | elapsed time per iteration (ms): 36100.0 | lm loss: nan | grad norm: 0.1 |
 validation loss at iteration 2 | lm loss value: 2.0 | lm loss PPL: 7.3 |
iteration 3/3 | loss: 2.1 | lr: 1e-4 | s/it: 36.1 | tok/s: 29000 | TFLOPs: 1.2 (exact 1.3) | rss: 1.5 | eta: 0:00:01 |
RuntimeError: out of memory
"""
JOBS = b"""{"kind": "intent", "time": 1.0, "scheduler": "pjm", "tag": "t", "link": 1, "chain": 1, "bulk": ""}
{"kind": "submitted", "time": 2.0, "scheduler": "pjm", "job_id": "238", "tag": "t", "link": 1, "chain": 2, "bulk": ""}
{"kind": "status", "time": 3.0, "job_id": "238", "state": "ended", "raw": "EXT", "exit_code": 1, "code": 11}
{"kind": "cancelled", "time": 4.0, "job_id": "238"}
{"kind": "attempt", "time": 5.0, "number": 1}
{"kind": "submitted", "time": 6.0, "scheduler": "slurm", "job_id": "9", "tag": "u", "link": 1, "chain": 1, "bulk": ""}
{"kind": "status", "time": 7.0, "job_id": "9", "state": "ended", "raw": "FAILED", "exit_code": 137, "signal": 9}
"""
EXIT = {
    "version": 1,
    "job_id": "9",
    "sub_job": "9",
    "exit_code": 1,
    "signal": "",
    "started": 1,
    "ended": 9,
    "host": "a",
}
ACCOUNT = {
    "scheduler": "pjm", "job_id": "9", "elapsed_seconds": 90.0, "nodes": 4, "energy_joules": 1e6, "power_watts": 400.0,
    "knobs": {"freq": {"require": "2200", "alloc": "2200", "use": "2200"}}, "capped": "", "values": {"JOB ID": "9"},
}  # fmt: skip
ENTRY = {"version": 2, "sweep": "s", "run": "r", "row": "r", "order": 0, "repeat": 1, "digest": "d", "variant": "v"}
IMPORTED = {
    "version": 1, "trainer": "megatron", "logs": ["run.out"], "given": {"nodes": 4}, "iterations_planned": 3,
    "arguments": {"num_layers": "24", "hidden_size": "2048", "seq_length": "1024", "padded_vocab_size": "50304"},
    "torn_lines": 0, "unread_lines": 1, "unknown_fields": {"x": 1}, "error": "", "imported": 1.0,
}  # fmt: skip
STATISTICS = b"""[Job Statistical Information]
 JOB ID                                  : 238
 NODE NUM (ALLOC)                        : 8:2x2x2
 ELAPSE TIME (USE)                       : 00:02:00 (120)
 ENERGY CONSUMPTION OF NODE (MEASURED)   : 12.5 Wh
 MAX MEMORY SIZE (USE)                   : 12.3 GiB (13207024435)
 freq (USE)                              : 2200
H,JOB_ID,JOB_NAME,MD,ST,USER
,238,job,NM,RUN,me
JOB_ID     JOB_NAME   MD ST  USER     START_DATE      ELAPSE_LIM
239[1-5]   job        BU RUN me       01/01 00:00:00  0001:00:00
[INFO] PJM 0000 pjsub Job 240_0-4 submitted.
[ERR.] PJM 0054 pjsub node=9: error.
"""
EXPRESSIONS = (
    b"layout.dp * layout.tp <= 8 and not node.tcmalloc", b'status == "ok" or layout.dp in (1, 2, 4)', b"1:30:00 < 2e-4",
    b"((layout.dp ** 64) % 7 - -3) / 0", b"not not true", b"1 < layout.dp < 8 != null", b"[1, 'a', true]",
)  # fmt: skip
TEXTS = (
    b'{"text": "a document"}\n{"text": "another", "id": 1}\n', b'[{"text": "a"}, {"text": {"b": "c"}}]', b"prose\n\nof",
    b"{", gzip.compress(b'{"text": "a"}\n', mtime=0), b"PAR1" + bytes(40) + b"PAR1", b"\x28\xb5\x2f\xfd" + bytes(20),
    b"BZh9" + bytes(30), b"\xfd7zXZ\x00" + bytes(30),
)  # fmt: skip
TEMPLATE = b"""{% extends "pjm.sh.j2" %}
{% block command %}
{% for rank in range(ranks) %}echo {{ rank }} {{ name | sh }}
{% endfor %}{{ super() }}{{ nodes / 2 }}
{% endblock %}
"""
PROFILE = b"""name: p
python_version: 3.9
python: env/bin/python3
modules: [lang, mpi]
preload: [a.so]
environment: [A=1, B=]
expected: {torch: 1.10.1, blas: [SSL2], fused_adamw: false}
build: {repository: "https://example.invalid/r", branch: b, steps: ["make all"], hours: 3, local_tmp: 80Gi}
"""
REQUEST = {
    "name": "job", "model": "NM", "directory": "/", "script": "s", "interpreter": ["bash"], "dims": [2, 2],
    "allocation": "noncont", "elapse_min": None, "elapse_max": 60, "ranged": False, "group": "g", "rscgrp": "r",
    "rscunit": "u", "resources": {"node": "4"}, "custom": {"freq": "2200"}, "mpi": {}, "llio": {}, "given": ["node"],
    "environment": {}, "origin": {}, "processes": 4, "processes_per_node": 1, "bulk": [0, 0], "steps": [],
}  # fmt: skip
QUEUED = {
    "number": 7,
    "request": REQUEST,
    "user": "u",
    "group": "g",
    "host": "h",
    "state": "RUN",
    "dates": {"RUN": 1.0},
}
LOCAL = {
    "number": 7, "script": "job.sh", "directory": "/", "after": None, "elapse": 60.0, "bulk": "0-3", "tag": "t",
    "host": "h", "mark": "m", "environment": {"PATH": "/bin"}, "submitted": 1.0,
}  # fmt: skip


def _json(*values: Any) -> Tuple[bytes, ...]:
    return tuple(json.dumps(value, indent=1).encode() for value in values)


def _bytes(*paths: Path) -> Tuple[bytes, ...]:
    return tuple(path.read_bytes() for path in paths)


def _folder(folder: Path) -> Dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def _flights() -> Tuple[bytes, ...]:
    return tuple(gzip.decompress(path.read_bytes()) for path in sorted(RUN.rglob("*.flight.gz")))


def _trace() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        write_rank(Path(folder), 0, FIRST_RANK, FIRST_CALLS)
        return (Path(folder) / TRACE_FILE).read_bytes()


def _in_run(file: str, form: str, *seeds: bytes) -> Reader:
    present = _bytes(RUN / file) if (RUN / file).exists() else ()
    name, contents = f"run directory: {file}", (*present, *seeds)
    return Reader(name, file, form, readers.run_directory, contents, _folder(RUN), cost=20, commands=6)


def _in_comparison(file: str, form: str) -> Reader:
    compared = GOLDEN / "runs" / "compared"
    around = {
        path.relative_to(compared).as_posix(): path.read_bytes() for path in compared.rglob("*") if path.is_file()
    }
    seeds = (around[file],)
    return Reader(
        f"comparison: {file}", file, form, readers.comparison, seeds, {**around, "top": b""}, cost=40, commands=4
    )


def _gguf_files() -> Tuple[bytes, ...]:
    """A Llama of one layer with a vocabulary of SentencePiece and one with a byte-level one; the package gguf is not
    needed to make them."""
    sizes = {"block_count": 1, "context_length": 8, "embedding_length": 32, "feed_forward_length": 32,
             "attention.head_count": 4, "attention.head_count_kv": 2, "rope.dimension_count": 8}  # fmt: skip
    shapes = {"attn_norm": (32,), "attn_q": (32, 32), "attn_k": (32, 16), "attn_v": (32, 16), "attn_output": (32, 32),
              "ffn_norm": (32,), "ffn_gate": (32, 32), "ffn_up": (32, 32), "ffn_down": (32, 32)}  # fmt: skip
    tensors = {"token_embd": (32, 400), "output_norm": (32,), "output": (32, 400), "rope_freqs": (4,)}
    tensors.update({f"blk.0.{name}": shape for name, shape in shapes.items()})
    infos, data = b"", b""
    for name, shape in tensors.items():
        is_packed = len(shape) == 2 and name != "output"
        item = bytes([0, 60]) + bytes(range(32)) if is_packed else struct.pack("<f", 1.0)
        infos += _gguf_string(f"{name}.weight") + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
        infos += struct.pack("<IQ", 8 if is_packed else 0, len(data))
        data += item * (math.prod(shape) // (32 if is_packed else 1))
        data += bytes(-len(data) % 32)
    files = []
    for vocabulary in (_gguf_sentencepiece(), _gguf_byte_level()):
        values = [_gguf_value("general.architecture", 8, _gguf_string("llama"))]
        values += [_gguf_value(f"llama.{key}", 4, struct.pack("<I", value)) for key, value in sizes.items()]
        values += [_gguf_value("llama.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", 1e-5)), *vocabulary]
        head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values)) + b"".join(values) + infos
        files.append(head + bytes(-len(head) % 32) + data)
    return tuple(files)


def _gguf_sentencepiece() -> List[bytes]:
    names = ["<unk>", "<s>", "</s>", *(f"<0x{number:02X}>" for number in range(256)), "a", "b", "ab", "aba"]
    kinds, scores = [2, 3, 3, *[6] * 256, 1, 1, 1, 1], [-float(number) for number in range(len(names))]
    return [
        _gguf_value("tokenizer.ggml.model", 8, _gguf_string("llama")),
        _gguf_value("tokenizer.ggml.tokens", 9, _gguf_strings(names)),
        _gguf_value("tokenizer.ggml.token_type", 9, struct.pack(f"<IQ{len(kinds)}i", 5, len(kinds), *kinds)),
        _gguf_value("tokenizer.ggml.scores", 9, struct.pack(f"<IQ{len(names)}f", 6, len(names), *scores)),
        _gguf_value("tokenizer.ggml.add_bos_token", 7, b"\1"),
    ]


def _gguf_byte_level() -> List[bytes]:
    names = ["<|end|>", "\u0120", *map(chr, range(33, 127)), "ab", "\u0120ab"]
    return [
        _gguf_value("tokenizer.ggml.model", 8, _gguf_string("gpt2")),
        _gguf_value("tokenizer.ggml.pre", 8, _gguf_string("llama-bpe")),
        _gguf_value("tokenizer.ggml.tokens", 9, _gguf_strings(names)),
        _gguf_value("tokenizer.ggml.merges", 9, _gguf_strings(["a b", "\u0120 ab"])),
        _gguf_value("tokenizer.ggml.eos_token_id", 4, struct.pack("<I", 0)),
        _gguf_value("tokenizer.chat_template", 8, _gguf_string("{{ messages }}")),
    ]


def _gguf_value(key: str, kind: int, content: bytes) -> bytes:
    return _gguf_string(key) + struct.pack("<I", kind) + content


def _gguf_string(text: str) -> bytes:
    content = text.encode("utf-8")
    return struct.pack("<Q", len(content)) + content


def _gguf_strings(texts: Sequence[str]) -> bytes:
    return struct.pack("<IQ", 8, len(texts)) + b"".join(map(_gguf_string, texts))


def _index() -> bytes:
    """An index of two runs with the same settings, and one with others."""
    from fugaku_gpt.jobs.store import _values_of, read_record
    from fugaku_gpt.records.index import LineWriter

    record, writer = read_record(RUN, "."), LineWriter()
    assert record is not None
    runs = [("a", record.settings), ("b/c", record.settings), ("d", {"layout.dp": 2, "data.paths": ["x"]})]
    lines = [writer.line(run, 31, f"{number:032x}", _values_of(record), settings)
             for number, (run, settings) in enumerate(runs)]  # fmt: skip
    return readers.sealed_index(b"\n" + b"\n".join(lines))


def all_readers() -> Tuple[Reader, ...]:
    """Every reader."""
    presets = sorted((ROOT / "fugaku_gpt" / "config" / "presets").glob("*.yaml"))
    machines = sorted((ROOT / "fugaku_gpt" / "machine" / "data").glob("*.yaml"))
    yaml = (BOMB, b"a: [[[[{b: c}]]]]\n", b"\xff\xfe", b"a: 1\na: 2\n", b"", b"- 1\n", b"--- 1\n--- 2\n")
    exported, corpus = _folder(GOLDEN / "exported"), _folder(GOLDEN / "corpus")
    pair = {name: corpus[name] for name in ("corpus.idx", "corpus.bin")}
    checkpoint = _folder(CHECKPOINT)
    manifest, tracker = (checkpoint["manifest.json"],), _bytes(RUN / "checkpoints" / "latest.json")
    logs = (LOG, *_bytes(RUN / "log.txt"))
    sweeps = (SWEEP, *_bytes(GOLDEN / "sweep.yaml"))
    plan = _json({"version": 1, "file": "s.yaml", "name": "s", "text": SWEEP.decode(), "overrides": [], "base": "/"})
    return (
        Reader("run file", "run.yaml", TEXT, readers.run_file, (*_bytes(RUN / "config.yaml", *presets), *yaml), cost=8),
        Reader("sweep file", "sweep.yaml", TEXT, readers.sweep, (*sweeps, *yaml), cost=40),
        Reader("sweep directory: plan", "sweep-plan.json", JSON, readers.sweep_plan, plan, cost=40),
        Reader("profile", "p.yaml", TEXT, readers.profile, (PROFILE, *yaml), cost=8),
        Reader("site file", "site.yaml", TEXT, readers.site, (*_sites(), *yaml), cost=4),
        Reader("template", "own.sh.j2", TEXT, readers.template, (TEMPLATE, b"{{ name }}", b"{% raw %}"), cost=40),
        Reader("job script", "job.sh", TEXT, readers.script, (SCRIPT, *_golden_scripts()), cost=8),
        Reader("table in Markdown", "table.md", TEXT, readers.markdown, (TABLE,), cost=4),
        Reader("table in CSV", "table.csv", TEXT, readers.csv, (CSV,)),
        Reader("rows of reference in CSV", "rows.csv", TEXT, readers.reference, (CSV,), cost=8),
        Reader("sheet of bullets", "sheet.md", TEXT, readers.bullets, (BULLETS,), cost=8),
        Reader("imported sheet", "reference.json", JSON, readers.sheet, _json(SHEET), cost=8),
        Reader("training log", "run.out", TEXT, readers.log, logs, cost=20, commands=3),
        _in_run("config.yaml", TEXT, *yaml),
        _in_run("result.json", JSON),
        _in_run("metrics.jsonl", LINES),
        _in_run("environment.json", JSON),
        _in_run("sweep.json", JSON, *_json(ENTRY, {**ENTRY, "version": 1})),
        _in_run("accounting.json", JSON, *_json({"version": 1, "jobs": [ACCOUNT]})),
        _in_run("operators.json", JSON, *_bytes(COMPARED / "operators.json")),
        _in_run("imported.json", JSON, *_json(IMPORTED)),
        _in_run("job.jsonl", LINES, JOBS),
        _in_run(".claim.2", JSON),
        _in_comparison("comparison.json", JSON),
        _in_comparison("ending.json", JSON),
        _in_comparison("pair-001/pair.json", JSON),
        _in_comparison("pair-001/a/noise.json", JSON),
        _in_comparison("pair-002/b/environment.json", JSON),
        _in_comparison("pair-002/b/metrics.jsonl", LINES),
        _in_comparison("pair-002/b/operators.json", JSON),
        Reader("index of runs", ".runs-index.json", LINES, readers.store_index, (_index(),), seal=readers.sealed_index),
        Reader("jobs of a run", "job.jsonl", LINES, readers.job, (JOBS,), _folder(RUN), cost=8),
        Reader("exit record", "exit/9.json", JSON, readers.job, _json(EXIT), {"job.jsonl": JOBS}, cost=4),
        Reader("checkpoint: manifest", "manifest.json", JSON, readers.manifest, manifest, checkpoint, cost=8),
        Reader(
            "checkpoint: manifest with its checksum", "manifest.json", JSON, readers.manifest, manifest, checkpoint,
            readers.sealed_manifest, cost=8,
        ),
        Reader(
            "checkpoint: data file", "data-000000.safetensors", BINARY, readers.manifest,
            (checkpoint["data-000000.safetensors"],), checkpoint, cost=8,
        ),
        Reader("checkpoint: tracker", "latest.json", JSON, readers.tracker, tracker),
        Reader("Hugging Face: config.json", "config.json", JSON, readers.hugging_face, (exported["config.json"],),
               exported, cost=20),
        Reader("Hugging Face: safetensors", "model.safetensors", BINARY, readers.hugging_face,
               (exported["model.safetensors"],), exported, cost=20),
        Reader("Hugging Face: index", "model.safetensors.index.json", JSON, readers.hugging_face,
               _json({"weight_map": {"wte.weight": "model.safetensors"}}), {"config.json": exported["config.json"]}),
        Reader("GGUF file", "model.gguf", BINARY, readers.gguf_file, _gguf_files(), cost=20),
        Reader("flight record", "rank-000000.flight", BINARY, readers.flight, _flights(), cost=20),
        Reader("trace", TRACE_FILE, BINARY, readers.trace, (_trace(),), cost=20),
        Reader("corpus: .idx", "corpus.idx", BINARY, readers.pair, (pair["corpus.idx"],), pair, cost=4),
        Reader("corpus: .bin", "corpus.bin", BINARY, readers.pair, (pair["corpus.bin"][:4096],), pair, cost=4),
        Reader("corpus: manifest", "manifest.json", JSON, readers.corpus, (corpus["manifest.json"],), corpus, cost=4),
        Reader("tasks of grids", "tasks.json", JSON, readers.grids,
               _json(arc_tasks(tasks=2, pairs=2, largest=3), {"\ud800": {"test": [{"input": [[1]]}]}}), cost=4),
        Reader("tokenizer.json", "tokenizer.json", JSON, readers.tokenizer, (corpus["tokenizer.json"],), cost=80),
        Reader("machine file", "m.yaml", TEXT, readers.machine,
               (*_bytes(*machines, GOLDEN / "machine-local.yaml"), *yaml), cost=40),
        Reader("texts of a corpus", "a.jsonl", TEXT, readers.texts, TEXTS, is_payload=True),
        Reader("statistics and answers of PJM", "job.238.stats", TEXT, readers.statistics, (STATISTICS,)),
        Reader("expression", "where.txt", TEXT, readers.expression, EXPRESSIONS, is_file=False),
        Reader("simulator: queue", "jobs/7.json", JSON, readers.queue, _json(QUEUED)),
        Reader("simulator: settings", "settings.json", JSON, readers.settings_of_simulator,
               _json({"nodes": 4, "slots": 1, "grace": 5.0})),
        Reader("queue of this machine", "7/job.json", JSON, readers.local_queue, _json(LOCAL)),
    )  # fmt: skip


def _sites() -> Tuple[bytes, ...]:
    return _bytes(*sorted((ROOT / "fugaku_gpt" / "pjm").rglob("*.yaml")))


def _golden_scripts() -> Tuple[bytes, ...]:
    return _bytes(*sorted((ROOT / "tests" / "jobs" / "golden").glob("*.sh"))[:3])
