"""A trace as one self-contained HTML page: nothing is loaded from elsewhere, and nothing of the text is taken for
markup."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable
from html import escape
from importlib import resources
from pathlib import Path

from specdec.trace.labels import harmless
from specdec.trace.report import EmittedToken, TraceReport

LEGEND = {
    "accepted": "drafted and accepted",
    "bonus": "picked behind accepted drafts",
    "plain": "picked, no draft was right",
}


def render(report: TraceReport) -> str:
    """The page."""
    css, script = asset("page.css"), asset("page.js")
    counts = report.counts
    legend = [
        f'<li><span class="token {kind}">{counts[kind]}</span> {meaning}</li>' for kind, meaning in LEGEND.items()
    ]
    facts = [f"<dt>{text_of(name)}</dt><dd>{text_of(value)}</dd>" for name, value in report.facts.items()]
    stats = report.stats
    acceptance = zip(stats.acceptance_by_depth, sorted(stats.tried_at), strict=True)
    return fill(
        asset("page.html"),
        {
            "title": f"specdec trace: {escape(harmless(report.text.strip()[:60]))}",
            "css": css,
            "css_hash": content_hash(css),
            "js": script,
            "js_hash": content_hash(script),
            "figures": figures(report),
            "facts": "".join(facts),
            "legend": "".join(legend),
            "prompt_count": str(len(report.prompt)),
            "prompt": "".join(map(text_of, report.prompt)),
            "text": "".join(token_span(i, token) for i, token in enumerate(report.tokens)),
            "last_step": str(max(0, len(report.steps) - 1)),
            "acceptance": bars(
                ("depth", "tried", "accepted"),
                [((str(depth), str(stats.tried_at[depth]), f"{share:.0%}"), share) for share, depth in acceptance],
                "Nothing was drafted.",
            ),
            "phases": bars(("phase", "ms a step"), phase_lines(report), "There was no step."),
            "data": json_for_script(report),
        },
    )


def write(report: TraceReport, path: Path) -> None:
    """Write the page to a file."""
    path.write_text(render(report), encoding="utf-8")


def figures(report: TraceReport) -> str:
    """The sums in one line."""
    stats = report.stats
    drafted = f"{stats.accepted} of {stats.drafted} drafts accepted" if stats.drafted else "nothing drafted"
    tokens, forwards = (
        f"{n} {noun}{'' if n == 1 else 's'}" for n, noun in ((stats.emitted, "token"), (stats.rounds, "forward"))
    )
    return f"{tokens} in {forwards} · τ {stats.tau:.2f} · {drafted}"


def token_span(index: int, token: EmittedToken) -> str:
    """One token of the text."""
    shown = text_of(token.text) or "▯"
    label = text_of(f"{token.label}, {token.kind}")
    return (
        f'<span class="token {token.kind}" role="button" tabindex="{0 if index == 0 else -1}" data-token="{index}" '
        f'aria-label="{label}">{shown}</span>'
    )


def phase_lines(report: TraceReport) -> list[tuple[tuple[str, ...], float]]:
    """Each phase's mean time, and its share of a step."""
    stats = report.stats
    times = {phase: stats.phase_ms(phase) for phase in stats.phases}
    total = sum(times.values()) or 1.0
    return [((phase, f"{time:.2f}"), time / total) for phase, time in times.items()]


def bars(heads: tuple[str, ...], lines: Iterable[tuple[tuple[str, ...], float]], otherwise: str) -> str:
    """A table whose last column draws a share (0 to 1) as a bar; a sentence where there are no lines."""
    body = [
        "<tr>"
        + "".join(table_cell(cell) for cell in cells)
        + '<td><svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        + f'<rect class="track" width="100" height="10"/><rect class="fill" width="{100 * share:.1f}" height="10"/>'
        + "</svg></td></tr>"
        for cells, share in lines
    ]
    if not body:
        return f"<p>{otherwise}</p>"
    head = "".join(f'<th scope="col">{name}</th>' for name in (*heads, ""))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def table_cell(text: str) -> str:
    """A cell, numbers to the right."""
    kind = ' class="number"' if text[:1].isdigit() else ""
    return f"<td{kind}>{text_of(text)}</td>"


def text_of(text: str) -> str:
    """Text as HTML."""
    return escape(harmless(text))


def json_for_script(report: TraceReport) -> str:
    """The report as JSON that cannot end the script element it stands in."""
    text = json.dumps(report.to_dict(), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def fill(template: str, values: dict[str, str]) -> str:
    """Put values in the place of `{{name}}`, once, so that nothing in a value is taken for a name."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: values[found[1]], template)


def asset(name: str) -> str:
    """A file that comes with the package."""
    return resources.files("specdec.trace").joinpath(name).read_text(encoding="utf-8")


def content_hash(text: str) -> str:
    """What a content security policy calls a style or script by."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
