"""The limits of the linter: ids of the reference without a rule, and the cases that each rule leaves undecided."""

from __future__ import annotations

from typing import Dict

# ids of the reference's table that have no rule, with the reason
NOT_DECIDED: Dict[str, str] = {
    "PJM073": "PLE_MPI_STD_EMPTYFILE matters on other sites alone, and a script does not tell whether its site's MPI "
    "makes empty files by default (on Fugaku it does not)",
}

_OPEN = "values with placeholders or variables"
UNDECIDED: Dict[str, str] = {
    "PJM001": "scripts whose directive prefix is changed on the command line (-C); lines in text of here-documents, "
    "and bodies that are no shell's",
    "PJM002": "whether a line was switched off on purpose",
    "PJM003": "what pjsub does with such a word: public scripts with –x seem to have run, without the option",
    "PJM005": "custom resources of a site: a key of -L that resembles no known one is taken for one; other sites' own "
    "options; whether pjsub takes -D DIR, which is in no manual and in one public script",
    "PJM006": "scripts of the K computer and FX10 themselves: reported as info only",
    "PJM007": "whether the script serves several schedulers on purpose",
    "PJM010": "a -s or -S on the command line",
    "PJM012": "whether pjsub really refuses it: public scripts hold --no-check-directory",
    "PJM013": "the name given on the command line",
    "PJM015": "--bulk, --step and --sparam on the command line; whether pjsub refuses two rank maps or takes the last",
    "PJM018": "a --mail-list on the command line",
    "PJM019": "words where a number is due, which may be placeholders to people",
    "PJM020": "a -g on the command line",
    "PJM021": "which groups you are in, and which groups your project may use",
    "PJM022": "on which volume the job is submitted and where your home is; volumes hidden behind links and variables",
    "PJM024": "an --interact on the command line; groups that the data file does not know",
    "PJM025": "groups of projects that are in no list; scripts that nothing but the misspelt group assigns to a site",
    "PJM026": "flags; values with placeholders",
    "PJM027": "whether pjsub takes the blanks away",
    "PJM030": "groups that the data file does not know; limits of your own project; the greatest shape along each axis",
    "PJM031": "which shapes a group takes along each axis",
    "PJM032": "how a shape is turned before its sides are rounded up: the fewest nodes are reported",
    "PJM035": "programs that start processes on other nodes themselves: any script, interpreter or variable in the "
    "commands is taken for one",
    "PJM040": "an elapse= on the command line; groups that the data file does not know",
    "PJM041": "bare numbers above 360 and M:SS above 72 minutes are taken as they stand; whether pjsub takes "
    "90m and 1:60:00 (reported as info)",
    "PJM043": "whether the program catches the signal itself",
    "PJM050": "the site's rule of the day on which the job is submitted",
    "PJM051": "the site's default of the day",
    "PJM054": _OPEN,
    "PJM055": "whether the program is sensitive to latency: only OpenMP threads under an explicit retention_state=1 "
    "are seen",
    "PJM060": _OPEN,
    "PJM062": "thread counts set in several places to several values, or worked out by the shell; threads that are no "
    "OpenMP",
    "PJM063": "binding by other means, such as rank files and numactl",
    "PJM065": "counts that the shell computes; several calls of mpiexec that share nodes (only an excess is reported)",
    "PJM066": "an --mpi on the command line",
    "PJM067": "values set in several places",
    "PJM064": "whether pjsub refuses a shape= that is greater than node=, or turns it",
    "PJM068": "functions that are named in arguments, or defined several times; nodes named by a variable",
    "PJM069": "which of several programs `wait PID` is for; a wait in a condition; "
    "commands other than sleep, tail, kill and fg that keep the script alive",
    "PJM071": "output paths made from variables that are set elsewhere",
    "PJM080": "the limit of the day: public scripts ask for 87Gi",
    "PJM081": "uses inside programs and other scripts",
    "PJM082": "whether the environment lies on node-local disk; Python started by other scripts",
    "PJM083": "which files a program opens; whether there are more than 16,384 files; files named by patterns or "
    "variables that differ in spelling",
    "PJM084": "guards inside other scripts",
    "PJM085": "what the program really allocates",
    "PJM086": "commands misspelt in more than one letter; aliases",
    "PJM087": "an end without its beginning, such as a second fi; quotes behind a substitution with a here-document; "
    "templates; csh, tcsh and zsh",
    "PJM088": "csh, tcsh and zsh",
    "PJM089": "whether pjsub passes over the mark",
    "PJM090": "exports in files that the script sources",
    "PJM091": "allocators linked into the program",
    "PJM092": "values from the site's set-up or from sourced files",
    "PJM094": "paths set in sourced files",
    "PJM095": "every other variable: only VIRTUAL_ENV, CONDA_PREFIX, CONDA_DEFAULT_ENV and PYENV_VERSION are seen",
    "PJM098": "words that are placeholders to people alone, such as NODES where a number is due (no other rule fires "
    "on them)",
    "PJM099": "groups of today that the data file does not know",
}
