"""The pages of the site that mkdocs.yml builds: docs/*.md, benchmarks/results/*.md, README.md and others.

Links in the Markdown are those of the repository, so they work on GitHub. Here they become links of the site, and
the site gets a copy of each linked file that is not a page. llms.txt and llms-full.txt get links to the site.
"""

from __future__ import annotations

import base64
import json
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "docs/README.md": "pages.md",
    "docs/preview.ipynb": "preview.md",
    ".ci/api.md": "api.md",
}
"""Pages that have another name in the site than in docs/."""
RESULTS = {
    f"benchmarks/results/{path.name}": path.name
    for path in sorted((ROOT / "benchmarks/results").glob("*.md"))
}
PAGES |= {
    source: f"results/{name.replace('README', 'index')}"
    for source, name in RESULTS.items()
}
LINK = re.compile(r"\[([^][]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
PIPE = re.compile(r"(?<=[\w\]] )\\\|(?= \w)")
"""A pipe in a type, in a table: GitHub wants a backslash before it, which Python-Markdown shows in code."""
OPTION = re.compile(r"(?<![\w-])--[a-z][\w.-]*")
SOURCES = {uri: source for source, uri in PAGES.items()}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the menu of results: their index, and a submenu of the reports."""
    reports = sorted(
        PAGES[source] for source in RESULTS if PAGES[source] != "results/index.md"
    )
    entry = next(entry for entry in config.nav or [] if "Results" in entry)
    entry["Results"] = [{"Summary": "results/index.md"}, {"Reports": reports}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source in PAGES:
        if file := files.get_file_from_path(source.removeprefix("docs/")):
            files.remove(file)
    for source, uri in PAGES.items():
        text = (ROOT / source).read_text()
        if source.endswith(".ipynb"):
            text, pictures = notebook(json.loads(text), Path(uri).stem)
            for name, content in pictures.items():
                files.append(File.generated(config, name, content=content))
        files.append(File.generated(config, uri, content=text))
    for name in ("llms.txt", "llms-full.txt"):
        text = re.sub(
            r"\]\(((?:docs/)?[\w-]+\.md)",
            lambda match: f"]({address(match[1], config)}",
            (ROOT / name).read_text(),
        )
        files.append(File.generated(config, name, content=text))
    return files


def address(source: str, config: MkDocsConfig) -> str:
    """The page of a Markdown file, with the site's URL if mkdocs.yml has one."""
    return f"{config.site_url or ''}{uri_of(source).removesuffix('.md')}.html"


def uri_of(source: str) -> str:
    """The file in the site of a file of the repository."""
    return PAGES.get(source, source.removeprefix("docs/"))


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
    folder = Path(SOURCES.get(page.file.src_uri, f"docs/{page.file.src_uri}")).parent

    def link(match: re.Match[str]) -> str:
        text, path, anchor = match.groups("")
        source = os.path.normpath(folder / path)
        if "://" in path or not (ROOT / source).is_file():
            return match[0]
        uri = uri_of(source)
        if files.get_file_from_path(uri) is None and Path(uri).suffix in ("", ".md"):
            uri += ".txt"  # a browser shows LICENSE.txt, and downloads LICENSE; other Markdown would become a page
        if files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / source)))
        here = os.path.relpath(uri, Path(page.file.src_uri).parent)
        return f"[{title(source) if text in (path, source) else text}]({here}{anchor})"

    parts = re.split(r"(^ *```.*?^ *```$)", markdown, flags=re.M | re.S)
    parts[::2] = [
        PIPE.sub("|", LINK.sub(link, pictures_by_palette(text))) for text in parts[::2]
    ]
    return "".join(parts)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Keep each option in a line: a browser would break it after its hyphens."""

    def code(match: re.Match[str]) -> str:
        return OPTION.sub(r'<span class="option">\g<0></span>', match[0])

    return re.sub(r"(?<!<span></span>)<code>[^<]*</code>", code, html)


def title(source: str) -> str:
    """The text in the site of a link whose text is a file's path: the page's heading, or the file's name."""
    if source.endswith(".md"):
        return (ROOT / source).read_text().partition("\n")[0].removeprefix("# ")
    return Path(source).name


def pictures_by_palette(text: str) -> str:
    """Replace each <picture> by two images; the theme shows the one for its palette."""
    return re.sub(
        r'<picture>\s*<source[^>]*srcset="([^"]+)">\s*<img alt="([^"]+)" src="([^"]+)">\s*</picture>',
        r"![\2](\3#only-light)![\2](\1#only-dark)",
        text,
    )


def notebook(content: dict[str, Any], name: str) -> tuple[str, dict[str, bytes]]:
    """Convert a notebook to Markdown, and its pictures by file name."""
    blocks: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in content["cells"]:
        source = "".join(cell["source"])
        blocks.append(
            source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"
        )
        for output in cell.get("outputs", []):
            if "text" in output:
                blocks.append(f"```text\n{''.join(output['text'])}```")
            if picture := output.get("data", {}).get("image/png"):
                file = f"{name}-{len(pictures)}.png"
                pictures[file] = base64.b64decode("".join(picture))
                blocks.append(f"![What the cell above draws]({file})")
    return "\n\n".join(blocks), pictures
