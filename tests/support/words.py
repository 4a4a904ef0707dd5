"""Patterns of unclear English, in the docs and in the messages, docstrings and comments of the code.

    python -m tests.support.words              every match: file, line, rule, text and replacement

tests/test_words.py holds the ceilings, which are in words.json and may only be lowered.
"""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

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


@dataclass(frozen=True)
class Rule:
    """One fault of style.

    Attributes:
        pattern: regular expression.
        instead: replacement to suggest.
        corpora: subset of CORPORA.
    """

    pattern: str
    instead: str
    corpora: tuple[str, ...] = CORPORA
    compiled: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "compiled", re.compile(self.pattern))


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


@dataclass(frozen=True)
class Passage:
    """A paragraph, docstring, message or block of comments, on one line.

    Attributes:
        starts: offset in text of each source line.
        lines: number of each source line in the file.
    """

    corpus: str
    path: str
    text: str
    starts: tuple[int, ...]
    lines: tuple[int, ...]

    @classmethod
    def join(cls, corpus: str, path: str, numbered: list[tuple[int, str]]) -> Passage:
        """Join the source lines, without indentation and empty lines."""
        pieces = [
            (number, " ".join(line.split()))
            for number, line in numbered
            if line.strip()
        ]
        starts, length = [], 0
        for _, piece in pieces:
            starts.append(length)
            length += len(piece) + 1
        text = " ".join(piece for _, piece in pieces)
        return cls(
            corpus, path, text, tuple(starts), tuple(number for number, _ in pieces)
        )

    def line_at(self, offset: int) -> int:
        """Return the file's line that has the character at this offset."""
        return self.lines[bisect_right(self.starts, offset) - 1]


@dataclass(frozen=True)
class Match:
    """A rule's match in a passage."""

    rule: str
    corpus: str
    path: str
    line: int
    excerpt: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: …{self.excerpt}… → {RULES[self.rule].instead}"


def matches(text: str, path: str = "", corpus: str | None = None) -> list[Match]:
    """Return the matches in a Markdown text (corpus None, "docs") or in Python source (any other corpus)."""
    passages = (
        doc_passages(path, text)
        if corpus in (None, "docs")
        else code_passages(path, text)
    )
    return [match for passage in passages for match in find(passage)]


def all_matches(root: Path = ROOT) -> list[Match]:
    """Return the matches in the docs and the code of a checkout."""
    docs = [
        root / name
        for name in ("README.md", "llms.txt", "CHANGELOG.md", "CONTRIBUTING.md")
    ]
    docs += sorted((root / "docs").glob("*.md"))
    code = sorted((root / "raypipe").rglob("*.py")) + sorted(
        (root / "jobs").glob("*.py")
    )
    hits = list[Match]()
    for path in docs:
        hits += matches(path.read_text(), str(path.relative_to(root)))
    for path in code:
        hits += matches(path.read_text(), str(path.relative_to(root)), "code")
    for path in sorted((root / "raypipe").rglob("csrc/*.[ch]")):
        hits += [
            match
            for passage in c_passages(str(path.relative_to(root)), path.read_text())
            for match in find(passage)
        ]
    return hits


def find(passage: Passage) -> Iterator[Match]:
    """Yield the matches of all rules of the passage's corpus."""
    for name, rule in RULES.items():
        if passage.corpus in rule.corpora:
            for match in rule.compiled.finditer(passage.text):
                excerpt = passage.text[max(0, match.start() - 25) : match.end() + 35]
                yield Match(
                    name,
                    passage.corpus,
                    passage.path,
                    passage.line_at(match.start()),
                    excerpt,
                )


def doc_passages(path: str, text: str) -> Iterator[Passage]:
    """Yield the paragraphs, list items, headings and table rows of Markdown, without code."""
    paragraph, in_code = list[tuple[int, str]](), False
    for number, line in enumerate(text.splitlines(), 1):
        is_fence = line.lstrip().startswith("```")
        if paragraph and (
            is_fence or not line.strip() or re.match(r"\s*(?:[#|>]|[-*] |\d+\. )", line)
        ):
            yield Passage.join("docs", path, paragraph)
            paragraph = []
        in_code ^= is_fence
        if not in_code and not is_fence and line.strip():
            paragraph.append((number, re.sub(r"`[^`]*`", "`X`", line)))
    if paragraph:
        yield Passage.join("docs", path, paragraph)


def c_passages(path: str, source: str) -> Iterator[Passage]:
    """Yield the comments of C source."""
    for comment in re.finditer(r"/\*.*?\*/", source, re.DOTALL):
        first = source.count("\n", 0, comment.start()) + 1
        yield Passage.join(
            CSRC, path, list(enumerate(comment.group().splitlines(), first))
        )


def code_passages(path: str, source: str) -> Iterator[Passage]:
    """Yield the messages (of exceptions and log lines), docstrings and comments of Python source."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ):
            if docstring := ast.get_docstring(node):
                numbered = list(enumerate(docstring.splitlines(), node.body[0].lineno))
                yield Passage.join("docstrings", path, numbered)
        elif isinstance(node, ast.Raise) and node.exc:
            yield from _message(path, node.exc)
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in LOG_METHODS
            and node.args
        ):
            yield from _message(path, node.args[0])
    block, column = list[tuple[int, str]](), 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or re.match(
            r"# (?:noqa|type|ruff)\b", token.string
        ):
            continue
        number, start = token.start
        if block and (number, start) != (block[-1][0] + 1, column):
            yield Passage.join("comments", path, block)
            block = []
        block, column = [*block, (number, token.string.lstrip("#"))], start
    if block:
        yield Passage.join("comments", path, block)


def _message(path: str, node: ast.expr) -> Iterator[Passage]:
    texts = [
        (part.lineno, part.value)
        for part in ast.walk(node)
        if isinstance(part, ast.Constant)
        and isinstance(part.value, str)
        and part.value.strip()
    ]
    if texts:
        yield Passage.join("messages", path, texts)


def count(hits: list[Match]) -> dict[str, dict[str, int]]:
    """Return {rule: {corpus: number of matches}}, without zeros."""
    counts: dict[str, dict[str, int]] = {}
    for match in hits:
        of_rule = counts.setdefault(match.rule, {})
        of_rule[match.corpus] = of_rule.get(match.corpus, 0) + 1
    return counts


def read_ceilings() -> dict[str, dict[str, int]]:
    """Return {rule: {corpus: most matches}}."""
    ceilings: dict[str, dict[str, int]] = json.loads(CEILINGS.read_text())
    return ceilings


def excess(hits: list[Match], ceilings: dict[str, dict[str, int]]) -> list[str]:
    """Return a line for each rule and corpus above its ceiling, followed by all of its matches."""
    lines = []
    for rule, by_corpus in count(hits).items():
        for corpus, number in by_corpus.items():
            ceiling = ceilings.get(rule, {}).get(corpus, 0)
            if number > ceiling:
                lines.append(
                    f"{rule} in {corpus}: {number}, at most {ceiling}. Write: {RULES[rule].instead}"
                )
                lines += [
                    f"  {match}"
                    for match in hits
                    if (match.rule, match.corpus) == (rule, corpus)
                ]
    return lines


if __name__ == "__main__":
    print(*all_matches(), sep="\n")
