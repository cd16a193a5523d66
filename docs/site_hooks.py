"""Make one site of the pages in docs/ and of those that stand elsewhere in the repository."""

import re
from pathlib import Path, PurePosixPath

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
ELSEWHERE = {"benchmarks/README.md": "costs.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)")
_home = {page: source for source, page in ELSEWHERE.items()}


def on_files(files, config):
    """Add the pages that stand outside docs/."""
    for source, page in ELSEWHERE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown, page, config, files):
    """Let links between the repository's files lead to pages; those to other files become plain text."""
    here = PurePosixPath(_home.get(page.file.src_uri, f"docs/{page.file.src_uri}")).parent
    up = "../" * page.file.src_uri.count("/")

    def lead(match):
        text, target, anchor = match.groups()
        if "://" in target:
            return match[0]
        path = Path(ROOT, here, target).resolve().relative_to(ROOT).as_posix()
        if path in ELSEWHERE:
            return f"[{text}]({up}{ELSEWHERE[path]}{anchor or ''})"
        if path.startswith("docs/"):
            return f"[{text}]({up}{path.removeprefix('docs/')}{anchor or ''})"
        return text

    return LINK.sub(lead, markdown)
