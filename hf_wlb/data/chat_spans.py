"""Which tokens of a conversation the assistant wrote, found with the tokenizer's own chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from jinja2.exceptions import TemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ASSISTANT = "assistant"

Answers = Literal["all", "last"]
Message = dict[str, Any]

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class MarkedTokens(NamedTuple):
    """A conversation's tokens.

    Attributes:
        input_ids: All of them.
        trained: As many; whether the assistant wrote it.
    """

    input_ids: list[int]
    trained: list[bool]


class ChatFormat:
    """Renders conversations with a tokenizer's chat template and marks what the assistant wrote.

    What follows an answer and ends the turn (``<|im_end|>``, ``</s>``) is marked, so that it is learned; what precedes
    it and is given at inference (``<|im_start|>assistant``) is not, and neither is white space after the end of turn.

    A template with ``{% generation %}`` blocks says by itself what the assistant wrote. Without them an answer is what
    is added to the rendered conversation before it, generation prompt included. That is checked: a template that
    renders an earlier turn differently once others follow is refused.

    Args:
        tokenizer: A fast one; with a chat template, unless only plain text is to be marked.

    Raises:
        ValueError: If the tokenizer cannot say where in the text its tokens are.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.is_fast:
            raise ValueError(
                f"{type(tokenizer).__name__} does not say where in the text its tokens are, which is needed to mask "
                "prompts. Use a fast tokenizer (AutoTokenizer.from_pretrained(..., use_fast=True))."
            )
        self._tokenizer = tokenizer
        added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._special_tokens = tuple({*tokenizer.all_special_tokens, *added})
        self._special_ids = {int(i) for i in cast(list[int], tokenizer.convert_tokens_to_ids([*self._special_tokens]))}

    def mark(
        self, messages: list[Message], *, after: int = 0, answers: Answers = "all", tools: Any = None, name: str
    ) -> MarkedTokens:
        """Tokenise a conversation.

        Args:
            messages: With ``role`` and ``content``.
            after: Answers among the first so many messages are not trained.
            answers: Of the others, all or the last one only.
            tools: Passed on to the template; a list, or the JSON text of one.
            name: The conversation, for errors, such as ``"Row 3"``.

        Raises:
            ValueError: If the template refuses the conversation, or does not tell what the assistant wrote.
        """
        wanted = [i for i, message in enumerate(messages) if i >= after and message["role"] == ASSISTANT]
        wanted = wanted[-1:] if answers == "last" else wanted
        tools = json.loads(tools) if isinstance(tools, str) else tools
        template = self._tokenizer.get_chat_template(None, tools)
        if _GENERATION.search(template):
            return self._mark_by_blocks(messages, wanted, tools, name)
        text = self._render(messages, tools, name)
        spans = [self._span_by_prefixes(text, messages, index, tools, name) for index in wanted]
        return self._mark_spans(text, spans, add_special_tokens=False)

    def mark_completion(self, prompt: str, completion: str) -> MarkedTokens:
        """Tokenise plain text, of which the completion is trained, with an end-of-text token where there is one."""
        span = (len(prompt), len(prompt) + len(completion))
        marked = self._mark_spans(prompt + completion, [span], add_special_tokens=True)
        eos = self._tokenizer.eos_token_id
        if completion and eos is not None:
            if marked.input_ids[-1] != eos:
                marked.input_ids.append(eos)
                marked.trained.append(True)
            marked.trained[-1] = True  # the tokenizer may have added it by itself
        return marked

    def _render(self, messages: list[Message], tools: Any, name: str, prompt: bool = False) -> str:
        try:
            rendered = self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=prompt
            )
        except TemplateError as error:
            raise ValueError(f"{name}: the chat template refuses this conversation: {error}") from None
        assert isinstance(rendered, str)
        return rendered

    # ---- templates with generation blocks ----

    def _mark_by_blocks(self, messages: list[Message], wanted: list[int], tools: Any, name: str) -> MarkedTokens:
        try:
            encoded: Any = self._tokenizer.apply_chat_template(
                messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True
            )
        except TemplateError as error:
            raise ValueError(f"{name}: the chat template refuses this conversation: {error}") from None
        input_ids, marks = list(encoded["input_ids"]), encoded["assistant_masks"]
        runs = list(_runs(marks))
        answers = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]
        if len(wanted) < len(answers):
            if len(runs) != len(answers):
                raise ValueError(
                    f"{name}: the chat template marks {len(runs)} passages as generated, but the assistant has "
                    f"{len(answers)} messages, so which belongs to which is not clear. Train all answers, or give one "
                    "{% generation %} block to every message."
                )
            runs = [run for index, run in zip(answers, runs, strict=True) if index in wanted]
        trained = [False] * len(input_ids)
        for start, stop in runs:
            stop += self._ends_turn_outside(input_ids, start, stop)
            trained[start:stop] = [True] * (stop - start)
        return MarkedTokens(input_ids, trained)

    def _ends_turn_outside(self, input_ids: Sequence[int], start: int, stop: int) -> bool:
        """Whether the end of turn comes directly after a block, which has no special token of its own."""
        if stop == len(input_ids) or input_ids[stop] not in self._special_ids:
            return False
        return not self._special_ids.intersection(input_ids[start:stop])

    # ---- other templates ----

    def _span_by_prefixes(
        self, text: str, messages: list[Message], index: int, tools: Any, name: str
    ) -> tuple[int, int]:
        if index == 0:
            raise ValueError(
                f"{name} begins with the assistant, and what this chat template puts before an answer cannot be told "
                "from it there. Put a user's or system message first, or mark answers with {% generation %} blocks in "
                "the template."
            )
        prompt = self._render(messages[:index], tools, name, prompt=True)
        until = text if index + 1 == len(messages) else self._render(messages[: index + 1], tools, name)
        for rendered, what in ((prompt, "what precedes message"), (until, "the conversation up to message")):
            if not text.startswith(rendered):
                place = next((i for i, (a, b) in enumerate(zip(rendered, text, strict=False)) if a != b), len(text))
                raise ValueError(
                    f"{name}: this chat template renders {what} {index} (the assistant's) differently once the rest "
                    f"follows ({rendered[place : place + 30]!r} instead of {text[place : place + 30]!r}), so its "
                    "answers cannot be told from the rest. Use answers='last', or a template with {% generation %} "
                    "blocks."
                )
        if prompt == self._render(messages[:index], tools, name):
            self._check_header(text[len(prompt) : len(until)], messages[index], name)
        end = len(text[: len(until)].rstrip())
        ends_turn = end > len(prompt) and text[:end].endswith(self._special_tokens)
        return len(prompt), end if ends_turn else len(until)

    @staticmethod
    def _check_header(answer: str, message: Message, name: str) -> None:
        """Refuses a template that puts a header before answers, but knows no generation prompt to tell it by."""
        content = message.get("content")
        if not isinstance(content, str) or not content.strip():
            return
        before, found, _ = answer.partition(content.strip())
        if found and before.strip():
            raise ValueError(
                f"{name}: this chat template ignores add_generation_prompt, so that {before!r} would be trained as if "
                "the assistant had written it. Have the template add it under add_generation_prompt, or mark answers "
                "with {% generation %} blocks."
            )

    def _mark_spans(self, text: str, spans: Sequence[tuple[int, int]], *, add_special_tokens: bool) -> MarkedTokens:
        """Mark tokens that overlap one of the spans, which are in order."""
        encoded = self._tokenizer(
            text,
            add_special_tokens=add_special_tokens,
            return_offsets_mapping=True,
            return_attention_mask=False,
            truncation=False,
            padding=False,
            verbose=False,
        )
        trained = []
        ahead = list(reversed(spans))
        for start, stop in encoded["offset_mapping"]:
            while ahead and ahead[-1][1] <= start:
                ahead.pop()
            trained.append(bool(ahead) and stop > max(start, ahead[-1][0]))
        return MarkedTokens(list(encoded["input_ids"]), trained)


def _runs(marks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, one behind the last) of every run of ones.

    >>> list(_runs([0, 1, 1, 0, 1]))
    [(1, 3), (4, 5)]
    """
    start = None
    for place, mark in enumerate([*marks, 0]):
        if mark and start is None:
            start = place
        elif not mark and start is not None:
            yield start, place
            start = None
