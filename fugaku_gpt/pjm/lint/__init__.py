"""A linter for ``#PJM`` job scripts: it reports text that ``pjsub`` would refuse, ignore or misread, and wasted nodes.

Severities. An **error** is shown only if ``pjsub`` refuses the script, or the job is sure to fail, on any day and with
any command line. An error of a rule is therefore shown as a **warning** if

* it depends on dated data of the site (limits and names of resource groups, today's power modes, volumes),
* an option on ``pjsub``'s command line can correct it (``-g``, ``-L elapse=``, ``--sparam``),
* ``pjsub`` accepts it and the job runs, though not as written (a directive below the first command), or
* the manuals do not say that ``pjsub`` refuses it.

``--strict`` shows these as errors, for a script that is submitted as it is. A **warning** marks text that is probably
not intended, or that wastes nodes; an **info** is advice.

Values with variables or placeholders (``${NODES}``, ``@nodes@``, ``%(NODE)s``, ``[NUMBER]``, ``{{ nodes }}``, and words
in place of a number) are checked by PJM098 alone. Rules for Fugaku do not apply to scripts for other sites. Findings
about something missing are reported on the first ``#PJM`` line. ``# noqa: PJM052`` at the end of a line suppresses that
finding on the line, ``# noqa`` suppresses all findings on it, and ``# noqa-file: PJM020`` anywhere in the file
suppresses a finding in the whole file; ids may be shortened from the right (``PJM05``).
"""
