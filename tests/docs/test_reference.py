"""Tests that the generated reference agrees with the code, and that a stale page is detected."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from docs import generate_reference
from fugaku_gpt import errors
from fugaku_gpt.cli.main import cli
from fugaku_gpt.config import valid_keys
from fugaku_gpt.config.schema import RunConfig
from fugaku_gpt.pjm.lint.registry import all_rules


def test_no_page_is_stale() -> None:
    assert generate_reference.stale() == []  # else: python -m docs.generate_reference


@pytest.mark.slow
def test_a_changed_a_missing_and_an_extra_page_are_detected(tmp_path: Path) -> None:
    generate_reference.write(tmp_path)
    assert generate_reference.stale(tmp_path) == []
    (tmp_path / "config.md").write_text("old\n", encoding="utf-8")
    (tmp_path / "exit-codes.md").unlink()
    (tmp_path / "cli" / "gone.md").write_text("# gone\n", encoding="utf-8")
    assert generate_reference.stale(tmp_path) == ["cli/gone.md", "config.md", "exit-codes.md"]
    generate_reference.write(tmp_path)
    assert generate_reference.stale(tmp_path) == []


def test_the_program_reports_stale_pages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate_reference.main(["--check"]) == 0
    monkeypatch.setattr(generate_reference, "exit_code_page", lambda: "# Exit codes\n")
    assert generate_reference.main(["--check"]) == 1
    assert "exit-codes.md" in capsys.readouterr().err
    assert generate_reference.main(["--force"]) == 2


def test_every_field_rule_code_and_command_has_an_entry() -> None:
    pages = generate_reference.pages()
    assert all(f"| `{key}` |" in pages["config.md"] for key in valid_keys())
    assert all(f"\n## {rule.id}\n" in pages["lint-rules.md"] for rule in all_rules())
    codes = {value for name, value in vars(errors).items() if name.startswith("EXIT_") and isinstance(value, int)}
    assert codes == set(errors.EXIT_CODES)
    for verbs, command in generate_reference.every_command(cli, ()):
        if verbs:
            page = pages[f"cli/{verbs[0]}.md"]
            assert f"# fugaku-gpt {' '.join(verbs)}\n" in page
            shown = [option for option in command.params if not getattr(option, "hidden", False)]
            options = [name for option in shown for name in option.opts if name.startswith("--") and name != "--help"]
            assert all(name in page for name in options), verbs


def test_every_command_that_names_exit_codes_is_in_their_table() -> None:
    page = generate_reference.exit_code_page()
    for verbs, command in generate_reference.every_command(cli, ()):
        if "exit code" in (command.help or "").lower():
            sentences = generate_reference.exit_code_sentences(command)
            assert sentences, f"{verbs}: write 'Exit codes: 0 ..., 3 ....'"
            assert not verbs or f"| [`{' '.join(verbs)}`]" in page


def test_the_program_s_help_names_every_exit_code() -> None:
    (sentence,) = generate_reference.exit_code_sentences(cli)
    assert [int(code) for code in re.findall(r"\d+", sentence)] == list(errors.EXIT_CODES)


def test_a_preformatted_paragraph_stays_preformatted() -> None:
    @click.command()
    def laid_out() -> None:
        """A sentence.

        \b
        one   two
        three four
        """

    section = "\n".join(generate_reference.command_section(("laid-out",), laid_out))
    assert "A sentence.\n\n```text\none   two\nthree four\n```\n" in section


def test_the_configuration_has_sections() -> None:
    page = generate_reference.pages()["config.md"]
    assert all(f"\n## {section}\n" in page for section in RunConfig.__dataclass_fields__)
