"""Renders a job that runs both sides alternately inside one allocation, so that both have the same nodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import List, Sequence, Tuple

from fugaku_gpt.compare.environments import side_profile
from fugaku_gpt.compare.sides import LiveSide
from fugaku_gpt.config import RunConfig
from fugaku_gpt.config.profile import Profile, this_python
from fugaku_gpt.config.schema import NODE_KNOBS
from fugaku_gpt.config.values import format_duration
from fugaku_gpt.errors import UsageError
from fugaku_gpt.input_files import resolved
from fugaku_gpt.jobs.missing import missing_needs
from fugaku_gpt.jobs.render import JobScript, render_job
from fugaku_gpt.jobs.submission import with_absolute_paths
from fugaku_gpt.launch.rank_variables import SAVED_VARIABLE_PREFIX

FOLDER = "pairs"  # in the job's folder: the folder of the comparison
TEMPLATE = "compare.sh.j2"
# keys that a scheduler sets for the whole allocation
_PER_JOB_KEYS = tuple(knob.key for knob in NODE_KNOBS if knob.per_job)
_SHARED_KEYS = ("launcher", "launcher_options", "srun_mpi", "modules")
_RANKS, _THREADS = "{ranks}", "{threads}"
_PAIRS_SHARE = 0.9  # share of the time limit for pairs; the rest is for the start and the end of the job


def comparison_script(
    sides: Tuple[LiveSide, LiveSide],
    base: RunConfig,
    configs: Tuple[RunConfig, RunConfig],
    arguments: Sequence[str],
) -> Tuple[RunConfig, JobScript]:
    """Returns the run that both sides change, with absolute paths, and the script of the job.

    Args:
        base: the run without either side's settings; its ``job`` section describes the job.
        configs: the runs of A and B.
        arguments: for ``fugaku-gpt compare`` in the job, besides sides, run and folder.

    Raises:
        UsageError: the sides differ in a setting of the whole job, or one side's environment is unknown.
    """
    _refuse_per_job_differences(sides, configs)
    sides = _in_environments(sides, base.job.profile)
    profiles = [side_profile(side.environment, not base.job.tarball) for side in sides]
    given_profiles = [profile for profile in profiles if profile is not None]
    for key in _SHARED_KEYS:
        values = [getattr(profile, key) for profile in given_profiles]
        if len(values) == 2 and values[0] != values[1]:
            raise UsageError(
                f"{sides[0].environment} and {sides[1].environment}: {key} differs ({values[0]!r} and {values[1]!r}): "
                "one job cannot have both; run each in a job of its own, and compare the recorded runs"
            )
    if any(profile.in_tarball for profile in given_profiles) and not base.job.tarball:
        raise UsageError("an environment lies in a tar file; say in which: --set job.tarball=FILE")
    # profile of the comparing program; each side's own variables are set for its ranks alone
    profile = replace((given_profiles or [this_python()])[0], environment=())
    base = with_absolute_paths(base)
    ranks = [config.layout.ranks for config in configs]
    larger_config = configs[ranks.index(max(ranks))]
    launcher = profile.launcher or {"pjm": "mpiexec", "slurm": "srun"}[base.job.scheduler]
    template_values = {
        "ranks": larger_config.layout.ranks,
        "ranks_per_node": larger_config.ranks_per_node,
        "saved_variable_prefix": SAVED_VARIABLE_PREFIX,
        "start": _launch_command(base, profile, launcher),
        "sides": [_side_argument(side) for side in sides],
        "compare_arguments": ["--out", FOLDER, *arguments, *_budget_argument(base, arguments)],
    }
    return base, render_job(base, profile, name=TEMPLATE, extra_values=template_values, notes=missing_needs(base))


def _in_environments(sides: Tuple[LiveSide, LiveSide], profile: str) -> Tuple[LiveSide, LiveSide]:
    """The sides, each with the job's environment where it names none.

    In the job, the comparing program runs in the environment of one side, so "the current Python" would be ambiguous.
    """
    if not profile:
        if len({bool(side.environment) for side in sides}) == 2:
            other = next(side for side in sides if not side.environment)
            raise UsageError(
                f"{other.text}: in a job, the Python that this program runs in here is not known; name both sides' "
                "environments, or the job's: --set job.profile=FILE.yaml"
            )
        return sides
    a, b = (side if side.environment else replace(side, environment=profile) for side in sides)
    return a, b


def _launch_command(config: RunConfig, profile: Profile, launcher: str) -> List[str]:
    if launcher == "srun":
        mpi_options = [f"--mpi={profile.srun_mpi}"] if profile.srun_mpi else []
        # since 22.05, srun does not take this number from the job
        options = [
            "--export=ALL",
            "--kill-on-bad-exit=1",
            f"--ntasks={_RANKS}",
            f"--cpus-per-task={_THREADS}",
            *mpi_options,
        ]
    else:
        options = ["-n", _RANKS]
    return [launcher, *options, *profile.launcher_options]


def _budget_argument(config: RunConfig, arguments: Sequence[str]) -> List[str]:
    """A ``--budget`` from the time limit where none is given, so that no pair is begun that would be cut off."""
    if config.job.elapse is None or any(argument.startswith("--budget") for argument in arguments):
        return []
    return [f"--budget={format_duration(_PAIRS_SHARE * config.job.elapse)}"]


def _side_argument(side: LiveSide) -> str:
    """A side as an argument that is valid in the job's folder: the file of an environment has an absolute path."""
    if side.environment.endswith((".yaml", ".yml")):
        environment = str(resolved(Path(side.environment)))
    else:
        environment = side.environment
    return ",".join([*filter(None, [environment]), *side.settings]) or "base"


def _refuse_per_job_differences(sides: Tuple[LiveSide, LiveSide], configs: Tuple[RunConfig, RunConfig]) -> None:
    texts = [{text.partition("=")[0]: text for text in side.settings} for side in sides]
    differing = [key for key in {**texts[0], **texts[1]} if texts[0].get(key) != texts[1].get(key)]
    per_job = [key for key in differing if key in _PER_JOB_KEYS or key.startswith("job.")]
    if configs[0].job.nodes > 1 and configs[0].ranks_per_node != configs[1].ranks_per_node:
        per_job.append("ranks per node")
    if per_job:
        raise UsageError(
            f"{', '.join(per_job)}: set for a whole job, so one job cannot have both; run each side in jobs of its own "
            "(`fugaku-gpt compare --factorial`, or a sweep), and compare the recorded runs"
        )
