"""Patterns of unclear English, in the docs and in the messages, docstrings and comments of the code.

    python -m tests.support.words              every match: its passage, rule, text and replacement

tests/test_words.py holds the ceilings, which are in words.json and may only be lowered.
"""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
CEILINGS = Path(__file__).with_name("words.json")
"""{rule: {corpus: most matches}}; a corpus that is absent allows none."""

CORPORA = ("docs", "messages", "docstrings", "comments")
CODE = CORPORA[1:]
CSRC = "csrc"
"""Corpus of the comments of C code, in which only the spelling is checked."""
LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical"}

# Words that begin a clause without its noun, and the verbs that follow them.
_VERBS = (
    "is|are|was|has|have|had|does|needs|differs|remains|follows|comes|stands|lies|fits|would|could|goes|makes|"
    "it|they|a|an|the|Ray|each|all|no"
)
_OWNERS = "a|an|the|its|what|who|all|these|those|such|which|several"


class Rule(NamedTuple):
    """One fault of style: a regular expression, and what to write; in some of the CORPORA."""

    pattern: str
    instead: str
    corpora: tuple[str, ...] = CORPORA


RULES = {
    "british": Rule(
        r"(?i)\b\w*(?:colour|grey(?!hound)|centre|neighbour|behaviour|favour|normalis|initialis|optimis|recognis|"
        r"serialis|synchronis|summaris|licence|catalogue)\w*",
        "American spelling",
        (*CORPORA, CSRC),
    ),
    "expected-is": Rule(r"\bexpected (?:is|are)\b", "must be …, got …"),
    "mend": Rule(r"\bmend(?:s|ed|ing)?\b", "fix"),
    "archaic": Rule(
        r"\b(?:anew|likewise|hence|thereby|whereof|for ever|as ever|all the same|in place of|heeds?|midst|want of|"
        r"at hand|the how|puts up with|trainings|chronicler|befits?)\b",
        "again, also, so, instead of",
    ),
    "some-number": Rule(r"\bsome \d", "about N"),
    "in-mid": Rule(r"\bin mid-\w+", "mid-epoch"),
    "to-the-bit": Rule(
        r"(?<!\bup )\bto (?:the bit|rounding)\b", "bit for bit, up to rounding"
    ),
    "is-of": Rule(
        r"\b(?:is|are|was|were) of (?!course\b)\w", "has, belongs to, comes from"
    ),
    "first-person": Rule(r"\b(?:[Ww]e|[Oo]ur|us)\b", "raypipe, you", ("docs",)),
    "by-for-with": Rule(
        r"\b(?:made?|written|decodes?|continues?|reads?|start|opened|convert|copy|say) (?:it |this |them )?"
        r"by (?:`|jobs|torch|pillow|a pattern|nvJPEG|its)",
        "with",
    ),
    "no-noun": Rule(
        r"(?<!\b[Tt]here )\b(?:is|are|was|were) no "
        r"(?!(?:longer|more|less|need|way|room|smaller|larger|other|further)\b)[a-z*.`]",
        "is not a",
    ),
    "of-your-own": Rule(
        r"\b(?:of (?:your|its|their) own|of (?:yours|ours))\b", "your own …"
    ),
    "fronted-of": Rule(
        rf"(?:^|[.:;] )[Oo]f (?:{_OWNERS}|[A-Z]\w+|\w+s)\b", "put the noun first"
    ),
    "headless-what": Rule(
        rf"(?:^|[.;:,(] |\band )[Ww](?:hat|ho|hoever|hatever) (?:{_VERBS})\b",
        "name the noun",
    ),
    "so-inversion": Rule(
        r"\b[Ss]o (?:do|does|are|is|have|has|will|would) [a-z]", "… does too"
    ),
    "go-on": Rule(
        r"\b(?:go|goes|going|went|gone) on (?:with|by|where|until|from|in|as|to|at)\b|\bgoes on\b",
        "continue",
    ),
    "stands": Rule(
        r"\b(?:stands?|stood|lies?|lay|lying) (?!for\b|in for\b|out\b|on its own\b)",
        "is",
    ),
    "tells": Rule(
        r"\b(?:is|are) told\b|\btells? (?:of|what|how|which|whether|why|the)\b",
        "prints, reports, shows",
    ),
    "beside": Rule(r"\bbeside\b", "next to, besides, alongside"),
    "alone": Rule(r"\balone\b", "only"),
    "countable-validation": Rule(
        r"\b[Ii]n (?:a )?validations?\b|\bof validations\b", "during validation"
    ),
    "half-comment": Rule(
        r"^(?:which|that|who|whose|what|of|as|by|in which|for|and|or|but|else|with|without)\b",
        "a clause with a subject",
        ("comments",),
    ),
    "docstring-start": Rule(
        r"^(?:What|Of|Whether|The same|As|How|Why|By|It|Who|Whose|Its|All|Within|One)\b",
        "begin with a verb or a noun",
        ("docstrings",),
    ),
    "provenance": Rule(
        r"busy (?:core|machine|x86)|[Oo]ther (?:work|jobs) kept|the day before|in the (?:later|earlier) run|"
        r"quieter machine|trust the ratios|\b\d\d? November\b|2026-11-2\d",
        "move it to benchmarks/results/",
        ("docs",),
    ),
    "old-names": Rule(
        r"\bBefore(?: the|,| this)?\b.*\b(?:was|had|took)\b|as before\)|as it is now|is called .* now",
        "describe only today's names",
        ("docs", "messages"),
    ),
    "page-says": Rule(
        r"\b[Tt]his page (?:says|sets|shows|makes|computes)\b|\bsays (?:so|what|how|which|where|when|who)\b|"
        r"\bhas the (?:details|figures|arithmetic)\b",
        "See X for Y",
        ("docs",),
    ),
}

Passage = tuple[str, int, str]
"""The corpus, the first line, and the text of a paragraph, docstring, message or block of comments."""

PROSE = ("README.md", "llms.txt", "CHANGELOG.md", "CONTRIBUTING.md", "docs/*.md")
SOURCES = ("raypipe/**/*.py", "jobs/*.py", "raypipe/**/csrc/*.[ch]")


def all_matches(root: Path = ROOT) -> dict[tuple[str, str], list[str]]:
    """Return {(rule, corpus): lines that name each match} of the docs and the code of a checkout."""
    found = defaultdict[tuple[str, str], list[str]](list)
    for pattern in (*PROSE, *SOURCES):
        for path in sorted(root.glob(pattern)):
            for corpus, line, text in passages(path.suffix, path.read_text()):
                place = f"{path.relative_to(root)}:{line}"
                for name, excerpt in find(corpus, text):
                    told = f"{place}: {name}: …{excerpt}… → {RULES[name].instead}"
                    found[name, corpus].append(told)
    return found


def find(corpus: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield the matches of all rules of a corpus, and what is around each."""
    joined = " ".join(text.split())
    for name, rule in RULES.items():
        for match in (
            re.finditer(rule.pattern, joined) if corpus in rule.corpora else ()
        ):
            yield name, joined[max(0, match.start() - 25) : match.end() + 35]


def passages(suffix: str, text: str) -> Iterator[Passage]:
    """Yield what is prose in a file."""
    if suffix in (".md", ".txt"):
        yield from _paragraphs(text)
    elif suffix == ".py":
        yield from _strings(text)
        yield from _comments(text)
    else:
        for comment in re.finditer(r"/\*.*?\*/", text, re.DOTALL):
            yield CSRC, text.count("\n", 0, comment.start()) + 1, comment.group()


def _paragraphs(text: str) -> Iterator[Passage]:
    """Yield the paragraphs, list items, headings and table rows of Markdown, without code."""
    without_code = re.sub(
        r"^ *```.*?^ *```",
        lambda block: "\n" * block.group().count("\n"),
        text,
        flags=re.M | re.S,
    )
    first, paragraph = 0, ""
    for number, line in enumerate([*without_code.splitlines(), ""], 1):
        if not line.strip() or re.match(r"\s*(?:[#|>]|[-*] |\d+\. )", line):
            yield "docs", first, paragraph
            first, paragraph = number, ""
        paragraph += " " + re.sub(r"`[^`]*`", "`X`", line)


def _strings(source: str) -> Iterator[Passage]:
    """Yield the messages of exceptions and log lines, and the docstrings."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            if docstring := ast.get_docstring(node):
                yield "docstrings", node.body[0].lineno, docstring
        elif isinstance(node, ast.Raise) and node.exc:
            yield "messages", node.lineno, _message(node.exc)
        elif (
            isinstance(node, ast.Call)
            and node.args
            and getattr(node.func, "attr", "") in LOG_METHODS
        ):
            yield "messages", node.lineno, _message(node.args[0])


def _message(node: ast.expr) -> str:
    constants = (part for part in ast.walk(node) if isinstance(part, ast.Constant))
    return " ".join(part.value for part in constants if isinstance(part.value, str))


def _comments(source: str) -> Iterator[Passage]:
    """Yield the blocks of comments that begin in one column."""
    end, column, block = (0, 0, "")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if re.match(r"# (?:noqa|type|ruff)\b", token.string):
            continue
        if token.start != (end + 1, column):
            yield "comments", end, block
            block = ""
        end, column = token.start
        block += " " + token.string.lstrip("#")
    yield "comments", end, block


def excess() -> list[str]:
    """Return a line for each rule and corpus above its ceiling, followed by all of its matches."""
    ceilings = json.loads(CEILINGS.read_text())
    lines = []
    for (rule, corpus), found in all_matches().items():
        ceiling = ceilings.get(rule, {}).get(corpus, 0)
        if len(found) > ceiling:
            lines += [f"{rule} in {corpus}: {len(found)}, at most {ceiling}", *found]
    return lines


if __name__ == "__main__":
    print(*(line for found in all_matches().values() for line in found), sep="\n")
