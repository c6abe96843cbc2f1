"""Prepares the directory of a run with configuration and script, and submits it so that no job can be lost.

Before the scheduler is called, ``job.jsonl`` gets an ``intent`` with a tag that the job carries as its comment. A
process that is killed after the scheduler accepted the job and before this is recorded leaves an open intent, and the
job is found by its tag.
"""

from __future__ import annotations

import re
import shlex
import shutil
import time
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from fugaku_gpt.config import RunConfig, changed_settings, dump_run_config, load_run_config, written_keys
from fugaku_gpt.errors import ConfigError, Uncertain, UsageError
from fugaku_gpt.input_files import resolved
from fugaku_gpt.jobs.billing import node_hours
from fugaku_gpt.jobs.render import JobScript, job_name, render_from_files, settings_of
from fugaku_gpt.jobs.schedulers.commands import TIMEOUT_SECONDS
from fugaku_gpt.jobs.schedulers.protocol import Overtaken, Refused, Scheduler, Submission
from fugaku_gpt.records.files import write_text_atomically
from fugaku_gpt.records.job import (
    JOB_FILE,
    OVER,
    Intent,
    JobHistory,
    append_event,
    append_status,
    read_history,
)
from fugaku_gpt.records.run import RunDirectory
from fugaku_gpt.records.sweep import ATTEMPTS

SCRIPT = "job.sh"
TAG_PREFIX = "fugaku-gpt-"
# an open intent younger than this may be a submission in progress
INTENT_SECONDS = 2 * TIMEOUT_SECONDS

# files that are copied, not moved, to an earlier attempt
_COPIED_FILES = ("config.yaml", SCRIPT, "sweep.json", JOB_FILE)
# settings that script and run take from the corpora where config.yaml has none
_KEYS_OF_CORPORA = ("model.vocab_size", "training.eval_interval")

_NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(?:\[[0-9][0-9,-]*\])?[A-Za-z0-9._-]*")
_REPEAT = re.compile(r"repeat-[0-9]+")

Render = Callable[[RunConfig], JobScript]


@dataclass(frozen=True)
class PreparedJob:
    """A run directory that can be submitted.

    Attributes:
        directory: directory in which the job starts.
        script: name of the script there.
        text: text of the script.
        node_hours: billed nodes times time limit, over all links and sub-jobs; None without a time limit.
        notes: settings that the scheduler has no equivalent for, and choices made for the user; one line each.
    """

    directory: Path
    config: RunConfig
    script: str
    text: str
    node_hours: Optional[float]
    notes: Tuple[str, ...]


def plan_job(config: RunConfig, directory: Path, render: Render = render_from_files) -> PreparedJob:
    """Return what :func:`prepare_job` would write, without writing it.

    Raises:
        ConfigError: the scheduler cannot express the run.
        UsageError: the directory holds a run or a job.
    """
    if config.job.chain > 1 and config.job.bulk:
        raise ConfigError("job.chain and job.bulk: a chain of bulk jobs cannot be submitted; leave one of them out")
    job_name(config)
    require_no_run(directory)
    absolute = with_absolute_paths(config)
    script = render(absolute)
    return PreparedJob(directory, absolute, SCRIPT, script.text, node_hours(config), script.notes)


def prepare_job(config: RunConfig, directory: Path, render: Render = render_from_files) -> PreparedJob:
    """Write ``config.yaml`` and ``job.sh``.

    Paths of the run are made absolute, as the job starts in its own directory.

    Raises:
        ConfigError, UsageError: see :func:`plan_job`; also if the directory cannot be written.
    """
    prepared = plan_job(config, directory, render)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_text_atomically(directory / "config.yaml", dump_run_config(prepared.config))
        write_text_atomically(directory / SCRIPT, prepared.text)
    except OSError as error:
        raise UsageError(f"{directory}: cannot be written: {error.strerror}; choose another --out") from None
    return prepared


def load_prepared(directory: Path) -> PreparedJob:
    """Load a directory that :func:`prepare_job` has written, with the present script, edits included.

    Raises:
        UsageError: it is not such a directory, or its configuration has changed since the script was rendered.
    """
    try:
        text = (directory / SCRIPT).read_bytes().decode("utf-8", "replace")  # line ends as they are
    except OSError as error:
        raise UsageError(
            f"{directory / SCRIPT}: cannot be read: {error.strerror}; valid: a run file, or a run directory with "
            f"config.yaml and {SCRIPT}"
        ) from None
    if not (directory / "config.yaml").exists() and any(job.folder for job in read_history(directory).jobs):
        raise UsageError(f"{directory}: has the record of a script that is of no run; submit that script again")
    config = load_run_config(directory / "config.yaml")
    stated = written_keys(directory / "config.yaml", ())
    optional = set(_KEYS_OF_CORPORA) - stated
    changed = [key for key in _settings_changed_since(text, config, directory) if key not in optional]
    if changed:
        file, script = shlex.quote(str(directory / "config.yaml")), shlex.quote(str(directory / SCRIPT))
        raise UsageError(
            f"{directory / SCRIPT}: was made before {', '.join(changed)} was changed in config.yaml; render it again "
            f"with `fugaku-gpt job render {file} --out {script}`"
        )
    return PreparedJob(directory, config, SCRIPT, text, node_hours(config), ())


def submissions(prepared: PreparedJob, excluded_nodes: Sequence[str] = ()) -> List[Submission]:
    """Return one submission for each link of the chain; ids that do not exist yet are ``<id of link N>``."""
    job = prepared.config.job
    return [
        Submission(
            script=prepared.script,
            directory=prepared.directory,
            name=job_name(prepared.config),
            after=f"<id of link {link - 1}>" if link > 1 else None,
            link=link,
            chain=job.chain,
            elapse=job.elapse,
            bulk=job.bulk,
            excluded_nodes=tuple(excluded_nodes),
        )
        for link in range(1, job.chain + 1)
    ]


def submit(
    prepared: Union[PreparedJob, Path],
    scheduler: Scheduler,
    clock: Callable[[], float] = time.time,
    excluded_nodes: Sequence[str] = (),
) -> List[str]:
    """Submit a prepared directory; return the job ids, one for each link of a chain, or fewer if a link ended before
    the next could follow it.

    Args:
        excluded_nodes: nodes that no link gets; see :func:`require_exclusion`.

    If several processes submit the same directory at once, only the one whose intent comes first in ``job.jsonl`` does.

    Raises:
        Refused: the scheduler refused the job. Earlier links of the chain that it accepted stay, and are named.
        Uncertain: it is unknown whether the scheduler accepted the job; ``job status`` finds out.
        UsageError: the directory has an active job, or may have one.
    """
    job = load_prepared(prepared) if isinstance(prepared, Path) else prepared
    directory = job.directory
    require_no_active_job(directory, scheduler, clock())
    ids: List[str] = []
    for submission in submissions(job, excluded_nodes):
        submission = replace(submission, after=ids[-1] if ids else None)
        try:
            ids.append(submit_recorded(directory, submission, scheduler, clock))
        except Overtaken:  # a short job has already ended: its end decides, as in any chain
            break
        except (Refused, Uncertain) as error:
            note = f"\n{directory}: submitted before that, and kept: {', '.join(ids)}" if ids else ""
            raise type(error)(f"{error}{note}") from None
    return ids


def require_exclusion(scheduler: Scheduler, nodes: Sequence[str]) -> None:
    """Refuse nodes that a scheduler's jobs cannot be kept off, and what is no name of a node.

    Raises:
        UsageError: the scheduler has no means for it, or a name is not valid.
    """
    if nodes and scheduler.why_no_exclusion:
        raise UsageError(f"--exclude-node {nodes[0][:60]}: {scheduler.why_no_exclusion}")
    for node in nodes:
        if not _NODE_NAME.fullmatch(node):
            raise UsageError(f"--exclude-node {node[:60]!r}: is not a node's name; valid: node17, or node[3-5]")


def submit_recorded(
    directory: Path, submission: Submission, scheduler: Scheduler, clock: Callable[[], float], folder: str = ""
) -> str:
    """Submit one script with a tag; record intent and outcome in a directory, and return the job id.

    Args:
        folder: start folder of a plain script, for the record; empty for the script of a run.

    Raises:
        Refused: the scheduler refused the job.
        Overtaken: the job that this one should follow has already ended.
        Uncertain: it is unknown whether the scheduler accepted the job; ``job status`` finds out.
        UsageError: another submission of this directory came first.
    """
    submission = replace(submission, tag=TAG_PREFIX + uuid.uuid4().hex)
    tag = submission.tag
    facts: Dict[str, Any] = {"tag": tag, "link": submission.link, "chain": submission.chain, "bulk": submission.bulk}
    if folder:
        facts["folder"] = folder
    append_event(directory, "intent", clock(), scheduler=scheduler.name, **facts)
    if submission.link == 1:
        _yield_to_earlier_submission(directory, tag, clock())
    try:
        job_id = scheduler.submit(submission)
    except Uncertain as error:
        raise Uncertain(
            f"{error}\n{directory}: the job may have been accepted; `fugaku-gpt job status` finds out"
        ) from None
    except UsageError as error:  # refused, or the command does not exist
        append_event(directory, "refused", clock(), tag=tag, reason=str(error))
        raise error if isinstance(error, Refused) else Refused(str(error)) from None
    facts.update(script=submission.script, command=scheduler.command_of(submission))
    append_event(directory, "submitted", clock(), scheduler=scheduler.name, job_id=job_id, **facts)
    return job_id


def new_attempt(directory: Path, timestamp: float) -> Path:
    """Move the files of earlier jobs to ``attempts/<run>/<number>`` beside the run directory, with copies of
    configuration and script, so that the run can be submitted again. Returns that folder.

    If there is a checkpoint, the job will continue from it: checkpoints stay, and so do the metrics, of which the
    attempt gets a copy.

    Raises:
        UsageError: the files cannot be moved.
    """
    attempts = resolved(directory).parent / ATTEMPTS / resolved(directory).name
    number = 1 + max((int(path.name) for path in attempts.glob("*") if path.name.isdecimal()), default=0)
    attempt = attempts / str(number)
    try:
        _move_to_attempt(RunDirectory(directory), attempt)
    except OSError as error:
        raise UsageError(f"{attempt}: cannot be written: {error.strerror}") from None
    append_event(directory, "attempt", timestamp, number=number)
    return attempt


def _move_to_attempt(run: RunDirectory, attempt: Path) -> None:
    resumes = bool(run.last_checkpoint())
    attempt.mkdir(parents=True)
    for path in sorted(run.path.iterdir()):
        if resumes and path == run.checkpoints_dir:
            continue
        if path.name in _COPIED_FILES or (resumes and path == run.metrics_file):
            shutil.copy2(path, attempt / path.name)
        elif path.is_dir() and _REPEAT.fullmatch(path.name):  # a sub-job's own run directory
            _move_to_attempt(RunDirectory(path), attempt / path.name)
        else:
            path.rename(attempt / path.name)


def resolve_intents(directory: Path, scheduler: Scheduler, timestamp: float) -> JobHistory:
    """Return the history of a directory after the scheduler was asked for the jobs of its open intents; see
    :func:`close_intents`.

    Raises:
        UsageError: the scheduler does not answer.
    """
    history = read_history(directory)
    intents = [intent for intent in history.open if intent.scheduler == scheduler.name]
    if not intents:
        return history
    return close_intents(directory, intents, scheduler.find([intent.tag for intent in intents]), timestamp)


def close_intents(
    directory: Path, intents: Sequence[Intent], job_ids: Mapping[str, str], timestamp: float
) -> JobHistory:
    """Record what a scheduler answered about open intents of a directory, and return the history after that.

    Args:
        job_ids: tag → id of the job that carries it (:meth:`Scheduler.find`). Such a job is recorded as submitted; an
            intent without one that is older than ``INTENT_SECONDS`` was never accepted, and is recorded as abandoned.
    """
    for intent in intents:
        if intent.tag in job_ids:
            _record_recovered_job(directory, intent, job_ids[intent.tag], timestamp)
        elif timestamp - intent.time > INTENT_SECONDS:
            reason = f"no answer was recorded, and {intent.scheduler} knows no job with its tag"
            append_event(directory, "abandoned", timestamp, tag=intent.tag, reason=reason)
    return read_history(directory)


def require_no_active_job(directory: Path, scheduler: Scheduler, timestamp: float) -> None:
    """Refuse a directory with a job that is waiting, running, or perhaps being submitted.

    Raises:
        UsageError: there is such a job, or the scheduler does not answer.
    """
    history = resolve_intents(directory, scheduler, timestamp)
    if history.open:
        seconds = max(1, round(INTENT_SECONDS - (timestamp - history.open[-1].time)))
        raise UsageError(
            f"{directory}: a submission to {history.open[-1].scheduler} was begun there and has not ended; if no other "
            f"process is submitting it, try again in {seconds} s"
        )
    jobs = [job.job_id for job in history.jobs if job.scheduler == scheduler.name]
    foreign_jobs = [job for job in history.jobs if job.scheduler != scheduler.name]
    open_elsewhere = [job for job in foreign_jobs if _last_state(history, job.job_id) not in OVER]
    if open_elsewhere:
        raise UsageError(f"{directory}: holds job {open_elsewhere[0].job_id} of {open_elsewhere[0].scheduler}")
    waiting = [job_id for job_id in jobs if _last_state(history, job_id) not in OVER]
    for job_id, status in scheduler.poll(waiting).items() if waiting else ():
        if job_id in waiting:
            append_status(directory, timestamp, status)
            if status.state not in OVER:
                raise UsageError(f"{directory}: job {job_id} is {status.state}; cancel it, or wait until it ends")
    if jobs or foreign_jobs:
        raise UsageError(f"{directory}: holds job {history.jobs[-1].job_id}; `fugaku-gpt job resume` submits it again")


def require_no_run(directory: Path) -> None:
    """Refuse a directory that holds a run or a job.

    Raises:
        UsageError: there is a run or a job.
    """
    record = RunDirectory(directory)
    if record.metrics_file.exists() or (directory / "result.json").exists():
        raise UsageError(f"{directory}: already holds a run; choose another --out, or remove it")
    history = read_history(directory)
    if history.jobs or history.open:
        raise UsageError(
            f"{directory}: already holds a job; see `fugaku-gpt job status {directory}`, or choose another --out"
        )


def with_absolute_paths(config: RunConfig, base: Optional[Path] = None) -> RunConfig:
    """Return the run with its paths made absolute, relative to ``base`` (default: the working directory)."""
    start = resolved(base if base is not None else Path.cwd())

    def absolute(path: str) -> str:
        return str(start / path) if path else path

    job = config.job
    return replace(
        config,
        data=replace(config.data, paths=tuple(absolute(path) for path in config.data.paths)),
        training=replace(config.training, eval_files=tuple(absolute(path) for path in config.training.eval_files)),
        job=replace(
            job,
            transfer=tuple(absolute(path) for path in job.transfer),
            transfer_dirs=tuple(absolute(path) for path in job.transfer_dirs),
            tarball=absolute(job.tarball),
            rank_map_file=absolute(job.rank_map_file),
            profile=absolute(job.profile),
            template=absolute(job.template),
        ),
    )


def _settings_changed_since(script: str, config: RunConfig, directory: Path) -> List[str]:
    """Return the settings that have changed since the script was rendered; empty if the script has no settings. Its
    paths may be relative to the present folder, or to the run's ``directory``."""
    try:
        scripted = settings_of(script.replace("\r\n", "\n"))
    except ConfigError:  # edited on purpose
        return []
    if scripted is None:
        return []
    if scripted.node.threads_per_rank is None:  # the ranks compute and record it
        config = replace(config, node=replace(config.node, threads_per_rank=None))
    current = changed_settings(with_absolute_paths(config))
    readings = [changed_settings(with_absolute_paths(scripted, base)) for base in (None, directory)]
    keys = {*current, *readings[0]}
    return sorted(key for key in keys if all(previous.get(key) != current.get(key) for previous in readings))


def _record_recovered_job(directory: Path, intent: Intent, job_id: str, timestamp: float) -> None:
    append_event(
        directory,
        "submitted",
        timestamp,
        scheduler=intent.scheduler,
        job_id=job_id,
        tag=intent.tag,
        script=SCRIPT,
        command=[],
        link=intent.link,
        chain=intent.chain,
        bulk=intent.bulk,
        **({"folder": intent.folder} if intent.folder else {}),
    )


def _yield_to_earlier_submission(directory: Path, tag: str, timestamp: float) -> None:
    """Withdraw if another submission of this directory came first.

    Raises:
        UsageError: another one came first.
    """
    history = read_history(directory)
    first = history.open[0].tag if history.open else tag
    if first != tag or history.jobs:
        reason = "another submission of this directory came first"
        append_event(directory, "refused", timestamp, tag=tag, reason=reason)
        raise UsageError(f"{directory}: {reason}; see `fugaku-gpt job status {directory}`")


def _last_state(history: JobHistory, job_id: str) -> str:
    status = history.statuses.get(job_id)
    return status.state if status is not None else ""
