"""Build hook of the site: the navigation, and one reference page for each package, made from its docstrings.

Pages that `nav` of mkdocs.yml does not name stand at the end of the section of their folder.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PACKAGES = {
    "specdec": "The loop and its nouns",
    "specdec.kv": "KV cache and writers",
    "specdec.verify": "Verifiers",
    "specdec.draft": "Drafters",
    "specdec.attention": "Attention",
    "specdec.hf": "Hugging Face models",
    "specdec.graphs": "Graphs",
    "specdec.kernels": "Kernels",
    "specdec.train": "Training",
    "specdec.bench": "Measuring",
    "specdec.trace": "Tracing",
}
"""Title of each page, in the order of the navigation; packages without a line follow by name."""


SECTIONS = {
    "tutorials": "Tutorials",
    "how-to": "How-to",
    "explanation": "Explanation",
    "results": "Results",
    "reference": "Reference",
}
"""Title of each folder's section."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Complete the navigation."""
    sections: dict[str, list[Any]] = {title: [] for title in SECTIONS.values()}
    pages: list[Any] = []
    for entry in config.nav or []:
        if isinstance(entry, dict):
            sections.update(entry)
        else:
            pages.append(entry)
    for page in unlisted_pages(Path(config.docs_dir), [*pages, *sections.values()]):
        sections[SECTIONS[Path(page).parts[0]]].append(page)
    sections["Reference"].append({"Python": [page_of(package) for package in packages(root_of(config))]})
    config.nav = [
        *pages,
        *({title: entries} for title, entries in sections.items() if entries),
    ]
    return config


def unlisted_pages(docs: Path, listed: list[Any]) -> list[str]:
    """Pages in a section's folder that are not in `listed`, at whatever depth."""
    known = set(leaves(listed))
    found = sorted(str(path.relative_to(docs)) for folder in SECTIONS for path in (docs / folder).rglob("*.md"))
    return [page for page in found if page not in known]


def leaves(nested: Any) -> list[str]:
    """All strings of nested lists and of the values of dictionaries."""
    if isinstance(nested, str):
        return [nested]
    inner = nested.values() if isinstance(nested, dict) else nested
    return [leaf for item in inner for leaf in leaves(item)]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    root = root_of(config)
    for package in packages(root):
        files.append(File.generated(config, page_of(package), content=text_of(package, root)))
    return files


def root_of(config: MkDocsConfig) -> Path:
    """The folder that holds the package."""
    return Path(config.config_file_path or ".").resolve().parent


def packages(root: Path) -> list[str]:
    """Packages with something to document, known ones first."""
    folders = sorted(path.parent for path in (root / "specdec").rglob("__init__.py"))
    found = [".".join(folder.relative_to(root).parts) for folder in folders if modules_of(folder)]
    order = {name: place for place, name in enumerate(PACKAGES)}
    return sorted(found, key=lambda name: (order.get(name, len(order)), name))


def modules_of(folder: Path) -> list[Path]:
    """Modules of a package that have something public."""
    modules = [path for path in sorted(folder.glob("*.py")) if not path.name.startswith("_")]
    return [path for path in modules if has_public_names(path)]


def has_public_names(path: Path) -> bool:
    """Whether a module defines a class, a function or a constant whose name does not start with `_`."""
    names: list[Any] = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
    return any(not name.startswith("_") for name in names)


def page_of(package: str) -> str:
    """Where a package's page lies."""
    return f"reference/python/{package.removeprefix('specdec.').replace('.', '-')}.md"


def text_of(package: str, root: Path) -> str:
    """The page: every module's docstring and public names."""
    lines = [f"# {PACKAGES.get(package, package)}", "", f"Package `{package}`.", ""]
    for path in modules_of(root / Path(*package.split("."))):
        module = f"{package}.{path.stem}"
        lines += [
            f"## `{module}`",
            "",
            f"::: {module}",
            "    options:",
            "      show_root_heading: false",
        ]
        lines += ["      show_root_toc_entry: false", ""]
    return "\n".join(lines)
