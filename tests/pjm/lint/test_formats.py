"""Tests of the output formats text, JSON and SARIF."""

from __future__ import annotations

import json
from typing import Any, Dict

from fugaku_gpt.pjm.lint.engine import Linter
from fugaku_gpt.pjm.lint.formats import as_json, as_sarif, as_text, explain
from fugaku_gpt.pjm.lint.registry import all_rules, find_rule
from tests.pjm.lint.cases import FT

BAD = FT + "#PJM -L freq=1800,eco_state=0\n"


def test_text_names_location_rule_severity_and_fix() -> None:
    linter = Linter(rules=[find_rule("PJM050"), find_rule("PJM020"), find_rule("PJM011")])
    text = as_text([linter.check(BAD, "dir/job.sh"), linter.check(FT + "#PJM -g a -S\n", "x.sh")], linter.limits)
    assert text.splitlines() == [
        "dir/job.sh:2:1: PJM011 info: neither -s nor -S: there will be no record of energy and power",
        "    fix: add #PJM -S",
        "dir/job.sh:2:1: PJM020 warning: no -g: pjsub refuses the job unless the command line names a group",
        "    fix: add #PJM -g GROUP, with the group of your project (`id` lists yours)",
        "dir/job.sh:3:9: PJM050 error: freq=1800 is neither 2000 nor 2200",
        "    fix: freq=2200,eco_state=2 (boost eco), freq=2000,eco_state=2 (eco) or freq=2000,eco_state=0 (normal)",
        f"1 error, 1 warning, 1 info in 2 files; limits of fugaku as of {linter.limits.date}; 2 taken for Fugaku",
        "1 of the warnings is an error with --strict",
    ]


def test_text_without_findings() -> None:
    linter = Linter()
    assert as_text([linter.check("", "a")], linter.limits) == "1 file checked, nothing found\n"


def test_text_names_the_site_and_the_reason_for_it() -> None:
    linter = Linter(rules=[])

    def text(group: str) -> str:
        return as_text([linter.check(f"#PJM -L rscgrp={group}\n", "job.sh")], linter.limits)

    assert text("small") == "1 file checked, nothing found; taken for Fugaku (rscgrp=small)\n"
    assert "job.sh: taken for another site than Fugaku (rscgrp=regular-a)" in text("regular-a")
    assert "job.sh: taken for Wisteria, Odyssey (rscgrp=regular-o): of the rules" in text("regular-o")
    assert "those for FX1000 systems apply; --site fugaku applies all" in text("regular-o")
    assert "taken for Genkai (rscgrp=a-batch; its limits are of 2025-10-09): of the rules, those for any" in text(
        "a-batch"
    )
    chosen = Linter(rules=[], site="any")
    assert as_text([chosen.check("#PJM -S\n", "a")], chosen.limits) == "1 file checked, nothing found\n"


def test_json_has_the_findings_and_counts() -> None:
    linter = Linter(rules=[find_rule("PJM050"), find_rule("PJM020")])
    data = json.loads(as_json([linter.check(BAD, "job.sh")], linter.limits))
    assert data["summary"] == {"files": 1, "error": 1, "warning": 1, "info": 0}
    assert data["limits"] == {"site": "fugaku", "date": linter.limits.date}
    (file,) = data["files"]
    assert file["path"] == "job.sh" and file["site"] == "fugaku"
    missing, frequency = file["findings"]
    assert (frequency["id"], frequency["severity"], frequency["line"], frequency["column"]) == ("PJM050", "error", 3, 9)
    assert frequency["lowered"] is None and "command line" in missing["lowered"] and missing["fix"]


def check_sarif(log: Dict[str, Any]) -> None:
    """The properties that SARIF 2.1.0 requires of what is used here (sections 3.13 to 3.52 of the standard)."""
    assert log["version"] == "2.1.0" and log["$schema"].endswith("sarif-2.1.0.json")
    assert set(log) <= {"$schema", "version", "runs"} and isinstance(log["runs"], list)
    for run in log["runs"]:
        assert set(run) <= {"tool", "results", "columnKind"}
        assert run["columnKind"] in ("utf16CodeUnits", "unicodeCodePoints")
        driver = run["tool"]["driver"]
        assert isinstance(driver["name"], str) and driver["name"]
        assert set(driver) <= {"name", "version", "rules", "properties"}
        ids = [rule["id"] for rule in driver["rules"]]
        assert len(set(ids)) == len(ids)
        for rule in driver["rules"]:
            assert set(rule) == {"id", "shortDescription", "fullDescription", "help", "defaultConfiguration"}
            assert all(rule[key]["text"] for key in ("shortDescription", "fullDescription", "help"))
            assert rule["defaultConfiguration"]["level"] in ("none", "note", "warning", "error")
        for result in run["results"]:
            assert result["message"]["text"] and result["level"] in ("none", "note", "warning", "error")
            assert ids[result["ruleIndex"]] == result["ruleId"]
            for location in result["locations"]:
                physical_location = location["physicalLocation"]
                uri = physical_location["artifactLocation"]["uri"]
                assert uri and uri.isascii() and " " not in uri
                assert physical_location["region"]["startLine"] >= 1 and physical_location["region"]["startColumn"] >= 1


def test_sarif_is_well_formed() -> None:
    linter = Linter()
    reports = [linter.check(BAD, "a dir/jöb \udcff.sh"), linter.check(BAD, "-"), linter.check("", "empty")]
    log = json.loads(as_sarif(reports, all_rules(), linter.limits))
    check_sarif(log)
    results = log["runs"][0]["results"]
    assert {result["level"] for result in results} == {"error", "warning", "note"}
    uris = {result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for result in results}
    assert uris == {"a%20dir/j%C3%B6b%20%FF.sh", "stdin"}


def test_sarif_without_findings_has_no_results() -> None:
    log = json.loads(as_sarif([], all_rules(), Linter().limits))
    check_sarif(log)
    assert log["runs"][0]["results"] == []


def test_explain_prints_all_fields_of_a_rule() -> None:
    text = explain(find_rule("pjm050"))
    assert text.startswith("PJM050 error: ")
    assert all(word in text for word in ("why:", "fix:", "source:", "PowerControlFunction", "leaves undecided:"))
