"""Rules for layered storage and memory (PJM080 to PJM085)."""

from __future__ import annotations

import re
from typing import Dict, Iterator, List, Optional, Set

from fugaku_gpt.machine.fugaku import JOB_BYTES, NODE_TEMPORARY_BYTES, TEMPORARY_BYTES
from fugaku_gpt.pjm.lint.facts import Facts, is_unfilled, printable
from fugaku_gpt.pjm.lint.launches import Launch
from fugaku_gpt.pjm.lint.registry import DATED, ERROR, INFO, WARNING, Hit, rule
from fugaku_gpt.pjm.lint.shell import Word
from fugaku_gpt.pjm.lint.sites import FUGAKU
from fugaku_gpt.pjm.values import parse_limit, parse_size

_USABLE = 25 * 10**9  # bytes of a node's memory that programs can count on
_MANY_NODES = 64
_SOURCE = "Fugaku user guide 1.52, LayeredStorageAndLLIO"
# ${PJM_LOCALTMP:-/tmp} and ${PJM_LOCALTMP+...} also work without temporary space
_USES = {
    key: re.compile(r"\$(?:" + variable + r"\b|\{" + variable + r"\})")
    for key, variable in (("localtmp-size", "PJM_LOCALTMP"), ("sharedtmp-size", "PJM_SHAREDTMP"))
}
_LOCAL = re.compile(r"\$\{?PJM_LOCALTMP\b")
_GUARD = re.compile(r"PLE_RANK_ON_NODE|OMPI_COMM_WORLD_LOCAL_RANK|\bmax-?proc-?per-?node\b")
_COPIERS = ("cp", "tar", "rsync", "unzip", "install", "dd", "unsquashfs", "zstd", "pigz")
_PYTHON = re.compile(r"(python|pypy)[0-9.]*")
_TRANSFERS = ("llio_transfer", "dir_transfer", "sort_libp")


@rule(
    "PJM080",
    ERROR,
    "more temporary space than a node has",
    why="localtmp-size and sharedtmp-size together are at most 87 GiB less 128 MiB of a node: [ERR.] PJM 0049.",
    fix="ask for less",
    source=_SOURCE + "; Command Reference J2UL-2549, message 0049",
    site=FUGAKU,
)
def temporary_space(facts: Facts) -> Iterator[Hit]:
    total = 0
    for key in ("localtmp-size", "sharedtmp-size"):
        text = facts.llio.get(key)
        if text is None:
            continue
        size = facts.size(facts.llio, key)
        if size is None and not is_unfilled(text):
            line, column = facts.position(f"llio.{key}", text)
            try:
                parse_size(text)
            except ValueError as error:
                yield Hit(line, f"{key}={printable(text)}: {printable(error)}", column, "write a size such as 30Gi")
        total += size or 0
    if total > TEMPORARY_BYTES:
        line = facts.line_of("llio.localtmp-size", "llio.sharedtmp-size")
        message = (
            f"localtmp-size and sharedtmp-size are {_gib(total)} together, more than {_gib(TEMPORARY_BYTES)} of a node"
        )
        if total <= NODE_TEMPORARY_BYTES:
            fix = "ask for 86Gi if pjsub refuses it: by the guide 128 MiB of the 87 GiB are kept"
            yield Hit(line, f"{message}; public jobs of June 2026 ran with it", fix=fix, severity=INFO)
        else:
            yield Hit(line, message, downgrade=DATED)


@rule(
    "PJM081",
    WARNING,
    "temporary space is used, but none is asked for",
    why="The default size of $PJM_LOCALTMP and $PJM_SHAREDTMP is 0: nothing can be written there.",
    fix='add #PJM --llio "localtmp-size=30Gi" (or sharedtmp-size)',
    source=_SOURCE,
    site=FUGAKU,
)
def no_temporary_space(facts: Facts) -> Iterator[Hit]:
    for key, pattern in _USES.items():
        if key not in facts.llio:
            for _, (line, column) in facts.find_uses(pattern):
                variable = "$PJM_LOCALTMP" if key == "localtmp-size" else "$PJM_SHAREDTMP"
                yield Hit(line, f"{variable} is used without --llio {key}", column, f'add #PJM --llio "{key}=30Gi"')
                break


@rule(
    "PJM082",
    WARNING,
    "Python on many nodes reads its modules from one server",
    why="Each process opens hundreds of files when Python starts, all through one metadata server of the volume: from "
    "some dozens of nodes on, start-up takes minutes and slows everybody.",
    fix="make the files common with llio_transfer or dir_transfer, or unpack a tar file to $PJM_LOCALTMP on each node",
    source=_SOURCE + "; Fugaku AI guide, PyTorch",
    site=FUGAKU,
)
def import_storm(facts: Facts) -> Iterator[Hit]:
    if not facts.nodes or facts.nodes < _MANY_NODES:
        return
    mended = any(
        word.text.rpartition("/")[2] in (*_TRANSFERS, "tar", "unsquashfs")
        or _LOCAL.search(word.raw)
        or "tmp/" in word.text
        for command in facts.commands
        for word in command.argv
    )
    for launch in facts.launches if not mended else ():
        program = next((word for word in launch.program if _PYTHON.fullmatch(word.text.rpartition("/")[2])), None)
        if program:
            message = f"{printable(program.text)} on {facts.nodes} nodes, and no llio_transfer, dir_transfer or tar"
            yield Hit(program.line, message, program.column)
            return


@rule(
    "PJM083",
    WARNING,
    "llio_transfer at the wrong moment",
    why="A common file must be made before any process of the job has opened it, must not be written, and is removed "
    "with llio_transfer --purge alone. Whether more than 16,384 files are made common cannot be seen here.",
    fix="call llio_transfer first, and llio_transfer --purge at the end",
    source=_SOURCE + ", llio_transfer",
    site=FUGAKU,
)
def misplaced_transfer(facts: Facts) -> Iterator[Hit]:
    if "llio_transfer" not in facts.body_text:
        return
    started: Dict[str, int] = {}
    common: Set[str] = set()
    for command in facts.commands:
        name = command.name
        files = [word for word in command.argv[1:] if not word.text.startswith("-")]
        if name == "llio_transfer":
            if any(word.text == "--purge" for word in command.argv):
                common -= {word.text for word in files}
                continue
            for word in files:
                if word.text in started:
                    message = f"{printable(word.text)} is made common after line {started[word.text]} has opened it"
                    yield Hit(word.line, message, word.column)
                common.add(word.text)
            continue
        for operator, target in command.redirections:
            if target.text in common and operator in (">", ">>", ">|", "&>", "&>>"):
                yield Hit(target.line, f"{printable(target.text)} is a common file, and is written here", target.column)
        if name == "rm":
            for word in files:
                if word.text in common:
                    message = f"rm {printable(word.text)} while it is a common file"
                    yield Hit(word.line, message, word.column, f"llio_transfer --purge {printable(word.text)}")
        elif name not in ("ls", "echo", "test", "[", "[[", "export", "rm"):
            for word in command.argv:
                started.setdefault(word.text, word.line)


@rule(
    "PJM084",
    WARNING,
    "a copy to $PJM_LOCALTMP that not one process of each node makes",
    why="Each node has its own $PJM_LOCALTMP. Started through mpiexec without a guard, all processes of a node write "
    "the same files at once; started without mpiexec, only the first node gets them.",
    fix='mpiexec sh -c \'[ "$PLE_RANK_ON_NODE" = 0 ] && tar xf FILE -C "$PJM_LOCALTMP"\'',
    source=_SOURCE + "; End-user's Guide J2UL-2534, 2.1.2 (PLE_RANK_ON_NODE)",
    site=FUGAKU,
)
def unguarded_copy(facts: Facts) -> Iterator[Hit]:
    if "PJM_LOCALTMP" not in facts.body_text:
        return
    launched = {launch.word: launch for launch in facts.launches}
    starts: List[int] = [launch.command.line for launch in launched.values()]
    ranks_per_node = facts.ranks_per_node
    for launch in launched.values():
        copier = _copying_word(launch)
        guarded = any(_GUARD.search(word.raw) for word in launch.command.argv)
        is_count_per_node = launch.count_word is not None and (not facts.nodes or launch.processes == facts.nodes)
        if copier and ranks_per_node and ranks_per_node > 1 and not guarded and not is_count_per_node:
            yield Hit(copier.line, f"{ranks_per_node} processes on each node copy to $PJM_LOCALTMP", copier.column)
    if not facts.nodes or facts.nodes == 1:
        return
    for command in facts.commands:
        argv = command.argv
        if command.name in _COPIERS and _LOCAL.search(argv[-1].raw) and command.line not in starts:
            message = f"only the first of {facts.nodes} nodes gets what {command.name} puts into $PJM_LOCALTMP"
            yield Hit(command.line, message, command.column)


def _copying_word(launch: Launch) -> Optional[Word]:
    """Return the word that copies into $PJM_LOCALTMP, also inside ``sh -c '...'``; None if there is none."""
    program = launch.program
    if not program or not any(_LOCAL.search(word.raw) for word in program):
        return None
    first = program[0].text.rpartition("/")[2]
    if first in _COPIERS:
        return program[0]
    if first in ("sh", "bash"):
        for word in program[1:]:
            if _LOCAL.search(word.raw) and any(re.search(rf"\b{copier}\b", word.text) for copier in _COPIERS):
                return word
    return None


@rule(
    "PJM085",
    WARNING,
    "more memory than a node can count on",
    why="Of a node's 32 GiB a job can ask for 30,739,333,120 bytes, of which programs can count on about 25 GB (23.2 "
    "GiB).",
    fix="ask for 23Gi or less, or leave node-mem= away",
    source="Fugaku user guide 1.52, UsageRules",
    site=FUGAKU,
)
def memory(facts: Facts) -> Iterator[Hit]:
    text = facts.resources.get("node-mem")
    if text is None or is_unfilled(text) and text.lower() != "unlimited":
        return
    line, column = facts.position("resources.node-mem", text)
    try:
        size = parse_limit(text)
    except ValueError as error:
        yield Hit(line, f"node-mem={printable(text)}: {printable(error)}", column, "write a size such as 23Gi")
        return
    if size is not None and size > JOB_BYTES:
        yield Hit(line, f"node-mem={text} is {_gib(size)}; a job gets {_gib(JOB_BYTES)} of a node at most", column)
    elif size is not None and size > _USABLE:
        yield Hit(line, f"node-mem={text} is {_gib(size)}; programs can count on {_gib(_USABLE)}", column)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
