"""Tests of documents that are equal to an earlier one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fugaku_gpt.data.duplicates import SeenDocuments


@given(documents=st.lists(st.binary(max_size=3), max_size=40))
def test_each_different_document_is_new_once(documents: "list[bytes]") -> None:
    seen = SeenDocuments()
    different = [document for document in documents if not seen.has_seen(document)]
    assert different == list(dict.fromkeys(documents))
