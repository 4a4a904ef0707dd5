"""The project's English: patterns of unclear sentences, counted per rule and corpus, may only become rarer."""

from __future__ import annotations

import words


def test_no_rule_has_more_matches_than_its_ceiling() -> None:
    lines = words.excess(words.all_matches(), words.read_ceilings())
    assert not lines, "\n".join(lines)


def test_ceilings_have_only_known_rules_and_corpora() -> None:
    for rule, by_corpus in words.read_ceilings().items():
        assert set(by_corpus) <= set(words.RULES[rule].corpora)


def test_a_match_names_file_line_and_replacement() -> None:
    source = (
        '"""A module.\n\nIt is\nof 3 channels."""\n\n# mends\n# it\n'
        'raise ValueError(f"{1}, expected is a file")\n'
    )
    matches = words.matches(source, "a.py", "code")
    assert sorted((match.line, match.rule, match.corpus) for match in matches) == [
        (3, "is-of", "docstrings"),
        (6, "mend", "comments"),
        (8, "expected-is", "messages"),
    ]
    assert (
        str(next(match for match in matches if match.rule == "mend"))
        == "a.py:6: mend: …mends it… → fix"
    )


def test_code_in_markdown_is_not_prose() -> None:
    text = "# Title\n\n```python\nmend()\n```\n\nCall `mend` now,\n| mend it |\n"
    assert [match.line for match in words.matches(text, "a.md")] == [8]
