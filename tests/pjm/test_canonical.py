"""Tests of a script as JSON, which is the same for every spelling of an option."""

from __future__ import annotations

from fugaku_gpt.pjm.canonical import script_as_json
from fugaku_gpt.pjm.lexer import read_script

SCRIPT = """#!/bin/bash
#PJM -L "node=4x6x16:torus:strict,elapse=1:00:00-2:00:00,rg=small,freq=2200" -L eco_state=2
#PJM -L proc-openfd=65536,proc-core=unlimited,node-mem=28Gi,mysite=x,flag
#PJM --mpi "proc=1536,max-proc-per-node=4,shape=4x6x16,rank-map-bychip:XYZ,assign-online-node"
#PJM --llio localtmp-size=30Gi,async-close=on,perf
#PJM -N job -g group -S -j -m b,e --mail-list a@example.org,b@example.org -p 200
#PJM -x PJM_LLIO_GFSCACHE=/vol0004,A=b
#PJM --bulk --sparam 0-9
# PJM -X
#PJM --odd thing stray
ls
#PJM -s
"""


def test_values_are_typed_where_possible() -> None:
    document = script_as_json(read_script(SCRIPT))
    assert document["resources"] == {
        "node": "4x6x16:torus:strict",
        "elapse": "1:00:00-2:00:00",
        "rscgrp": "small",
        "freq": 2200,
        "eco_state": 2,
        "proc-openfd": 65536,
        "proc-core": "unlimited",
        "node-mem": 28 * 2**30,
        "mysite": "x",
        "flag": None,
    }
    assert document["nodes"] == {
        "shape": [4, 6, 16],
        "count": 384,
        "allocation": "torus",
        "strict": "strict",
        "io": None,
    }
    assert document["elapse"] == {"min_seconds": 3600, "max_seconds": 7200, "range": True}
    assert document["mpi"] == {
        "proc": 1536,
        "max-proc-per-node": 4,
        "shape": [4, 6, 16],
        "rank-map-bychip": "XYZ",
        "assign-online-node": True,
    }
    assert document["llio"] == {"localtmp-size": 30 * 2**30, "async-close": True, "perf": True}
    assert (document["name"], document["group"], document["stats_nodes"], document["join"]) == (
        "job",
        "group",
        True,
        True,
    )
    assert (document["mail"], document["priority"]) == (["b", "e"], 200)
    assert document["mail_list"] == ["a@example.org", "b@example.org"]
    assert document["environment"] == {"PJM_LLIO_GFSCACHE": "/vol0004", "A": "b"}
    assert (document["bulk"], document["sparam"], document["bulk_numbers"]) == (True, "0-9", [0, 9])
    assert document["--odd"] == "thing"
    assert document["body_line"] == 11
    assert [[item["line"] for item in document[name]] for name in ("late", "disabled")] == [[12], [9]]
    assert all("PJM" in item["text"] for item in (*document["late"], *document["disabled"]))
    assert document["problems"] == [{"line": 10, "kind": "stray-word", "text": "stray"}]
    assert document["directives"][0] == {
        "line": 2,
        "option": "-L",
        "key": "node",
        "value": "4x6x16:torus:strict",
        "known": True,
    }


def test_invalid_values_stay_text() -> None:
    document = script_as_json(read_script("#PJM -L node=${N},elapse=soon,freq=fast --mpi proc=$P -m x -p high\n"))
    assert document["resources"] == {"node": "${N}", "elapse": "soon", "freq": "fast"}
    assert (document["mpi"], document["mail"], document["priority"]) == ({"proc": "$P"}, "x", "high")
    assert "nodes" not in document
    assert "elapse" not in document


def test_step_parameters_are_split() -> None:
    document = script_as_json(read_script('#PJM --step --sparam "jid=1,sn=2,sd=ec==0:one:1"\n'))
    assert document["step_parameters"] == {
        "jid": 1,
        "jnam": None,
        "sn": 2,
        "condition": "ec==0",
        "deletion": "one",
        "steps": [1],
    }


def test_a_script_without_directives() -> None:
    assert script_as_json(read_script("ls\n")) == {
        "directives": [],
        "resources": {},
        "mpi": {},
        "llio": {},
        "body_line": 1,
        "late": [],
        "disabled": [],
        "problems": [],
    }
