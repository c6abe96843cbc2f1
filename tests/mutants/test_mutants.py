"""Tests of the program that tries the tests, on a toy package."""

from __future__ import annotations

import subprocess
from pathlib import Path
from textwrap import dedent
from typing import Dict, List

import pytest

pytest.importorskip("cosmic_ray")  # the tools of `make mutants` are in `make dev` alone

from tests.mutants.__main__ import EQUIVALENT, UNTESTED, main, noticed_share, sampled, table
from tests.mutants.equivalents import Equivalents
from tests.mutants.line_map import LineMap, distance, importers, read_or_make
from tests.mutants.rooms import all_tests, modules
from tests.mutants.source import Mutant, mutants_of_lines, random_mutants, statement_lines
from tests.mutants.trial import NOTICED, SURVIVED, TIMED_OUT, chosen_tests

ROOT = Path(__file__).resolve().parents[2]
TOY = """\
_UNUSED = 5


def is_long(value):
    return value > 10


def rounds():
    return 3
"""
TESTS = """\
from fugaku_gpt.config.toy import is_long, rounds


def test_the_limit():
    assert [is_long(value) for value in (9, 10, 11)] == [False, False, True]


def test_that_asserts_nothing():
    rounds()


def test_that_fails():
    assert rounds() == 4
"""
EQUIVALENTS = """\
- {file: fugaku_gpt/config/toy.py, operator: NumberReplacer, line: _UNUSED = 5, mutant: _UNUSED = 6, reason: unused}
- {file: fugaku_gpt/config/toy.py, operator: NumberReplacer, line: _UNUSED = 5, mutant: _UNUSED = 4, reason: unused}
"""


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """Returns a repository with a package of one module, its tests, and a list of equivalents."""
    root = tmp_path / "toy"
    texts = {
        "fugaku_gpt/__init__.py": "",
        "fugaku_gpt/config/__init__.py": "",
        "fugaku_gpt/config/toy.py": TOY,
        "tests/__init__.py": "",
        "tests/config/__init__.py": "",
        "tests/config/test_toy.py": TESTS,
        "tests/mutants/__init__.py": "",
        "tests/mutants/plugin.py": (ROOT / "tests" / "mutants" / "plugin.py").read_text(encoding="utf-8"),
        "equivalents.yaml": EQUIVALENTS,
    }
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    return root


@pytest.mark.slow
def test_noticed_surviving_and_equivalent_changes_are_counted(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in toy.rglob("*.py")}
    arguments = ["--mutants", "9", "--equivalents", str(toy / "equivalents.yaml"), "--map", str(toy / "map.json")]
    assert main(arguments, toy) == 3
    output = capsys.readouterr().out
    assert "left out: tests/config/test_toy.py::test_that_fails" in output
    assert [line.split() for line in output.splitlines() if line.startswith(("fugaku_gpt/config/toy.py ", "all "))] == [
        [name, "2", "1", "1", "0"] for name in ("fugaku_gpt/config/toy.py", "all")
    ]
    assert (
        "fugaku_gpt/config/toy.py:9 NumberReplacer: survived\n  1 of 1 tests\n  @@ -9 +9 @@\n  -    return 3" in output
    )
    assert "66.7% noticed" in output
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize(
    "operator, same, opposite",
    [("==", "is", "is not"), ("is", "==", "!="), ("!=", "is not", "is"), ("is not", "!=", "==")],
)
def test_equality_is_changed_into_inequality_and_never_into_identity(
    toy: Path, operator: str, same: str, opposite: str
) -> None:
    file = "fugaku_gpt/config/toy.py"
    (toy / file).write_text(TOY.replace("> 10", f"{operator} _UNUSED"), encoding="utf-8")
    changed = {mutant.after for mutant in mutants_of_lines(toy, file, [f"return value {operator} _UNUSED"])}
    assert f"return value {opposite} _UNUSED" in changed
    assert f"return value {same} _UNUSED" not in changed


def test_an_entry_of_a_line_that_is_gone_is_stale(toy: Path) -> None:
    entries = Equivalents(toy / "equivalents.yaml")
    assert entries.stale(toy) == []
    moved = TOY.replace("_UNUSED = 5\n", "\n# a comment\n_UNUSED  =  5\n")
    (toy / "fugaku_gpt/config/toy.py").write_text(moved, encoding="utf-8")
    assert entries.stale(toy) == []
    (toy / "fugaku_gpt/config/toy.py").write_text(TOY.replace("5", "7"), encoding="utf-8")
    assert [key[3] for key in entries.stale(toy)] == ["_UNUSED = 4", "_UNUSED = 6"]


def test_an_entry_without_a_reason_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(EQUIVALENTS.replace("unused}", "''}"), encoding="utf-8")
    with pytest.raises(ValueError, match="entry 1: expected texts for file, line, mutant, operator, reason"):
        Equivalents(tmp_path / "bad.yaml")


@pytest.mark.slow
def test_every_entry_of_our_list_is_a_change_of_a_line_that_is_there() -> None:
    assert Equivalents(Path(__file__).with_name("equivalents.yaml")).stale(ROOT) == []


def test_each_node_has_a_single_mutant_and_a_seed_gives_the_same_ones(toy: Path) -> None:
    (file,) = modules(toy, ["toy"])
    mutants = sampled(toy, [file], 9, seed=1)
    assert sorted(mutant.line for mutant in mutants) == [1, 5, 5, 9]
    assert mutants == list(random_mutants(toy, file, 1))
    texts = {tuple(mutant.text for mutant in random_mutants(toy, file, seed)) for seed in range(9)}
    assert len(texts) > 1


def test_a_line_has_every_change_of_each_operator(toy: Path) -> None:
    mutants = list(mutants_of_lines(toy, "fugaku_gpt/config/toy.py", ["return value > 10"]))
    changed = {mutant.after for mutant in mutants}
    assert changed == {
        "return value > 11",
        "return value > 9",
        *(f"return value {operator} 10" for operator in ("==", "!=", "<", "<=", ">=")),
    }
    assert {mutant.line for mutant in mutants} == {5}


def test_marks_between_parameters_are_not_changed(toy: Path) -> None:
    text = "def a(b, *, c=d * e):\n    return lambda f, *, g: f * g\n"
    (toy / "fugaku_gpt/config/toy.py").write_text(text, encoding="utf-8")
    afters = {mutant.after for mutant in random_mutants(toy, "fugaku_gpt/config/toy.py", 1)}
    assert len(afters) == 2 and all("b, *, c" in after or "f, *, g" in after for after in afters)


def test_blank_lines_that_go_with_a_decorator_are_not_counted(toy: Path) -> None:
    (toy / "fugaku_gpt/config/toy.py").write_text("import a\n\n\n@a.b\ndef c():\n    pass\n", encoding="utf-8")
    (mutant,) = mutants_of_lines(toy, "fugaku_gpt/config/toy.py", ["@a.b"])
    assert (mutant.line, mutant.before, mutant.after) == (4, "@a.b", "")


@pytest.mark.slow
def test_modules_take_turns(toy: Path) -> None:
    (toy / "fugaku_gpt/config/other.py").write_text("A = 1 + 2 + 3 + 4\n", encoding="utf-8")
    for seed in range(5):
        files = [mutant.file for mutant in sampled(toy, modules(toy), 8, seed)]
        assert files.count("fugaku_gpt/config/toy.py") == 4
        assert files.count("fugaku_gpt/config/other.py") == 4


@pytest.mark.parametrize(
    ("line", "lines"),
    [(1, [1, 2]), (2, [1, 2]), (3, [3, 4]), (4, [3, 4]), (5, [5, 6, 7]), (6, [5, 6, 7]), (8, [8]), (9, [9])],
)
def test_the_statement_of_a_line_is_the_innermost(line: int, lines: List[int]) -> None:
    text = dedent(
        """\
        A = (1,
             2)
        @decorator
        def function():
            if (A and
                A and
                A):
                return 1
            return 2
        """
    )
    assert list(statement_lines(text, line)) == lines


def test_tests_of_the_own_folder_come_first_and_failing_ones_never(toy: Path) -> None:
    file, parameter = "fugaku_gpt/config/toy.py", "tests/test_any.py::test[fugaku_gpt/config/toy.py]"
    wide, narrow, fails = "tests/cli/test_a.py::test", "tests/cli/test_z.py::test", "tests/config/test_toy.py::fails"
    neighbor, mirror = "tests/config/test_all.py::test", "tests/config/test_toy.py::test"
    tests = {
        file: {5: [wide, narrow, fails, neighbor, mirror], 1: [""]},
        "fugaku_gpt/cli/a.py": {line: [wide, mirror] for line in range(9)},
    }
    seconds = dict.fromkeys((wide, narrow, fails, neighbor, mirror), 1.0)
    lines = LineMap(tests, seconds, [fails])
    expected = [mirror, neighbor, narrow, wide]
    assert lines.tests_of(toy, file, 5) == expected
    assert lines.tests_of(toy, file, 1) == expected  # of any line of the module, as it runs at the import
    shared = LineMap(tests, {**seconds, parameter: 9.0}, [fails])
    assert shared.tests_of(toy, file, 1) == [parameter, *expected]


def test_the_tests_of_a_line_are_the_same_on_any_machine(toy: Path) -> None:
    """The seconds that a loaded machine measures choose no test and no order."""
    file = "fugaku_gpt/config/toy.py"
    tests = {file: {5: [f"tests/cli/test_{name}.py::test" for name in "abc"], 4: ["tests/cli/test_b.py::test"]}}
    chosen = {
        tuple(chosen_tests(LineMap(tests, dict(zip(tests[file][5], seconds)), []).tests_of(toy, file, 5), 2))
        for seconds in ((1.0, 2.0, 3.0), (3.0, 2.0, 1.0), (900.0, 900.0, 900.0))
    }
    assert chosen == {("tests/cli/test_a.py::test", "tests/cli/test_c.py::test")}


def test_many_parameters_of_a_test_do_not_displace_far_tests(toy: Path) -> None:
    file, far = "fugaku_gpt/config/toy.py", "tests/cli/test_a.py::test"
    close = [f"tests/config/test_toy.py::test[{number:03}]" for number in range(120)]
    lines = LineMap({file: {5: [far, *close]}}, dict.fromkeys([far, *close], 1.0), [])
    assert lines.tests_of(toy, file, 5) == [*close[:50], far, *close[50:]]


def test_chosen_tests_of_a_file_follow_each_other() -> None:
    tests = ["test_a.py::one", "test_b.py::one", "test_a.py::two", "test_b.py::two"]
    assert chosen_tests(tests, 3) == ["test_a.py::one", "test_a.py::two", "test_b.py::one"]


@pytest.mark.parametrize(
    ("test", "steps"),
    [
        ("tests/planner/search/test_best.py::test", 0),
        ("tests/planner/search/test_plan.py::test_best", 1),
        ("tests/planner/test_intervals.py::test", 2),
        ("tests/planner/test_search.py::test", 1),
        ("tests/cli/plan/test_best.py::test", 3),
        ("tests/test_limits.py::test", 3),
    ],
)
def test_the_nearest_tests_of_a_module_are_those_of_the_mirror(test: str, steps: int) -> None:
    assert distance(test, "fugaku_gpt/planner/search/best.py") == steps


def test_a_module_that_a_test_imports_is_tried_by_all_tests_of_it(toy: Path) -> None:
    """An import in the middle of a test runs the module's own lines, though other tests depend on them."""
    file, first, other = "fugaku_gpt/config/toy.py", "tests/config/test_a.py::test", "tests/config/test_b.py::test"
    tests = {file: {1: [first], 4: [first], 5: [first, other], 8: [first], 9: [other]}}
    lines = LineMap(tests, {first: 1.0, other: 1.0}, [])
    assert [lines.tests_of(toy, file, line) for line in (1, 4, 5, 8, 9)] == [
        [other, first], [other, first], [other, first], [other, first], [other],
    ]  # fmt: skip


@pytest.mark.slow
def test_a_map_runs_changed_tests_again_and_follows_moved_lines(toy: Path, tmp_path: Path) -> None:
    module, old, new = "fugaku_gpt/config/toy.py", "tests/config/test_toy.py", "tests/config/test_more.py"
    file = tmp_path / "map.json"
    lines = read_or_make(toy, tmp_path, ["tests"], file)
    assert lines.tests[module][9] == [f"{old}::test_that_asserts_nothing", f"{old}::test_that_fails"]
    (tmp_path / "results.json").unlink()
    (toy / module).write_text("# a comment\n" + TOY, encoding="utf-8")
    lines = read_or_make(toy, tmp_path, ["tests"], file)
    assert not (tmp_path / "results.json").exists()  # nothing was run
    assert lines.tests[module][10] == [f"{old}::test_that_asserts_nothing", f"{old}::test_that_fails"]
    text = "from fugaku_gpt.config.toy import rounds\n\ndef test_rounds():\n    assert rounds() == 3\n"
    (toy / new).write_text(text, encoding="utf-8")
    lines = read_or_make(toy, tmp_path, ["tests"], file)
    assert lines.tests[module][10] == [
        f"{new}::test_rounds", f"{old}::test_that_asserts_nothing", f"{old}::test_that_fails"
    ]  # fmt: skip
    (toy / old).write_text("def test_other():\n    pass\n", encoding="utf-8")
    lines = read_or_make(toy, tmp_path, ["tests"], file)
    assert lines.tests[module][10] == [f"{new}::test_rounds"] and lines.failed == []
    assert set(lines.seconds) == {f"{new}::test_rounds", f"{old}::test_other"}


def test_modules_that_import_a_module_are_listed(toy: Path) -> None:
    texts = {
        "a": "from fugaku_gpt.config.toy import rounds\n",
        "b": "from fugaku_gpt.config import toy\n",
        "c": "toy\n",
    }
    for name, text in texts.items():
        (toy / f"fugaku_gpt/{name}.py").write_text(text, encoding="utf-8")
    assert importers(toy, "fugaku_gpt/config/toy.py") == {"fugaku_gpt/a.py", "fugaku_gpt/b.py"}


def test_the_share_leaves_out_equivalent_changes() -> None:
    results = (NOTICED, NOTICED, TIMED_OUT, SURVIVED, UNTESTED, EQUIVALENT)
    mutants: Dict[Mutant, str] = {
        Mutant("a.py", number, "operator", "", "", ""): result for number, result in enumerate(results)
    }
    assert noticed_share(mutants) == pytest.approx(3 / 5)
    assert noticed_share({}) == 1.0
    assert table(mutants).splitlines()[-1].split() == ["all", "2", "2", "1", "1"]


def test_a_module_that_is_not_there_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "planner/nothing"]) == 2
    assert "--only planner/nothing: no module of this name" in capsys.readouterr().out


def test_the_rooms_hold_modules_of_plain_data_that_are_there() -> None:
    files = modules(ROOT)
    assert {"fugaku_gpt/report/check_figures.py", "fugaku_gpt/config/values.py", "fugaku_gpt/jobs/render.py"} <= set(
        files
    )
    assert {file.split("/")[1] for file in files} == {
        "config", "formulas", "jobs", "layout", "pjm", "planner", "records", "report", "sweep",
    }  # fmt: skip
    assert modules(ROOT, ["planner/training_schedule"]) == ["fugaku_gpt/planner/training_schedule.py"]
    both = modules(ROOT, ["config/values", "report/figures"])
    assert both == ["fugaku_gpt/config/values.py", "fugaku_gpt/report/figures.py"]


def test_tests_of_texts_are_left_out() -> None:
    tests = all_tests(ROOT)
    assert {"tests/config", "tests/cli", "tests/test_limits.py"} <= set(tests)
    assert not {"tests/house", "tests/mutants", "tests/conftest.py", "tests/__init__.py"} & set(tests)
