"""Commands whose calls to the file system are made to fail, and what must hold whatever fails."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Callable, Dict, Iterable, List

from fugaku_gpt.checkpoint.directory import list_checkpoints
from fugaku_gpt.checkpoint.retention import verify_checkpoint
from fugaku_gpt.errors import FugakuGptError
from fugaku_gpt.records.files import write_json_atomically
from fugaku_gpt.records.run import OK, Result, RunDirectory
from tests.disk_faults.calls import Call, Ended

SMALL = (
    "model.layers=1",
    "model.hidden=16",
    "model.heads=2",
    "model.seq_len=16",
    "model.vocab_size=256",
    "training.iterations=4",
    "training.global_batch=4",
    "training.micro_batch=1",
    "training.eval_interval=2",
    "checkpoint.interval=2",
    "node.threads_per_rank=1",
)
# what fails here costs nothing that was asked for: locks are a help where there are any; a file that cannot be removed
# is in nobody's way; flight records serve a diagnosis; the index of runs saves a later command time
HARMLESS_CALLS = ("unlink", "lock")
WATCH_SECONDS = 60
HARMLESS_PATHS = ("run/flight", "..runs-index.json")


@dataclass(frozen=True)
class Scenario:
    """Commands that are run in turn.

    Attributes:
        commands: the arguments of ``fugaku-gpt``, for the folder whose calls fail and one beside it with a corpus and
            other inputs.
        problems: what is wrong with their end, for the folder, the call that failed, the error's text and the end.
    """

    commands: Callable[[Path, Path], List[List[str]]]
    problems: Callable[[Path, Call, str, Ended], List[str]]

    def command_lines(self, root: Path, inputs: Path) -> List[List[str]]:
        """The command lines. One that waits for a job is ended after a while, as by a user who has read the cause."""
        lines = [[sys.executable, "-m", "fugaku_gpt", *arguments] for arguments in self.commands(root, inputs)]
        return [["timeout", str(WATCH_SECONDS), *line] if "watch" in line else line for line in lines]


def _set(*settings: str) -> List[str]:
    return [word for setting in settings for word in ("--set", setting)]


def _train(root: Path, inputs: Path) -> List[List[str]]:
    settings = _set(*SMALL, "training.tensorboard=true")
    return [["train", "--data", str(inputs / "bytes"), "--out", str(root / "run"), "--ranks", "2", *settings]]


def _sweep(root: Path, inputs: Path) -> List[List[str]]:
    fields = ", ".join(setting.replace("=", ": ") for setting in SMALL)
    sweep = inputs / "sweep.yaml"
    defaults = f"{{data.paths: [{inputs / 'bytes'}], {fields}}}"
    sweep.write_text(f"preset: tiny\ndefaults: {defaults}\nmatrix: {{training.lr: [1e-3, 5e-4]}}\n", encoding="utf-8")
    run = ["sweep", "run", str(sweep), "--out", str(root / "sweep")]
    return [run, ["sweep", "status", str(root / "sweep")], ["report", "table", str(root / "sweep")]]


def _compare(root: Path, inputs: Path) -> List[List[str]]:
    settings = ["--preset", "tiny", *_set(*SMALL[:-2]), "--data", str(inputs / "bytes")]
    size = ["--iterations", "2", "--warm-up", "0", "--pairs", "2", "--load", "1"]
    return [["compare", "base", "training.weight_decay=0.2", *settings, *size, "--out", str(root / "comparison")]]


def _job(root: Path, inputs: Path) -> List[List[str]]:
    template = inputs / "quick.j2"
    write_json_atomically(inputs / "result.json", asdict(Result(OK, "", 1.0, 2.0, 4)))
    template.write_text(f"#!/bin/bash\necho started; cp {inputs}/result.json .\n", encoding="utf-8")
    settings = _set(f"job.template={template}", "job.elapse=0:10:00", f"data.paths=[{inputs / 'bytes'}]", *SMALL)
    out = str(root / "run")
    return [
        ["job", "submit", "--preset", "tiny", *settings, "--scheduler", "local", "--out", out, "--yes"],
        ["job", "watch", out],
        ["job", "status", out],
        ["job", "logs", out],
        ["job", "collect", out],
        ["runs", "ls", str(root)],
    ]


def _problems_of_train(root: Path, call: Call, text: str, ended: Ended) -> List[str]:
    problems = problems_of_any(root, call, text, ended)
    directory = RunDirectory(root / "run")
    try:
        result = directory.result()
    except FugakuGptError as error:
        return [*problems, f"a damaged record: {error}"]
    if ended.is_ok:
        if result is None or result.status != OK:
            problems.append(f"exit code 0, but result.json has {result}")
        checkpoints = list_checkpoints(directory.checkpoints_dir)
        if not checkpoints or checkpoints[0].iteration != 4 or verify_checkpoint(checkpoints[0].path):
            problems.append("exit code 0, but the checkpoint of the last iteration is missing or damaged")
        iterations = [line["iteration"] for line in directory.metrics("iteration")]
        if iterations != [1, 2, 3, 4]:
            problems.append(f"exit code 0, but the metrics have the iterations {iterations}")
    elif result is not None and result.status == OK and not call.path.endswith("result.json"):
        problems.append(f"exit codes {ended.codes}, but result.json is ok")
    elif result is None and (directory.metrics_file.exists()) and "result.json" not in ended.output:
        problems.append(f"exit codes {ended.codes}, no result.json, and no word about it")
    return problems


def problems_of_any(_root: Path, call: Call, text: str, ended: Ended) -> List[str]:
    """List the problems that no command may have."""
    problems = []
    if None in ended.codes:
        problems.append("it never ended")
    if ended.orphans:
        problems.append(f"it left processes: {', '.join(map(str, ended.orphans))}")
    if "Traceback (most recent call last)" in ended.output:
        problems.append("a traceback")
    # nor need be what is not missed: a file that is not read in the end, a folder that is there already
    is_harmless = call.name in (*HARMLESS_CALLS, "open-to-read", "mkdir") or call.path.startswith(HARMLESS_PATHS)
    is_named = text in ended.output
    if not is_named and not (ended.is_ok and is_harmless):
        problems.append("nothing names the error")
    return problems


def _with_logs(ended: Ended, logs: Iterable[Path]) -> Ended:
    """The end, with the logs of runs after what was printed: a run names there what costs it nothing else, such as an
    older checkpoint that could not be removed."""
    texts = [log.read_text(encoding="utf-8") for log in sorted(logs)]
    return replace(ended, output="\n".join([ended.output, *texts]))


def _problems_of_compare(root: Path, call: Call, text: str, ended: Ended) -> List[str]:
    return problems_of_any(root, call, text, _with_logs(ended, root.glob("comparison/*/*/log.txt")))


def _problems_of_sweep(root: Path, call: Call, text: str, ended: Ended) -> List[str]:
    problems = problems_of_any(root, call, text, _with_logs(ended, root.glob("sweep/*/log.txt")))
    if ended.is_ok:
        ends = [RunDirectory(folder).result() for folder in (root / "sweep").iterdir() if folder.is_dir()]
        if len([end for end in ends if end is not None and end.status == OK]) != 2:
            problems.append(f"exit codes 0, but the runs ended so: {ends}")
    return problems


def _problems_of_job(root: Path, call: Call, text: str, ended: Ended) -> List[str]:
    """A process in the background names in its log what it could not write: there its user looks for its end."""
    log = root / ".local" / "state" / "fugaku-gpt" / "local" / "queue.log"
    printed = log.read_text(encoding="utf-8") if log.exists() else ""
    return problems_of_any(root, call, text, replace(ended, output=ended.output + printed))


SCENARIOS: Dict[str, Scenario] = {
    "train": Scenario(_train, _problems_of_train),
    "sweep": Scenario(_sweep, _problems_of_sweep),
    "compare": Scenario(_compare, _problems_of_compare),
    "job": Scenario(_job, _problems_of_job),
}
