"""The rules, grouped by subject. Importing this package registers them."""

from fugaku_gpt.pjm.lint.rules import (  # noqa: F401
    elapse,
    environment,
    exclusive,
    grammar,
    identity,
    launching,
    mpi,
    nodes,
    option_values,
    output,
    power,
    preload,
    shell_text,
    storage,
    threads,
)
