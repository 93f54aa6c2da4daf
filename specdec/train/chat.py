"""What a chat template puts around turns, and how self-written user turns are started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from specdec.errors import UnsupportedError

USER, REPLY, NEXT, SYSTEM = "\u2402user\u2403", "\u2402reply\u2403", "\u2402next\u2403", "\u2402system\u2403"
"""Texts that no template contains, to find where it puts the turns."""


class ChatTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is needed here."""

    chat_template: Any

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...

    def encode(self, text: str, **kwargs: Any) -> Any: ...


@dataclass(frozen=True)
class ChatPieces:
    """Token ids that stand between turns; they are forced while everything else is sampled."""

    opening: tuple[int, ...]
    """From the start to the first user turn, with the template's own system prompt where it has one."""
    opening_around_system: tuple[tuple[int, ...], tuple[int, ...]] | None
    """The same for a system prompt of ours: what stands before and behind it; None where the template takes none."""
    after_user: tuple[int, ...]
    """From the end of a user turn to the start of the reply."""
    after_reply: tuple[int, ...]
    """From the end of a reply to the start of the next user turn."""


def chat_pieces(tokenizer: ChatTokenizer) -> ChatPieces:
    """Find the pieces by rendering a conversation.  Raises `UnsupportedError` without a usable chat template."""
    if not tokenizer.chat_template:
        raise UnsupportedError(
            "the model has no chat template, so it cannot write both sides of a conversation; give prompts of your "
            "own with --prompts FILE (JSON lines with turns), or set the tokenizer's chat_template"
        )
    turns = [("user", USER), ("assistant", REPLY), ("user", NEXT)]
    text = _render(tokenizer, turns)
    places = [text.find(mark) for mark in (USER, REPLY, NEXT)]
    if -1 in places or places != sorted(places):
        raise UnsupportedError("the chat template leaves out or reorders turns of a conversation; give --prompts FILE")
    opening, rest = text.split(USER, 1)
    after_user, rest = rest.split(REPLY, 1)
    after_reply = rest.split(NEXT, 1)[0]
    return ChatPieces(
        _ids(tokenizer, opening),
        _around_system(tokenizer, turns),
        _ids(tokenizer, after_user),
        _ids(tokenizer, after_reply),
    )


def _render(tokenizer: ChatTokenizer, turns: list[tuple[str, str]]) -> str:
    conversation = [{"role": role, "content": content} for role, content in turns]
    return tokenizer.apply_chat_template(conversation, tokenize=False)


def _around_system(tokenizer: ChatTokenizer, turns: list[tuple[str, str]]) -> tuple | None:
    try:
        text = _render(tokenizer, [("system", SYSTEM), *turns])
    except Exception as refused:  # templates refuse roles with whatever error their engine raises
        if type(refused).__name__ not in ("TemplateError", "UndefinedError", "TemplateRuntimeError"):
            raise
        return None
    if SYSTEM not in text:
        return None
    before, rest = text.split(SYSTEM, 1)
    return _ids(tokenizer, before), _ids(tokenizer, rest.split(USER, 1)[0])


def _ids(tokenizer: ChatTokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


OPENERS = (
    "Write", "Write a short story about", "Write a Python function that", "Write a poem about", "Write an email to",
    "Write a letter", "Write a paragraph", "Write a review of", "Write a speech", "Write a program in C++",
    "Write a SQL query", "Write a dialogue between", "Create", "Create a list of", "Create a plan", "Create a table",
    "Design", "Develop", "Draft", "Compose a song", "Explain", "Explain the difference between", "Explain how",
    "Explain why", "Describe", "Describe the process of", "Discuss", "Compare", "Compare and contrast", "Analyze",
    "Summarize", "Summarize the following text", "Rewrite", "Rewrite the following sentence", "Edit", "Translate",
    "Correct", "Classify", "Identify", "List", "Give me", "Give an example of", "Generate", "Suggest", "Provide",
    "Name", "Tell me about", "Tell me a", "What", "What is", "What are the", "What would happen if", "What happened",
    "How", "How do I", "How does", "How can", "How many", "How would you", "Why", "Why do", "Why is", "When", "Where",
    "Who", "Which", "Is it", "Are there", "Do you", "Does", "Can you", "Can you help me", "Could you",
    "Could you explain", "Should", "Would", "Please", "Help me", "I want to", "I need", "I need help with",
    "I'm trying to", "I'm writing", "I have", "I have a list of", "I am", "I would like", "My", "My friend",
    "Suppose", "Suppose that", "Consider", "Given", "Given the following", "Given a", "If", "If a", "Let", "Let's",
    "Calculate", "Compute", "Solve", "Solve the equation", "Find", "Find the", "Prove that", "Determine", "Evaluate",
    "Estimate", "A", "A train", "A box contains", "The", "The following", "There are", "In", "In the", "In what year",
    "Imagine", "Imagine that you are", "Pretend to be", "Act as", "You are", "You are a", "Play the role of", "As a",
    "Implement", "Implement a", "Debug", "Here is", "Here is a paragraph:", "Read the", "Extract", "Convert", "Sort",
    "Choose", "Recommend", "Outline", "Plan", "Argue", "Define", "Interpret", "Reflect on", "Continue", "Complete",
    "Fill in", "Make", "Show", "Build", "Use", "Using", "Think of", "Based on", "Hi", "Hello", "Good morning",
    "Thank you", "Two", "Three", "Every", "Some",
)  # fmt: skip
"""First words of user turns, so that rare kinds of request are asked too; written for this, from no data set."""

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a careful assistant who answers briefly.",
    "You are an expert programmer. Answer with code and a short explanation.",
    "You are a patient teacher. Explain step by step.",
    "You are a mathematician. Show your work.",
    "You are a poet.",
    "You are a travel guide who knows every city.",
    "You are a scientist who speaks to a general audience.",
    "You are a historian.",
    "You are a friendly cook.",
    "You are an editor. Improve the text you are given.",
    "You are a critical thinker. Look at both sides.",
    "You are a storyteller.",
    "You answer in bullet points.",
    "You answer in one paragraph.",
    "You are a customer service agent.",
    "You are a doctor who gives general information.",
    "You are a business consultant.",
    "You extract facts from text and return them as JSON.",
    "You play any character the user asks for and stay in that role.",
)
"""System prompts for the part of the rows that does not use the template's own."""
