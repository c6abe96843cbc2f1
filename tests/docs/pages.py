"""Reads the documentation: its pages, their code blocks, commands, links and anchors."""

from __future__ import annotations

import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, List, Set, Tuple

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
EXAMPLES = DOCS / "examples"
# Comment above a console block: its output is compared with what its commands print now. A comment `exit N` says that
# its last command ends with an exit code other than 0.
RERUN = "<!-- rerun -->"

# Text that differs from one run or machine to the next: times, commits.
VARIABLE = re.compile(r"\b\d+\.\d+ s\b|\b[0-9a-f]{12}\b")

_FENCE = re.compile(r"^```([a-z]*)([^\n]*)\n(.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)
_MARKS = re.compile(r"(?:<!-- (?:rerun|exit \d+) -->\s*)+\Z")  # right above a block
_SEPARATORS = {"|", "||", "&&", ";", "&", "(", ")"}


@dataclass(frozen=True)
class Block:
    """A fenced code block.

    Attributes:
        page: path below the repository's root.
        language: the word after the fence, such as ``console``.
        title: the file that the block shows, below ``docs/examples``; empty for most.
        text: the content, with its last newline.
        rerun: True if its commands are run again and their output is compared.
        exit_code: the exit code with which its last command must end; the commands before it end with 0.
    """

    page: str
    language: str
    title: str
    text: str
    rerun: bool
    exit_code: int

    @property
    def commands(self) -> List[str]:
        """The shell lines of the block, continued lines joined: all lines of ``sh``, those after ``$`` of
        ``console``."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "sh":
            return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        return [line[2:].strip() for line in lines if line.startswith("$ ")] if self.language == "console" else []

    @property
    def output(self) -> List[str]:
        """The lines of a ``console`` block that commands printed."""
        return [line.rstrip() for line in self.text.replace("\\\n", " ").splitlines() if not line.startswith("$ ")]


def pages() -> List[Path]:
    """README.md and every page of the documentation, the generated ones included."""
    outside_docs = [
        ROOT / "README.md",
        ROOT / "benchmarks" / "README.md",
        ROOT / "benchmarks" / "reports" / "README.md",
    ]
    return outside_docs + sorted(DOCS.rglob("*.md"))


def written_pages() -> List[Path]:
    """The pages that are not generated."""
    return [page for page in pages() if DOCS / "reference" not in page.parents]


def lay_out_examples(folder: Path) -> None:
    """Puts the examples into the folder where commands run, beside links to the checkout's benchmarks and profiles."""
    for name in ("benchmarks", "env"):
        (folder / name).symlink_to(ROOT / name)
    for example in EXAMPLES.iterdir():
        shutil.copy(str(example), str(folder / example.name))


def name_of(page: Path) -> str:
    """A page's path below the repository's root."""
    return page.relative_to(ROOT).as_posix()


def blocks_of(page: Path) -> Iterator[Block]:
    """The fenced code blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    for match in _FENCE.finditer(text):
        title = re.search(r'title="([^"]+)"', match.group(2))
        marks = _MARKS.search(text, 0, match.start())
        above = marks.group(0) if marks else ""
        code = re.search(r"<!-- exit (\d+) -->", above)
        yield Block(
            name_of(page),
            match.group(1),
            title.group(1) if title else "",
            match.group(3),
            RERUN in above,
            int(code.group(1)) if code else 0,
        )


def without_code(text: str) -> str:
    """A page's prose: no fenced blocks and no code spans."""
    return re.sub(r"``.+?``|`[^`\n]+`", "", _FENCE.sub("", text))


def fugaku_gpt_calls(line: str) -> List[Tuple[str, ...]]:
    """The arguments of every call of ``fugaku-gpt`` in a shell line: behind pipes, ``mpirun`` and in ``$(...)``."""
    calls = [call for inner in re.findall(r"\$\((fugaku-gpt [^)]*)\)", line) for call in fugaku_gpt_calls(inner)]
    lexer = shlex.shlex(re.sub(r"\$\([^)]*\)", "substituted", line), posix=True, punctuation_chars="|&;()")
    lexer.whitespace_split = True
    argv: List[str] = []
    for word in [*lexer, ";"]:
        if word not in _SEPARATORS:
            argv.append(word)
            continue
        if "fugaku-gpt" in argv:
            before, arguments = argv[: argv.index("fugaku-gpt")], argv[argv.index("fugaku-gpt") + 1 :]
            if not before or before[0] in ("mpirun", "mpiexec", "time", "echo") or "=" in before[0]:
                calls.append(tuple(_without_redirections(arguments)))
        argv = []
    return calls


def _without_redirections(argv: List[str]) -> Iterator[str]:
    skip = False
    for word in argv:
        if re.fullmatch(r"[12]?>>?|<", word):
            skip = True
        elif not skip:
            yield word
        else:
            skip = False


def links_of(page: Path) -> List[str]:
    """The targets of a page's links and pictures, without those on the web."""
    targets = re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8")))
    return [target for target in targets if "://" not in target]


def anchors_of(page: Path) -> Set[str]:
    """The anchors that a page's headings have."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    anchors: Set[str] = set()
    for heading in re.findall(r"^#{1,6} (.+)$", text, re.MULTILINE):
        anchor = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())
        number = 1
        while anchor in anchors:
            anchor, number = f"{anchor.rsplit('_', 1)[0] if number > 1 else anchor}_{number}", number + 1
        anchors.add(anchor)
    return anchors
