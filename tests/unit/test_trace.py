"""Traces agree with the generation they are of, and their page takes nothing for markup."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest
import torch

from specdec import cli
from specdec.draft.scripted import ScriptedDrafter
from specdec.errors import ConfigError
from specdec.stats import SpecStats
from specdec.trace.collect import trace
from specdec.trace.html import content_hash, render
from specdec.trace.labels import harmless, pieces, visible
from specdec.trace.report import Candidate, EmittedToken, Node, TracedStep, TraceReport
from specdec.types import CommitStats, StepRecord
from tests.models import byte_tokenizer, tiny_llama

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> & \"'\u202eevil\x00{{data}}\u2028"


@pytest.fixture(scope="module")
def traced():
    """A trace with accepted, bonus and plain tokens, and what `model.generate` writes."""
    model, tokenizer = tiny_llama(vocab_size=257), byte_tokenizer()
    prompt = tokenizer("once upon a time", return_tensors="pt")["input_ids"]
    expected = model.generate(prompt, max_new_tokens=30, do_sample=False, pad_token_id=0)[0, prompt.shape[1] :].tolist()
    spoiled = [token if i % 7 else (token + 1) % 257 for i, token in enumerate(expected)]
    drafter = ScriptedDrafter([spoiled], 257, depth=4, siblings=1)
    options = dict(max_new_tokens=30, do_sample=False, pad_token_id=0)
    report = trace(model, tokenizer, prompt, drafter=drafter, top=3, **options)
    return report, expected, model, prompt


def test_tokens_are_those_of_plain_decoding(traced):
    report, expected, _, _ = traced
    assert [token.token for token in report.tokens] == expected
    assert report.counts["accepted"] == report.stats.accepted > 0
    assert report.counts["bonus"] > 0 and report.counts["plain"] > 0
    assert sum(report.counts.values()) == report.stats.emitted == 30


def test_steps_cover_all_tokens_in_order(traced):
    report = traced[0]
    first = 0
    for step in report.steps:
        assert step.first_token == first
        members = report.tokens[first : first + step.num_tokens]
        assert {token.step for token in members} == {step.index}
        assert [token.depth for token in members] == list(range(1, step.num_tokens + 1))
        accepted = [node.token for node in step.nodes if node.accepted]
        assert accepted == [token.token for token in members if token.kind == "accepted"]
        assert step.rows_staged == len(step.nodes) + 1
        assert step.rows_committed == step.num_tokens
        first += step.num_tokens
    assert first == 30


def test_probabilities_are_the_models(traced):
    report, expected, model, prompt = traced
    with torch.no_grad():
        logits = model(torch.cat([prompt, torch.tensor([expected])], dim=1)).logits[0, prompt.shape[1] - 1 : -1]
    probs = logits.softmax(-1)
    for i, token in enumerate(report.tokens):
        assert token.probability == pytest.approx(float(probs[i, token.token]), abs=1e-4)
        assert token.top[0].token == token.token, "greedy decoding takes the best"
        assert [other.probability for other in token.top] == sorted((o.probability for o in token.top), reverse=True)
        for other in token.rejected:
            assert other.token != token.token
            assert other.probability == pytest.approx(float(probs[i, other.token]), abs=1e-4)


def test_nodes_below_a_rejected_one_have_no_probability(traced):
    report = traced[0]
    unseen = 0
    for step in report.steps:
        kept = {0, *(i for i, node in enumerate(step.nodes, start=1) if node.accepted)}
        for node in step.nodes:
            assert (node.probability is not None) == (node.parent in kept)
            unseen += node.probability is None
    assert unseen > 0


def test_pages_hold_what_was_committed(traced):
    report = traced[0]
    length = len(report.prompt) - 1
    for step in report.steps:
        assert step.context_length == length
        length += step.rows_committed
        assert len(step.pages) * report.page_size >= length
        assert len(set(step.pages)) == len(step.pages)


def test_sampled_text_is_traced_too():
    model, tokenizer = tiny_llama(vocab_size=257), byte_tokenizer()
    options = dict(max_new_tokens=12, do_sample=True, temperature=0.9, pad_token_id=0)
    prompt = tokenizer("abcabcabc", return_tensors="pt")["input_ids"]
    torch.manual_seed(3)
    expected = model.generate(prompt, **options)
    torch.manual_seed(3)
    report = trace(model, tokenizer, "abcabcabc", drafter="ngram", **options)
    assert [token.token for token in report.tokens] == expected[0, prompt.shape[1] :].tolist()
    assert any(token.top[0].token != token.token for token in report.tokens)


def test_batches_are_refused():
    with pytest.raises(ConfigError, match="one prompt"):
        trace(tiny_llama(vocab_size=257), byte_tokenizer(), torch.ones(2, 3, dtype=torch.long))


@pytest.mark.parametrize("text", ["naïve café, 日本語 🙂!", "plain", ""])
def test_pieces_make_up_the_text(text):
    tokenizer = byte_tokenizer()
    tokens = tokenizer(text)["input_ids"]
    found = pieces(tokenizer, tokens)
    assert len(found) == len(tokens)
    assert "".join(found) == text


def test_an_unfinished_character_is_shown_at_the_end():
    tokenizer = byte_tokenizer()
    assert pieces(tokenizer, tokenizer("a🙂")["input_ids"][:3]) == ["a", "", "\N{REPLACEMENT CHARACTER}"]


def test_labels_have_no_invisible_characters():
    assert visible(" a\n\t\u202e\x00\u200b") == "␣a⏎⇥\\u{202e}\\u{0}\\u{200b}"
    assert (
        harmless("a\n\x00\u202eb\u2066")
        == "a\n\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}"
    )
    assert harmless("👨‍👩‍👧 שלום") == "👨‍👩‍👧 שלום", "joiners and right-to-left text stay"


class Page(HTMLParser):
    """What a browser would find in the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.token_texts: list[str] = []
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self._inside = ""
        self._in_token = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.elements.append((tag, attributes))
        self._inside = tag
        if "data-token" in attributes:
            self.token_texts.append("")
            self._in_token = True

    def handle_endtag(self, tag):
        self._in_token = False
        self._inside = ""

    def handle_data(self, data):
        if self._in_token:
            self.token_texts[-1] += data
        if self._inside == "script":
            self.scripts.append(data)
        if self._inside == "style":
            self.styles.append(data)


def hostile_report() -> TraceReport:
    token = EmittedToken(
        5, HOSTILE, HOSTILE, "plain", 1, 0, 0.5, (Candidate(5, HOSTILE, 0.5),), (Candidate(6, HOSTILE, 0.1),)
    )
    step = TracedStep(
        0,
        HOSTILE,
        (Node(6, HOSTILE, 0, 1, False, 0.1),),
        0,
        1,
        3,
        (0,),
        2,
        1,
        10,
        HOSTILE,
        {HOSTILE: 1.0},
        {HOSTILE: HOSTILE},
    )
    record = StepRecord(0, (0,), [1], [[6]], [[0]], [[]], [[5]], [False], CommitStats(2, 1, 10), {HOSTILE: 1.0})
    return TraceReport({HOSTILE: HOSTILE}, (HOSTILE,), (token,), (step,), 16, SpecStats.of([record]))


def test_hostile_text_stays_text():
    text = render(hostile_report())
    page = Page(text)
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == 2 and "img" not in tags
    assert page.token_texts == [harmless(HOSTILE)]
    data = next(script for script in page.scripts if script.lstrip().startswith("{"))
    assert json.loads(data)["tokens"][0]["text"] == HOSTILE, "data must survive unchanged"
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    assert "\u202e" not in text and "\x00" not in text


def test_the_page_is_self_contained(traced):
    text = render(traced[0])
    page = Page(text)
    for tag, attributes in page.elements:
        assert tag not in ("link", "iframe", "object", "img", "base"), tag
        assert "src" not in attributes and "href" not in attributes and "style" not in attributes
    assert set(re.findall(r"https?://[^\s\"']+", text)) <= {"http://www.w3.org/2000/svg"}
    assert "url(" not in text and "@import" not in text
    policy = next(a["content"] or "" for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    [style], [_, script] = page.styles, page.scripts
    assert f"'{content_hash(style)}'" in policy and f"'{content_hash(script)}'" in policy
    assert policy.startswith("default-src 'none'")


def test_the_page_shows_every_token_once(traced):
    report = traced[0]
    page = Page(render(report))
    assert page.token_texts == [harmless(token.text) or "▯" for token in report.tokens]
    stops = [attributes["tabindex"] for _, attributes in page.elements if "data-token" in attributes]
    assert stops == ["0"] + ["-1"] * (len(report.tokens) - 1), "one stop for the tab key, arrows for the rest"


def test_sums_of_the_page_are_those_of_the_records(traced):
    report = traced[0]
    text = render(report)
    assert f"{report.stats.emitted} tokens in {report.stats.rounds} forwards" in text
    for share in report.stats.acceptance_by_depth:
        assert f"{share:.0%}" in text


def test_the_command_writes_a_page_and_json(tmp_path, capsys):
    folder = tmp_path / "model"
    tiny_llama(vocab_size=257, eos_token_id=256).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    page = tmp_path / "report.html"
    arguments = ["trace", "ab ab ab", "--model", str(folder), "--max-new-tokens", "6"]
    assert cli.run([*arguments, "--html", str(page), "--json"], {}) == 0
    shown = json.loads(capsys.readouterr().out)
    assert len(shown["tokens"]) == 6 and shown["facts"]["drafter"] == "suffix"
    assert Page(page.read_text(encoding="utf-8")).token_texts == [harmless(t["text"]) or "▯" for t in shown["tokens"]]
    assert cli.run([*arguments, "--html", str(tmp_path / "nowhere" / "report.html")], {}) == 2
    assert "no such folder" in capsys.readouterr().err
