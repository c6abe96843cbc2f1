"""A checker of ``#PJM`` job scripts: what ``pjsub`` would refuse, ignore or misread, and what wastes the job.

Severities. An **error** is shown only where ``pjsub`` refuses the script, or the job surely fails, as the script
stands: whatever the day, and whatever stands on the command line. An error of a rule is therefore shown as a
**warning** where

* it depends on data of the site with a date (limits and names of resource groups, today's power modes, volumes),
* an option on ``pjsub``'s command line can mend it (``-g``, ``-L elapse=``, ``--sparam``),
* ``pjsub`` takes it and the job runs, though not as written (a directive below the first command), or
* the manuals do not say that ``pjsub`` refuses it.

``--strict`` shows these as the errors that they are today, for a script that is handed in as it stands. A **warning**
is what is likely not meant, or wastes nodes; an **info** is advice.

Values with variables or placeholders (``${NODES}``, ``@nodes@``, ``%(NODE)s``, ``[NUMBER]``, ``{{ nodes }}``, and words
where a number is due) are not judged but for PJM098. Rules for Fugaku keep silent about scripts of other sites.
Findings about what is missing stand on the first ``#PJM`` line. ``# noqa: PJM052`` at the end of a line silences
findings on it, ``# noqa`` all of them, and ``# noqa-file: PJM020`` anywhere in the file those of the whole file; ids
may be shortened from the right (``PJM05``).
"""
