"""Output formats of findings: text, JSON and SARIF 2.1.0."""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import Any, Dict, Iterable, List, Sequence
from urllib.parse import quote

from fugaku_gpt import __version__
from fugaku_gpt.pjm.groups import SiteLimits
from fugaku_gpt.pjm.lint.engine import STDIN, FileReport
from fugaku_gpt.pjm.lint.registry import ERROR, INFO, SEVERITIES, WARNING, Rule
from fugaku_gpt.pjm.lint.sites import ANY, FUGAKU, FX1000, NO_DIRECTIVE
from fugaku_gpt.pjm.lint.undecided import NOT_DECIDED, UNDECIDED

_SARIF_LEVELS = {ERROR: "error", WARNING: "warning", INFO: "note"}
_APPLIES_TO = {
    FUGAKU: "scripts for Fugaku",
    FX1000: "scripts for Fugaku and other FX1000 systems (Flow, Odyssey)",
    ANY: "scripts for any PJM site",
}
_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def as_text(reports: Sequence[FileReport], limits: SiteLimits) -> str:
    """Format each finding as ``FILE:LINE:COLUMN: ID severity: message`` and its fix, then a summary line.

    A script that was not checked by all rules for Fugaku gets a line with the reason.
    """
    lines: List[str] = []
    downgraded = 0
    for report in reports:
        name = _printable("<stdin>" if report.path == STDIN else report.path)
        for finding in report.findings:
            position, message = f"{name}:{finding.line}:{finding.column}", _printable(finding.message)
            lines.append(f"{position}: {finding.id} {finding.severity}: {message}")
            lines.append(f"    fix: {_printable(finding.fix)}")
            downgraded += bool(finding.downgraded) and finding.severity == WARNING
        if report.site != FUGAKU and report.site_reason not in ("", NO_DIRECTIVE):
            rules = "those for FX1000 systems" if report.site == FX1000 else "those for any site"
            title = report.limits.title if report.limits is not None else "another site than Fugaku"
            dated = f"; its limits are of {report.limits.date}" if report.limits and report.limits.has_limits else ""
            reason = f"taken for {title} ({_printable(report.site_reason)}{dated})"
            lines.append(f"{name}: {reason}: of the rules, {rules} apply; --site fugaku applies all")
    counts = count_severities(reports)
    files = f"{len(reports)} file{'s' if len(reports) != 1 else ''}"
    site = _site_of_all(reports)
    if not counts:
        return "\n".join([*lines, f"{files} checked, nothing found{site}"]) + "\n"
    totals = ", ".join(
        f"{counts[severity]} {severity}{'s' if counts[severity] != 1 else ''}"
        for severity in reversed(SEVERITIES)
        if counts[severity]
    )
    lines.append(f"{totals} in {files}; limits of {limits.site} as of {limits.date}{site}")
    if downgraded:
        lines.append(f"{downgraded} of the warnings {'is an error' if downgraded == 1 else 'are errors'} with --strict")
    return "\n".join(lines) + "\n"


def _site_of_all(reports: Sequence[FileReport]) -> str:
    """Describe the sites that scripts were taken for; empty if there is no script for Fugaku, or the user chose."""
    reasons = [report.site_reason for report in reports if report.site == FUGAKU and report.site_reason]
    if not reasons:
        return ""
    return (
        f"; taken for Fugaku ({_printable(reasons[0])})" if len(reports) == 1 else f"; {len(reasons)} taken for Fugaku"
    )


def as_json(reports: Sequence[FileReport], limits: SiteLimits) -> str:
    """Format one JSON object: files with their findings, counts, and the date of the limits."""
    data = {
        "version": 1,
        "limits": _limits_data(limits),
        "files": [
            {
                "path": _without_surrogates(report.path),
                "site": report.site,
                "site_reason": report.site_reason or None,
                "limits": _limits_data(report.limits) if report.limits is not None else None,
                "findings": [
                    {
                        "id": finding.id,
                        "severity": finding.severity,
                        "line": finding.line,
                        "column": finding.column,
                        "title": finding.title,
                        "message": _without_surrogates(finding.message),
                        "fix": _without_surrogates(finding.fix),
                        "lowered": finding.downgraded or None,
                    }
                    for finding in report.findings
                ],
            }
            for report in reports
        ],
        "summary": {"files": len(reports), **{name: count_severities(reports)[name] for name in reversed(SEVERITIES)}},
    }
    return json.dumps(data, indent=2) + "\n"


def _limits_data(limits: SiteLimits) -> Dict[str, str]:
    return {"site": limits.site, "date": limits.date}


def as_sarif(reports: Sequence[FileReport], rules: Sequence[Rule], limits: SiteLimits) -> str:
    """Format a SARIF 2.1.0 log with one run, for code-scanning services and editors."""
    indices = {rule.id: index for index, rule in enumerate(rules)}
    run = {
        "tool": {
            "driver": {
                "name": "fugaku-gpt job lint",
                "version": __version__,
                "rules": [_sarif_rule(rule) for rule in rules],
                "properties": {"limitsSite": limits.site, "limitsDate": limits.date},
            }
        },
        "columnKind": "unicodeCodePoints",
        "results": [
            {
                "ruleId": finding.id,
                "ruleIndex": indices[finding.id],
                "level": _SARIF_LEVELS[finding.severity],
                "message": {"text": _without_surrogates(f"{finding.message}. Fix: {finding.fix}")},
                "locations": [
                    {
                        "physicalLocation": {
                            "artifactLocation": {"uri": _uri(report.path)},
                            "region": {"startLine": finding.line, "startColumn": finding.column},
                        }
                    }
                ],
            }
            for report in reports
            for finding in report.findings
        ],
    }
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"


def explain(rule: Rule) -> str:
    """Describe a rule in full."""
    lines = [
        f"{rule.id} {rule.severity}: {rule.title}",
        "",
        f"why:     {rule.why}",
        f"fix:     {rule.fix}",
        f"applies: {_APPLIES_TO[rule.site]}",
        f"source:  {rule.source}",
    ]
    if rule.id in UNDECIDED:
        lines.append(f"leaves undecided: {UNDECIDED[rule.id]}")
    return "\n".join(lines) + "\n"


def explain_not_decided(id: str) -> str:
    """Explain why an id of the reference has no rule."""
    return f"{id}: no rule checks this; {NOT_DECIDED[id]}\n"


def rule_rows(rules: Iterable[Rule]) -> List[Dict[str, str]]:
    """Return one row for each rule."""
    return [{"id": rule.id, "severity": rule.severity, "site": rule.site, "title": rule.title} for rule in rules]


def count_severities(reports: Iterable[FileReport]) -> "Counter[str]":
    """Count the findings of each severity."""
    return Counter(finding.severity for report in reports for finding in report.findings)


def _sarif_rule(rule: Rule) -> Dict[str, Any]:
    return {
        "id": rule.id,
        "shortDescription": {"text": rule.title},
        "fullDescription": {"text": rule.why},
        "help": {"text": f"{rule.why}\nFix: {rule.fix}\nSource: {rule.source}"},
        "defaultConfiguration": {"level": _SARIF_LEVELS[rule.severity]},
    }


def _uri(path: str) -> str:
    if path == STDIN:
        return "stdin"
    return quote(os.fsencode(path.replace(os.sep, "/")))


def _without_surrogates(text: str) -> str:
    """Replace the surrogates that stand for bytes which are not UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _printable(text: str) -> str:
    """Escape text for a terminal: file names may hold control characters."""
    return "".join(mark if mark.isprintable() else repr(mark)[1:-1] for mark in _without_surrogates(text))
