"""The project's English: patterns of unclear sentences, counted per rule and corpus, may only become rarer."""

from __future__ import annotations

import words


def test_no_rule_has_more_matches_than_its_ceiling() -> None:
    lines = words.excess()
    assert not lines, "\n".join(lines)


def test_prose_is_found_in_code_and_code_in_prose_is_not() -> None:
    source = (
        '"""A module.\n\nIt is\nof 3 channels."""\n\n# mends\n# it\n'
        'raise ValueError(f"{1}, expected is a file")\n'
    )
    text = "# Title\n\n```python\nmend()\n```\n\nCall `mend` now,\n| mend it |\n"
    found = {
        (name, corpus)
        for suffix, content in ((".py", source), (".md", text))
        for corpus, _, passage in words.passages(suffix, content)
        for name, _ in words.find(corpus, passage)
    }
    assert found == {
        ("is-of", "docstrings"),
        ("mend", "comments"),
        ("expected-is", "messages"),
        ("mend", "docs"),
    }
