"""The meaning of each error number of PJM, who can remedy it, and the advice that users get.

Sources: Command Reference J2UL-2549 (messages of pjsub, pjdel, pjstat, pjwait), Fugaku user guide ("PJM 0079 ERROR
REASON list"). 00xx are pjsub's, 01xx those of commands that change jobs, 02xx pjstat's, 06xx pjwait's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Tuple

USER = "user"  # the user must change the script or the command
SITE = "site"  # the site must grant a right or a budget, or change a setting
RETRY = "retry"  # the same command may succeed later


@dataclass(frozen=True)
class ErrorMeaning:
    """The meaning of an error number.

    Attributes:
        meaning: the error in plain words.
        remedy: who or what can remedy it: ``user``, ``site`` or ``retry``.
        advice: how to remedy it.
    """

    meaning: str
    remedy: str
    advice: str


_SUBMIT_LATER = "submit it again after about ten minutes; if the error persists, ask the support desk"
_SHOW_LIMITS = "see the group's limits with: pjacl --rg GROUP"

ERROR_MEANINGS: Dict[str, ErrorMeaning] = {
    "0001": ErrorMeaning("unknown option, or an option without its argument", USER, "check the options with job lint"),
    "0002": ErrorMeaning("options that exclude each other", USER, "check the options with job lint"),
    "0003": ErrorMeaning("an argument that is not valid", USER, "check the options with job lint"),
    "0004": ErrorMeaning("an argument that is not valid", USER, "check the options with job lint"),
    "0008": ErrorMeaning("a quote that is never closed", USER, "close the quotes of the line"),
    "0009": ErrorMeaning("an argument that is not valid", USER, "check the options with job lint"),
    "0012": ErrorMeaning("the step job to join is over", USER, "submit the step as a new step job"),
    "0018": ErrorMeaning("no step job of that name", USER, "check jnam= of --sparam"),
    "0020": ErrorMeaning("a file cannot be opened", USER, "check that the script is there and can be read"),
    "0021": ErrorMeaning("a path is too long", USER, "at most 4096 characters"),
    "0022": ErrorMeaning("the script is not a script", USER, "check the file"),
    "0023": ErrorMeaning("several scripts where one is allowed", USER, "submit them one by one"),
    "0025": ErrorMeaning("a line is too long", USER, "at most 4096 characters; use several #PJM lines"),
    "0026": ErrorMeaning("the working directory cannot be used", USER, "change to a directory that the job can reach"),
    "0027": ErrorMeaning("the working directory cannot be used", USER, "change to a directory that the job can reach"),
    "0028": ErrorMeaning("the working directory cannot be used", USER, "change to a directory that the job can reach"),
    "0041": ErrorMeaning("no such group", USER, "check -g; the command id lists your groups"),
    "0045": ErrorMeaning("a path is not on the global file system", USER, "put output files on a data area"),
    "0046": ErrorMeaning("a value outside its range", USER, _SHOW_LIMITS),
    "0047": ErrorMeaning("a value is not a multiple of what it must be", USER, "round it"),
    "0048": ErrorMeaning("the size of a temporary area is not valid", USER, "check localtmp-size and sharedtmp-size"),
    "0049": ErrorMeaning(
        "temporary areas exceed what a node has", USER, "localtmp and sharedtmp: about 87 GiB together"
    ),
    "0050": ErrorMeaning("no layered storage here", USER, "drop --llio"),
    "0054": ErrorMeaning("below the lower limit of the resource group", USER, _SHOW_LIMITS),
    "0056": ErrorMeaning("a start time in the past", USER, "check --at"),
    "0057": ErrorMeaning("above the upper limit of the resource group", USER, _SHOW_LIMITS),
    "0058": ErrorMeaning(
        "no such resource group or unit", USER, "check rscgrp= and rscunit=; see them with: pjstat --rsc"
    ),
    "0059": ErrorMeaning("the resource group or unit is closed", RETRY, "wait until it is open, or take another"),
    "0060": ErrorMeaning("a step number that is not valid or is taken", USER, "check sn= of --sparam"),
    "0063": ErrorMeaning("an option given more than once", USER, "give it once"),
    "0068": ErrorMeaning("the configuration has changed meanwhile", RETRY, "submit it again"),
    "0069": ErrorMeaning("resource group or unit not given", USER, "give -L rscgrp= and, if needed, rscunit="),
    "0070": ErrorMeaning("no permission for this", SITE, "the site does not allow it to you; ask it, or do without"),
    "0071": ErrorMeaning(
        "the group may not submit jobs", USER, "give your project's group with -g; group fugaku cannot submit"
    ),
    "0072": ErrorMeaning("as many jobs as are accepted are there already", RETRY, "wait; see: pjstat --limit"),
    "0073": ErrorMeaning("refused by the site's rules", SITE, "ask the site"),
    "0074": ErrorMeaning("refused by the site's rules", SITE, "ask the site"),
    "0076": ErrorMeaning(
        "a custom resource with a value that is not allowed", USER, "take one of the values that it names"
    ),
    "0077": ErrorMeaning("too many custom resources", USER, "at most 64"),
    "0079": ErrorMeaning(
        "refused by the site's gate", SITE, "see the text; budgets and groups are the project's matter"
    ),
    "0084": ErrorMeaning("an interactive job could not be started", RETRY, "try again, or with --sparam wait-time="),
    "0085": ErrorMeaning("an interactive job could not be started", RETRY, "try again, or with --sparam wait-time="),
    "0089": ErrorMeaning("not supported here", USER, "do without"),
    "0090": ErrorMeaning("the job operation software does not answer", RETRY, _SUBMIT_LATER),
    "0091": ErrorMeaning("internal error of the job operation software", RETRY, _SUBMIT_LATER),
    "0093": ErrorMeaning("this node cannot submit jobs", USER, "go to a login node"),
    "0112": ErrorMeaning("no such job", USER, "it may have ended: pjstat -H"),
    "0113": ErrorMeaning(
        "not possible in the job's state", USER, "see the state with pjstat; in RNP and RNE only --enforce"
    ),
    "0170": ErrorMeaning("no permission", USER, "the job is not yours"),
    "0171": ErrorMeaning("no permission", USER, "the job is not yours"),
    "0201": ErrorMeaning("unknown option, or an option without its argument", USER, "check the command"),
    "0202": ErrorMeaning("options that exclude each other", USER, "check the command"),
    "0203": ErrorMeaning("an argument that is not valid", USER, "check the command"),
    "0204": ErrorMeaning("an argument that is not valid", USER, "check the command"),
    "0211": ErrorMeaning("not a job id", USER, "ids are such as 238, 239[1] or 240_0"),
    "0270": ErrorMeaning("no permission", SITE, "the site does not allow it to you"),
    "0290": ErrorMeaning("the job operation software does not answer", RETRY, _SUBMIT_LATER),
    "0291": ErrorMeaning("internal error of the job operation software", RETRY, _SUBMIT_LATER),
    "0297": ErrorMeaning("the data cannot be had", RETRY, _SUBMIT_LATER),
}

# text of the gate's refusal (PJM 0079 and REASON) → its meaning; searched in lower case, in this order
GATE_MEANINGS: Tuple[Tuple[str, ErrorMeaning], ...] = (
    ("group is not active", ErrorMeaning("the group has expired", SITE, "renew the project, or give another group")),
    ("user is not active", ErrorMeaning("the user has expired", SITE, "ask the project manager")),
    (
        "node is too few",
        ErrorMeaning("fewer nodes than are allowed now", USER, "more nodes, or wait for the limit's end"),
    ),
    (
        "node is too many",
        ErrorMeaning("more nodes than are allowed now", USER, "fewer nodes, or wait for the limit's end"),
    ),
    ("elapse limit is too short", ErrorMeaning("shorter than is allowed now", USER, "ask for more time")),
    ("elapse limit is too long", ErrorMeaning("longer than is allowed now", USER, "ask for less time")),
    ("use resource is too few", ErrorMeaning("fewer node-hours than are allowed now", USER, "more nodes or time")),
    (
        "use resource is too many",
        ErrorMeaning("more node-hours than are allowed now", USER, "fewer nodes or less time"),
    ),
    (
        "remaining resource shortage",
        ErrorMeaning("the budget is reserved by other jobs", RETRY, "wait for them to end"),
    ),
    ("need more resource", ErrorMeaning("the budget is short", SITE, "smaller job, or more budget")),
    ("computing resources shortage", ErrorMeaning("the budget is short", SITE, "smaller job, or more budget")),
)

# text that Fugaku's pjsub prints without a number → its meaning; searched in lower case
UNNUMBERED_MEANINGS: Tuple[Tuple[str, ErrorMeaning], ...] = (
    (
        "current directory is not a data area",
        ErrorMeaning(
            "the working directory is not on a data area",
            USER,
            "submit from a data area, or with --no-check-directory on the command line",
        ),
    ),
    (
        "if you use spack, set pjm_llio_gfscache",
        ErrorMeaning(
            "Spack's volume is not mounted",
            USER,
            "add -x PJM_LLIO_GFSCACHE=/vol0004, or --no-check-gfscache on the command line",
        ),
    ),
    (
        "so set pjm_llio_gfscache",
        ErrorMeaning(
            "the working directory's volume is not mounted",
            USER,
            "add that volume to -x PJM_LLIO_GFSCACHE",
        ),
    ),
)
