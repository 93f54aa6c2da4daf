"""Build hook of the site: puts the options of every command into the page about the command line."""

from __future__ import annotations

from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

PAGE = "reference/cli.md"
MARKER = "<!-- commands -->"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace the marker by one section for each command."""
    if page.file.src_uri != PAGE:
        return markdown
    if MARKER not in markdown:
        raise ValueError(f"{PAGE} has no {MARKER}")
    return markdown.replace(MARKER, "\n".join(sections()))


def sections() -> list[str]:
    """Every command with its arguments and options, as its own `--help` has them."""
    from specdec.cli import build_app

    lines: list[str] = []
    commands: dict[str, Any] = getattr(typer.main.get_command(build_app()), "commands")  # noqa: B009
    for name, command in commands.items():
        lines += [
            f"## `specdec {name}`",
            "",
            cell(command.help or ""),
            "",
            "| option | default | meaning |",
        ]
        lines += ["| --- | --- | --- |"]
        for option in command.params:
            if option.name != "help":
                lines.append(f"| {spelling(option)} | {default_of(option)} | {cell(option.help or '')} |")
        lines.append("")
    return lines


def spelling(option: Any) -> str:
    """How the option is written."""
    if option.param_type_name == "argument":
        return f"`{option.name.upper()}`"
    return " / ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))


def default_of(option: Any) -> str:
    """The default, where there is one to show."""
    default = option.default
    if default is None or default is False or callable(default):
        return ""
    if default is True:
        return "on"
    return f"`{', '.join(map(str, default)) if isinstance(default, list | tuple) else default}`"


def cell(text: str) -> str:
    """Text that breaks no table and is no markup."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
