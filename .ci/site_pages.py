"""What mkdocs.yml builds its site from: docs/*.md, and the pages of the repository that lie elsewhere.

Links in the Markdown are those of the repository, so they work on GitHub. Here they become links of the site, and
the site gets a copy of each linked file that is not a page.
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
    ".ci/reference.md": "reference.md",
}
"""Pages that have another name in the site than in docs/."""
LINK = re.compile(r"\[([^][]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
SOURCES = {uri: source for source, uri in PAGES.items()}


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
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    folder = Path(SOURCES.get(page.file.src_uri, f"docs/{page.file.src_uri}")).parent

    def link(match: re.Match[str]) -> str:
        text, path, anchor = match.groups("")
        source = os.path.normpath(folder / path)
        if "://" in path or not (ROOT / source).is_file():
            return match[0]
        uri = PAGES.get(source, source.removeprefix("docs/"))
        if files.get_file_from_path(uri) is None:
            # A browser shows LICENSE.txt, and downloads LICENSE; Markdown that is no page would be taken for one.
            uri += ".txt" if Path(uri).suffix in ("", ".md") else ""
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / source)))
        return f"[{title(source) if text == path else text}]({uri}{anchor})"

    parts = re.split(r"(^ *```.*?^ *```$)", markdown, flags=re.M | re.S)
    parts[::2] = [LINK.sub(link, pictures_by_palette(text)) for text in parts[::2]]
    return "".join(parts)


def title(source: str) -> str:
    """What a link that shows a page's file name shows in the site: the page's heading."""
    if source.endswith(".md"):
        return (ROOT / source).read_text().partition("\n")[0].removeprefix("# ")
    return Path(source).name


def pictures_by_palette(text: str) -> str:
    """Each <picture> as two images, of which the theme shows the one of its palette."""
    return re.sub(
        r'<picture>\s*<source[^>]*srcset="([^"]+)">\s*<img alt="([^"]+)" src="([^"]+)">\s*</picture>',
        r"![\2](\3#only-light)![\2](\1#only-dark)",
        text,
    )


def notebook(content: dict[str, Any], name: str) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and its pictures by file name."""
    blocks: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in content["cells"]:
        source = "".join(cell["source"])
        blocks.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            if "text" in output:
                blocks.append(f"```text\n{''.join(output['text'])}```")
            if picture := output.get("data", {}).get("image/png"):
                file = f"{name}-{len(pictures)}.png"
                pictures[file] = base64.b64decode("".join(picture))
                blocks.append(f"![What the cell above draws]({file})")
    return "\n\n".join(blocks), pictures
