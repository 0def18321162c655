"""MkDocs hooks: notebooks as pages, formulas as MathML, wide tables, and structured metadata on the landing page."""

import base64
import html
import json
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any

import yaml
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', flags=re.DOTALL)

MADE = re.compile(r"<!-- made: ([\w-]+) -->\n(.*?)\n<!-- end -->", flags=re.DOTALL)
"""A generated table or plot, as ``python -m benchmarks.harness.pages`` marks it."""
WRAPPED = ("hflayers", "models", "projects", "summary-accuracy", "summary-models", "summary-search", "summary-speed")
"""The tables with long texts, whose cells may have several lines."""


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Puts generated tables and plots into a ``div`` of a class of their own."""

    def wide(made: re.Match[str]) -> str:
        kind = "wide wrap" if made[1] in WRAPPED else "wide"
        return f'<div class="{kind}" markdown>\n\n{made[2].strip()}\n\n</div>'

    return MADE.sub(wide, markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Converts formulas to MathML, which browsers render without a script."""
    return FORMULA.sub(lambda found: _mathml(html.unescape(found[3]), block=found[2] == "["), content)


def _mathml(formula: str, block: bool) -> str:
    return str(convert(formula, display="block" if block else "inline"))


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Inserts metadata for search engines, from CITATION.cff, into the head of the landing page."""
    if not page.is_homepage:
        return output
    cited = yaml.safe_load((Path(config.config_file_path).parent / "CITATION.cff").read_text(encoding="utf-8"))
    text = json.dumps(metadata(cited), ensure_ascii=False).replace("</", "<\\/")
    return output.replace("</head>", f'<script type="application/ld+json">{text}</script>\n</head>', 1)


def metadata(cited: dict[str, Any]) -> dict[str, Any]:
    """The software of a CITATION.cff as JSON-LD, with the vocabulary of schema.org."""
    paper = cited["preferred-citation"]
    people = [f"{each['given-names']} {each['family-names']}" for each in paper["authors"]]
    found = {
        "@context": "https://schema.org",
        "@type": "SoftwareSourceCode",
        "name": cited["title"],
        "description": cited["abstract"],
        "version": str(cited["version"]),
        "license": f"https://spdx.org/licenses/{cited['license']}.html",
        "keywords": cited["keywords"],
        "programmingLanguage": "Python",
        "runtimePlatform": "PyTorch",
        "citation": {
            "@type": "ScholarlyArticle",
            "name": paper["title"],
            "author": [{"@type": "Person", "name": name} for name in people],
            "datePublished": str(paper["year"]),
        },
    }
    if "repository-code" in cited:
        found["codeRepository"] = cited["repository-code"]
    return found


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for every notebook, with its outputs if it was executed before."""
    for notebook in [file for file in files if file.src_uri.endswith(".ipynb")]:
        place = PurePosixPath(notebook.src_uri)
        title, *parts = notebook_parts(json.loads(notebook.content_string)["cells"])
        text = [title, f"[Download this notebook]({place.name})"]
        for number, part in enumerate(parts):
            if isinstance(part, bytes):
                picture = place.with_name(f"{place.stem}-{number}.png")
                files.append(File.generated(config, str(picture), content=part))
                part = f"![Output of the cell above]({picture.name}){{ .output }}"
            text.append(part)
        files.append(File.generated(config, str(place.with_suffix(".md")), content="\n\n".join(text)))
    return files


def notebook_parts(cells: list[dict[str, Any]]) -> Iterator[str | bytes]:
    """The cells of a notebook as Markdown, each followed by its outputs: text as Markdown, figures as PNG bytes."""
    for cell in cells:
        source = "".join(cell["source"])
        yield f"```python\n{source}\n```" if cell["cell_type"] == "code" else source
        for kind, outputs in groupby(cell.get("outputs", []), key=lambda output: output["output_type"]):
            if kind == "stream":  # consecutive stream outputs are one text
                yield _quoted("".join(text for output in outputs for text in output["text"]))
                continue
            for output in outputs:
                picture = output["data"].get("image/png")
                yield base64.b64decode("".join(picture)) if picture else _quoted("".join(output["data"]["text/plain"]))


def _quoted(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```"
