"""Renders the job script of a run from its configuration and a profile.

The templates are in ``jobscripts/``. They receive only plain values that are computed here. Settings that a scheduler
has no equivalent for are returned as notes, which are also comments in the script.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import traceback
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import fugaku_gpt
from fugaku_gpt.config import RunConfig, changed_settings
from fugaku_gpt.config.knobs import is_requested
from fugaku_gpt.config.load import SettingsLayer, build_run_config
from fugaku_gpt.config.profile import Profile, load_profile, this_python, with_absolute_paths
from fugaku_gpt.config.schema import NODE_KNOBS
from fugaku_gpt.config.tree import flatten, parse_yaml
from fugaku_gpt.config.values import format_duration
from fugaku_gpt.errors import EXIT_RESUME, ConfigError, UsageError
from fugaku_gpt.formulas.parameters import size_name
from fugaku_gpt.input_files import read_text
from fugaku_gpt.jobs.choices import choice_notes, refuse_power_pair
from fugaku_gpt.jobs.directives import directive_value
from fugaku_gpt.jobs.missing import missing_needs
from fugaku_gpt.launch.rank_variables import page_variables
from fugaku_gpt.limits import SCRIPT_TEXT, TEMPLATE_MEMORY, TEMPLATE_SECONDS, TEMPLATE_TEXT
from fugaku_gpt.machine import fugaku
from fugaku_gpt.machine.bounded import BoundExceeded, call_in_child
from fugaku_gpt.records.job import NOTHING_LEFT

if TYPE_CHECKING:
    import jinja2

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,62}")
_SETTINGS = "Made by `fugaku-gpt job render` from these settings; all others are at their defaults."
# between Slurm's signal and the time limit; the signal may come a minute early, which would stop a job of minutes at
# its start
_WARNING_SECONDS = 60
_LONGEST_ERROR = 500  # characters of a template's error
_LAUNCHERS = {"pjm": "mpiexec", "slurm": "srun", "local": ""}


@dataclass(frozen=True)
class JobScript:
    """A rendered script.

    Attributes:
        notes: settings that the scheduler has no equivalent for, and choices made for the user; one line each.
    """

    text: str
    notes: Tuple[str, ...]


def render_job(
    config: RunConfig,
    profile: Profile,
    template: Optional[str] = None,
    name: str = "",
    extra_values: Mapping[str, Any] = {},  # noqa: B006  # never written to
    notes: Sequence[str] = (),
) -> JobScript:
    """Render the job script of a run for the scheduler ``config.job.scheduler``.

    Args:
        template: text of a user's template; it may extend ``pjm.sh.j2``, ``slurm.sh.j2`` or ``local.sh.j2`` and
            override blocks. Default: the scheduler's own.
        name: name of another template in ``jobscripts/`` than the scheduler's.
        extra_values: values for the template, which override those of the run.
        notes: further notes, such as what the job lacks.

    Raises:
        ConfigError: the scheduler cannot express the run (such as its name), or the template is not valid.
    """
    import jinja2

    environment = _environment(template_folder())
    scheduler = config.job.scheduler
    context, context_notes = _context(config, profile)
    all_notes = (*notes, *context_notes)
    values = {**context, **extra_values, "notes": all_notes}
    try:
        if template is None:
            text = environment.get_template(name or f"{scheduler}.sh.j2").render(**values)
        else:
            text = _render_of_user(config.job.template, lambda: environment.from_string(template).render(**values))
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"{config.job.template or error.name}:{error.lineno}: {error.message}") from None
    except jinja2.TemplateError as error:  # the sandbox's SecurityError is one
        raise ConfigError(f"{config.job.template or scheduler}: cannot be rendered: {error}") from None
    return JobScript(re.sub(r"\n{3,}", "\n\n", text), all_notes)


@lru_cache(maxsize=None)
def _environment(folder: Path) -> "jinja2.Environment":
    """The environment of the templates in a folder, which compiles each of them once, not for every job of a sweep."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        loader=jinja2.FileSystemLoader(str(folder)),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # shell text: every value goes through `sh` or `directive`
    )
    environment.filters["sh"] = lambda value: shlex.quote(str(value))
    environment.filters["directive"] = directive_value
    return environment


def _render_of_user(name: str, render: Callable[[], str]) -> str:
    """Render a user's template, whatever it does, within bounds.

    Raises:
        ConfigError: it fails, or exceeds a bound.
    """
    import jinja2

    def text_or_error() -> str:
        try:
            return "=" + render()
        except MemoryError:
            raise
        except jinja2.TemplateSyntaxError as error:
            return f"!{name if error.name is None else error.name}:{error.lineno}: {error.message}"
        except jinja2.TemplateError as error:  # the sandbox's SecurityError is one
            return f"!{_template_place(name, error)}: cannot be rendered: {error}"
        except Exception as error:  # of an expression, such as a division by zero
            return f"!{_template_place(name, error)}: cannot be rendered: {type(error).__name__}: {error}"

    try:
        text = call_in_child(
            text_or_error, seconds=TEMPLATE_SECONDS.value, memory=TEMPLATE_MEMORY.value, length=SCRIPT_TEXT.value + 1
        )
    except BoundExceeded as exceeded:
        raise ConfigError(f"{name}: cannot be rendered: the template {exceeded}") from None
    if not text.startswith("="):
        raise ConfigError(text[1:_LONGEST_ERROR])
    return text[1:]


def _template_place(name: str, error: BaseException) -> str:
    """The file and, where it is known, the line of the template in which an error arose."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    return f"{name}:{lines[-1]}" if lines and lines[-1] else name


def template_folder() -> Path:
    """Return the folder of the templates: inside an installed package, at the top of a checkout otherwise."""
    package = Path(fugaku_gpt.__file__).resolve().parent
    installed = package / "jobscripts"
    return installed if installed.is_dir() else package.parent / "jobscripts"


def render_from_files(config: RunConfig, notes: Sequence[str] = ()) -> JobScript:
    """Call :func:`render_job` with the profile and the template that ``job.profile`` and ``job.template`` name, and
    note what the job lacks, after other notes.

    Raises:
        ConfigError: see :func:`render_job`; also if a file is not valid or cannot be read.
    """
    template = None
    if config.job.template:
        try:
            template = read_text(config.job.template, TEMPLATE_TEXT)
        except OSError as error:
            raise ConfigError(f"job.template: {config.job.template}: cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"job.template: {config.job.template}: cannot be read: {error}") from None
    return render_job(config, profile_of(config), template, notes=[*notes, *missing_needs(config)])


def profile_of(config: RunConfig) -> Profile:
    """Return the profile that ``job.profile`` names, or that of this Python.

    Raises:
        ConfigError: it is not valid.
    """
    if not config.job.profile:
        return this_python()
    file = Path(config.job.profile)
    profile = load_profile(file)
    return profile if config.job.tarball else with_absolute_paths(profile, file.parent)


def job_name(config: RunConfig) -> str:
    """Return the name of the job: ``job.name``, or a name made from model and layout.

    Raises:
        ConfigError: ``job.name`` is not a name that schedulers accept (PJM: a letter first, 63 characters).
    """
    layout = config.layout
    name = config.job.name or f"gpt-{size_name(config.model)}-dp{layout.dp}-tp{layout.tp}-pp{layout.pp}"
    if not _NAME.fullmatch(name):
        valid = "a letter, then letters, digits and . _ -, 63 characters in all"
        raise ConfigError(f"job.name: {name!r}: is not a name that a batch system takes; valid: {valid}")
    return name


def settings_of(text: str) -> Optional[RunConfig]:
    """Return the run that a script was rendered from, by the settings in its comments; None if there are none.

    Raises:
        ConfigError: the settings are not valid.
    """
    lines = text.split("\n")
    try:
        start = lines.index(f"# {_SETTINGS}") + 1
    except ValueError:
        return None
    written = []
    for line in lines[start:]:
        if not line.startswith("#   "):
            break
        written.append(line[4:])
    tree = dict(flatten(parse_yaml("\n".join(written), "settings of the script")))
    return build_run_config([SettingsLayer("settings of the script", tree)])


def _context(config: RunConfig, profile: Profile) -> Tuple[Dict[str, Any], List[str]]:
    job, node = config.job, config.node
    notes: List[str] = []

    def inside(path: str) -> bool:
        return bool(job.tarball) and "/" in path and not path.startswith("/")

    threads = node.threads_per_rank
    if threads is None and (job.scheduler == "pjm" or profile.cores is not None):
        cores = profile.cores or fugaku.CORES
        threads = max(1, cores // config.ranks_per_node)
        notes.append(
            f"node.threads_per_rank is not set: {threads}, by {cores} cores and {config.ranks_per_node} ranks a node"
        )
    context: Dict[str, Any] = {
        **{key: getattr(job, key) for key in _COPIED_KEYS},
        "settings": {key: _yaml_scalar(value) for key, value in changed_settings(config).items()},
        "name": job_name(config),
        "ranks": config.layout.ranks,
        "ranks_per_node": config.ranks_per_node,
        "threads": threads,
        "own_ranks": job.scheduler == "local",
        "elapse": _duration_text(job.elapse),
        "elapse_min": _duration_text(job.elapse_min),
        "rank_map": job.rank_map,
        "open_files": node.open_files,
        "exit_resume": EXIT_RESUME,
        "exit_nothing_left": NOTHING_LEFT if job.scheduler == "pjm" else 0,
        "launcher": profile.launcher or _LAUNCHERS[job.scheduler],
        "launcher_options": profile.launcher_options,
        "modules": profile.modules,
        "path": [folder for folder in profile.path if not inside(folder)],
        "path_in_tarball": [folder for folder in profile.path if inside(folder)],
        "library_path": [folder for folder in profile.library_path if not inside(folder)],
        "library_path_in_tarball": [folder for folder in profile.library_path if inside(folder)],
        "python": profile.python,
        "python_in_tarball": inside(profile.python),
        "variables": _variables(config, profile, threads),
    }
    if job.scheduler == "pjm":
        context.update(_pjm_context(config, profile, notes))
    elif job.scheduler == "slurm":
        context.update(_slurm_context(config, profile, notes))
    else:
        context.update(_local_context(config, profile, notes))
    libraries = [*([profile.tcmalloc] if node.tcmalloc else []), *profile.preload]
    context["preload"] = [
        f"{context['unpacked']}/{shlex.quote(path)}" if inside(path) else shlex.quote(path) for path in libraries
    ] + [shlex.quote(path) for path in node.preload]
    if job.chain > 1 and job.elapse is None and job.scheduler != "pjm":  # PJM has a note of its own
        notes.append(
            "job.chain: no job.elapse: a link cannot foresee its end, and stops for the next one only if it is asked to"
        )
    if not profile.name and job.scheduler != "local":
        notes.append(f"no job.profile: the ranks use {profile.python}, which must be there on the nodes")
    return context, notes


_COPIED_KEYS = (
    "scheduler", "nodes", "group", "resource_group", "resource_unit", "node_memory", "rank_map_file", "statistics",
    "volumes", "local_tmp", "shared_tmp", "llio", "transfer", "transfer_dirs", "tarball", "bulk", "chain",
    "accept_findings",
)  # fmt: skip


def _variables(config: RunConfig, profile: Profile, threads: Optional[int]) -> Dict[str, str]:
    """Return the variables to export for the ranks; later ones override earlier ones."""
    node, variables = config.node, {}
    if threads is not None:
        variables["OMP_NUM_THREADS"] = str(threads)
        if config.job.scheduler == "pjm":
            variables["PARALLEL"] = str(threads)  # Fujitsu's OpenMP takes the smaller of the two
    if config.job.scheduler == "pjm":
        variables["PLE_MPI_STD_EMPTYFILE"] = "off"
        if fugaku.power_knobs(node, config.job.nodes)["retention_state"] == 1:
            variables["OMP_WAIT_POLICY"] = "active"  # cores that wait must not fall asleep: waking takes 3 ms
    variables.update(page_variables(node))
    for setting in (*profile.environment, *config.job.environment):
        name, _, text = setting.partition("=")
        if name == "LD_PRELOAD":
            raise ConfigError("job.environment: LD_PRELOAD would reach every process of the job; use node.preload")
        variables[name] = text
    return variables


def _pjm_context(config: RunConfig, profile: Profile, notes: List[str]) -> Dict[str, Any]:
    job, node = config.job, config.node
    knobs = fugaku.power_knobs(node, job.nodes)
    refuse_power_pair(node)
    _refuse_unknown_rules(job.accept_findings)
    notes += choice_notes(config)
    if profile.launcher == "srun":
        raise ConfigError(f"{job.profile or 'profile'}: launcher: srun starts ranks under Slurm only; valid: mpiexec")
    suffixes = [job.allocation, job.strict]
    elapse = _duration_text(job.elapse)
    return {
        "knobs": knobs,
        "node": ":".join([job.shape or str(job.nodes), *(suffix for suffix in suffixes if suffix)]),
        "elapse": f"{_duration_text(job.elapse_min)}-{elapse}" if job.elapse_min is not None else elapse,
        "rank_map": job.rank_map.replace("bynode:", "bynode="),
        "unpacked": '"$PJM_LOCALTMP"',
        "sub_number": '"${PJM_BULKNUM:-0}"',
    }


def _refuse_unknown_rules(ids: Sequence[str]) -> None:
    """Refuses accepted findings of rules that are not there.

    Raises:
        ConfigError: a rule is not there.
    """
    from fugaku_gpt.pjm.lint.registry import find_rule

    for id in ids:
        try:
            find_rule(id)
        except UsageError as error:
            raise ConfigError(f"job.accept_findings: {error}") from None


def _slurm_context(config: RunConfig, profile: Profile, notes: List[str]) -> Dict[str, Any]:
    job, node = config.job, config.node
    for knob in NODE_KNOBS:
        value = getattr(node, knob.name)
        if "slurm" in knob.unsupported_by and is_requested(value):
            notes.append(f"{knob.key}={value}: Slurm has no equivalent; not applied")
    for key in ("shape", "allocation", "strict", "resource_unit", "shared_tmp", "rank_map_file"):
        if getattr(job, key):
            notes.append(f"job.{key}={getattr(job, key)}: Slurm has no equivalent; not applied")
    for key in ("volumes", "llio", "transfer", "transfer_dirs"):
        if getattr(job, key):
            notes.append(f"job.{key}: Slurm has no layered storage; files are read where they are")
    if job.statistics == "nodes":
        notes.append("job.statistics=nodes: Slurm keeps its own accounting; see sacct")
    _note_large_pages(config, notes)
    srun_options = [f"--mpi={profile.srun_mpi}"] if profile.srun_mpi else []
    if node.freq_mhz is not None:
        srun_options.append(f"--cpu-freq={node.freq_mhz * 1000}")
        notes.append("node.freq_mhz: --cpu-freq works only where the site allows it; the run says what it saw")
    placement = {"bychip": "block", "bynode": "cyclic"}.get(job.rank_map.partition(":")[0])
    if placement:
        srun_options.append(f"--distribution={placement}")
    if ":" in job.rank_map:
        notes.append(f"job.rank_map={job.rank_map}: Slurm has no order of axes; {placement} is used")
    limits = [limit for limit in (job.elapse, job.elapse_min) if limit is not None]
    return {
        "srun_arguments": srun_options,
        "warning": _WARNING_SECONDS if min(limits, default=math.inf) >= 4 * _WARNING_SECONDS else None,
        "node_memory": _slurm_size(job.node_memory),
        "local_tmp": _slurm_size(job.local_tmp),
        "unpacked": '"$local_tmp"',
        "sub_number": '"${SLURM_ARRAY_TASK_ID:-0}"',
    }


def _local_context(config: RunConfig, profile: Profile, notes: List[str]) -> Dict[str, Any]:
    job, node = config.job, config.node
    if job.nodes != 1:
        raise ConfigError(f"job.nodes: {job.nodes}: the local scheduler has this one machine; valid: 1")
    knobs = [knob.name for knob in NODE_KNOBS if "local" in knob.unsupported_by]
    for section, keys, values in (("node", knobs, node), ("job", _KEYS_NOT_LOCAL, job)):
        for key in keys:
            value = getattr(values, key)
            if value not in (None, "", ()):
                setting = "" if isinstance(value, tuple) else f"={value}"
                notes.append(f"{section}.{key}{setting}: not applied on this machine")
    if profile.preload:
        libraries = ", ".join(profile.preload)
        notes.append(f"{profile.name}: preload: {libraries}: not applied on this machine; use node.preload")
    _note_large_pages(config, notes)
    return {"unpacked": '"$local_tmp"', "sub_number": '"${FUGAKU_GPT_SUB_NUMBER:-0}"'}


_KEYS_NOT_LOCAL = (
    "allocation", "strict", "elapse_min", "group", "resource_group", "resource_unit", "node_memory", "rank_map",
    "rank_map_file", "volumes", "local_tmp", "shared_tmp", "llio", "transfer", "transfer_dirs",
)  # fmt: skip


def _note_large_pages(config: RunConfig, notes: List[str]) -> None:
    for knob in NODE_KNOBS:
        value = getattr(config.node, knob.name)
        if knob.variable and is_requested(value):
            notes.append(f"{knob.key}={value}: only Fujitsu's large-page library reads it")


def _yaml_scalar(value: object) -> str:
    """Format a value as JSON that is also YAML, in printable ASCII (JSON's surrogate pairs are not YAML)."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(character if " " <= character <= "~" else f"\\U{ord(character):08x}" for character in text)


def _duration_text(seconds: Optional[float]) -> str:
    return format_duration(seconds) if seconds is not None else ""


def _slurm_size(size: str) -> str:
    """Convert 28Gi to 28G: Slurm's units are binary."""
    return size[:-1] if size else ""
