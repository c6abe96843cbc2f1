"""The variables that a rank's libraries read: threads, large pages, preloaded libraries.

``train`` imports this file on every rank, so it imports little.
"""

from __future__ import annotations

import os
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from fugaku_gpt.config.schema import NODE_KNOBS, NodeConfig

# A job script that starts ranks of several builds saves path variables under this prefix, as they were before it put
# its own build's folders into them.
SAVED_VARIABLE_PREFIX = "FUGAKU_GPT_KEPT_"


def rank_environment(
    node: NodeConfig, threads: int, libraries: Sequence[str] = (), build: Optional[Mapping[str, str]] = None
) -> List[str]:
    """The ``env`` command in front of a rank's Python, with the rank's variables.

    They reach the ranks under any launcher, and nothing else.

    Args:
        node: the run's settings, which win over those of the build.
        threads: threads of a rank.
        libraries: libraries to preload.
        build: variables of the ranks' build.
    """
    variables = dict(build) if build is not None else {}
    variables.update({**thread_variables(threads, variables), **page_variables(node)})
    if "PARALLEL" in os.environ or "PARALLEL" in variables:  # Fujitsu's OpenMP takes the smaller of the two
        variables["PARALLEL"] = str(threads)
    if libraries:
        variables["LD_PRELOAD"] = prepended(libraries, "LD_PRELOAD", variables)
    # the caller, such as a job for several runs, may have set variables of pages that this run does not ask for
    inherited_pages = [name for name, _ in page_settings(node) if name in os.environ and name not in variables]
    removals = [argument for name in inherited_pages for argument in ("-u", name)]
    return ["env", *removals, *(f"{name}={value}" for name, value in variables.items())]


def thread_variables(threads: int, build: Optional[Mapping[str, str]] = None) -> Dict[str, str]:
    """Variables that set the number of threads of a rank's libraries, and how they wait; ``build`` has those of the
    ranks' build."""
    inherited = {**os.environ, **(build if build is not None else {})}
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        # GNU's OpenMP threads spin for milliseconds at each barrier; on a core that another process wants, an iteration
        # was seen to take 40 times as long. Some tens of microseconds bridge the gaps between operators as well.
        "GOMP_SPINCOUNT": inherited.get("GOMP_SPINCOUNT", "2000"),
    }


def page_variables(node: NodeConfig) -> Dict[str, str]:
    """The variables of Fujitsu's large-page library that a run sets."""
    return {name: str(value) for name, value in page_settings(node) if value is not None}


def page_settings(node: NodeConfig) -> Tuple[Tuple[str, Optional[object]], ...]:
    """The variables of Fujitsu's large-page library, with a run's values; None: the run does not set it."""
    return tuple((knob.variable, getattr(node, knob.name)) for knob in NODE_KNOBS if knob.variable)


def prepended(values: Sequence[str], name: str, variables: Optional[Mapping[str, str]] = None) -> str:
    """A path variable with ``values`` in front.

    The previous value is that in ``variables``, or else that from before a job script put one build's folders into it,
    or else the present one.
    """
    previous = os.environ.get(SAVED_VARIABLE_PREFIX + name, os.environ.get(name))
    if variables is not None and name in variables:
        previous = variables[name]
    return ":".join([*values, *filter(None, [previous])])
